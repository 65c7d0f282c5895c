"""Both histology jobs as README states them, all sites side by side for time: the numbers are those of one thread."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from harmofl.tasks import resolve_experiment
from tests.benchmarks.federation_in_memory import scores_by_round
from tests.federation.conftest import ROOT, Run, simulate

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Demo:
    """A finished run of a job without options, and what its best model must reach."""

    job: str
    sites: list[str]
    key_score: str
    least: float
    run: Run


@pytest.fixture(
    scope="module",
    params=[
        ("harmofl_camelyon17", [f"hospital{number}" for number in range(1, 6)], "accuracy", 0.70),
        ("harmofl_nuclei", ["lung", "kidney", "breast", "prostate"], "dice", 0.75),
    ],
    ids=lambda param: param[0],
)
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    job, sites, key_score, least = request.param
    one_each = {"OMP_NUM_THREADS": "1"}
    run = simulate(ROOT / "jobs" / job, tmp_path_factory.mktemp(job), len(sites), one_each, timeout=1500)
    assert run.code == 0, run.output
    return Demo(job, sites, key_score, least, run)


def test_the_first_line_says_that_this_is_a_demo(demo: Demo) -> None:
    first = [line for line in demo.run.output.splitlines() if " - INFO - " in line][0]
    assert "DEMO" in first and "synthetic" in first


def test_all_sites_take_part_and_are_scored(demo: Demo) -> None:
    results = demo.run.results
    assert results.demo and results.method == "harmofl" and results.key_score == demo.key_score
    assert sorted(results.sites) == sorted(results.sites_expected) == sorted(demo.sites)
    assert [sorted(accepted) for accepted in results.sites_accepted] == [sorted(demo.sites)] * results.rounds
    assert results.sites_without_test == [] and results.warnings == []
    for result in results.sites.values():
        assert result.cases_skipped == {} and min(result.cases_used.values()) > 0 and result.amplitude_sent
        score = result.test[demo.key_score]
        assert score.mean is not None and score.n > 0
    assert "ERROR" not in demo.run.output and "Traceback" not in demo.run.output


def test_the_model_has_learned(demo: Demo, tmp_path: Path) -> None:
    results = demo.run.results
    trained = results.mean_over_sites[demo.key_score]
    assert trained is not None and trained >= demo.least
    settings = json.loads((ROOT / "jobs" / demo.job / "app" / "config" / "experiment.json").read_text())
    experiment = resolve_experiment(settings, demo=True)
    assert experiment.hash == results.experiment_hash
    unmoved = experiment.model_copy(update={"federation": experiment.federation.model_copy(update={"rounds": 0})})
    (scores,) = scores_by_round(unmoved, demo.sites, tmp_path)
    assert trained >= np.mean(list(scores.values())) + 0.15, scores


def test_the_best_model_is_self_contained(demo: Demo) -> None:
    content = torch.load(demo.run.server / "best_FL_global_model.pt", weights_only=True)
    notes = content["harmofl"]
    assert notes["amplitude_frozen"] and sorted(notes["amplitude_sites"]) == sorted(demo.sites)
    assert json.loads(notes["experiment"])["name"] == demo.job
    assert all(torch.isfinite(value).all() for value in content["model"].values())
