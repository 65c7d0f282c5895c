"""Properties and edge cases of spectra, replacement and site gain."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harmofl.core.amplitude import amplitude_spectrum, replace_amplitude, site_gain_filter, statistic_shape, zscore
from harmofl.core.radial import site_gain
from harmofl.core.spectra import PHASE_FLOOR

REPLACED = ["dc", "low", "full"]
sizes = st.tuples(st.integers(4, 40), st.integers(4, 40))
seeds = st.integers(0, 2**31)
fractions = st.floats(0.03, 0.5)


def random_images(size: tuple[int, int], seed: int, batch: int = 3, channels: int = 2) -> torch.Tensor:
    return torch.rand((batch, channels, *size), generator=torch.Generator().manual_seed(seed)) * 200


def spectrum_of(images: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft2(images.double())


@given(size=sizes, seed=seeds, region=st.sampled_from(REPLACED), fraction=fractions)
@settings(max_examples=40, deadline=None)
def test_own_amplitude_in_gives_the_image_out(size, seed, region, fraction):
    images = random_images(size, seed, batch=1)
    own = amplitude_spectrum(images, region, fraction)[0]
    torch.testing.assert_close(replace_amplitude(images, own, region, fraction), images, rtol=0, atol=2e-3)


@given(size=sizes, seed=seeds, region=st.sampled_from(REPLACED), fraction=fractions)
@settings(max_examples=40, deadline=None)
def test_phase_is_kept_and_the_target_reached(size, seed, region, fraction):
    images, others = random_images(size, seed), random_images(size, seed + 1)
    target = amplitude_spectrum(others, region, fraction).mean(0)
    result = replace_amplitude(images, target, region, fraction)
    assert result.shape == images.shape
    before, after = spectrum_of(images), spectrum_of(result)
    clear = (before.abs() > 1e-3 * before.abs().amax((-2, -1), keepdim=True)) & (
        after.abs() > 1e-3 * after.abs().amax()
    )
    turn = torch.angle(after[clear] / before[clear])
    assert turn.abs().max() < 1e-3
    reached = amplitude_spectrum(result, region, fraction)
    # float32 noise is 1e-7 of DC, about 2e5 here; 1 is far below the amplitudes at stake.
    torch.testing.assert_close(reached, target.expand_as(reached), rtol=1e-4, atol=1.0)


@pytest.mark.parametrize("size", [(16, 16), (64, 48)])
def test_the_gain_of_the_highest_and_lowest_frequencies_by_hand(size):
    # A step of 1 in one bin is 1/2 there and 1/4 beside it after [1, 2, 1] / 4; the ends repeat: 1/2 + 1/4 at them.
    # Bins of images up to 64 pixels lie around 2^(-6 + j / 2), j = 0..10, so f = 1/2 and all above it are in the last.
    highest, lowest = torch.zeros(2, 1, 11)
    highest[0, 10], lowest[0, 0] = 1, 1
    above = site_gain(highest, torch.zeros(1, 11), *size)[0]
    ends = [(size[0] // 2, 0), (0, size[1] // 2), (size[0] // 2, size[1] // 2)]
    assert [float(above[place]) for place in ends] == pytest.approx([math.exp(0.75)] * 3)
    below = site_gain(lowest, torch.zeros(1, 11), *size)[0]
    assert [float(below[place]) for place in ends] == pytest.approx([1.0] * 3)
    if size == (64, 48):  # f = 1 / 64 is the middle of the first bin
        assert float(below[1, 0]) == pytest.approx(math.exp(0.75)) and float(above[1, 0]) == pytest.approx(1.0)


@given(size=sizes, seed=seeds)
@settings(max_examples=30, deadline=None)
def test_site_gain_keeps_phase_and_mean_and_is_the_identity_on_its_own_profile(size, seed):
    images = zscore(random_images(size, seed)) + 0.5
    own = amplitude_spectrum(images, "site_gain", 0.1).mean(0)
    torch.testing.assert_close(site_gain_filter(images, own, own), images, rtol=0, atol=1e-5)

    target = own + torch.linspace(-2, 2, own.shape[1])
    result = site_gain_filter(images, target, own)
    assert result.shape == images.shape
    ratio = spectrum_of(result) / spectrum_of(images)
    clear = spectrum_of(images).abs() > 1e-2 * spectrum_of(images).abs().amax()
    assert torch.angle(ratio[clear]).abs().max() < 1e-3
    assert ratio[clear].abs().max() < 4.01  # the gain's limit
    torch.testing.assert_close(result.mean((-2, -1)), images.mean((-2, -1)), rtol=0, atol=1e-5)


@given(size=sizes, seed=seeds, region=st.sampled_from([*REPLACED, "site_gain"]))
@settings(max_examples=30, deadline=None)
def test_a_permuted_batch_gives_permuted_results(size, seed, region):
    images = random_images(size, seed, batch=5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    statistics = amplitude_spectrum(images, region, 0.2)
    torch.testing.assert_close(amplitude_spectrum(images[order], region, 0.2), statistics[order], rtol=1e-5, atol=0.02)
    if region != "site_gain":
        target = statistics.mean(0)
        expected = replace_amplitude(images, target, region, 0.2)[order]
        torch.testing.assert_close(replace_amplitude(images[order], target, region, 0.2), expected, rtol=0, atol=1e-3)


@given(side=st.integers(4, 40), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_low_over_half_the_side_is_full(side, seed):
    # Square images: b = floor(side / 2) reaches every frequency, odd sides and the Nyquist bins of even ones included.
    images, others = random_images((side, side), seed), random_images((side, side), seed + 1)
    low = amplitude_spectrum(others, "low", 0.5).mean(0)
    full = amplitude_spectrum(others, "full", 0.5).mean(0)
    torch.testing.assert_close(
        replace_amplitude(images, low, "low", 0.5), replace_amplitude(images, full, "full", 0.5), rtol=0, atol=1e-3
    )


@given(size=sizes, seed=seeds, offset=st.sampled_from([0.0, -50.0, 3000.0]))
@settings(max_examples=30, deadline=None)
def test_zscore(size, seed, offset):
    images = random_images(size, seed) + offset
    double = images.double()
    expected = (double - double.mean((-2, -1), keepdim=True)) / double.std((-2, -1), keepdim=True, correction=0)
    torch.testing.assert_close(zscore(images).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("contrast", [0.5, 1e-3, 200.0])
def test_zscore_of_faint_images_by_hand(contrast):
    # half of the pixels 0, half c: mean c / 2, deviation c / 2
    images = torch.zeros(1, 1, 4, 4)
    images[..., 2:] = contrast
    expected = torch.tensor([-1.0, -1.0, 1.0, 1.0]).expand(1, 1, 4, 4)
    torch.testing.assert_close(zscore(images), expected, rtol=1e-5, atol=0)
    # a deviation below 1e-6 is taken for 1e-6: -0.5e-7 / 1e-6
    torch.testing.assert_close(zscore(images / contrast * 1e-7), 0.05 * expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1000.1, -777.7, 65504.0])
@pytest.mark.parametrize("side", [16, 96, 384])
def test_zscore_of_a_constant_image_is_zero(value, side):
    # mean() of 147,456 equal values is off by some last bits; divided by 1e-6 they would be a bright image.
    assert torch.equal(zscore(torch.full((1, 1, side, side), value)), torch.zeros(1, 1, side, side))


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("region", ["low", "full"])
def test_zero_image_becomes_the_zero_phase_image_of_the_target(region, is_compiling, monkeypatch):
    # while a graph is traced, and on a device, no coefficient can be asked whether it is 0
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    target = amplitude_spectrum(random_images((20, 24), 0), region, 0.2).mean(0)
    zero = torch.zeros(2, 2, 20, 24)
    result = replace_amplitude(zero, target, region, 0.2)
    assert torch.isfinite(result).all()
    half = torch.zeros(2, 20, 13)
    if region == "full":
        half = target
    else:  # b = floor(20 * 0.2) = 4
        half[:, :5, :5] = target[:, 4:]
        half[:, -4:, :5] = target[:, :4]
    torch.testing.assert_close(result[0], torch.fft.irfft2(half, s=(20, 24)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("region", [*REPLACED, "site_gain"])
def test_a_region_that_was_read_from_a_file_is_the_same(region):
    images, read = random_images((20, 24), 0), json.loads(json.dumps(region))
    assert read is not region
    statistics = amplitude_spectrum(images, region, 0.2)
    assert torch.equal(amplitude_spectrum(images, read, 0.2), statistics)
    assert statistic_shape(read, 2, 20, 24, 0.2) == tuple(statistics.shape[1:])
    if region != "site_gain":
        replaced = (replace_amplitude(images, statistics.mean(0), name, 0.2) for name in (region, read))
        assert torch.equal(*replaced)


def test_dc_of_a_zero_and_of_a_negative_image_is_the_target_mean():
    # A target of 5 a pixel: 5 * 16 * 16 = 1280. The published step would turn the negative image to a mean of -5.
    images = torch.stack([torch.zeros(1, 16, 16), torch.full((1, 16, 16), -3.0)])
    result = replace_amplitude(images, torch.full((1, 1, 1), 1280.0), "dc", 0.1)
    torch.testing.assert_close(result, torch.full_like(result, 5.0))


@pytest.mark.parametrize("region", REPLACED)
@pytest.mark.parametrize("value", [0.0, 1.0, 100.3])
@pytest.mark.parametrize("size", [(32, 32), (35, 50)])
def test_constant_images_stay_finite_and_reach_the_target_mean(region, value, size):
    target = amplitude_spectrum(random_images(size, 3), region, 0.1).mean(0)
    result = replace_amplitude(torch.full((2, 2, *size), value), target, region, 0.1)
    assert torch.isfinite(result).all()
    middle = target.shape[1] // 2 if region == "low" else 0
    torch.testing.assert_close(result.mean((-2, -1))[0], target[:, middle, 0] / (size[0] * size[1]), rtol=1e-4, atol=0)


def image_with_tiny_wave(ratio: float) -> torch.Tensor:
    """One strong wave (row frequency 3) and one (column frequency 5) of `ratio` times its height, 64 x 64, float32."""
    rows = torch.arange(64, dtype=torch.float64)
    strong = torch.cos(2 * torch.pi * 3 * rows / 64)[:, None].expand(64, 64)
    weak = ratio * torch.cos(2 * torch.pi * 5 * rows / 64 + 1.0)[None, :].expand(64, 64)
    return (strong + weak).float()[None, None]


def test_coefficients_below_the_floor_are_left_alone_and_above_it_replaced():
    target = torch.full((1, 64, 33), 500.0)
    for ratio, expected in ((100 * PHASE_FLOOR, 500.0), (0.3 * PHASE_FLOOR, None)):
        images = image_with_tiny_wave(ratio)
        before = torch.fft.rfft2(images)[0, 0, 0, 5].abs()
        assert before > 0
        after = spectrum_of(replace_amplitude(images, target, "full", 0.1))[0, 0, 0, 5].abs()
        # Left alone: 0.3e-6 of 64 * 64 / 2 is 6e-4; a replacement would make it 500.
        assert float(after) == pytest.approx(expected, rel=1e-3) if expected else float(after) < 0.1


@pytest.mark.parametrize("region", REPLACED)
def test_one_broken_image_leaves_the_others_alone(region):
    images = random_images((24, 24), 5)
    target = amplitude_spectrum(images, region, 0.2).mean(0)
    expected = replace_amplitude(images, target, region, 0.2)
    broken = images.clone()
    broken[1, 0, 3, 3] = torch.nan
    result = replace_amplitude(broken, target, region, 0.2)
    torch.testing.assert_close(result[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("region", [*REPLACED, "site_gain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c1_half_precision_input_is_transformed_in_float32(region, dtype):
    images = (random_images((96, 96), 1, batch=2, channels=3) / 200).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        statistics = amplitude_spectrum(images, region, 0.1)
        target = statistics.mean(0)
        if region == "site_gain":
            result = site_gain_filter(images, target + 0.2, target)
            exact = site_gain_filter(images.float(), target + 0.2, target)
        else:
            result = replace_amplitude(images, target, region, 0.1)
            exact = replace_amplitude(images.float(), target, region, 0.1)
    assert statistics.dtype == torch.float32
    assert torch.equal(statistics, amplitude_spectrum(images.float(), region, 0.1))
    assert result.dtype == dtype
    assert torch.equal(result, exact.to(dtype))


@pytest.mark.parametrize("region", [*REPLACED, "site_gain"])
def test_channels_last_is_kept_and_changes_no_value(region):
    images = random_images((33, 40), 2, channels=3)
    last = images.contiguous(memory_format=torch.channels_last)
    target = amplitude_spectrum(last, region, 0.1).mean(0)
    torch.testing.assert_close(target, amplitude_spectrum(images, region, 0.1).mean(0), rtol=1e-6, atol=0)
    if region == "site_gain":
        result, plain = site_gain_filter(last, target + 0.3, target), site_gain_filter(images, target + 0.3, target)
    else:
        result, plain = (replace_amplitude(x, target * 1.1, region, 0.1) for x in (last, images))
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert plain.is_contiguous()
    torch.testing.assert_close(result.contiguous(), plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("region", REPLACED)
def test_in_place_output_equals_the_returned_one(region):
    images = random_images((20, 30), 4, batch=2)
    target = amplitude_spectrum(random_images((20, 30), 5), region, 0.2).mean(0)
    expected = replace_amplitude(images, target, region, 0.2)
    work = images.clone()
    assert replace_amplitude(work, target, region, 0.2, out=work) is work
    assert torch.equal(work, expected)


def test_more_images_than_a_chunk_holds_equal_single_images():
    # 3 x 200 x 200 is 120,000 values: a chunk of 900,000 holds 7 images, so 16 images take three chunks.
    images = random_images((200, 200), 6, batch=16, channels=3)
    target = amplitude_spectrum(images, "full", 0.1).mean(0)
    together = replace_amplitude(images, target, "full", 0.1)
    for index in (0, 6, 7, 15):
        single = replace_amplitude(images[index : index + 1], target, "full", 0.1)
        torch.testing.assert_close(together[index], single[0], rtol=0, atol=1e-3)


def test_inputs_are_refused_in_one_line():
    images = random_images((16, 20), 0)
    for wrong in ("off", "site_gain"):
        with pytest.raises(ValueError, match="does not replace an amplitude"):
            replace_amplitude(images, torch.zeros(2, 1, 1), wrong, 0.1)
    with pytest.raises(ValueError, match=r"has shape \(2, 16, 10\), these images need \(2, 16, 11\)"):
        replace_amplitude(images, torch.zeros(2, 16, 10), "full", 0.1)
    with pytest.raises(ValueError, match="no amplitude statistic"):
        amplitude_spectrum(images, "off", 0.1)
    for fraction in (0.0, -0.1, 0.51, float("nan")):
        with pytest.raises(ValueError, match="low_fraction"):
            statistic_shape("low", 3, 96, 96, fraction)


def test_statistic_shapes():
    # b = floor(80 * 0.1) = 8 for low; 96 x 80 has 80 // 2 + 1 = 41 columns.
    assert statistic_shape("full", 3, 96, 80, 0.1) == (3, 96, 41)
    assert statistic_shape("low", 3, 96, 80, 0.1) == (3, 17, 9)
    assert statistic_shape("dc", 3, 96, 80, 0.1) == (3, 1, 1)
    assert statistic_shape("off", 3, 96, 80, 0.1) == (0,)
    for region in ("full", "low", "dc", "site_gain"):
        statistics = amplitude_spectrum(torch.rand(2, 3, 96, 80), region, 0.1)
        assert tuple(statistics.shape) == (2, *statistic_shape(region, 3, 96, 80, 0.1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [384, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("region", [*REPLACED, "site_gain"])
def test_c1_cuda_equals_the_cpu(region, dtype, size):
    images = (random_images((size, size), 1, batch=9, channels=3) / 200).to(dtype)
    target = amplitude_spectrum(images, region, 0.1).mean(0)
    with torch.autocast("cuda", dtype=torch.float16):
        statistics = amplitude_spectrum(images.cuda(), region, 0.1)
        if region == "site_gain":
            result = site_gain_filter(images.cuda(), target.cuda() + 0.2, target.cuda())
            expected = site_gain_filter(images, target + 0.2, target)
        else:
            result = replace_amplitude(images.cuda(), target.cuda(), region, 0.1)
            expected = replace_amplitude(images, target, region, 0.1)
    torch.testing.assert_close(statistics.cpu().mean(0), target, rtol=1e-4, atol=0.05)
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu().float(), expected.float(), rtol=1e-2, atol=1e-2)
