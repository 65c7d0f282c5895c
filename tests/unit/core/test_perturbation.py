"""Weight perturbation: equal to SAM, exact restore, complete state."""

import copy
import io

import pytest
import torch
from pytorch_optimizer import SAM
from torch import nn
from toy_training import OPTIMIZERS, Sequence, batch, equal, interrupted, loss_of, network, weights

from harmofl.core.perturbation import WeightPerturbation


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_equal_an_independent_sam(name, options):
    ours, theirs = network(), network()
    wrapped = WeightPerturbation(OPTIMIZERS[name](ours.parameters(), **options), 0.05)
    base = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    settings = {"lr": 0.05, "momentum": 0.9} if name == "sgd" else {"lr": 1e-2}
    reference = SAM(theirs.parameters(), base, rho=0.05, weight_decay=1e-2, **settings)
    for seed in range(20):
        result = wrapped.step(loss_of(ours, seed))
        expected = loss_of(theirs, seed)()
        expected.backward()
        reference.first_step(zero_grad=True)
        loss_of(theirs, seed)().backward()
        reference.second_step(zero_grad=True)
        assert float(result.loss) == pytest.approx(float(expected.detach()), abs=1e-6)
        assert not result.skipped
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_one_step_is_equations_6_and_7():
    # f(w) = w1^2 / 2 + 2 w2^2 at (3, 1): g = (3, 4), ||g|| = 5, delta = 0.5 g / 5 = (0.3, 0.4).
    # Gradient at (3.3, 1.4) is (3.3, 5.6); SGD with rate 0.1 steps from (3, 1) to (2.67, 0.44).
    point = nn.Parameter(torch.tensor([3.0, 1.0]))
    wrapped = WeightPerturbation(torch.optim.SGD([point], lr=0.1), 0.5)
    result = wrapped.step(lambda: point[0] ** 2 / 2 + 2 * point[1] ** 2)
    torch.testing.assert_close(point.detach(), torch.tensor([2.67, 0.44]))
    assert float(result.loss) == 6.5  # 9 / 2 + 2, of the unperturbed weights
    assert not result.loss.requires_grad


def test_the_norm_is_one_over_all_groups():
    first, second = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0]))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=0.1)
    wrapped = WeightPerturbation(optimizer, 1.0)
    (first**2 / 2 + second**2 / 2).sum().backward()
    with wrapped.perturbed():
        # g = (3, 4), norm 5: 3 + 0.6 and 4 + 0.8.
        torch.testing.assert_close(torch.cat([first, second]).detach(), torch.tensor([3.6, 4.8]))
    assert (first.item(), second.item()) == (3.0, 4.0)


def test_c8_a_thousand_steps_with_rate_0_leave_the_weights_bit_for_bit():
    model = network()
    before = weights(model)
    wrapped = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.0), 0.05)
    for seed in range(1000):
        wrapped.step(loss_of(model, seed % 7))
    assert equal(model, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_equals_no_interruption_bit_for_bit(name):
    model = network()
    wrapped = WeightPerturbation(OPTIMIZERS[name](model.parameters()), 0.05)
    for seed in range(5):
        wrapped.step(loss_of(model, seed))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": wrapped.state_dict()}, file)
    for seed in range(5, 10):
        wrapped.step(loss_of(model, seed))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network(seed=1)
    resumed.load_state_dict(saved["model"])
    continued = WeightPerturbation(OPTIMIZERS[name](resumed.parameters()), 0.7)
    continued.load_state_dict(saved["optimizer"])
    assert continued.alpha == 0.05
    for seed in range(5, 10):
        continued.step(loss_of(resumed, seed))
    assert equal(resumed, weights(model))


def test_groups_stay_shared_with_the_base_optimizer_after_loading():
    model = network()
    wrapped = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.1), 0.05)
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    wrapped.param_groups[0]["lr"] = 0.0
    before = weights(model)
    wrapped.step(loss_of(model, 0))
    assert equal(model, before)


def test_alpha_0_is_a_plain_step_in_one_pass():
    ours, plain = network(), network()
    wrapped = WeightPerturbation(OPTIMIZERS["adam"](ours.parameters()), 0.0)
    optimizer = OPTIMIZERS["adam"](plain.parameters())
    for seed in range(5):
        closure = Sequence(loss_of(ours, seed))
        wrapped.step(closure)
        assert closure.passes == 1
        optimizer.zero_grad()
        loss_of(plain, seed)().backward()
        optimizer.step()
    assert equal(ours, weights(plain))


# C8: exact restore.


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")])
@pytest.mark.parametrize("passes", [1, 2])
def test_c8_an_exception_between_the_passes_restores_the_weights(passes, scaler):
    model = network()
    wrapped = WeightPerturbation(OPTIMIZERS["adam"](model.parameters()), 0.5)
    wrapped.step(loss_of(model, 0), scaler=scaler)
    before = weights(model)
    closure = Sequence(*[loss_of(model, 1)] * (passes - 1), interrupted)
    with pytest.raises(KeyboardInterrupt):
        wrapped.step(closure, scaler=scaler)
    assert equal(model, before)
    assert not wrapped.step(loss_of(model, 2), scaler=scaler).skipped


def test_c8_an_exception_inside_perturbed_restores_the_weights():
    model = network()
    before = weights(model)
    wrapped = WeightPerturbation(OPTIMIZERS["adam"](model.parameters()), 0.5)
    loss_of(model, 0)().backward()

    def fail() -> None:
        with wrapped.perturbed():
            assert not equal(model, before)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert equal(model, before)


@pytest.mark.parametrize("gradient", [None, 0.0, float("inf"), float("nan")])
def test_perturbed_without_a_direction_stays_put(gradient):
    point = nn.Parameter(torch.tensor([1.0, 2.0]))
    if gradient is not None:
        point.grad = torch.tensor([gradient, 0.0])
    with WeightPerturbation(torch.optim.SGD([point], lr=0.1), 0.5).perturbed():
        assert torch.equal(point.detach(), torch.tensor([1.0, 2.0]))


def test_memory_format_of_weights_is_kept():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    wrapped = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    wrapped.step(lambda: model(torch.ones(1, 3, 5, 5)).square().sum())
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_autocast_around_the_step_does_not_hide_the_perturbation():
    inside, around = network(), network()
    first = WeightPerturbation(torch.optim.SGD(inside.parameters(), lr=0.1), 2.0)
    second = WeightPerturbation(torch.optim.SGD(around.parameters(), lr=0.1), 2.0)

    def own_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(inside, 0)()

    first.step(own_autocast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second.step(loss_of(around, 0))
    # Cached bfloat16 weights would make the second pass repeat the first.
    for mine, other in zip(around.parameters(), inside.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        WeightPerturbation(torch.optim.SGD(network().parameters(), lr=0.1), alpha)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_cuda_steps_equal_the_cpu_and_restore_exactly(options):
    ours, theirs = network().cuda(), network()
    scaler = torch.amp.GradScaler("cuda")
    first = WeightPerturbation(OPTIMIZERS["sgd"](ours.parameters(), **options), 0.05)
    second = WeightPerturbation(OPTIMIZERS["sgd"](theirs.parameters(), **options), 0.05)

    def on_device(seed: int):
        inputs, labels = (tensor.cuda() for tensor in batch(seed))
        return lambda: nn.functional.cross_entropy(ours(inputs), labels)

    for seed in range(10):
        assert not first.step(on_device(seed), scaler=scaler, clip_norm=1.0).skipped
        second.step(loss_of(theirs, seed), clip_norm=1.0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=1e-4)
    before = weights(ours)
    first.param_groups[0]["lr"] = 0.0
    for seed in range(20):
        first.step(on_device(seed), scaler=scaler)
    assert equal(ours, before)


def test_moments_follow_their_weights_into_another_memory_format():
    """Fused optimizers go through memory as it lies, so that moments in another order would move other weights."""
    first, second = torch.rand(2, 4, 3, 3, 3, generator=torch.Generator().manual_seed(0))

    def stepped(start, gradient, memory_format, state=None):
        layer = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=memory_format)
        with torch.no_grad():
            layer.weight.copy_(start)
        optimizer = WeightPerturbation(torch.optim.Adam(layer.parameters(), lr=0.1, fused=True), 0.0)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))
        layer.weight.grad = torch.empty_like(layer.weight).copy_(gradient)
        optimizer.optimizer.step()
        return layer.weight.detach().contiguous(), optimizer.state_dict()

    held, state = stepped(torch.zeros(4, 3, 3, 3), first, torch.contiguous_format)
    expected, _ = stepped(held, second, torch.contiguous_format, state)
    moved, _ = stepped(held, second, torch.channels_last, state)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)  # steps of 0.1 in float32
