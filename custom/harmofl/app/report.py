"""`harmofl report`: the page of a finished run, written again with what only its reader has."""

import sys
import tempfile
from pathlib import Path

from harmofl.app.cell import RUN
from harmofl.app.job import JobError
from harmofl.app.verdict import run_folder
from harmofl.app.watch import server_run_folder
from harmofl.data.findings import DataRootError
from harmofl.evidence.paired import Comparison, compare_with_local
from harmofl.evidence.report import Examples, write_report
from harmofl.evidence.results import (
    REPORT_FILE,
    RESULTS_FILE,
    ROUNDS_FILE,
    Results,
    ResultsError,
    read_results,
    read_rounds,
)
from harmofl.flare.live import FAILURE_FILE
from harmofl.flare.state import StateError
from harmofl.sections import one_line


def report(
    run: Path,
    *,
    data: Path | None,
    site: str | None,
    kit: Path | None = None,
    demo: bool,
    local_only: Path | None,
    output: Path | None,
) -> int:
    """Write report.html of a run; its results and models are not changed.

    Args:
        run: simulator workspace, downloaded job, or the folder with results.json.
        data: data root; pictures are added of the sites found there.
        site: the only site to draw; the data root may then be its own folder.
        kit: startup kit of the only site to draw, whose own settings say whose a case is.
        demo: add pictures of the demo's synthetic data, which is made again.
        local_only: a run of the same sites, each on its own.
        output: the page; beside results.json where it is None.

    Returns:
        0, or 1 where a site's data cannot be used: its pictures are left out.

    Raises:
        JobError: no such run, one of another version, or runs that cannot be compared; one line.
    """
    folder = find_run(run)
    if output is not None and output.suffix != ".html":  # a result must not be taken for the page
        raise JobError(f"-o {output}: name a page, FILE.html")
    try:
        results, rounds = read_results(folder / RESULTS_FILE), read_rounds(folder / ROUNDS_FILE)
        comparison = _compared(results, local_only)
        examples = _examples(folder, results, data, demo=demo, site=site, kit=kit)
    except (ResultsError, StateError) as error:
        raise JobError(str(error)) from None
    except DataRootError as error:
        _say(f"failed: {error}")
        return 1
    path = output or folder / REPORT_FILE
    try:
        write_report(results, rounds, path, failure=failure_of(folder), comparison=comparison, examples=examples)
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); name another file with -o") from None
    if examples is not None and not results.demo and any(shown.pictures for shown in examples.sites):
        _say("the page holds images of patients: keep it where they may be seen")
    left_out = [shown for shown in (examples.sites if examples else ()) if shown.left_out]
    for shown in left_out:
        _say(f"no pictures of site {shown.site}: {shown.left_out}; `harmofl check` lists what is wrong")
    _say(f"report: {path}")
    return int(bool(left_out))


def find_run(run: Path) -> Path:
    """The folder with results.json of what a person calls a run.

    Raises:
        JobError: there is none, and why where the run left a reason; or there are several.
    """
    places = (run, run_folder(run), server_run_folder(run), run / "app_server", run / RUN)
    found = [place for place in places if (place / RESULTS_FILE).is_file()]
    if len(found) > 1:
        raise JobError(f"{run}: holds several runs: {', '.join(map(str, found))}; name one")
    if found:
        return found[0]
    reason = next((reason for place in places if (reason := failure_of(place))), None)
    if reason:
        raise JobError(f"{run}: the run failed before it had results: {reason}")
    if not run.is_dir():
        raise JobError(
            f"{run}: is not a folder; name a simulator workspace, a downloaded job, its app_server or a run of a "
            "comparison"
        )
    raise JobError(f"{run}: holds no {RESULTS_FILE}; did the run finish?")


def failure_of(folder: Path) -> str:
    """Why a run failed, empty where it did not."""
    path = folder / FAILURE_FILE
    return " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""


def _compared(results: Results, local_only: Path | None) -> Comparison | None:
    if local_only is None:
        return None
    return compare_with_local(results, read_results(find_run(local_only) / RESULTS_FILE))


def _examples(
    folder: Path, results: Results, data: Path | None, *, demo: bool, site: str | None, kit: Path | None
) -> Examples | None:
    if kit is not None and data is None:
        raise JobError("--kit: is that of the site whose data lies in --data ROOT; give that too")
    if data is None and not demo:
        if site is not None:
            raise JobError("--site: says whose data lies in --data ROOT; give that too")
        return None
    if demo and not results.demo:
        raise JobError("--demo: this run trained on real data; add its pictures with --data ROOT, where the data lies")
    from harmofl.app.examples import collect_examples

    with tempfile.TemporaryDirectory(prefix="harmofl-") as place:
        return collect_examples(folder, results, data, Path(place), site=site, kit=kit)


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl report: {one_line(line)}\n")
    sys.stdout.flush()
