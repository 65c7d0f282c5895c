"""Runs of one machine that share demo data and decoded images: who makes them, who waits, and what is shared."""

import fcntl
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harmofl.experiment import Experiment, set_key
from harmofl.files import LOCK, locked_folder
from harmofl.flare.participant import Participant
from harmofl.flare.shared_data import demo_folder
from harmofl.flare.site import SiteConfig
from harmofl.tasks import TASKS, load_task, resolve_experiment

JOBS = Path(__file__).resolve().parents[3] / "jobs"
FEW: dict[str, dict[str, Any]] = {
    "prostate": {"cases": 1, "matrix": 64, "slices": 3},
    "camelyon17": {"slides": 3, "patches": 6},
    "nuclei": {"patients": 3, "images": 3, "size": 64},
}


def demo_of(task: str, changes: Mapping[str, Any] | None = None) -> Experiment:
    """The demo of a task's job with few images."""
    written = json.loads((JOBS / f"harmofl_{task}" / "app" / "config" / "experiment.json").read_text())
    written["demo"] = {"data": FEW[task]}
    for key, value in (changes or {}).items():
        set_key(written, key, value)
    return resolve_experiment(written, demo=True)


class Watched:
    """An experiment that notes which of its sections are read."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self.read = experiment, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._experiment, name)


@pytest.mark.parametrize("task", TASKS)
def test_what_demo_data_is_made_of_decides_its_folder(task: str, tmp_path: Path) -> None:
    """No task reads another section than those that decide where the data is shared."""
    experiment = demo_of(task)
    watched = Watched(experiment)
    load_task(experiment).write_demo(tmp_path / "hospital1", "hospital1", watched)  # type: ignore[arg-type]
    assert watched.read and watched.read <= {"task", "seed", "data", "reader", "demo"}


def test_experiments_that_differ_in_training_alone_share_demo_data() -> None:
    folder, plain = Path("folder"), demo_of("prostate")
    place = demo_folder(folder, "HK", plain)
    for key, value in {"method": "fedavg", "training.learning_rate": 1.0, "federation.rounds": 9}.items():
        other = demo_of("prostate", {key: value})
        assert other.hash != plain.hash and demo_folder(folder, "HK", other) == place
    for key, value in {"seed": 7, "demo.data": {"cases": 9}, "data.height": 96, "reader.slices": "all"}.items():
        assert demo_folder(folder, "HK", demo_of("prostate", {key: value})) != place, key
    assert demo_folder(folder, "UCL", plain) != place


def test_the_second_run_decodes_nothing_and_computes_the_same(
    written: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written["demo"] = {"data": {"cases": 4, "matrix": 64, "slices": 3}}
    set_key(written, "amplitude.minimum_cases", 1)
    experiment = resolve_experiment(written, demo=True)

    def amplitude(state: str, shared: Path | None = None) -> Any:
        site = SiteConfig("HK", True, None, tmp_path / state, device="cpu", minimum_cases=1, shared_data=shared)
        participant = Participant(experiment, site, "run", lambda: False, logging.getLogger("HK"))
        return participant.estimate_amplitude().amplitude.values  # type: ignore[union-attr]

    own = amplitude("alone")
    first = amplitude("first", tmp_path / "shared")

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("made anew")

    monkeypatch.setattr("harmofl.data.synthetic._write_case", refuse)
    monkeypatch.setattr("harmofl.data.volumes.read_volume", refuse)
    second = amplitude("second", tmp_path / "shared")
    assert np.array_equal(own, first) and np.array_equal(own, second)
    assert not any((tmp_path / "second").rglob("*.decoded")), "one copy for all"
    with pytest.raises(AssertionError, match="made anew"):
        amplitude("third", tmp_path / "elsewhere")


def test_a_shared_folder_is_one_process_at_a_time(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "HK") as folder, (folder / LOCK).open("w") as other:
        assert folder.stat().st_mode & 0o077 == 0, "patient images are for their owner alone"
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "HK" / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
