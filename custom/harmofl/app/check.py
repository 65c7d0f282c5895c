"""`harmofl check`: what the folders of images hold, what is wrong with them, and what training will cost."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from harmofl.app.console import plain_console
from harmofl.app.costs import PROCESS_BYTES, Pace, measure_pace, training_bytes
from harmofl.app.hospital_names import read_hospital
from harmofl.app.inspection import SiteInspection, inspect
from harmofl.app.job import read_job
from harmofl.app.processor_time import busy_line
from harmofl.core.training import TrainingError
from harmofl.data.findings import Finding, count_text
from harmofl.experiment import Experiment

NARROWEST = 110  # columns; tables that go to a file are not squeezed to 80


def check(
    data_root: Path,
    job_folder: Path,
    assignments: Sequence[str],
    site: str | None,
    *,
    kit: Path | None = None,
    allow_code: bool = False,
) -> int:
    """Report on every site's folder under `data_root`, or on `data_root` itself where it is one site's folder.

    Args:
        data_root: the folder.
        job_folder: the job.
        assignments: `key=value` changes of experiment.json.
        site: the only site to look at.
        kit: startup kit of the only site to look at, whose own settings say what is whose.
        allow_code: let a task that the job brings along run.

    Returns:
        1 where a site or a case cannot be used, else 0.

    Raises:
        JobError, ExperimentError: a mistake in the command or the job.
    """
    job = read_job(job_folder, assignments)
    job.admit_task(own_code=allow_code)
    experiment = job.resolve(demo=False)
    console = plain_console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    fewest: int | None = None
    split: AbstractContextManager[None] = nullcontext()
    if kit is not None:
        own = read_hospital(kit)
        experiment, data_root, site, fewest = own.words_in(experiment), own.own_folder(data_root), own.name, own.fewest
        split = own.split_as_kept(experiment.task)
    with split:
        inspection = inspect(data_root, job, experiment, site, fewest)
    for line in inspection.problems:
        console.print(f"error: {line}")
    if inspection.problems and inspection.sites and site is None:
        console.print("(to check the sites that are here, name one with --site)")
    for found in inspection.sites:
        _show_site(console, found)
    for finding in inspection.findings:
        console.print(str(finding))
    if any(found.report.training_images for found in inspection.sites):
        _show_costs(console, inspection.sites, experiment)
    if inspection.has_errors:
        console.print("errors were found: fix them, then check again")
    return int(inspection.has_errors)


def _show_site(console: Console, site: SiteInspection) -> None:
    report = site.report
    console.print(f"\nsite {site.name}: {site.folder}", style="bold")
    for line in finding_lines(site.findings):
        console.print(line)
    if not report.rows:
        return
    table = Table(box=None, pad_edge=False)
    for position, heading in enumerate(report.columns):
        numbers = all(row[position].replace(".", "", 1).isdigit() for row in report.rows)
        table.add_column(heading, justify="right" if numbers else "left")
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    console.print(report.summary)


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """One line a finding; notices that say the same of several files share one."""
    lines: list[str] = []
    notices: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.severity == "notice":
            notices.setdefault((finding.message, finding.fix), []).append(finding.subject)
        else:
            lines.append(str(finding))
    for (message, fix), subjects in notices.items():
        more = f" and {len(subjects) - 1} more" if len(subjects) > 1 else ""
        lines.append(str(Finding("notice", "", subjects[0] + more, message, fix)))
    return lines


def _show_costs(console: Console, sites: Sequence[SiteInspection], experiment: Experiment) -> None:
    needed = training_bytes(experiment)
    data, network, rounds = experiment.data, experiment.network, experiment.federation.rounds
    console.print(
        f"\nmemory: about {size_text(PROCESS_BYTES + needed)} to train with batches of {experiment.training.batch_size}"
        f" at {data.height} x {data.width}, {network.name} of width {network.width}; "
        f"{size_text(psutil.virtual_memory().available)} are free on this machine"
    )
    try:
        pace: Pace | None = measure_pace(experiment)
    except TrainingError as error:
        console.print(f"time: not measured, {error}")
        pace = None
    for site in (site for site in sites if site.report.training_images):
        line = f"  {site.name}: {size_text(site.report.bytes_held)} of images held in memory"
        if pace is not None:
            seconds = _round_seconds(site, pace, experiment)
            line += (
                f"; a round about {duration_text(seconds)}, {count_text(rounds, 'round')} "
                f"{duration_text(seconds * rounds)}"
            )
        console.print(line)
    if pace is not None:
        console.print(f"time: {pace.training:.2g} s for training on an image, from {pace.how}")
        _show_busy(console, sites, pace, experiment)


def _show_busy(console: Console, sites: Sequence[SiteInspection], pace: Pace, experiment: Experiment) -> None:
    rounds = [
        f"{duration_text(_round_seconds(site, pace.as_busy, experiment))} at {site.name}"
        for site in sites
        if site.report.training_images
    ]
    if busy := busy_line(pace.share, f"a round takes {', '.join(rounds)}"):
        console.print(busy)


def _round_seconds(site: SiteInspection, pace: Pace, experiment: Experiment) -> float:
    images = site.report.training_images * experiment.training.local_epochs
    validation = site.report.validation_images * experiment.federation.share_validated
    return images * pace.training + validation * pace.prediction


def size_text(count: float) -> str:
    """A number of bytes for a person."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def duration_text(seconds: float) -> str:
    """A time for a person."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
