"""The number of loader processes decides nothing: order, augmentation and dropout have a generator each."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from harmofl.core.training import arrays_sha256, state_arrays
from harmofl.experiment import Experiment, set_key
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig
from harmofl.flare.wire import ModelMessage
from harmofl.tasks import resolve_experiment, untrained_network

JOBS = Path(__file__).resolve().parents[3] / "jobs"
SMALL: dict[str, Any] = {
    "data.height": 64,
    "data.width": 64,
    "network.width": 4,
    "training.batch_size": 3,
    "training.local_epochs": 2,
    "training.augmentation": "flip_rotate",
    "amplitude.minimum_cases": 1,
}
DEMOS: dict[str, tuple[str, dict[str, Any]]] = {
    "harmofl_prostate": ("HK", {"cases": 4, "matrix": 64, "slices": 3}),
    "harmofl_camelyon17": ("hospital1", {"slides": 5, "patches": 15}),
    "harmofl_nuclei": ("lung", {"patients": 5, "images": 5, "size": 96}),
}


def small_demo(job: str) -> Experiment:
    settings = json.loads((JOBS / job / "app" / "config" / "experiment.json").read_text())
    settings["demo"]["data"] |= DEMOS[job][1]
    settings["demo"]["overrides"] = {"federation.rounds": 1}
    for key, value in SMALL.items():
        set_key(settings, key, value)
    return resolve_experiment(settings, demo=True)


def one_round(experiment: Experiment, site: str, folder: Path, workers: int) -> tuple[str, dict[str, Any]]:
    """Hash of what one round of a site added and its numbers; the decoded files are kept in `folder`."""
    config = SiteConfig(
        site, simulated=True, data_root=None, state_root=folder, threads=1, workers=workers, minimum_cases=1
    )
    participant = Participant(experiment, config, f"run{workers}", lambda: False, logging.getLogger(site))
    amplitude = participant.estimate_amplitude().amplitude
    update = participant.train(0, ModelMessage(state_arrays(untrained_network(experiment)), amplitude))
    assert update.difference is not None and amplitude is not None
    numbers = {key: update.numbers[key] for key in ("loss", "validation", "steps", "images")}
    return arrays_sha256({**update.difference, "amplitude": amplitude.values}), numbers


@pytest.mark.parametrize("job", DEMOS)
def test_any_number_of_loader_processes_gives_equal_weights(job: str, tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more processes than cores
    experiment, site = small_demo(job), DEMOS[job][0]
    alone = one_round(experiment, site, tmp_path, 0)
    assert alone[1]["steps"] >= 2 * 2, "in one batch an epoch nothing could come in another order"
    for workers in (1, 2, 4):
        assert one_round(experiment, site, tmp_path, workers) == alone, f"{workers} loader processes"
