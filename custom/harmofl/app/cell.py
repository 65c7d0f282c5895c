"""One cell of a comparison: a run in a process of its own, its scores and what explains them in cell.json."""

import logging
import multiprocessing
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmofl.app.job import Job
from harmofl.evidence.comparison import CELL_FILE, CellKey, CellRecord, DriftRecord, SiteScores
from harmofl.evidence.results import ROUNDS_FILE, Results, read_results, read_rounds
from harmofl.evidence.time_spent import PARTS, Part

if TYPE_CHECKING:
    from harmofl.experiment import Experiment
    from harmofl.flare.in_process import FinishedRun, InProcessFederation

FAILURE_FILE, LOG_FILE = "failure.txt", "log.txt"
RUN, STATE = "run", "sites"  # folders of a cell; the second one is for the time of the run


@dataclass(frozen=True)
class CellPlan:
    """All that the process of a cell needs.

    Attributes:
        folder: of the cell.
        job: the job's folder.
        overrides: of its experiment.json, by `section.key`.
        key: what decides the cell's numbers.
        data_roots: by site; None for demo data.
        threads: of torch.
        landscape: also measure the loss around the models.
        shared_data: folder that the cells of a comparison keep demo data and decoded images in; None shares nothing.
        asked_at: by `time.monotonic`, when the process was asked for; None where nobody wants to know.
    """

    folder: Path
    job: Path
    overrides: Mapping[str, Any]
    key: CellKey
    data_roots: Mapping[str, Path] | None
    threads: int
    landscape: bool
    shared_data: Path | None = None
    asked_at: float | None = None

    @property
    def progress_file(self) -> Path:
        """Has one line a finished round."""
        return self.folder / RUN / ROUNDS_FILE


def run_cell(plan: CellPlan) -> None:
    """Run a cell in a process of its own, which this ends: cell.json is written, or the reason why it is not."""
    shutil.rmtree(plan.folder, ignore_errors=True)
    plan.folder.mkdir(parents=True)
    with (plan.folder / LOG_FILE).open("w", encoding="utf-8", buffering=1) as log:
        sys.stdout = sys.stderr = log
        logging.basicConfig(stream=log, level=logging.INFO, force=True)
        try:
            record = _measure(plan)
        except Exception as error:  # whatever a run raises is one cell's failure
            traceback.print_exc()
            (plan.folder / FAILURE_FILE).write_text(_one_line(error), encoding="utf-8")
            sys.exit(1)
        finally:
            shutil.rmtree(plan.folder / STATE, ignore_errors=True)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    _write_atomically(record, plan.folder)


def _write_atomically(record: CellRecord, folder: Path) -> None:
    from harmofl.flare.state import write_text_atomically

    write_text_atomically(record.model_dump_json(indent=1) + "\n", folder / CELL_FILE)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if type(error).__module__.startswith("harmofl") else f"{type(error).__name__}: {text}"


def _measure(plan: CellPlan) -> CellRecord:
    # loaded already where this process was forked from the one that has it
    import harmofl.app.cell_imports  # noqa: F401
    from harmofl.flare.in_process import InProcessFederation
    from harmofl.tasks import resolve_experiment

    spent, parent = dict.fromkeys(PARTS, 0.0), multiprocessing.parent_process()
    if plan.asked_at is not None:
        spent["start"] = time.monotonic() - plan.asked_at
    job = Job.read(plan.job, plan.overrides)
    job.admit_task(own_code=True)
    experiment = resolve_experiment(job.settings, demo=plan.data_roots is None)
    left_out = plan.key.left_out
    with _timed(spent, "start"):
        federation = InProcessFederation(
            experiment,
            [site for site in plan.key.sites if site != left_out],
            plan.folder,
            plan.data_roots,
            unseen=[left_out] if left_out else [],
            shared_data=plan.shared_data,
            threads=plan.threads,
            # nobody waits for this cell any more
            should_stop=lambda: parent is not None and not parent.is_alive(),
        )
    finished = _run(federation, spent)
    explained = _explained(plan, federation, finished, spent)
    return _record(plan, experiment, finished, explained, spent)


def _run(federation: "InProcessFederation", spent: dict[Part, float]) -> "FinishedRun":
    with _timed(spent, "reading"):
        for participant in federation.participants.values():
            _ = participant.data
    with _timed(spent, "training"):
        finished = federation.run()
    spent["scoring"], spent["report"] = finished.scoring_seconds, finished.report_seconds
    spent["training"] -= spent["scoring"] + spent["report"]
    return finished


@contextmanager
def _timed(spent: dict[Part, float], part: Part) -> Iterator[None]:
    started = time.monotonic()
    yield
    spent[part] += time.monotonic() - started


def _explained(
    plan: CellPlan, federation: "InProcessFederation", finished: "FinishedRun", spent: dict[Part, float]
) -> dict[str, Any]:
    """What explains the run, by field of its record."""
    from harmofl.app.explanation import amplitude_distances, landscape_of

    told: dict[str, Any] = {"landscape": None}
    with _timed(spent, "explaining"):
        told["amplitude_distance"] = amplitude_distances(federation)
    if plan.landscape:
        with _timed(spent, "landscape"):
            told["landscape"] = landscape_of(federation, finished)
    return told


def _record(
    plan: CellPlan,
    experiment: "Experiment",
    finished: "FinishedRun",
    explained: Mapping[str, Any],
    spent: Mapping[Part, float],
) -> CellRecord:
    from harmofl.flare.record import scores_of

    results, rounds = read_results(plan.folder / RUN / "results.json"), read_rounds(plan.progress_file)
    scores = {
        site: SiteScores(best=result.test, final=result.test_final_model) for site, result in results.sites.items()
    }
    for site, numbers in finished.unseen.items():
        scores[site] = SiteScores(best=scores_of(numbers, "best"), final=scores_of(numbers, "final"))
    steps = sum(sum(record.steps.values()) for record in rounds)
    (plan.folder / RUN / "FL_global_model.pt").unlink(missing_ok=True)  # the best one is kept
    return CellRecord(
        format=2,
        key=plan.key,
        experiment=experiment.model_dump(mode="json"),
        method=experiment.method,
        seed=experiment.seed,
        demo=results.demo,
        key_score=results.key_score,
        score_note=results.score_note,
        seen=sorted(results.sites),
        best_round=results.best_round,
        scores=scores,
        validation=[*(record.validation_mean for record in rounds), finished.final_validation],
        drift=[DriftRecord(**vars(drift)) for drift in finished.drift],
        test_over_training=_test_over_training(results),
        passes=steps * (2 if experiment.perturbation.alpha > 0 else 1),
        # where the data comes from and what explains the run is not the method's cost
        seconds=round(spent["training"] + spent["scoring"], 1),
        spent={part: round(seconds, 2) for part, seconds in spent.items() if seconds > 0},
        **explained,
    )


def _test_over_training(results: Results) -> float:
    """Mean over sites of the cases that are tested over those that are trained on."""
    used = [result.cases_used for result in results.sites.values()]
    return sum(cases.get("test", 0) / max(1, cases.get("training", 0)) for cases in used) / len(used)
