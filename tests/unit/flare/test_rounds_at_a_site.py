"""What a site keeps between rounds, what it never looks at, and what it must not pile up. A27, C16, D3."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from toy_rounds import ToyRounds

from harmofl.core.training import state_arrays
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import Experiment, set_key
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig
from harmofl.flare.wire import Arrays, ModelMessage
from harmofl.tasks import resolve_experiment, untrained_network
from tests.loose_limits import LOOSE

MIB = 2**20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for site, scanner in (("BIDMC", "ge_3t_endorectal"), ("HK", "siemens_1.5t_endorectal")):
        write_prostate_site(folder / site, scanner, 4, 0, matrix=64, slices=3)
    return folder


def participant(root: Path, folder: Path, experiment: Experiment) -> Participant:
    site = SiteConfig(
        "HK", simulated=False, data_root=root, state_root=folder, device="cpu", minimum_cases=1, settings=LOOSE
    )
    return Participant(experiment, site, "run", lambda: False, logging.getLogger("HK"))


def second_round(root: Path, folder: Path, written: dict[str, Any], keep: bool, *, after_first: bool = True) -> Arrays:
    """The difference of round 1, by a new process, after round 0 or alone."""
    set_key(written, "training.keep_moments", keep)
    experiment = resolve_experiment(written | {"method": "fedavg"})
    message = ModelMessage(state_arrays(untrained_network(experiment)))
    if after_first:
        participant(root, folder, experiment).train(0, message)
    difference = participant(root, folder, experiment).train(1, message).difference
    assert difference is not None
    return difference


def same(first: Arrays, second: Arrays) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in first)


def test_c16_moments_are_kept_or_start_anew_as_the_job_says(root: Path, tmp_path: Path, written: Any) -> None:
    kept = second_round(root, tmp_path / "kept", written, True)
    anew = second_round(root, tmp_path / "anew", written, False)
    alone = second_round(root, tmp_path / "alone", written, False, after_first=False)
    assert same(anew, alone), "without moments a round depends on model and round number alone"
    assert not same(kept, anew)


def test_d3_no_task_but_the_evaluation_touches_the_test_cases(root: Path, tmp_path: Path, written: Any) -> None:
    set_key(written, "amplitude.minimum_cases", 1)
    experiment = resolve_experiment(written)
    site = participant(root, tmp_path, experiment)
    read: list[str] = []

    class Watched:
        """Notes every look at a part of the data."""

        def __init__(self, name: str, held: Any) -> None:
            self._name, self._held = name, held

        def __getattr__(self, attribute: str) -> Any:
            read.append(self._name)
            return getattr(self._held, attribute)

        def __len__(self) -> int:
            return len(self._held)

        def __getitem__(self, item: int) -> Any:
            read.append(self._name)
            return self._held[item]

    for part in ("training", "validation", "test"):
        object.__setattr__(site.data, part, Watched(part, getattr(site.data, part)))
    amplitude = site.estimate_amplitude().amplitude
    weights = state_arrays(untrained_network(experiment))
    site.train(0, ModelMessage(weights, amplitude))
    assert set(read) == {"training", "validation"}
    read.clear()
    site.evaluate(ModelMessage(weights, amplitude))
    assert "test" in read


@pytest.mark.slow
def test_a27_memory_stays_level_over_rounds(root: Path, tmp_path: Path, written: Any) -> None:
    """A model of 30 MiB at two sites and a server in one process: one that stayed behind a round would show.

    Half of a model a round is the limit; the first rounds fill caches and allocators.
    """
    set_key(written, "network.width", 32)
    set_key(written, "amplitude.minimum_cases", 1)
    toy = ToyRounds(resolve_experiment(written | {"method": "fedavg"}), root, tmp_path, ("BIDMC", "HK"))
    model = sum(value.nbytes for value in toy.weights.values()) / MIB
    assert model > 25
    resident = []
    for number in range(16):
        toy.round(number)
        resident.append(psutil.Process().memory_info().rss / MIB)
    growth = float(np.polyfit(range(10), resident[6:], 1)[0])
    assert growth < model / 2, resident
