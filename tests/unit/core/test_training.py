"""fit_round: deterministic, a plain loop without the method's parts, refusing what cannot train."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from toy_segmentation import (
    BATCH,
    IMAGES,
    STEPS,
    cross_entropy,
    dataset,
    equal,
    fitted,
    network,
    normalization,
    settings,
)

from harmofl.core.augmentation import flip_and_rotate
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import (
    TrainingError,
    TrainingStoppedError,
    array_difference,
    autocast,
    batches,
    build_optimizer,
    fit_round,
    seed_of,
    stream_seed,
)


def test_seeds_depend_on_run_site_and_round_alone():
    # SHA-256 of "7/A/2/train" begins with these 8 bytes; shifted right by one bit they are a 63-bit number
    digest = hashlib.sha256(b"7/A/2/train").hexdigest()[:16]
    assert seed_of(7, "A", 2) == int(digest, 16) // 2
    seeds = {seed_of(s, site, r) for s in (0, 1) for site in ("A", "B") for r in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_every_purpose_and_epoch_of_a_round_has_a_seed_of_its_own():
    # SHA-256 of "5/order/1", as above
    assert stream_seed(5, "order", 1) == int(hashlib.sha256(b"5/order/1").hexdigest()[:16], 16) // 2
    seeds = {stream_seed(s, purpose, e) for s in (5, 6) for purpose in ("order", "augmentation") for e in (0, 1)}
    assert len(seeds) == 8


def with_dropout(seed=1, **given):
    """Train a network that draws random numbers itself; its weights."""
    model = nn.Sequential(network(), nn.Dropout(0.5))
    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), 0.05, model)
    fit_round(model, normalization(), optimizer, cross_entropy, dataset(), settings=settings(**given), seed=seed)
    return model


def test_what_a_network_draws_comes_of_the_seed_and_moves_nothing_else():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = with_dropout(epochs=2)
    assert torch.equal(torch.rand(3), expected), "torch's own generator was left as it was"
    torch.manual_seed(2)
    assert equal(first, with_dropout(epochs=2))
    assert equal(first, with_dropout(epochs=2, workers=2))
    assert not equal(first, with_dropout(epochs=2, seed=2))


def test_the_order_is_the_same_with_and_without_augmentation():
    def seen(augmentation):
        model, held = network(), []
        model.register_forward_pre_hook(lambda module, inputs: held.append(inputs[0].flatten(2).sort().values))
        optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), 0.0, model)
        how = settings(augmentation=augmentation, epochs=2)
        fit_round(model, normalization(intensity="none"), optimizer, cross_entropy, dataset(), settings=how, seed=3)
        return torch.cat(held)

    plain = seen("none")
    assert torch.equal(plain, seen("flip_rotate")), "sorted pixels tell which image it is, however it is turned"
    assert not torch.equal(plain[:IMAGES], plain[IMAGES:]), "each epoch has an order of its own"


def test_order_augmentation_and_network_have_each_its_own_seed():
    def by_hand(purpose, epoch):
        return int(hashlib.sha256(f"3/{purpose}/{epoch}".encode()).hexdigest()[:16], 16) // 2

    model, seen, drawn = network(), [], set()
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.register_forward_pre_hook(lambda module, inputs: drawn.add(torch.initial_seed()))
    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), 0.0, model)
    plain = normalization(intensity="none")
    fit_round(model, plain, optimizer, cross_entropy, dataset(), settings=settings(epochs=2), seed=3)
    assert drawn == {by_hand("network", 0)}
    images, labels = dataset().tensors
    expected = []
    for epoch in range(2):
        order, augmentation = (
            torch.Generator().manual_seed(by_hand(purpose, epoch)) for purpose in ("order", "augmentation")
        )
        for items in torch.tensor(list(RandomSampler(images, generator=order))).split(BATCH):
            expected.append(flip_and_rotate(images[items], labels[items], augmentation)[0])
    assert torch.equal(torch.cat(seen), torch.cat(expected))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_one_seed_gives_one_result(name):
    torch.manual_seed(1)
    first, *_, result = fitted(name=name)
    torch.manual_seed(2)  # the global random state must not matter
    again, *_, same = fitted(name=name)
    assert equal(first, again)
    assert result == same


@pytest.mark.parametrize("augmentation", ["none", "flip_rotate"])
def test_another_seed_gives_another_result(augmentation):
    assert not equal(fitted(seed=1, augmentation=augmentation)[0], fitted(seed=2, augmentation=augmentation)[0])


def test_masks_move_with_their_images():
    model, seen = network(), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    def checking_loss(logits, targets):
        assert torch.equal(targets, (seen[-1][:, 1] > 0.5).long())  # as the data set makes them
        return cross_entropy(logits, targets)

    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), 0.05, model)
    layer = normalization(intensity="none")
    fit_round(model, layer, optimizer, checking_loss, dataset(), settings=settings(), seed=1)
    assert not torch.equal(torch.cat(seen)[:BATCH], dataset().tensors[0][:BATCH])
    assert len(seen) == 2 * STEPS
    # both passes of a step see the same images
    assert all(torch.equal(seen[index], seen[index + 1]) for index in range(0, len(seen), 2))


def test_augmentation_matters():
    assert not equal(fitted(augmentation="none")[0], fitted(augmentation="flip_rotate")[0])


@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_without_perturbation_and_amplitude_it_is_a_plain_loop(norm, name):
    model, *_, result = fitted(
        norm=norm, alpha=0.0, layer=normalization(intensity="none"), seed=5, name=name, augmentation="none", epochs=2
    )
    plain = network(norm)
    optimizer = {
        "sgd": lambda: torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True),
        "adam": lambda: torch.optim.Adam(plain.parameters(), lr=0.05, weight_decay=1e-4, fused=True),
    }[name]()
    losses = []
    for epoch in range(2):
        order = torch.Generator().manual_seed(stream_seed(5, "order", epoch))
        for images, targets in DataLoader(dataset(), BATCH, sampler=RandomSampler(dataset(), generator=order)):
            optimizer.zero_grad()
            loss = cross_entropy(plain(images.contiguous(memory_format=torch.channels_last)), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert equal(model, plain)
    assert (result.steps, result.skipped_steps, result.images) == (2 * STEPS, 0, 2 * IMAGES)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-6)


def test_perturbation_matters():
    assert not equal(fitted(alpha=0.05)[0], fitted(alpha=0.0)[0])


def test_clipping_matters():
    assert not equal(fitted(clip_norm=1e-3)[0], fitted()[0])


@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_statistics_are_observed_once_a_batch_whatever_the_passes(alpha):
    layer = normalization("full")
    passes = 0

    def counting_loss(logits, targets):
        nonlocal passes
        passes += 1
        return cross_entropy(logits, targets)

    fitted(layer=layer, alpha=alpha, loss=counting_loss, epochs=2)
    assert passes == 2 * STEPS * (2 if alpha else 1)
    assert layer.local.state_dict()["batches"].tolist() == 3 * [2 * STEPS]
    assert layer.local_images == 2 * IMAGES


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("estimation", ["first_batch", "running_mean"])
def test_each_image_is_weighed_under_its_own_number(estimation, workers):
    layer, data = normalization("full", estimation=estimation), dataset()
    how = replace(settings("none", epochs=2), workers=workers)
    model = network()
    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), 0.05, model)
    fit_round(model, layer, optimizer, cross_entropy, data, settings=how, seed=1)
    weights = layer.local.state_dict()["weights"]
    each = layer.statistics(data.tensors[0]).double()
    expected = torch.einsum("cn,nchw->chw", weights, each[: weights.shape[1]]) / weights.sum(1)[:, None, None]
    torch.testing.assert_close(layer.local_statistic, expected.float(), rtol=1e-5, atol=1e-5)
    assert int((weights[0] > 0).sum()) == (BATCH if estimation == "first_batch" else IMAGES)


def test_statistics_are_those_of_the_augmented_images():
    # full: a turned image has a turned spectrum
    turned, still = normalization("full"), normalization("full")
    fitted(layer=turned)
    fitted(layer=still, augmentation="none")
    assert not torch.equal(turned.local_statistic, still.local_statistic)


def test_batch_norm_records_the_first_pass_only():
    model, *_ = fitted(norm="batch", alpha=0.05)
    assert int(model[1].num_batches_tracked) == STEPS


def test_frozen_statistics_do_not_move():
    layer = normalization("full")
    layer.freeze(layer.statistics(dataset().tensors[0]).mean(0), IMAGES)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    fitted(layer=layer)
    assert layer.local_images == 0
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("allowed", [0, 2])
def test_it_stops_between_two_batches(allowed):
    model = network()
    optimizer = WeightPerturbation(build_optimizer(model, "adam", 1e-2, 0.9, 0.0), 0.05, model)
    asked = 0

    def should_stop():
        nonlocal asked
        asked += 1
        return asked > allowed

    with pytest.raises(TrainingStoppedError):
        fit_round(
            model,
            normalization(),
            optimizer,
            cross_entropy,
            dataset(),
            settings=settings(),
            seed=0,
            should_stop=should_stop,
        )
    steps = [int(moments["step"]) for moments in optimizer.optimizer.state.values()]
    assert steps == ([2] * len(list(model.parameters())) if allowed else [])


def test_an_empty_data_set_is_refused():
    with pytest.raises(TrainingError, match="the training split is empty"):
        fitted(dataset(0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_when_every_step_is_skipped_the_weights_stay_and_the_round_fails(bad):
    model = network()
    optimizer = WeightPerturbation(build_optimizer(model, "adam", 1e-2, 0.9, 0.0), 0.05, model)
    with pytest.raises(TrainingError, match=f"none of {STEPS} steps had finite loss.*training.learning_rate"):
        fit_round(
            model,
            normalization(),
            optimizer,
            lambda logits, targets: cross_entropy(logits, targets) * bad,
            dataset(),
            settings=settings(),
            seed=0,
        )
    assert equal(model, network())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_batch_is_skipped_and_counted(bad):
    calls = 0

    def once_bad(logits, targets):
        nonlocal calls
        calls += 1
        return cross_entropy(logits, targets) * (bad if calls == 1 else 1.0)

    model, *_, result = fitted(loss=once_bad)
    assert (result.steps, result.skipped_steps, result.images) == (STEPS, 1, IMAGES)
    assert math.isfinite(result.loss)
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


def test_bfloat16_trains_float32_weights_near_those_of_float32():
    low, full = fitted(precision="bfloat16")[0], fitted()[0]
    assert {value.dtype for value in low.state_dict().values()} == {torch.float32}
    assert not equal(low, full)
    for mine, other in zip(low.parameters(), full.parameters(), strict=True):
        # bfloat16 has 8 bits; three steps of rate 0.05 move weights of size about 0.3 by about 0.05
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-2)


def test_gradients_that_float16_rounds_to_0_survive_by_the_loss_scaler():
    # The gradient of a logit is at most 2^-10 (the mean over 4 x 16 x 16 pixels) times 2^-18, and the smallest number
    # of float16 is 2^-24; the scaler begins at 2^16.
    model, *_, result = fitted(
        precision="float16", clip_norm=1.0, loss=lambda logits, targets: cross_entropy(logits, targets) * 2.0**-18
    )
    assert (result.steps, result.skipped_steps) == (STEPS, 0)
    assert not equal(model, network())


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, None)])
def test_auto_is_bfloat16_on_a_gpu_that_has_it_and_float32_elsewhere(monkeypatch, supported, expected):
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
        patched.setattr(torch, "autocast", lambda device, dtype: asked.append((device, dtype)))
        autocast(torch.device("cuda"), "auto")
        autocast(torch.device("cpu"), "auto")
    assert asked == ([("cuda", expected)] if expected else [])
    assert equal(fitted(precision="auto")[0], fitted(precision="float32")[0])


def test_batches_without_a_generator_keep_the_order():
    seen = torch.cat([images for images, _ in batches(dataset(), BATCH, None)])
    assert torch.equal(seen, dataset().tensors[0])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_left_the_finite_numbers_are_no_difference(value):
    before = {"w": np.zeros(3, np.float32), "count": np.array(1)}
    moved = array_difference(before, {"w": np.array([1, 2, 3], np.float32), "count": np.array(4)})
    assert moved["w"].tolist() == [1, 2, 3] and moved["count"] == 3
    with pytest.raises(TrainingError, match="not finite in w; lower training.learning_rate"):
        array_difference(before, {"w": np.array([1, value, 3], np.float32), "count": np.array(4)})
