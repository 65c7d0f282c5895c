"""Estimates of memory and time."""

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from harmofl.app import costs
from harmofl.app.job import read_job
from harmofl.app.processor_time import Clocks
from harmofl.core.networks import build_network
from harmofl.experiment import Experiment, ExperimentError


def resolved(job: Path, *assignments: str) -> Experiment:
    return read_job(job, assignments).resolve(demo=False)


def test_memory_grows_with_the_batch_and_never_below_what_must_be_kept(job: Path) -> None:
    network = build_network("unet", 3, (0.5, 0.5), width=4, norm="instance", seed=0)
    # weights, gradients, two moments of Adam and the weights before the perturbation, 4 bytes a number
    fixed = 5 * 4 * sum(parameter.numel() for parameter in network.parameters())
    eight = costs.training_bytes(resolved(job)) - fixed
    sixteen = costs.training_bytes(resolved(job, "training.batch_size=16")) - fixed
    assert sixteen == pytest.approx(2 * eight, rel=0.01)
    # the first level alone keeps the outputs of two convolutions and of two norms: 4 x (8, 4, 64, 64) float32
    assert eight > 4 * 8 * 4 * 64 * 64 * 4


def test_fedprox_holds_one_copy_of_the_parameters_more_and_moon_two() -> None:
    small = ["network.width=4", "data.height=64", "data.width=64"]
    folder = Path(__file__).parents[3] / "jobs" / "harmofl_camelyon17"
    needed = {}
    for method in ("fedavg", "fedprox", "moon"):
        experiment = read_job(folder, [*small, f"method={method}"]).resolve(demo=False)
        needed[method] = costs.training_bytes(experiment)
    network = build_network("densenet121", 3, (0.5, 0.5), width=4, norm=experiment.network.norm, seed=0)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert needed["fedprox"] - needed["fedavg"] == 4 * parameters
    assert needed["moon"] - needed["fedavg"] == 2 * 4 * parameters


def test_as_many_sites_as_fit_and_at_least_one(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if costs.torch.cuda.is_available():
        pytest.skip("a GPU is there, whose memory counts instead")
    experiment = resolved(job)
    one = costs.PROCESS_BYTES + costs.training_bytes(experiment)
    memory = psutil.virtual_memory()

    def free(count: float) -> None:
        held = memory._replace(available=int(count * one / costs.SPARED) + 1000)
        monkeypatch.setattr(costs.psutil, "virtual_memory", lambda: held)

    for count, fitting in ((3.0, 3), (3.9, 3), (0.2, 1)):
        free(count)
        assert costs.fitting_processes(experiment) == fitting


@pytest.mark.parametrize(("on_card", "in_memory", "fitting"), [(3.5, 9.0, 3), (9.0, 2.5, 2), (0.5, 9.0, 1)])
def test_sites_that_share_a_card_fit_into_its_memory_and_the_machines(
    job: Path, monkeypatch: pytest.MonkeyPatch, on_card: float, in_memory: float, fitting: int
) -> None:
    experiment = resolved(job)
    a_site = costs.CONTEXT_BYTES + costs.training_bytes(experiment)
    monkeypatch.setattr(costs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(costs.torch.cuda, "mem_get_info", lambda: (int(on_card * a_site / costs.SPARED), 0))
    free = int(in_memory * costs.PROCESS_BYTES / costs.SPARED)
    held = psutil.virtual_memory()._replace(available=free)
    monkeypatch.setattr(costs.psutil, "virtual_memory", lambda: held)
    assert costs.fitting_processes(experiment) == fitting


def test_the_pace_is_measured_on_the_jobs_own_network(job: Path) -> None:
    pace = costs.measure_pace(resolved(job))
    assert pace.training > 0 and pace.prediction > 0 and 0 < pace.share <= 1
    assert "after the first, processor time on" in pace.how  # how many steps depends on the machine


class Machine:
    """Clocks that move by hand while `measure_pace` works, which the steps and predictions here do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float], load: float = 1.0) -> None:
        self.now, self.load, self.steps = 0.0, load, []
        waiting = iter(seconds)

        def training(*_: object) -> Callable[[], None]:
            self.steps.append(_[-2:])
            return lambda: self._work(next(waiting))

        monkeypatch.setattr(costs, "_answer_shape", lambda *_: self._work(0.25))
        monkeypatch.setattr(costs, "_training", training)
        monkeypatch.setattr(costs, "_prediction", lambda *_: lambda: self._work(next(waiting)))
        monkeypatch.setattr(costs.torch, "get_num_threads", lambda: 4)

    def _work(self, seconds: float) -> None:
        self.now += seconds

    @property
    def clocks(self) -> Clocks:
        """Three threads at work; `load` seconds pass on the wall for one of the processor."""
        return Clocks(lambda: self.now * self.load, lambda: self.now * 3, lambda: self.now)


def test_the_first_step_of_the_process_and_of_the_size_are_left_out(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # one image: 2 s at first, then 0.5 s; a batch of 8 in 9 s, and as 8 x 0.5 s fit into 5 s once, one of 4 s, which
    # counts; 8 predictions take 3 s at first and 0.8 s then
    machine = Machine(monkeypatch, [2.0, 0.5, 9.0, 4.0, 3.0, 0.8])
    pace = costs.measure_pace(resolved(job, "training.batch_size=8"), machine.clocks)
    assert machine.steps == [(1, 1), (1, 1), (8, 1), (8, 1)]
    assert pace.training == 4.0 / 8
    assert pace.prediction == pytest.approx(0.8 / 8)
    # what each process takes once: the answer's shape, the first step, the first batch and the first prediction
    assert pace.first == pytest.approx(0.25 + (2.0 - 0.5) + (9.0 - 4.0) + (3.0 - 0.8))
    assert pace.how == "1 step of 8 images after the first, processor time on 4 threads, 3.0 of them at work"
    assert pace.share == 1


def test_load_is_not_counted_as_speed(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [2.0, 0.5, 9.0, 4.0, 3.0, 0.8]
    quiet, loaded = (
        costs.measure_pace(resolved(job, "training.batch_size=8"), Machine(monkeypatch, seconds, load).clocks)
        for load in (1.0, 2.5)
    )
    assert (loaded.training, loaded.prediction, loaded.first) == (quiet.training, quiet.prediction, quiet.first)
    assert loaded.share == pytest.approx(0.4)
    # 0.5 s on an idle machine are 1.25 s for a thread that gets 0.4 of a core
    assert loaded.as_busy.training == pytest.approx(1.25)
    assert loaded.as_busy.prediction == pytest.approx(0.1 / 0.4)
    assert loaded.as_busy.first == pytest.approx(8.95 / 0.4)


def test_a_gpu_is_timed_on_the_wall_once_it_has_done_its_work(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [2.0, 0.5, 9.0, 4.0, 3.0, 0.8], load=2.5)
    waited: list[float] = []
    monkeypatch.setattr(costs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(costs.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(costs.torch.cuda, "synchronize", lambda: waited.append(machine.now))
    monkeypatch.setattr(costs, "placed", lambda network, device: network)
    pace = costs.measure_pace(resolved(job, "training.batch_size=4"), machine.clocks)
    # on the wall a step of one image takes 1.25 s, so that a batch of 4 does not fit into 5 s, and four steps of one
    # image would: they take 9 x 2.5 s; prediction of one image 3 x 2.5 s, after one of 4 s that is left out
    assert machine.steps == [(1, 1), (1, 1), (1, 4)]
    assert pace.training == pytest.approx(9 * 2.5 / 4)
    assert pace.prediction == pytest.approx(3.0 * 2.5)
    assert pace.share == 1 and pace.as_busy == pace, "nobody tells a GPU's share"
    assert len(waited) == 5, "three trainings and two predictions"
    assert pace.how == "4 steps of 1 image after the first, by the clock on a GPU, other work on it included"


def test_a_slow_step_is_measured_once_after_the_first_and_said_so(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [20.0, 12.0])
    pace = costs.measure_pace(resolved(job), machine.clocks)
    assert pace.how.startswith("1 step of 1 image after the first")
    assert pace.how.endswith("it took 12 s, so no more were measured")
    assert (pace.training, pace.prediction, pace.first) == (12, 2, 8.25)


def test_a_network_that_cannot_be_built_is_a_mistake_in_the_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Experiment) -> None:
        raise ValueError("network.norm: no")

    monkeypatch.setattr(costs, "untrained_network", refuse)
    with pytest.raises(ExperimentError, match=r"network.norm: no"):
        costs.training_bytes(resolved(job))


def test_classification_is_measured_with_a_label_an_image() -> None:
    small = ["network.width=4", "data.height=64", "data.width=64"]
    job = read_job(Path(__file__).parents[3] / "jobs" / "harmofl_camelyon17", small)
    pace = costs.measure_pace(job.resolve(demo=False))
    assert pace.training > 0
