"""`harmofl evaluate`: how a model scores on the images of a hospital that took no part in its training."""

import hashlib
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harmofl.app.check import NARROWEST, finding_lines
from harmofl.app.console import plain_console
from harmofl.app.job import JobError
from harmofl.app.model_file import LoadedModel
from harmofl.app.profile import hospital_profile
from harmofl.core.training import NotFiniteError
from harmofl.data.findings import DataRootError
from harmofl.data.patches import UnreadablePatchesError
from harmofl.evidence.evaluation import (
    EVALUATION_FILE,
    FORMAT,
    Evaluation,
    FindingRecord,
    ModelRecord,
    read_evaluation,
)
from harmofl.evidence.results import ResultsError
from harmofl.evidence.score_summaries import summary_of_cases, summary_of_images
from harmofl.flare.state import write_text_atomically
from harmofl.tasks import Predict
from harmofl.tasks.single_images import SingleImage, image_use
from harmofl.tasks.whole_site import SiteScores, score_camelyon17, score_nuclei, score_prostate

OF_EACH, NEUTRAL = "of each case itself", "none: a gain of 1"
MOST_WORKERS = 4  # processes that decode patches
RECORDED = ("harmofl", "torch", "monai", "numpy", "scipy")


def evaluate(
    model: LoadedModel,
    data: Path,
    output: Path,
    *,
    site: str | None = None,
    profile_of: Path | None = None,
    force: bool = False,
) -> int:
    """Score all cases of a folder, print the table and write evaluation.json into `output` where anything was scored.

    Returns:
        1 where a file could not be used or nothing could be scored, else 0.

    Raises:
        JobError: a mistake in the command: no such folder, an `output` in it, or a file that must not be replaced; also
            a model whose output is not finite for some image.
    """
    console = plain_console()
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    target = _usable_target(data, output, force)
    console.print(f"{model.label}, on {model.device.type}")
    own = hospital_profile(model, profile_of, console.print)
    started = time.monotonic()
    try:
        found = _scores(model, data, site, own, console)
    except UnreadablePatchesError as error:
        console.print(f"error: {error}")
        return 1
    except NotFiniteError as error:
        raise JobError(f"{model.path.name}: nothing is scored: {error}; take the model of another round") from None
    except DataRootError as error:
        raise JobError(str(error)) from None
    for line in finding_lines(found.findings):
        console.print(line)
    own_profile = str(profile_of) if profile_of else _stand_in(model)
    record = _record(model, data, found, site=site, own_profile=own_profile, seconds=time.monotonic() - started)
    if record.names:  # without a case there is no row to show
        _show(console, record)
    if not any(summary.n for summary in record.scores.values()):
        kept = "; the earlier one stays" if target.exists() else ""
        console.print(f"error: nothing in {data} could be scored, so {EVALUATION_FILE} is not written{kept}")
        return 1
    output.mkdir(parents=True, exist_ok=True)
    write_text_atomically(record.model_dump_json(indent=2) + "\n", target)
    console.print(f"evaluation: {target} (names cases; it stays where the images are)")
    return int(any(finding.severity == "error" for finding in found.findings))


def _usable_target(data: Path, output: Path, force: bool) -> Path:
    """The file to write: never among the hospital's images, and in place of nothing but an earlier evaluation."""
    target = output / EVALUATION_FILE
    if not data.is_dir():
        raise JobError(f"{data} is not a folder; name the folder of the hospital's images and annotations")
    if output.resolve().is_relative_to(data.resolve()):
        raise JobError(f"-o {output}: lies in the data folder {data}, which is never written to; name another with -o")
    if output.exists() and not output.is_dir():
        raise JobError(f"-o {output}: is a file; name a folder")
    if not target.exists() and not target.is_symlink():
        return target
    if not force:
        raise JobError(f"{target} exists already; name another folder with -o, or overwrite with --force")
    try:
        read_evaluation(target)
    except ResultsError as error:
        raise JobError(f"--force replaces an earlier evaluation only, and {error}; name another folder") from None
    return target


def _scores(model: LoadedModel, data: Path, site: str | None, own: Tensor | None, console: Console) -> SiteScores:
    experiment = model.experiment
    if own is None and model.takes_profile and not image_use(experiment.task).shows_scanner:
        own = model.normalization.target
    if experiment.task == "camelyon17":
        workers = min(MOST_WORKERS, torch.get_num_threads())
        return score_camelyon17(data, site, experiment, model.predictor(own), workers)
    shared = model.predictor(own) if own is not None or not model.takes_profile else None

    def predictor_of(image: SingleImage) -> Predict:
        return shared or model.predictor(model.own_profile_of(image))

    score = {"prostate": score_prostate, "nuclei": score_nuclei}[experiment.task]
    with console.status("") as status:
        return score(data, site, experiment, predictor_of, lambda name: status.update(f"{name} scored"))


def _record(
    model: LoadedModel, data: Path, found: SiteScores, *, site: str | None, own_profile: str | None, seconds: float
) -> Evaluation:
    checkpoint, experiment = model.checkpoint, model.experiment
    scores = {name: summary_of_images(estimate) for name, estimate in found.pooled.items()}
    scores |= {
        name: summary_of_cases(values, found.patients, found.largest.get(name, 1.0))
        for name, values in found.by_case.items()
    }
    return Evaluation(
        format=FORMAT,
        model=ModelRecord(
            file=model.path.name,
            sha256=hashlib.sha256(model.path.read_bytes()).hexdigest(),
            run_id=checkpoint.run_id,
            experiment=experiment.name,
            experiment_hash=checkpoint.experiment_hash,
            task=experiment.task,
            network=experiment.network.name,
            rounds=checkpoint.next_round,
        ),
        data=str(data),
        site=site,
        own_profile=own_profile,
        unit=found.unit,
        names=found.names,
        skipped=dict(Counter(finding.code for finding in found.findings if finding.severity == "error")),
        scores=scores,
        rules=list(found.rules),
        findings=[FindingRecord(**vars(finding)) for finding in found.findings],
        versions={name: version(name) for name in RECORDED},
        seconds=round(seconds, 2),
    )


def _show(console: Console, record: Evaluation) -> None:
    by_case = {name: summary for name, summary in record.scores.items() if summary.per_case}
    if by_case:
        table = Table(box=None, pad_edge=False)
        table.add_column(record.unit)
        for name in by_case:
            table.add_column(name, justify="right")
        for row, case in enumerate(record.names):
            table.add_row(case, *(_number(summary.per_case[row]) for summary in by_case.values()))
        console.print(table)
    table = Table(box=None, pad_edge=False)
    for heading in ("score", "mean", "95 % interval over patients", "patients", "n", "undefined"):
        table.add_column(heading, justify="left" if heading == "score" else "right")
    for name, held in record.scores.items():
        counts = (str(count) for count in (held.patients, held.n, held.undefined))
        table.add_row(name, _number(held.mean), held.interval_text or "-", *counts)
    console.print(table)
    for rule in record.rules:
        console.print(rule)
    if record.own_profile is not None:
        console.print(f"own profile: {record.own_profile}, as harmofl predict takes it with the same --profile-of")


def _stand_in(model: LoadedModel) -> str | None:
    """What harmofl predict takes for the own profile where no folder of the hospital is named."""
    if not model.takes_profile:
        return None
    return OF_EACH if image_use(model.experiment.task).shows_scanner else NEUTRAL


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
