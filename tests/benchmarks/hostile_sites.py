"""What one diverged or reversed site costs a federation, with and without bounds; how near honest sites come to them.

    python -m tests.benchmarks.hostile_sites [--rounds 4] [--sites BIDMC HK UCL] [--set federation.norm_bound=5]
    python -m tests.benchmarks.hostile_sites --honest [--rounds 4]

The first trains the prostate demo on synthetic data in one process, by the code that sites and server run, and prints a
Markdown table: the mean test Dice of the honest sites, of the final and of the best model, the rounds in which the
hostile site was named, and whether the fall of the score named it. The second trains honest sites of the sizes of
Camelyon17-WILDS (the largest has 4.2 times the steps of the smallest) and prints the largest norm per step by the
median of the round before and by what the optimizer can do, where 5 names and 10 scales a site.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harmofl.core.norm_rule import NormRule, usual_norm
from harmofl.core.training import TrainingError
from harmofl.data.synthetic_histology import write_patches_site
from harmofl.evidence.results import RoundRecord, read_results, read_rounds
from harmofl.experiment import Experiment, parse_assignment, read_settings
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.participant import Participant
from harmofl.flare.wire import Arrays, ModelMessage, UpdateMessage
from harmofl.tasks import resolve_experiment

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SITES, HOSTILE = ("BIDMC", "HK", "UCL"), "HK"
FROM = 1  # the hostile site is honest in round 0, so that the others have a measure of it
WILDS = {"hospital1": 59_436, "hospital2": 34_904, "hospital3": 85_054, "hospital4": 129_838, "hospital5": 146_722}
PATCHES = 80  # of the largest hospital
UNEQUAL = {"data.height": 64, "data.width": 64, "training.batch_size": 4, "training.local_epochs": 1}
Change = Callable[[Arrays, int], Arrays]


def huge(difference: Arrays, round_number: int) -> Arrays:
    """1e30 in each weight, with the sign of its change, in one round."""
    if round_number != FROM:
        return difference
    return {
        name: (1e30 * np.sign(value)).astype(value.dtype) if value.dtype.kind == "f" else value
        for name, value in difference.items()
    }


def times(factor: float) -> Change:
    """The whole difference times a factor, in every round."""

    def change(difference: Arrays, round_number: int) -> Arrays:
        return {
            name: (value * factor).astype(value.dtype) if value.dtype.kind == "f" else value
            for name, value in difference.items()
        }

    return change


ATTACKS: dict[str, Change | None] = {
    "none": None,
    f"1e30 in each weight in round {FROM}": huge,
    f"100 times its difference from round {FROM} on": times(100.0),
    f"-10 times its difference from round {FROM} on": times(-10.0),
}
SERVERS: dict[str, dict[str, Any]] = {
    "norm_bound null": {"federation.norm_bound": None},
    "norm_bound 10": {"federation.norm_bound": 10.0},
    # of three sites the trimmed mean is the median
    "median, norm_bound 10": {"federation.aggregation": "median"},
}


class HostileSite(Participant):
    """A site that trains as it should and sends something else."""

    change: Change

    def train(self, round_number: int, received: ModelMessage, best_round: int | None = None) -> UpdateMessage:
        """Train, then change what is sent."""
        update = super().train(round_number, received, best_round)
        if round_number < FROM or update.difference is None:
            return update
        return replace(update, difference=self.change(update.difference, round_number))


def settings_of(job: str, overrides: Mapping[str, Any]) -> Experiment:
    """A job's demo with other settings."""
    settings = read_settings(JOBS / job / "app" / "config" / "experiment.json")
    settings["demo"]["overrides"] |= dict(overrides)
    return resolve_experiment(json.loads(json.dumps(settings)), demo=True)


def run_with(
    experiment: Experiment, sites: Sequence[str], change: Change | None, folder: Path, roots: Any = None
) -> tuple[InProcessFederation, str]:
    """Run a federation with a hostile site, where there is a change; why it failed, empty where it did not."""
    federation = InProcessFederation(experiment, sites, folder, roots)
    if change is not None:
        hostile = federation.participants[HOSTILE]
        hostile.__class__ = HostileSite
        hostile.change = change  # type: ignore[attr-defined]
    try:
        federation.run()
    except (TrainingError, ValueError) as error:
        return federation, str(error)
    return federation, ""


def hostile_rows(sites: Sequence[str], overrides: Mapping[str, Any]) -> Iterator[str]:
    """The table of attacks and servers, line by line."""
    yield "| what the site sends | server | final model | best model | named | fall names it |"
    yield "|---|---|---|---|---|---|"
    for attack, change in ATTACKS.items():
        for server, of_server in SERVERS.items():
            experiment = settings_of("harmofl_prostate", {**overrides, **of_server})
            with tempfile.TemporaryDirectory() as name:
                federation, failure = run_with(experiment, sites, change, Path(name))
                rounds = federation.run_state.rounds
                scores = f"fails in round {len(rounds)} | –" if failure else _scores(Path(name), sites)
            named = ", ".join(str(record.round) for record in rounds if HOSTILE in record.outliers) or "never"
            falls = [record.fall for record in rounds if record.fall]
            told = "no fall" if not falls else "yes" if any(f"{HOSTILE} (cosine" in fall for fall in falls) else "no"
            yield f"| {attack} | {server} | {scores} | {named} | {told} |"


def _scores(folder: Path, sites: Sequence[str]) -> str:
    """Mean test Dice of the honest sites of the final and of the best model."""
    results = read_results(folder / "run" / "results.json")
    honest = [results.sites[site] for site in sites if site != HOSTILE]
    found = [[held[results.key_score].mean for held in (one.test_final_model, one.test)] for one in honest]
    final, best = np.nanmean(np.array(found, float), axis=0)
    return f"{final:.3f} | {best:.3f}"


HONEST: dict[str, dict[str, Any]] = {
    "harmofl": {},
    "harmofl, SGD": {"training.optimizer": "sgd", "training.learning_rate": 0.01},
    "fedavg, float16 exchange": {"method": "fedavg", "federation.exchange": "float16"},
    "fedbn": {"method": "fedbn"},
    "fednova": {"method": "fednova"},
    "fedadam": {"method": "fedadam"},
}


def honest_rows(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Honest sites of unequal sizes: how near their norms come to the limits, line by line."""
    yield "| settings | steps of the sites | by the median of the round before | by the reach | named | scaled |"
    yield "|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as data:
        roots = {site: Path(data) / site for site in WILDS}
        profiles = read_settings(JOBS / "harmofl_camelyon17" / "app" / "config" / "experiment.json")["demo"]["data"]
        for center, (site, size) in enumerate(WILDS.items()):
            count = round(PATCHES * size / max(WILDS.values()))
            profile = profiles["laboratories"][site]
            write_patches_site(roots[site], profile, [center], slides=20, patches=count, seed=center, size=64)
        for name, changed in HONEST.items():
            experiment = settings_of("harmofl_camelyon17", {**UNEQUAL, **overrides, **changed})
            with tempfile.TemporaryDirectory() as folder:
                federation, failure = run_with(experiment, list(WILDS), None, Path(folder), roots)
                assert not failure, failure
                rounds = read_rounds(Path(folder) / "run" / "round_metrics.jsonl")
            relative, absolute = nearest_to_limits(federation, rounds)
            named = sum(len(record.outliers) for record in rounds)
            scaled = sum(len(record.scaled) for record in rounds)
            steps = ", ".join(str(value) for value in rounds[0].steps.values())
            yield f"| {name} | {steps} | {relative:.2f} | {absolute:.2f} | {named} | {scaled} |"


def nearest_to_limits(federation: InProcessFederation, rounds: Sequence[RoundRecord]) -> tuple[float, float]:
    """The largest norm per step by the usual one, over all rounds and sites, and in round 0 by what is possible."""
    relative, run = 0.0, federation.run_state
    for before, record in zip(rounds, rounds[1:], strict=False):
        usual = usual_norm(list(before.norm.values())) or np.inf
        relative = max(relative, max(record.norm.values()) / usual)
    rule = run.rule.open_round(run.initial_weights())._norms
    assert isinstance(rule, NormRule)
    first = rounds[0]
    absolute = max(
        norm * first.steps[site] / replace(rule, bound=1.1).limits(first.steps[site]).norm
        for site, norm in first.norm.items()
    )
    return relative, absolute


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.hostile_sites", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--honest", action="store_true", help="honest sites of unequal sizes in place of hostile ones")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sites", nargs="+", default=SITES, help=f"with {HOSTILE}, which is the hostile one")
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    overrides = {"federation.rounds": options.rounds, "federation.minimum_sites": len(options.sites)}
    if options.honest:
        overrides["federation.minimum_sites"] = len(WILDS)
    overrides |= dict(parse_assignment(text) for text in options.assignments)
    rows = honest_rows(overrides) if options.honest else hostile_rows(options.sites, overrides)
    for row in rows:
        sys.stdout.write(row + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
