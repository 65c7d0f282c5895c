"""Estimates of memory and time."""

from pathlib import Path

import psutil
import pytest

from harmofl.app import costs
from harmofl.app.job import read_job
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
    assert pace.training > 0 and pace.prediction > 0
    assert "image" in pace.how and "CPU" in pace.how  # how many depends on the machine


def test_a_slow_step_is_measured_once_and_said_so(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LONGEST_MEASUREMENT", 0.0)
    pace = costs.measure_pace(resolved(job))
    assert "no more were measured" in pace.how
    assert pace.prediction == pytest.approx(pace.training / 6)


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
