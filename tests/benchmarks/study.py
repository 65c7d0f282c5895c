"""The study behind the jobs' defaults; STUDY.md beside this file has its rule, written before the first run.

    python -m tests.benchmarks.study screen -o STUDY      # or confirm, unseen, long, real
    python -m tests.benchmarks.study collect -o STUDY     # every finished run, a line each, into STUDY/runs.csv
    python -m tests.benchmarks.study_table                # its tables, from the runs in study.csv beside this file

Each run is a cell of `harmofl compare`. Finished ones are kept; a stage goes on where it stopped. All stages but
`screen` need the leaders that it found (`--leaders`).
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import harmofl
from harmofl.app.cell import CellPlan
from harmofl.app.grid import Cell, finished_record, run_cells
from harmofl.app.job import Job
from harmofl.evidence.comparison import CellKey, CellRecord
from harmofl.tasks import resolve_experiment
from tests.benchmarks.study_data import Place, real_nuclei, real_patches

ROOT = Path(__file__).resolve().parents[2]
SCREENED, FRESH = (20, 21), (30, 31, 32)
DEMO_EPOCHS = {"prostate": 3, "nuclei": 3, "camelyon17": 2}
REGIONS = ("off", "dc", "low", "full", "site_gain")
ALPHAS = (0.005, 0.05, 0.5)
COLUMNS = ["stage", "task", "setting", "seed", "left_out", "score", "value", "passes", "best_round", "seconds"]


@dataclass(frozen=True)
class Setting:
    """What a run does; rounds and epochs are the demo's where None, `times` multiplies the epochs."""

    intensity: str = "zscore"
    region: str = "off"
    alpha: float = 0.0
    rounds: int | None = None
    epochs: int | None = None
    times: int = 1
    preset: str = "robust"
    norm: str | None = None

    @property
    def name(self) -> str:
        """A short name that tells all settings apart."""
        shape = "" if self.rounds is None else f" R{self.rounds}"
        shape += "" if self.epochs is None else f" E{self.epochs}"
        whole = self.preset if self.preset != "robust" else f"{self.intensity}+{self.region}"
        norm = f" {self.norm}" if self.norm else ""
        return f"{whole} a{self.alpha:g}{shape}{f' {self.times}x' if self.times > 1 else ''}{norm}"

    def overrides(self, task: str) -> dict[str, Any]:
        """Of the job's experiment.json."""
        chosen: dict[str, Any] = {
            "method": "harmofl",
            "perturbation.alpha": self.alpha,
            "amplitude.preset": self.preset,
        }
        chosen["training.local_epochs"] = (self.epochs or DEMO_EPOCHS[task]) * self.times
        if self.preset == "robust":
            chosen |= {"amplitude.intensity": self.intensity, "amplitude.region": self.region}
        if self.rounds is not None:
            chosen["federation.rounds"] = self.rounds
        if self.norm:
            chosen["network.norm"] = self.norm
        return chosen


@dataclass(frozen=True)
class Run:
    """One run; without `place` it is on demo data."""

    stage: str
    task: str
    setting: Setting
    seed: int
    left_out: str | None = None
    place: Place | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Of the run's folder."""
        unseen = f"_without_{self.left_out}" if self.left_out else ""
        real = "_real" if self.place else ""
        return f"{self.task}{real}_{self.setting.name}_seed{self.seed}{unseen}".replace(" ", "_")


REFERENCE, TWICE = Setting(), Setting(times=2)


def screen() -> list[Run]:
    """Steps, alphas, published wholes, compute, few and many local epochs, and the other norm layer."""
    settings = [Setting(step, region) for step in ("window", "zscore") for region in REGIONS]
    settings.remove(Setting("zscore", "dc"))
    settings += [Setting(region=region, alpha=alpha) for region in ("off", "site_gain") for alpha in ALPHAS]
    settings += [Setting(preset=preset, alpha=0.05) for preset in ("as_published", "as_described")]
    settings += [TWICE, Setting(region="site_gain", times=2)]
    for rounds, epochs in ((6, 1), (1, 6)):
        shape = partial(Setting, rounds=rounds, epochs=epochs)
        settings += [shape(region=region, alpha=alpha) for region in ("off", "site_gain") for alpha in (0, 0.05)]
        settings.append(shape(times=2))
    batch = partial(Setting, norm="batch_stats")
    settings += [batch(), batch("window"), batch(region="site_gain"), batch("window", "full")]
    return [Run("screen", "prostate", setting, seed) for setting in settings for seed in SCREENED]


def confirm(leaders: Sequence[Setting]) -> list[Run]:
    """The two leaders and both controls on the three demos, fresh seeds."""
    settings = [REFERENCE, TWICE, *leaders]
    return [Run("confirm", task, one, seed) for task in DEMO_EPOCHS for one in settings for seed in FRESH]


def unseen(leader: Setting) -> list[Run]:
    """Sites that took no part."""
    nuclei = [(one, site) for one in (REFERENCE, TWICE, leader) for site in ("lung", "kidney", "breast", "prostate")]
    prostate = [(one, site) for one in (REFERENCE, leader) for site in ("BMC", "I2CVB", "UCL")]
    return [Run("unseen", "nuclei", one, FRESH[0], site) for one, site in nuclei] + [
        Run("unseen", "prostate", one, FRESH[0], site) for one, site in prostate
    ]


def long(leader: Setting) -> list[Run]:
    """Training that has converged."""
    settings = [Setting(rounds=10), Setting(rounds=10, times=2)]
    settings.append(Setting(leader.intensity, leader.region, leader.alpha, rounds=10))
    return [Run("long", "nuclei", setting, seed) for setting in settings for seed in FRESH[:2]]


def real(leader: Setting, folder: Path) -> list[Run]:
    """Public histology: five patients' nuclei at two sites, 72 patches of five sources."""
    places = {"nuclei": real_nuclei(folder), "camelyon17": real_patches()}
    return [
        Run("real", task, setting, seed, place=place)
        for task, place in places.items()
        for setting in (REFERENCE, TWICE, leader)
        for seed in FRESH
    ]


def cell_of(run: Run, folder: Path) -> Cell:
    """The cell that makes a run."""
    job = ROOT / "jobs" / f"harmofl_{run.task}"
    overrides = run.setting.overrides(run.task) | {"seed": run.seed}
    plain = Job.read(job, {})
    sites = list(run.place.roots) if run.place else plain.sites
    if run.place:
        overrides = plain.settings["demo"]["overrides"] | dict(run.place.overrides) | overrides
    least = len(sites) - (run.left_out is not None)
    overrides |= {"federation.minimum_sites": least, "amplitude.minimum_sites": least}
    experiment = resolve_experiment(Job.read(job, overrides).settings, demo=run.place is None)
    key = CellKey(
        experiment_hash=experiment.hash,
        version=harmofl.__version__,
        data="real" if run.place else "demo",
        sites=sorted(sites),
        left_out=run.left_out,
    )
    roots = dict(run.place.roots) if run.place else None
    plan = CellPlan(folder / "cells" / run.name, job, overrides, key, roots, threads=1, landscape=False)
    return Cell(run.name, run.name, plan, experiment)


def score(run: Run, record: CellRecord) -> float:
    """Mean over the sites that count, of the model that validation picked."""
    sites = [run.left_out] if run.left_out else record.seen
    means = [summary.mean for site in sites if (summary := record.scores[site].best.get(record.key_score))]
    return float(np.mean([mean for mean in means if mean is not None]))


def collect(runs: Sequence[Run], folder: Path) -> None:
    """Write every finished run into runs.csv, a line each."""
    with (folder / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for run in runs:
            record = finished_record(cell_of(run, folder).plan)
            if record is not None:
                value = f"{score(run, record):.4f}"
                told = [run.stage, run.task, run.setting.name, run.seed, run.left_out or "", record.key_score, value]
                writer.writerow([*told, record.passes, record.best_round, record.seconds])


def main() -> int:
    """Run a stage or print what there is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["screen", "confirm", "unseen", "long", "real", "collect"])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--leaders", type=json.loads, default=[], help='[["zscore", "site_gain", 0.05], ...]')
    options = parser.parse_args()
    folder = options.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    leaders = [Setting(*leader) for leader in options.leaders]
    stages = {"screen": screen()}
    if leaders:
        first = leaders[0]
        stages |= {"confirm": confirm(leaders), "unseen": unseen(first), "long": long(first)}
        stages |= {"real": real(first, folder)}
    if options.stage == "collect":
        collect([run for runs in stages.values() for run in runs], folder)
        return 0
    cells = [cell_of(run, folder) for run in stages[options.stage]]
    waiting = [cell for cell in cells if finished_record(cell.plan) is None]
    failures = run_cells(waiting, 2, lambda line: print(line, flush=True))  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
