"""The running mean of a site's statistics: exact, resumable, honest about what it has seen."""

import io

import pytest
import torch

from harmofl.core.amplitude import RunningAmplitude


def statistics_of(seed: int) -> torch.Tensor:
    return 100 * torch.rand((4, 2, 5, 3), generator=torch.Generator().manual_seed(seed))


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("estimation", ["first_batch", "running_mean", "before_training"])
def test_a_saved_running_mean_goes_on_bit_for_bit(estimation):
    whole, first = RunningAmplitude(estimation, 0.3), RunningAmplitude(estimation, 0.3)
    for seed in range(2):
        whole.update(statistics_of(seed))
        first.update(statistics_of(seed))
    second = RunningAmplitude(estimation, 0.3)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    for seed in range(2, 5):
        whole.update(statistics_of(seed))
        second.update(statistics_of(seed))
    assert torch.equal(second.mean, whole.mean)
    assert second.images == whole.images


def test_a_saved_empty_running_mean_stays_empty():
    running = RunningAmplitude("running_mean", 0.1)
    running.load_state_dict(saved_and_loaded(RunningAmplitude("running_mean", 0.1).state_dict()))
    assert running.images == 0
    with pytest.raises(ValueError, match="no batch"):
        _ = running.mean


def test_exact_mean_of_many_images_does_not_drift():
    # 20,000 statistics of 1e7 and 1: a float32 sum would lose every 1, the float64 one gives (1e7 + 1) / 2.
    running = RunningAmplitude("before_training", 0.1)
    for _ in range(100):
        running.update(torch.tensor([1e7, 1.0]).repeat(100)[:, None])
    assert running.mean.dtype == torch.float32
    assert float(running.mean) == float(torch.tensor(5000000.5, dtype=torch.float64).float())


@pytest.mark.parametrize("momentum", [0.0, -0.1, 1.1, float("nan")])
def test_momentum_out_of_range_is_refused(momentum):
    with pytest.raises(ValueError, match="momentum"):
        RunningAmplitude("running_mean", momentum)
