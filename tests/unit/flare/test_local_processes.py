"""A site that names several devices trains as on one, and is left with one line and no process where that fails."""

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional

from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import TrainingError, TrainingStoppedError, state_arrays
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import Experiment, set_key
from harmofl.flare import participant as module
from harmofl.flare.local_processes import Assignment
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.wire import Arrays, ModelMessage, UpdateMessage
from harmofl.tasks import resolve_experiment, untrained_network
from tests.loose_limits import LOOSE

BATCH = 7


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_prostate_site(folder / "HK", "siemens_1.5t_endorectal", 9, 0, matrix=64, slices=4)  # 6 for training
    return folder


@pytest.fixture
def experiment(written: dict[str, Any]) -> Experiment:
    changes = {
        "amplitude.minimum_cases": 1,
        "training.batch_size": BATCH,
        "training.momentum": 0.9,
        "training.keep_moments": True,
    }
    for key, value in changes.items():
        set_key(written, key, value)
    return resolve_experiment(written)


@pytest.fixture
def make(root: Path, tmp_path: Path) -> Callable[..., Participant]:
    def participant(
        experiment: Experiment, device: str, stop: Callable[[], bool] = lambda: False, folder: str = "state"
    ) -> Participant:
        site = SiteConfig(
            "HK",
            simulated=False,
            data_root=root,
            state_root=tmp_path / folder,
            device=device,
            minimum_cases=1,
            settings=LOOSE,
        )
        return Participant(experiment, site, "run", stop, logging.getLogger("HK"))

    return participant


class Unpickled:
    """Does something in another process, by being unpickled there in place of the task, which is not used."""

    def __init__(self, action: Callable[..., Any], *given: str) -> None:
        self._reduced = action, given

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def unpickle_in_the_other(monkeypatch: pytest.MonkeyPatch, action: Callable[..., Any], *given: str) -> None:
    def assignment(*of: Any) -> Assignment:
        return Assignment(*of[:4], Unpickled(action, *given), of[5])  # type: ignore[arg-type]

    monkeypatch.setattr(module, "Assignment", assignment)


def smooth(put: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Take smooth functions for those with kinks, where rounding decides between two gradients.

    Instance norm makes the network nonlinear.
    """
    put(nn.LeakyReLU, "forward", lambda self, inputs: functional.leaky_relu(inputs, 1.0))
    put(nn.MaxPool2d, "forward", lambda self, inputs: functional.avg_pool2d(inputs, 2))


def weights_of(experiment: Experiment) -> Arrays:
    return state_arrays(untrained_network(experiment))


def second_round(
    experiment: Experiment, make: Any, tmp_path: Path, devices: str
) -> tuple[UpdateMessage, UpdateMessage]:
    """Round 1 with the moments of round 0, on one device and on several."""
    one = make(experiment, devices.partition(",")[0])
    message = ModelMessage(weights_of(experiment), one.estimate_amplitude().amplitude)
    one.train(0, message)
    shutil.copytree(tmp_path / "state", tmp_path / "copied")
    before = set(multiprocessing.active_children())
    several = make(experiment, devices, folder="copied").train(1, message)
    assert set(multiprocessing.active_children()) == before and not torch.distributed.is_initialized()
    return one.train(1, message), several


def test_two_processes_of_a_site_train_as_one(
    experiment: Experiment, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smooth(monkeypatch.setattr)
    unpickle_in_the_other(monkeypatch, smooth)
    one, two = second_round(experiment, make, tmp_path, "cpu,cpu")
    assert one.difference is not None and two.difference is not None
    assert one.numbers["steps"] == two.numbers["steps"] == 4, "23 slices: batches of 7, 7, 7 and 2"
    assert one.numbers["images"] == two.numbers["images"] == 23
    assert two.numbers["loss"] == pytest.approx(one.numbers["loss"], abs=1e-6)
    moved = max(np.abs(change).max() for change in one.difference.values())
    # weights are below 4 in size, where float32 has steps of 2^-22: each optimizer step rounds to half of one, and a
    # gradient that is rounded differently may move it by one more
    tolerance = 4 * 1.5 * 2.0**-22
    assert moved > 1000 * tolerance
    for name, change in one.difference.items():
        np.testing.assert_allclose(two.difference[name], change, rtol=0, atol=tolerance)
    saved = [torch.load(tmp_path / folder / "state/run/round_000001.pt") for folder in ("state", "copied")]
    moments = [held["optimizer"]["optimizer"]["state"] for held in saved]
    assert moments[0].keys() == moments[1].keys()
    for number, held in moments[0].items():
        torch.testing.assert_close(moments[1][number]["momentum_buffer"], held["momentum_buffer"], rtol=1e-3, atol=1e-5)


def sabotage(kind: str) -> None:
    step, steps = WeightPerturbation.step, []

    def broken(self: WeightPerturbation, *given: Any, **named: Any) -> Any:
        steps.append(kind)
        if len(steps) == 2:
            if kind == "exit":
                os._exit(3)
            raise {"training": TrainingError, "value": ValueError}[kind]("/patients/Jane is broken")
        return step(self, *given, **named)

    WeightPerturbation.step = broken  # type: ignore[method-assign]


LINES = {
    "value": (SiteError, "site HK: its training process on cpu failed (ValueError)"),
    "training": (TrainingError, "/patients/Jane is broken"),  # such an error's own line names no file
    "exit": (
        SiteError,
        "site HK: its training process on cpu failed (ended with exit code 3; is there enough memory?)",
    ),
}


@pytest.mark.parametrize(
    "kind", ["value", pytest.param("training", marks=pytest.mark.slow), pytest.param("exit", marks=pytest.mark.slow)]
)
def test_a_process_that_fails_ends_the_round_in_one_line(
    experiment: Experiment, make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    unpickle_in_the_other(monkeypatch, sabotage, kind)
    expected, line = LINES[kind]
    with pytest.raises(expected) as caught:
        make(experiment, "cpu,cpu").train(0, ModelMessage(weights_of(experiment)))
    assert str(caught.value) == line
    assert not multiprocessing.active_children() and not torch.distributed.is_initialized()
    assert ("Jane" in caplog.text) == (kind == "value"), "what may name patients is in the site's findings"


@pytest.mark.slow
@pytest.mark.parametrize("when", [multiprocessing.active_children, torch.distributed.is_initialized])
def test_a_stop_is_followed_while_processes_start_and_between_batches(
    experiment: Experiment, make: Any, when: Callable[[], Any]
) -> None:
    with pytest.raises(TrainingStoppedError):
        make(experiment, "cpu,cpu", lambda: bool(when())).train(0, ModelMessage(weights_of(experiment)))
    assert not multiprocessing.active_children() and not torch.distributed.is_initialized()


def test_batch_norm_is_refused_on_the_cpu(written: dict[str, Any], make: Any) -> None:
    set_key(written, "network.norm", "batch")
    experiment = resolve_experiment(written)
    with pytest.raises(SiteError, match="set device to cpu alone, or network.norm to instance in the job") as caught:
        make(experiment, "cpu,cpu").train(0, ModelMessage(weights_of(experiment)))
    assert caught.value.code == "batch_norm" and "\n" not in str(caught.value)


def test_a_card_that_is_missing_is_named(experiment: Experiment, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    site = SiteConfig("HK", False, None, Path("/state"), device="cuda:0,cuda:1")
    with pytest.raises(SiteError, match="site HK asks for cuda:1 and has 1 GPUs") as caught:
        module.check_several(site, untrained_network(experiment))
    assert caught.value.code == "no_gpu"


ORPHANING = """
import sys, time
from pathlib import Path
from harmofl.flare import local_processes
from harmofl.flare.local_processes import _Companion, Assignment
from harmofl.flare.site import SiteConfig
class Slow:
    def __reduce__(self):
        return time.sleep, (600,)
if __name__ == "__main__":
    site = SiteConfig("HK", True, None, Path("/state"), device="cpu,cpu")
    companion = _Companion(Assignment(None, site, "run", {}, Slow(), b""), 1, "/nowhere")
    print(companion._process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_process_outlives_a_site_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphaning.py"
    script.write_text(ORPHANING)
    site = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert site.stdout is not None
        other = psutil.Process(int(site.stdout.readline()))
        deadline = time.monotonic() + 60
        while other.num_threads() < 2 and time.monotonic() < deadline:  # the thread that watches the parent
            time.sleep(0.1)
        site.send_signal(signal.SIGKILL)
        other.wait(30)  # raises where it goes on
    finally:
        site.kill()
        site.wait()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_a_site_train_as_one(experiment: Experiment, make: Any, tmp_path: Path) -> None:
    one, two = second_round(experiment, make, tmp_path, "cuda:0,cuda:1")
    assert one.difference is not None and two.difference is not None
    assert two.numbers["loss"] == pytest.approx(one.numbers["loss"], rel=1e-3)
    moved = max(np.abs(change).max() for change in one.difference.values())
    for name, change in one.difference.items():  # TF32 and bfloat16 round at 2^-8
        np.testing.assert_allclose(two.difference[name], change, rtol=0, atol=moved * 2.0**-6)
