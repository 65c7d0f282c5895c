"""Honest sites of every task, preset and method never meet a bound on what a site may claim."""

from pathlib import Path
from typing import Any

import pytest

from harmofl.app.job import read_job
from harmofl.flare import in_process
from harmofl.flare.claims import check_amplitude, check_numbers
from harmofl.flare.in_process import InProcessFederation
from harmofl.methods import METHODS, PRESETS

JOBS = Path(__file__).resolve().parents[3] / "jobs"
SITES = {
    "harmofl_prostate": ("BIDMC", "HK"),
    "harmofl_camelyon17": ("hospital1", "hospital2"),
    "harmofl_nuclei": ("lung", "kidney"),
}
DATA = {
    "harmofl_prostate": {"cases": 4, "matrix": 64, "slices": 4},
    "harmofl_camelyon17": {"slides": 6, "patches": 12},
    "harmofl_nuclei": {"patients": 4, "images": 4},
}
SMALL = {
    "data.height": 64,
    "data.width": 64,
    "network.width": 4,
    "federation.minimum_sites": 2,
    "amplitude.minimum_sites": 2,
    "amplitude.minimum_cases": 1,
    "federation.rounds": 2,
    "training.batch_size": 3,
    "training.local_epochs": 2,
    "federation.weights": "samples",
}


def run_honestly(job: str, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Run a tiny federation on demo data; a claim beyond a bound ends it."""
    asked: list[str] = []

    def numbers(*given: Any) -> None:
        asked.append(given[3])
        check_numbers(*given)

    def amplitude(*given: Any) -> None:
        asked.append("a spectrum")
        check_amplitude(*given)

    monkeypatch.setattr(in_process, "check_numbers", numbers)
    monkeypatch.setattr(in_process, "check_amplitude", amplitude)
    held = read_job(JOBS / job, [])
    held.settings["demo"]["data"] |= DATA[job]
    held.settings["demo"]["overrides"] |= SMALL | changes
    experiment = held.resolve(demo=True)
    InProcessFederation(experiment, SITES[job], folder).run()
    assert asked.count("train") == 4 and asked.count("evaluate") == 2
    assert asked.count("a spectrum") == (0 if experiment.amplitude.region == "off" else 2)


def of_task(job: str, preset: str) -> dict[str, Any]:
    """A preset; DenseNet121 cannot have the norm layers of the published ones."""
    return {"amplitude.preset": preset} | ({"network.norm": "batch"} if job == "harmofl_camelyon17" else {})


@pytest.mark.parametrize(
    ("job", "changes"),
    [
        ("harmofl_prostate", {"amplitude.preset": "robust", "method": "harmofl"}),
        ("harmofl_nuclei", of_task("harmofl_nuclei", "as_described")),
        ("harmofl_prostate", {"method": "fednova", "amplitude.preset": "as_published"}),
        ("harmofl_prostate", {"method": "central"}),
    ],
)
def test_honest_sites_meet_no_bound(
    job: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_honestly(job, tmp_path, monkeypatch, changes)


@pytest.mark.slow
@pytest.mark.parametrize("job", SITES)
@pytest.mark.parametrize("preset", PRESETS)
def test_honest_sites_of_every_task_and_preset_meet_none(
    job: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_honestly(job, tmp_path, monkeypatch, of_task(job, preset))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_honest_sites_of_every_method_meet_none(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = "harmofl_camelyon17" if method == "moon" else "harmofl_prostate"  # MOON needs a classifier
    run_honestly(job, tmp_path, monkeypatch, {"method": method})


@pytest.mark.slow
@pytest.mark.parametrize("intensity", ["window", "zscore", "none"])
@pytest.mark.parametrize("region", ["dc", "low", "full", "site_gain"])
@pytest.mark.parametrize("job", ["harmofl_prostate", "harmofl_nuclei"])
def test_honest_amplitudes_of_every_region_and_intensity_meet_none(
    job: str, region: str, intensity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (region, intensity) == ("dc", "zscore"):
        intensity = "none"  # a z-scored image has no sum to shift
    changes = {"amplitude.region": region, "amplitude.intensity": intensity, "amplitude.low_fraction": 0.5}
    run_honestly(job, tmp_path, monkeypatch, changes | {"federation.rounds": 2, "data.split": "as_published"})
