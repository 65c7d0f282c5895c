"""Honest sites of very unequal sizes are neither named nor scaled, whatever the method: real training."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from harmofl.core.norm_rule import usual_norm
from harmofl.data.synthetic import write_prostate_site
from harmofl.evidence.results import read_results, read_rounds
from harmofl.flare.in_process import InProcessFederation
from harmofl.tasks import resolve_experiment

# the largest has more than 4.2 times the steps of the smallest, as hospitals of Camelyon17-WILDS have
CASES = {"BIDMC": 5, "HK": 9, "UCL": 26}
SCANNERS = {"BIDMC": "ge_3t_endorectal", "HK": "siemens_1.5t_endorectal", "UCL": "siemens_mixed"}
SMALL: dict[str, Any] = {
    "name": "unequal",
    "task": "prostate",
    "data": {"height": 64, "width": 64},
    "network": {"name": "unet", "width": 4},
    "amplitude": {"minimum_sites": 3, "minimum_cases": 1},
    "training": {"optimizer": "adam", "learning_rate": 4e-3, "batch_size": 4},
    "federation": {"rounds": 4, "minimum_sites": 3},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data of each site."""
    folder = tmp_path_factory.mktemp("unequal")
    for site, cases in CASES.items():
        write_prostate_site(folder / site, SCANNERS[site], cases=cases, seed=0, matrix=64, slices=4)
    return {site: folder / site for site in CASES}


SETTINGS: dict[str, dict[str, Any]] = {
    "harmofl": {},
    "sgd": {"training": {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 4}},
    "moments_anew": {"training": SMALL["training"] | {"keep_moments": False}},
    "fednova": {"method": "fednova"},
    "fedadam_float16": {"method": "fedadam", "federation": SMALL["federation"] | {"exchange": "float16"}},
    "fedbn": {"method": "fedbn"},
    "batch_norm_of_all": {"method": "fedavg", "network": SMALL["network"] | {"norm": "batch"}},
    "median": {"federation": SMALL["federation"] | {"aggregation": "median"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_honest_sites_of_unequal_sizes_never_meet_a_bound(roots: dict[str, Path], tmp_path: Path, name: str) -> None:
    experiment = resolve_experiment({**SMALL, **SETTINGS[name]})
    assert experiment.federation.norm_bound == 10
    InProcessFederation(experiment, CASES, tmp_path, roots).run()
    rounds = read_rounds(tmp_path / "run" / "round_metrics.jsonl")
    steps = rounds[0].steps
    assert max(steps.values()) >= 4.2 * min(steps.values())
    for record in rounds:
        assert set(record.norm) == set(CASES) and min(record.norm.values()) > 0
        assert record.outliers == record.scaled == {}
        assert set(record.cosine) == set(CASES)
    # twice as far from the bound of 10, and so below what is named, over all rounds
    for before, after in itertools.pairwise(rounds):
        assert max(after.norm.values()) < 5 * (usual_norm(list(before.norm.values())) or 0.0)
    results = read_results(tmp_path / "run" / "results.json")
    assert results.experiment["federation"]["norm_bound"] == 10
    assert not any("outlier" in warning for warning in results.warnings)


def test_a_run_without_weights_that_travel_has_no_norms(roots: dict[str, Path], tmp_path: Path) -> None:
    experiment = resolve_experiment({**SMALL, "method": "local_only", "federation": {"rounds": 1, "minimum_sites": 3}})
    sites = ["BIDMC", "HK"]
    InProcessFederation(experiment, sites, tmp_path, {site: roots[site] for site in sites}).run()
    (record,) = read_rounds(tmp_path / "run" / "round_metrics.jsonl")
    assert record.norm == dict.fromkeys(sites, 0.0) and record.cosine == record.outliers == {}
