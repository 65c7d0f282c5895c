"""The running mean of a site's statistics: exact, resumable, honest about what it has seen."""

import io
import json

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


@pytest.mark.parametrize("estimation", ["first_batch", "running_mean", "before_training"])
def test_an_estimation_that_was_read_from_a_file_is_the_same(estimation):
    read = json.loads(json.dumps(estimation))
    assert read is not estimation
    named, other = RunningAmplitude(estimation, 0.3), RunningAmplitude(read, 0.3)
    for seed in range(3):
        named.update(statistics_of(seed))
        other.update(statistics_of(seed))
    assert torch.equal(named.mean, other.mean) and named.settled == other.settled


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


@pytest.mark.parametrize(("momentum", "batches"), [(0.1, 22), (0.5, 4), (0.9, 1), (1.0, 1)])
def test_a_running_mean_stands_on_what_weighs_a_tenth_of_the_heaviest(momentum, batches):
    # 0.9^21 = 0.109 and 0.9^22 = 0.098; 0.5^3 = 0.125 and 0.5^4 = 0.06
    running = RunningAmplitude("running_mean", momentum)
    for batch in range(40):
        items = torch.arange(2 * batch, 2 * batch + 2)
        running.update(torch.ones(2, 3, 1), None, items)
    behind = running.behind()
    assert behind.shape == (3, 80)
    assert behind[0].nonzero().flatten().tolist() == list(range(80 - 2 * batches, 80))


@pytest.mark.parametrize("estimation", ["first_batch", "running_mean", "before_training"])
def test_a_batch_that_shows_nothing_in_a_channel_is_no_batch_of_it(estimation):
    running = RunningAmplitude(estimation, 0.5)
    running.update(torch.tensor([[[9.0], [2.0]]]), torch.tensor([[False, True]]), torch.tensor([0]))
    assert running.mean[0].isnan().all() and running.mean[1].item() == 2.0 and not running.settled
    running.update(torch.tensor([[[4.0], [8.0]]]), torch.tensor([[True, True]]), torch.tensor([1]))
    # channel 0 saw one batch; channel 1 two: the first, (0.25 * 2 + 0.5 * 8) / 0.75, and (2 + 8) / 2
    second = {"first_batch": 2.0, "running_mean": 6.0, "before_training": 5.0}[estimation]
    assert running.mean.flatten().tolist() == pytest.approx([4.0, second])
    assert running.settled == (estimation == "first_batch")
    assert running.behind().tolist() == [[False, True], [True, estimation != "first_batch"]]
    assert (running.images, running.blank) == (2, 1)


def test_each_channel_has_its_own_heaviest_image_and_blank_images_are_kept():
    running = RunningAmplitude("running_mean", 0.9)
    running.update(torch.rand(12, 2, 3), None, torch.arange(12))
    # item 12 shows channel 0 alone: there it weighs 0.9 and each of the twelve 0.1 * 0.9 / 12, in channel 1 0.9 / 12
    running.update(torch.rand(1, 2, 3), torch.tensor([[True, False]]), torch.tensor([12]))
    assert running.behind().tolist() == [12 * [False] + [True], 12 * [True] + [False]]
    again = RunningAmplitude("running_mean", 0.9)
    again.load_state_dict(running.state_dict())
    assert (again.blank, again.images, again.behind().tolist()) == (1, 13, running.behind().tolist())
