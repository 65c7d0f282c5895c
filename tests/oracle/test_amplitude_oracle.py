"""Amplitude step against float64 NumPy written from the definitions: full plane, angle, polar form, loops over bins."""

import math

import numpy as np
import pytest
import torch

from harmofl.core.amplitude import (
    AmplitudeNormalization,
    RunningAmplitude,
    amplitude_spectrum,
    replace_amplitude,
    site_gain_filter,
    statistic_shape,
    zscore,
)

SIZES = [(32, 32), (33, 40), (40, 33), (31, 17), (96, 80)]
LOW_FRACTIONS = [0.02, 0.1, 0.3]


def images_of(size: tuple[int, int], batch: int = 3, channels: int = 2, seed: int = 0) -> np.ndarray:
    """Smooth non-negative images with texture, 0..255 like windowed slices."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[: size[0], : size[1]]
    images = np.empty((batch, channels, *size))
    for image in images.reshape(-1, *size):
        phase_row, phase_column = generator.uniform(0, 6, 2)
        wave = 60 * np.cos(rows / 5 + phase_row) * np.sin(columns / 7 + phase_column)
        image[:] = 100 + wave + generator.normal(0, 12, size)
    return images.clip(0, 255)


def signed_frequency(index: int, length: int) -> int:
    """Frequency number of a bin: 0, 1, ... then the negative ones; the Nyquist bin of even lengths is -length / 2."""
    return index if index < (length + 1) // 2 else index - length


def replaced(image: np.ndarray, amplitude: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Eq 3-4 on the full plane of one channel: inverse DFT of (target amplitude inside the region, own phase)."""
    spectrum = np.fft.fft2(image)
    combined = np.where(inside, amplitude, np.abs(spectrum)) * np.exp(1j * np.angle(spectrum))
    restored = np.fft.ifft2(combined)
    assert np.abs(restored.imag).max() < 1e-9 * np.abs(restored.real).max()
    return restored.real


def region_mask(size: tuple[int, int], region: str, fraction: float) -> np.ndarray:
    height, width = size
    reach = {"dc": 0, "full": max(size)}.get(region, math.floor(min(size) * fraction))
    mask = np.zeros(size, bool)
    for row in range(height):
        for column in range(width):
            mask[row, column] = (
                abs(signed_frequency(row, height)) <= reach and abs(signed_frequency(column, width)) <= reach
            )
    return mask


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).float()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("region", "fraction"), [("dc", 0.1), ("full", 0.1), *[("low", f) for f in LOW_FRACTIONS]])
def test_replacement_is_the_polar_recombination_of_the_full_plane(size, region, fraction):
    images, others = images_of(size), images_of(size, seed=1) ** 1.1
    statistics = amplitude_spectrum(as_tensor(others), region, fraction)
    target = statistics.mean(0)
    result = replace_amplitude(as_tensor(images), target, region, fraction).double().numpy()

    mean_amplitude = np.abs(np.fft.fft2(others)).mean(0)
    mask = region_mask(size, region, fraction)
    for index in range(len(images)):
        for channel in range(images.shape[1]):
            expected = replaced(images[index, channel], mean_amplitude[channel], mask)
            # float32 transforms of values up to about 400: 2e-6 of the range is 1e-3.
            np.testing.assert_allclose(result[index, channel], expected, atol=1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fraction", LOW_FRACTIONS)
def test_low_statistic_lists_signed_rows_and_columns_from_zero(size, fraction):
    images = images_of(size)
    statistics = amplitude_spectrum(as_tensor(images), "low", fraction)
    reach = math.floor(min(size) * fraction)
    assert statistics.shape[1:] == statistic_shape("low", 2, *size, fraction) == (2, 2 * reach + 1, reach + 1)
    full = np.abs(np.fft.fft2(images))
    for row in range(-reach, reach + 1):
        for column in range(reach + 1):
            expected = full[:, :, row % size[0], column]
            # rtol for the coefficients themselves, atol for float32 noise relative to DC (about 1e5).
            np.testing.assert_allclose(statistics[:, :, row + reach, column].numpy(), expected, rtol=1e-5, atol=0.1)


@pytest.mark.parametrize("size", SIZES)
def test_full_and_dc_statistics(size):
    images = images_of(size) - 90  # means of both signs: dc is an absolute value
    full = np.abs(np.fft.fft2(images))
    np.testing.assert_allclose(
        amplitude_spectrum(as_tensor(images), "full", 0.1).numpy(), full[..., : size[1] // 2 + 1], rtol=1e-4, atol=0.1
    )
    dc = amplitude_spectrum(as_tensor(images), "dc", 0.1)
    assert dc.shape == (3, 2, 1, 1)
    np.testing.assert_allclose(dc[..., 0, 0].numpy(), np.abs(images.sum((-2, -1))), rtol=1e-4, atol=0.1)


def test_published_dc_replacement_and_mean_shift_agree_on_non_negative_images():
    images = images_of((32, 48))
    target = np.array([150.0, 80.0]) * 32 * 48
    result = replace_amplitude(as_tensor(images), as_tensor(target)[:, None, None], "dc", 0.1)
    shift = images - images.mean((-2, -1), keepdims=True) + np.array([150.0, 80.0])[:, None, None]
    np.testing.assert_allclose(result.numpy(), shift, atol=1e-4)
    for channel in range(2):
        published = replaced(images[0, channel], target[channel], region_mask((32, 48), "dc", 0))
        np.testing.assert_allclose(result[0, channel].numpy(), published, atol=1e-4)


def test_exact_zero_coefficients_have_phase_zero_like_the_angle_of_zero():
    # Rows repeat with period 2: all rows of the spectrum but two are exactly 0, at any rounding of powers of two.
    image = np.zeros((1, 1, 16, 16))
    image[0, 0, ::2] = np.arange(16.0)
    image[0, 0, 1::2] = 3.0
    target = np.abs(np.fft.fft2(images_of((16, 16), 1, 1)[0, 0])) + 1
    spectrum = np.fft.fft2(image[0, 0])
    assert (spectrum == 0).sum() >= 100
    result = replace_amplitude(as_tensor(image), as_tensor(target[None, :, :9]), "full", 0.1)
    mask = np.ones((16, 16), bool)
    mask[(np.abs(spectrum) < 1e-6 * np.abs(spectrum).max()) & (spectrum != 0)] = False
    combined = np.where(mask, target, np.abs(spectrum)) * np.exp(1j * np.angle(spectrum))
    np.testing.assert_allclose(result[0, 0].numpy(), np.fft.ifft2(combined).real, atol=2e-3)


# site_gain, steps 1 to 7 of the study, with loops over coefficients.


def standardized(image: np.ndarray) -> np.ndarray:
    return (image - image.mean()) / max(image.std(), 1e-6)


def octaves_of(size: tuple[int, int]) -> int:
    return 6 if max(size) <= 64 else math.ceil(math.log2(max(size)))


def radial_frequency(row: int, column: int, size: tuple[int, int]) -> float:
    return math.hypot(signed_frequency(row, size[0]) / size[0], signed_frequency(column, size[1]) / size[1])


def profile_of(image: np.ndarray) -> np.ndarray:
    """Step 4 on the full plane, where every coefficient simply counts once."""
    size, octaves = image.shape, octaves_of(image.shape)
    amplitude = np.abs(np.fft.fft2(image, norm="ortho"))
    sums, counts = np.zeros(2 * octaves - 1), np.zeros(2 * octaves - 1)
    for row in range(size[0]):
        for column in range(size[1]):
            if row == column == 0:
                continue
            position = 2 * (math.log2(radial_frequency(row, column, size)) + octaves)
            bin_number = min(max(round(position), 0), 2 * octaves - 2)
            sums[bin_number] += amplitude[row, column]
            counts[bin_number] += 1
    filled = [number for number in range(len(counts)) if counts[number]]
    profile = np.empty(len(counts))
    for number in range(len(counts)):
        source = min(filled, key=lambda candidate: (abs(candidate - number), candidate))
        profile[number] = math.log(max(sums[source] / counts[source], 1e-6))
    return profile


def filtered(image: np.ndarray, target: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Steps 6 and 7 on the full plane."""
    size, octaves = image.shape, octaves_of(image.shape)
    step = np.clip(target - own, -math.log(4), math.log(4))
    smooth = np.empty_like(step)
    for number in range(len(step)):
        before, after = max(number - 1, 0), min(number + 1, len(step) - 1)
        smooth[number] = (step[before] + 2 * step[number] + step[after]) / 4
    gain = np.ones(size)
    for row in range(size[0]):
        for column in range(size[1]):
            if row or column:
                position = 2 * (math.log2(radial_frequency(row, column, size)) + octaves)
                gain[row, column] = math.exp(np.interp(position, np.arange(len(smooth)), smooth))
    return np.fft.ifft2(np.fft.fft2(image) * gain).real


@pytest.mark.parametrize("size", [(32, 32), (64, 48), (33, 40), (31, 17), (80, 96), (65, 20)])
def test_site_gain_follows_the_seven_steps(size):
    images, others = images_of(size), images_of(size, seed=3) ** 1.3
    own = np.array([[profile_of(standardized(channel)) for channel in image] for image in images])
    target = np.array([[profile_of(standardized(channel)) for channel in image] for image in others]).mean(0)
    target[:, -3:] += 2.5  # beyond the limit of log 4, so that the clip is seen

    statistics = amplitude_spectrum(zscore(as_tensor(images)), "site_gain", 0.1)
    assert statistics.shape[1:] == statistic_shape("site_gain", 2, *size, 0.1)
    np.testing.assert_allclose(statistics.numpy(), own, atol=1e-5)

    layer = AmplitudeNormalization(
        intensity="zscore",
        region="site_gain",
        low_fraction=0.1,
        estimation="before_training",
        momentum=0.1,
        channels=2,
        height=size[0],
        width=size[1],
    )
    layer.freeze(as_tensor(target), 9)
    layer.set_own(as_tensor(own.mean(0)))
    result = layer(as_tensor(images))
    direct = site_gain_filter(zscore(as_tensor(images)), as_tensor(target), as_tensor(own.mean(0)))
    torch.testing.assert_close(result, direct, rtol=0, atol=1e-5)
    for index in range(len(images)):
        for channel in range(2):
            expected = filtered(standardized(images[index, channel]), target[channel], own.mean(0)[channel])
            np.testing.assert_allclose(result[index, channel].numpy(), expected, atol=5e-5)


@pytest.mark.parametrize(
    ("size", "bins"), [((64, 64), 11), ((65, 20), 13), ((96, 96), 13), ((128, 96), 13), ((384, 384), 17)]
)
def test_bin_count_rule(size, bins):
    # n = 6 up to 64 pixels, else ceil(log2): 65, 96 and 128 give 7, 384 gives 9; bins 2 n - 1.
    assert statistic_shape("site_gain", 3, *size, 0.1) == (3, bins)


# Running mean.


def test_running_mean_is_equation_3_with_its_bias_corrected():
    batches = [images_of((16, 20), batch=size, seed=size) for size in (4, 3, 4, 1, 2, 4, 4)]
    running, accumulated = RunningAmplitude("running_mean", 0.1), 0.0
    for step, batch in enumerate(batches, start=1):
        running.update(amplitude_spectrum(as_tensor(batch), "full", 0.1))
        accumulated = 0.9 * accumulated + 0.1 * np.abs(np.fft.fft2(batch)).mean(0)
        expected = (accumulated / (1 - 0.9**step))[..., :11]
        np.testing.assert_allclose(running.mean.numpy(), expected, rtol=1e-4, atol=0.05)
    # Seven steps: the literal A_7 has 1 - 0.9^7 = 52 % of the scale, the corrected one all of it.
    assert running.images == 22


def test_before_training_is_the_mean_over_images_whatever_the_batches():
    images = images_of((16, 20), batch=11)
    whole, pieces = RunningAmplitude("before_training", 0.1), RunningAmplitude("before_training", 0.1)
    whole.update(amplitude_spectrum(as_tensor(images), "full", 0.1))
    for piece in np.split(images, [4, 5, 9]):
        pieces.update(amplitude_spectrum(as_tensor(piece), "full", 0.1))
    torch.testing.assert_close(whole.mean, pieces.mean, rtol=1e-6, atol=0)
    np.testing.assert_allclose(pieces.mean.numpy(), np.abs(np.fft.fft2(images)).mean(0)[..., :11], rtol=1e-4, atol=0.05)
    assert pieces.images == 11


def test_first_batch_is_what_the_released_code_keeps():
    first, second = images_of((16, 20), seed=1), images_of((16, 20), seed=2)
    running = RunningAmplitude("first_batch", 0.1)
    running.update(amplitude_spectrum(as_tensor(first), "dc", 0.1))
    kept = running.mean
    running.update(amplitude_spectrum(as_tensor(second), "dc", 0.1))
    assert torch.equal(running.mean, kept)
    np.testing.assert_allclose(kept[:, 0, 0].numpy(), first.sum((-2, -1)).mean(0), rtol=1e-6)
    assert running.images == 3
