"""The layer: when it learns, when it is frozen, what it saves, what it refuses."""

import copy
import io

import pytest
import torch

from harmofl.core.amplitude import AmplitudeNormalization, amplitude_spectrum, zscore

HEIGHT, WIDTH = 24, 20
REGIONS = ["dc", "low", "full", "site_gain"]


def layer_for(
    region: str, estimation: str = "running_mean", intensity: str = "none", momentum: float = 0.1, size=(HEIGHT, WIDTH)
):
    return AmplitudeNormalization(
        intensity=intensity,
        region=region,
        low_fraction=0.2,
        estimation=estimation,
        momentum=momentum,
        channels=2,
        height=size[0],
        width=size[1],
    )


def images_of(seed: int, batch: int = 4, scale: float = 100.0) -> torch.Tensor:
    return scale * torch.rand((batch, 2, HEIGHT, WIDTH), generator=torch.Generator().manual_seed(seed))


def striped(level: float, batch: int = 1) -> torch.Tensor:
    """Images of contrast whose mean is exactly a level: columns half above and half below it, in turn."""
    stripes = 0.5 - torch.arange(WIDTH) % 2
    return (level + stripes).expand(batch, 2, HEIGHT, WIDTH).clone()


def frozen_layer(region: str, intensity: str = "none") -> AmplitudeNormalization:
    layer = layer_for(region, "before_training", intensity)
    statistics = layer.statistics(images_of(99, scale=150.0))
    layer.freeze(statistics.mean(0), 4)
    if region == "site_gain":
        layer.set_own(layer.statistics(images_of(98)).mean(0) - 0.3)
    return layer


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_off_and_untargeted_layers_do_the_intensity_step_alone():
    images = images_of(0)
    for region in ["off", *REGIONS]:
        assert torch.equal(layer_for(region, intensity="none")(images), images)
        assert torch.equal(layer_for(region, intensity="window")(images), images)
        assert torch.equal(layer_for(region, intensity="zscore")(images), zscore(images))


@pytest.mark.parametrize("estimation", ["first_batch", "running_mean"])
@pytest.mark.parametrize("region", ["dc", "low", "full"])
def test_algorithm_1_updates_then_normalizes_with_the_local_mean(region, estimation):
    layer = layer_for(region, estimation)
    for seed in range(3):
        images = images_of(seed)
        layer.observe(images)
        reached = amplitude_spectrum(layer(images), region, 0.2)
        torch.testing.assert_close(reached, layer.local_statistic.expand_as(reached), rtol=1e-4, atol=0.05)
    assert layer.local_images == (4 if estimation == "first_batch" else 12)


@pytest.mark.parametrize("region", REGIONS)
def test_before_training_normalizes_only_once_frozen(region):
    layer = layer_for(region, "before_training")
    images = images_of(0)
    layer.observe(images)
    assert torch.equal(layer(images), images)
    layer.freeze(layer.local_statistic * 1.2, 4)
    if region == "site_gain":
        layer.set_own(layer.local_statistic)
    assert not torch.allclose(layer(images), images, atol=1e-2)


def test_site_gain_under_estimation_has_a_gain_of_1():
    layer = layer_for("site_gain", "running_mean", "zscore")
    layer.observe(images_of(0))
    assert torch.equal(layer(images_of(0)), zscore(images_of(0)))


def test_site_gain_without_its_own_profile_says_so():
    layer = layer_for("site_gain")
    layer.freeze(torch.zeros(layer.target.shape), 4)
    with pytest.raises(RuntimeError, match="own profile"):
        layer(images_of(0))


# The six points of C3: what the released code does, and what this layer does.


def test_c3_1_the_region_is_explicit():
    images, target = images_of(0), images_of(1).square() / 100
    layers = {region: layer_for(region) for region in ("dc", "full")}
    results = {}
    for region, layer in layers.items():
        layer.freeze(layer.statistics(target).mean(0), 4)
        results[region] = torch.fft.rfft2(layer(images)).abs()
    before = torch.fft.rfft2(images).abs()
    torch.testing.assert_close(results["dc"][..., 1:], before[..., 1:], rtol=1e-3, atol=0.05)
    torch.testing.assert_close(results["dc"][..., 0, 0], results["full"][..., 0, 0], rtol=1e-4, atol=0.05)
    # Independent textures: their amplitudes differ by far more than a tenth in most coefficients.
    changed = (results["full"] - before).abs() > 0.1 * before
    assert changed.float().mean() > 0.7


def test_c3_2_the_momentum_is_a_fraction_not_cut_to_0():
    layer = layer_for("dc", "running_mean", momentum=0.1)
    for level in (1.0, 2.0):
        layer.observe(striped(level))
    # A_1 = 0.1, A_2 = 0.9 * 0.1 + 0.1 * 2 = 0.29 a pixel; divided by 1 - 0.81 = 0.19.
    expected = torch.full((2, 1, 1), HEIGHT * WIDTH * 0.29 / 0.19)
    torch.testing.assert_close(layer.local_statistic, expected, rtol=1e-6, atol=0)


def test_c3_3_a_statistic_that_sums_to_0_counts_as_one():
    around_zero, bright = striped(0.0, 2), striped(8.0, 2)
    layer = layer_for("dc", "first_batch")
    assert layer.local_statistic is None
    layer.observe(around_zero)
    layer.observe(bright)
    assert torch.equal(layer.local_statistic, torch.zeros(2, 1, 1))
    assert (layer(bright) - around_zero).abs().max() < 1e-5
    layer.freeze(torch.zeros(2, 1, 1), 2)
    assert saved_and_loaded(layer.state_dict())["frozen"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("region", REGIONS)
def test_c3_4_forward_passes_move_no_statistic(region, training):
    layer = layer_for(region).train(training)
    layer.observe(images_of(0))
    before, state = layer.local_statistic, copy.deepcopy(layer.state_dict())
    for seed in (1, 1, 2):
        layer(images_of(seed))
    assert torch.equal(layer.local_statistic, before)
    assert layer.local_images == 4
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("intensity", ["none", "zscore"])
@pytest.mark.parametrize("region", REGIONS)
def test_c3_5_the_input_is_not_changed_and_no_gradient_flows(region, intensity):
    layer = frozen_layer(region, intensity)
    images = images_of(0)
    original = images.clone()
    layer.observe(images)
    result = layer(images.requires_grad_())
    assert torch.equal(images.detach(), original)
    assert not result.requires_grad
    assert not torch.allclose(result, images, atol=1e-2)


@pytest.mark.parametrize("region", REGIONS)
def test_c3_6_a_reloaded_layer_is_still_frozen(region):
    layer = frozen_layer(region)
    state = saved_and_loaded(layer.state_dict())
    assert bool(state["frozen"])
    assert int(state["images"]) == 4
    reloaded = layer_for(region)
    reloaded.observe(images_of(5))
    reloaded.load_state_dict(state)
    before = reloaded.local_statistic
    reloaded.observe(images_of(6))
    assert torch.equal(reloaded.local_statistic, before)
    assert torch.equal(reloaded(images_of(7)), layer(images_of(7)))


def test_an_unfrozen_state_thaws_a_frozen_layer():
    layer = frozen_layer("dc")
    layer.load_state_dict(layer_for("dc").state_dict())
    assert torch.equal(layer(images_of(0)), images_of(0))


@pytest.mark.parametrize("region", REGIONS)
def test_observe_does_nothing_once_frozen(region):
    layer = layer_for(region)
    layer.observe(images_of(0))
    before = layer.local_statistic
    layer.freeze(torch.ones(layer.target.shape), 10)
    layer.observe(images_of(1))
    assert torch.equal(layer.local_statistic, before)
    assert layer.local_images == 4
    assert int(layer.images) == 10


def test_observe_does_nothing_for_region_off():
    layer = layer_for("off")
    layer.observe(images_of(0))
    assert layer.local_statistic is None


def test_a_copy_and_a_state_hold_everything():
    layer = frozen_layer("site_gain", "zscore")
    assert set(layer.state_dict()) == {"target", "own", "frozen", "has_own", "images"}
    assert layer.images.dtype == torch.int64
    assert layer.own.shape == layer.target.shape
    assert layer_for("full").own.shape == (0,)
    assert torch.equal(copy.deepcopy(layer)(images_of(0)), layer(images_of(0)))


@pytest.mark.parametrize("region", REGIONS)
def test_wrong_targets_are_refused_and_change_nothing(region):
    layer = layer_for(region)
    shape = tuple(layer.target.shape)
    with pytest.raises(ValueError, match="has shape"):
        layer.freeze(torch.ones(*shape[:-1], shape[-1] + 1), 5)
    for value in (float("nan"), float("inf")):
        target = torch.ones(shape)
        target.view(-1)[-1] = value
        with pytest.raises(ValueError, match="not finite"):
            layer.freeze(target, 5)
    with pytest.raises(ValueError, match="0 images"):
        layer.freeze(torch.ones(shape), 0)
    if region != "site_gain":
        with pytest.raises(ValueError, match="negative"):
            layer.freeze(-torch.ones(shape), 5)
    assert not bool(layer.frozen)
    assert torch.equal(layer.target, torch.zeros(shape))


def test_own_profiles_are_checked_too():
    with pytest.raises(ValueError, match="only site_gain"):
        layer_for("full").set_own(torch.zeros(2, 11))
    layer = layer_for("site_gain")
    with pytest.raises(ValueError, match="own profile has shape"):
        layer.set_own(torch.zeros(2, 10))
    for value in (torch.nan, torch.inf):  # a channel is known as a whole or not at all
        partly = torch.zeros(2, 11)
        partly[1, 3] = value
        with pytest.raises(ValueError, match="own profile has values"):
            layer.set_own(partly)
    with pytest.raises(ValueError, match="takes no global amplitude"):
        layer_for("off").freeze(torch.zeros(0), 3)


def test_a_saved_amplitude_of_another_image_size_is_refused():
    small = layer_for("full")
    other = layer_for("full", size=(HEIGHT, WIDTH + 2))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(small.state_dict())


@pytest.mark.parametrize("size", [384, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c1_half_precision_and_autocast(size, dtype):
    layer = layer_for("full", intensity="zscore", size=(size, size))
    images = torch.rand((2, 2, size, size), generator=torch.Generator().manual_seed(0)).to(dtype)
    convolution = torch.nn.Conv2d(2, 2, 3)
    with torch.autocast("cpu", dtype=dtype):
        layer.observe(images)
        layer.freeze(layer.local_statistic, 2)
        normalized = layer(images)
        loss = convolution(normalized).float().square().mean()
    loss.backward()
    assert normalized.dtype == dtype
    torch.testing.assert_close(normalized.float(), layer(images.float()), rtol=1e-2, atol=1e-2)
    assert torch.isfinite(convolution.weight.grad).all()


@pytest.mark.parametrize("region", REGIONS)
def test_half_precision_networks_keep_a_float32_amplitude(region):
    network = torch.nn.Sequential(frozen_layer(region), torch.nn.Conv2d(2, 1, 3))
    target = network[0].target.clone()
    network.half()
    assert network[1].weight.dtype == torch.float16
    assert torch.equal(network[0].target, target)
    assert torch.isfinite(network[0](images_of(0).half())).all()


@pytest.mark.parametrize("intensity", ["none", "zscore"])
@pytest.mark.parametrize("region", ["off", *REGIONS])
def test_channels_last_comes_out_as_it_went_in(region, intensity):
    layer = layer_for("off", intensity=intensity) if region == "off" else frozen_layer(region, intensity)
    images = images_of(0)
    result = layer(images.contiguous(memory_format=torch.channels_last))
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.contiguous(), layer(images), rtol=0, atol=1e-4)


@pytest.mark.parametrize("region", REGIONS)
def test_export_traces_to_the_same_numbers(region):
    layer = frozen_layer(region, "zscore").eval()
    exported = torch.export.export(layer, (images_of(0),)).module()
    torch.testing.assert_close(exported(images_of(1)), layer(images_of(1)), rtol=0, atol=1e-5)
    torch.testing.assert_close(layer(images_of(1)), frozen_layer(region, "zscore")(images_of(1)))


def test_a_broken_image_does_not_enter_the_mean():
    layer = layer_for("full")
    layer.observe(images_of(0))
    before = layer.local_statistic
    broken = images_of(1)
    broken[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite intensities"):
        layer.observe(broken)
    assert torch.equal(layer.local_statistic, before)
