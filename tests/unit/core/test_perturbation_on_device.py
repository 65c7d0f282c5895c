"""The perturbed step that reads no number from the device, compared with the one that does."""

import copy

import pytest
import torch
from toy_training import OPTIMIZERS, Sequence, batch, equal, loss_of, network, scaled, weights

from harmofl.core.perturbation import WeightPerturbation


def wrapped(model: torch.nn.Module, name: str, alpha: float) -> WeightPerturbation:
    return WeightPerturbation(OPTIMIZERS[name](model.parameters(), fused=True), alpha)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_steps_give_the_same_weights(name, alpha, clip_norm):
    watched, unwatched = network(), network()
    one, other = wrapped(watched, name, alpha), wrapped(unwatched, name, alpha)
    for seed in range(10):
        expected = one.step(loss_of(watched, seed), clip_norm=clip_norm)
        result = other._step_on_device(loss_of(unwatched, seed), clip_norm)
        assert not result.skipped
        torch.testing.assert_close(result.loss, expected.loss, rtol=0, atol=1e-6)
    for mine, theirs in zip(unwatched.parameters(), watched.parameters(), strict=True):
        # theta + a g is rounded once on the one path and twice on the other: 2^-24 of weights below 1, ten times
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("broken", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_pass_that_is_not_finite_leaves_weights_and_moments(name, factor, broken):
    model = network()
    optimizer = wrapped(model, name, 0.05)
    optimizer._step_on_device(loss_of(model, 0), None)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    passes = [scaled(loss_of(model, 1), factor) if bad else loss_of(model, 1) for bad in broken]
    assert optimizer._step_on_device(Sequence(*passes), 1.0).skipped
    assert equal(model, before)
    for index, moments in optimizer.state_dict()["optimizer"]["state"].items():
        for key, value in moments.items():
            assert torch.equal(value, state["optimizer"]["state"][index][key])
    assert not optimizer._step_on_device(loss_of(model, 2), None).skipped
    assert not equal(model, before)


def test_a_gradient_of_zero_has_no_direction():
    model = network()
    optimizer, before = wrapped(model, "adam", 0.05), weights(model)
    # the second pass has a gradient: weight decay and that gradient would move the weights
    assert optimizer._step_on_device(Sequence(scaled(loss_of(model, 1), 0.0), loss_of(model, 1)), None).skipped
    assert equal(model, before)


def test_a_gradient_of_zero_skips_the_step_whatever_the_second_pass_gives():
    # 0.05 / 0 times 0 is NaN, yet the gradient of a sum is 1 wherever it is taken
    point = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    optimizer = WeightPerturbation(torch.optim.SGD([point], lr=1.0, fused=True), 0.05)
    assert optimizer._step_on_device(Sequence(lambda: 0.0 * point.sum(), point.sum), None).skipped
    assert point.tolist() == [2.0, 3.0]
    assert not optimizer._step_on_device(Sequence(point.sum, point.sum), None).skipped
    assert point.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("alpha", "skipped"), [(0.0, False), (0.05, True)])
def test_a_network_frozen_altogether_stays_as_it_is(alpha, skipped):
    model = network()
    model.requires_grad_(False)
    optimizer, before = wrapped(model, "adam", alpha), weights(model)
    assert optimizer._step_on_device(loss_of(model, 0), None).skipped is skipped
    assert equal(model, before)


def test_a_perturbation_inside_another_has_memory_of_its_own():
    model = network()
    optimizer = wrapped(model, "sgd", 0.05)
    loss_of(model, 0)().backward()
    before = weights(model)
    with optimizer.perturbed():
        outer = weights(model)
        with optimizer.perturbed():
            assert not equal(model, outer)
        assert equal(model, outer)
    assert equal(model, before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_waits_for_nothing(name):
    model = network().cuda()
    inputs, labels = (tensor.cuda() for tensor in batch(0))
    optimizer = wrapped(model, name, 0.05)

    def closure() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(inputs), labels)

    optimizer.step(closure, clip_norm=1.0)  # state is made here
    torch.cuda.set_sync_debug_mode("error")
    try:
        skipped = optimizer.step(closure, clip_norm=1.0).skipped
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(skipped, torch.Tensor) and skipped.is_cuda and not skipped
