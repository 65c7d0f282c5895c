"""Weight perturbation between its two passes: overflow, clipping, batch statistics, missing gradients."""

import copy

import pytest
import torch
from torch import nn
from toy_training import OPTIMIZERS, Sequence, batch, equal, interrupted, loss_of, network, scaled, weights

from harmofl.core.perturbation import WeightPerturbation, frozen_batch_statistics

# C5: infinite gradients, scaler, clipping.


@pytest.mark.parametrize("broken", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c5_a_pass_that_is_not_finite_skips_the_step(name, factor, broken):
    model = network()
    wrapped = WeightPerturbation(OPTIMIZERS[name](model.parameters()), 0.05)
    wrapped.step(loss_of(model, 0))
    before, state = weights(model), copy.deepcopy(wrapped.state_dict())
    passes = [scaled(loss_of(model, 1), factor) if bad else loss_of(model, 1) for bad in broken]
    closure = Sequence(*passes)
    assert wrapped.step(closure).skipped
    assert closure.passes == (1 if broken[0] else 2)
    assert equal(model, before)
    for index, moments in wrapped.state_dict()["optimizer"]["state"].items():
        for key, value in moments.items():
            assert torch.equal(value, state["optimizer"]["state"][index][key])
    assert not wrapped.step(loss_of(model, 2)).skipped


@pytest.mark.parametrize("alpha", [0.0, 0.05])
@pytest.mark.parametrize("broken", [(True, False), (False, True), (True, True)])
def test_c5_overflow_under_a_scaler_halves_its_scale_once(broken, alpha):
    model = network()
    wrapped = WeightPerturbation(OPTIMIZERS["adam"](model.parameters()), alpha)
    # 2^100 times a loss of order 1 times 1e10 is beyond float32's 3.4e38, as 1e6 is beyond float16 in real use.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=10**6)
    before = weights(model)
    passes = [scaled(loss_of(model, 1), 1e10 if bad else 1.0) for bad in broken]
    skipped = wrapped.step(Sequence(*passes), scaler=scaler).skipped
    if alpha == 0.0 and not broken[0]:  # the second pass does not take place
        assert not skipped
        return
    assert skipped
    assert equal(model, before)
    assert scaler.get_scale() == 2.0**99
    # Scaled gradients near 2^99 are finite, although the sum of their squares would not be.
    assert not wrapped.step(loss_of(model, 2), scaler=scaler).skipped
    assert not equal(model, before)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c5_a_scaler_changes_no_number(name, options):
    plain, amplified = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    first = WeightPerturbation(OPTIMIZERS[name](plain.parameters(), **options), 0.05)
    second = WeightPerturbation(OPTIMIZERS[name](amplified.parameters(), **options), 0.05)
    for seed in range(10):
        expected = first.step(loss_of(plain, seed), clip_norm=0.1)
        result = second.step(loss_of(amplified, seed), scaler=scaler, clip_norm=0.1)
        torch.testing.assert_close(result.loss, expected.loss, rtol=0, atol=1e-6)
    # Powers of two scale without rounding.
    for mine, other in zip(amplified.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert scaler.get_scale() == 2.0**18  # one update a step: ten steps grow it twice at an interval of four


def test_c5_clipping_touches_the_second_gradient_alone():
    # f(w) = w^2 / 2 at 10, alpha 1: g = 10, w + 1 = 11, gradient there 11, clipped to 2; rate 1 steps to 8.
    # Were the first gradient clipped too, the perturbed point would still be 11 (only its direction counts), but a
    # perturbation clipped like a gradient would not; were the norm of pass 1 used, 11 * 2 / 10 = 2.2 gave 7.8.
    point = nn.Parameter(torch.tensor([10.0]))
    seen = []

    def closure():
        seen.append(float(point.detach()))
        return (point**2 / 2).sum()

    WeightPerturbation(torch.optim.SGD([point], lr=1.0), 1.0).step(closure, clip_norm=2.0)
    assert seen == [10.0, 11.0]
    assert float(point.detach()) == pytest.approx(8.0, abs=1e-5)


def test_a_gradient_below_the_limit_is_not_clipped():
    ours, free = network(), network()
    WeightPerturbation(OPTIMIZERS["sgd"](ours.parameters()), 0.05).step(loss_of(ours, 0), clip_norm=1e6)
    WeightPerturbation(OPTIMIZERS["sgd"](free.parameters()), 0.05).step(loss_of(free, 0))
    assert equal(ours, weights(free))


# C6: batch statistics.


def batch_norm_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_c6_only_the_first_pass_moves_running_statistics():
    model, single = batch_norm_network(), batch_norm_network()
    wrapped = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.1), 0.5, module=model)
    wrapped.step(loss_of(model, 0))
    loss_of(single, 0)()
    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, single[1].running_mean)
    assert torch.equal(model[1].running_var, single[1].running_var)
    assert model[1].momentum == 0.1


def test_c6_the_second_pass_still_normalizes_by_its_batch():
    model, other = batch_norm_network(), batch_norm_network()
    WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.1), 0.5, module=model).step(loss_of(model, 0))
    WeightPerturbation(torch.optim.SGD(other.parameters(), lr=0.1), 0.5).step(loss_of(other, 0))
    assert int(other[1].num_batches_tracked) == 2
    assert equal(model, weights(other))


def test_c6_recording_comes_back_after_an_exception():
    model = batch_norm_network()
    wrapped = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.1), 0.5, module=model)
    with pytest.raises(KeyboardInterrupt):
        wrapped.step(Sequence(loss_of(model, 0), interrupted))
    model(batch(1)[0])
    assert int(model[1].num_batches_tracked) == 2


def test_c6_a_second_pass_that_overflows_leaves_no_trace():
    model = batch_norm_network()
    wrapped = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.1), 0.5, module=model)
    inputs = batch(0)[0]
    result = wrapped.step(Sequence(loss_of(model, 0), lambda: model(inputs * float("inf")).sum()))
    assert result.skipped
    assert torch.isfinite(model[1].running_mean).all()


def test_frozen_batch_statistics_respects_layers_in_evaluation():
    model = batch_norm_network()
    model(batch(0)[0])
    model[1].eval()
    inputs = batch(1)[0]
    expected = model(inputs)
    with frozen_batch_statistics(model):
        assert torch.equal(model(inputs), expected)
    assert model[1].track_running_stats


# C7: no gradient, no direction.


@pytest.mark.parametrize("with_scaler", [False, True])
def test_c7_all_gradients_zero_skip_the_step(with_scaler):
    model = network()
    wrapped = WeightPerturbation(OPTIMIZERS["adam"](model.parameters()), 0.05)
    wrapped.step(loss_of(model, 0))
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu") if with_scaler else None
    closure = Sequence(scaled(loss_of(model, 1), 0.0))
    assert wrapped.step(closure, scaler=scaler).skipped
    assert closure.passes == 1
    assert equal(model, before)


@pytest.mark.parametrize("with_scaler", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_c7_a_network_frozen_altogether_stays_as_it_is(alpha, with_scaler):
    model = network()
    model.requires_grad_(False)
    before = weights(model)
    wrapped = WeightPerturbation(OPTIMIZERS["adam"](model.parameters()), alpha)
    scaler = torch.amp.GradScaler("cpu") if with_scaler else None
    wrapped.step(loss_of(model, 0), scaler=scaler)
    assert equal(model, before)


def test_c7_frozen_parameters_are_left_alone():
    model = network()
    model[0].requires_grad_(False)
    encoder = weights(model[0])
    wrapped = WeightPerturbation(OPTIMIZERS["sgd"](model.parameters()), 0.05)
    head = weights(model[2])
    for seed in range(3):
        assert not wrapped.step(loss_of(model, seed)).skipped
    assert equal(model[0], encoder)
    assert not equal(model[2], head)


def test_c7_a_gradient_that_appears_in_the_second_pass_is_used():
    early, late = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    wrapped = WeightPerturbation(torch.optim.SGD([early, late], lr=0.1), 0.5)
    wrapped.step(Sequence(lambda: early**2, lambda: early**2 + late))
    # early: perturbed to 2.5, gradient 5, step to 2 - 0.5; late: not perturbed, gradient 1, step to 3 - 0.1.
    assert float(early.detach()) == pytest.approx(1.5)
    assert float(late.detach()) == pytest.approx(2.9)


def test_c7_a_gradient_that_is_missing_in_the_second_pass_leaves_its_parameter():
    one, two = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(4.0))
    wrapped = WeightPerturbation(torch.optim.SGD([one, two], lr=0.1), 0.5)
    wrapped.step(Sequence(lambda: one**2 / 2 + two**2 / 2, lambda: one**2 / 2))
    assert float(two.detach()) == 4.0
    # one: perturbed by 0.5 * 3 / 5 to 3.3, so the step is 0.33.
    assert float(one.detach()) == pytest.approx(2.67)


@pytest.mark.parametrize("gradient", [2.0**-20, 2.0**15])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c7_half_precision_weights_move_by_alpha_whatever_the_norm(dtype, gradient):
    # 4 equal gradients have twice their size as norm, so that each weight moves by alpha / 2 = 1 / 4. For 2^-20 the
    # factor alpha / norm is 2^18, for 2^15 the norm is 2^16: both beyond the 65,504 of float16.
    point = nn.Parameter(torch.zeros(4, dtype=dtype))
    wrapped = WeightPerturbation(torch.optim.SGD([point], lr=0.0), 0.5)
    point.grad = torch.full((4,), gradient, dtype=dtype)
    with wrapped.perturbed():
        assert torch.equal(point.detach(), torch.full((4,), 0.25, dtype=dtype))
    assert torch.equal(point.detach(), torch.zeros(4, dtype=dtype))
