"""What an amplitude of real images can be: bounds derived by hand, images that reach them, values beyond them."""

import math

import numpy as np
import pytest
import torch

from harmofl.core.amplitude import RunningAmplitude, zscore
from harmofl.core.amplitude_limits import amplitude_problem
from harmofl.core.contrast import has_contrast
from harmofl.core.gaussian_mechanism import ClippedMean, clipping_center
from harmofl.core.radial import bin_count, bin_sizes
from harmofl.core.spectra import amplitude_spectrum

SIZES = [(64, 64), (64, 96), (65, 67), (66, 65)]


def problem(values, region, size, intensity="window", *, largest=1.0, low_fraction=0.1, sigma=0.0):
    height, width = size
    return amplitude_problem(
        np.asarray(values),
        region,
        height=height,
        width=width,
        low_fraction=low_fraction,
        intensity=intensity,
        largest=largest,
        sigma=sigma,
    )


def extreme_images(height, width):
    """Images (B, 2, H, W) in [0, 1] that reach for the bounds, most of them of 0 and 1 alone."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    shared = [
        ((rows + columns) % 2).float(),  # all power in one coefficient
        ((columns * 2) // width).float().expand(height, width),
        (rows * columns == 0).float(),
        ((rows == 3) & (columns == 5)).float(),
        1 - ((rows == 3) & (columns == 5)).float(),
        torch.rand(height, width, generator=generator),
        (torch.rand(height, width, generator=generator) > 0.5).float(),
        (torch.rand(height, width, generator=generator) > 0.999).float(),
        torch.full((height, width), 0.999) + 0.001 * torch.rand(height, width, generator=generator),
    ]
    return torch.stack([torch.stack([image, image.flip(0)]) for image in shared])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("intensity", ["window", "zscore", "none"])
@pytest.mark.parametrize(
    ("region", "low_fraction"), [("dc", 0.1), ("low", 0.1), ("low", 0.5), ("full", 0.1), ("site_gain", 0.1)]
)
def test_no_image_and_no_mean_of_images_meets_a_bound(size, intensity, region, low_fraction):
    images = extreme_images(*size)
    if intensity == "zscore":
        images = zscore(images)
    statistics = amplitude_spectrum(images, region, low_fraction)
    for one in statistics:
        assert problem(one, region, size, intensity, low_fraction=low_fraction) is None
    running = RunningAmplitude("running_mean", 0.1)
    for batch in statistics.split(2):
        running.update(batch)
    for mean in (statistics.mean(0), running.mean):
        assert problem(mean, region, size, intensity, low_fraction=low_fraction) is None


@pytest.mark.parametrize("region", ["low", "full", "site_gain"])
@pytest.mark.parametrize("intensity", ["window", "zscore"])
@pytest.mark.parametrize("clip", [0.01, 2.0])
def test_a_clipped_mean_meets_none_either(region, intensity, clip):
    images = extreme_images(64, 64)
    center = clipping_center(region, 2, 64, 64, 0.1, intensity=intensity)
    assert problem(center.values, region, (64, 64), intensity) is None
    mean = ClippedMean(center, clip, len(images))
    shown = zscore(images) if intensity == "zscore" else images
    mean.add(amplitude_spectrum(shown, region, 0.1), range(len(images)), has_contrast(images))
    assert problem(mean.result(), region, (64, 64), intensity) is None


def single(shape, place, value):
    values = np.zeros(shape, np.float32)
    values[place] = value
    return values


# 64 x 64 pixels: N = 4096. A half plane has 33 columns, `low` at 0.1 reaches b = 6: 13 x 7, zero frequency in row 6.
@pytest.mark.parametrize(
    ("region", "intensity", "values", "within", "said"),
    [
        # the sum of 4096 intensities of at most 1
        ("dc", "window", single((1, 1, 1), 0, 1.0), 4096, "at zero frequency, an image of 64 x 64 pixels"),
        ("low", "window", single((1, 13, 7), (0, 6, 0), 1.0), 4096, "at zero frequency"),
        ("full", "window", single((1, 64, 33), (0, 0, 0), 1.0), 4096, "at zero frequency"),
    ],
)
def test_the_sum_of_the_intensities_is_the_bound_at_zero_frequency(region, intensity, values, within, said):
    assert problem(values * within, region, (64, 64), intensity) is None
    assert said in problem(values * within * 1.002, region, (64, 64), intensity)
    assert problem(values * within * 1.002, region, (64, 64), intensity, largest=2.0) is None


@pytest.mark.parametrize(
    ("place", "largest"),
    [
        ((0, 32, 32), 2048),  # one coefficient, its own conjugate: N / 2
        ((0, 0, 32), 2048),
        ((0, 5, 0), 2048),  # its conjugate is another row of the same column
        ((0, 5, 7), 2048 / math.sqrt(2)),  # counts twice: 2 |F|^2 <= (N / 2)^2
    ],
)
def test_parseval_bounds_every_other_coefficient_at_mean_one_half(place, largest):
    values = single((1, 64, 33), place, largest)
    values[0, 0, 0] = 2048
    assert problem(values, "full", (64, 64)) is None
    values[place] *= 1.01
    assert "without zero frequency" in problem(values, "full", (64, 64))
    # intensities up to 3 have at mean 1/2 sqrt(1/2 * 5/2) N
    assert problem(values, "full", (64, 64), largest=3.0) is None
    # no mean at all and yet a deviation: only intensities below 0 have that
    values[0, 0, 0], values[place] = 0, 100
    assert "without zero frequency" in problem(values, "full", (64, 64))


def test_a_zscored_image_has_no_sum_and_deviation_1():
    values = single((1, 64, 33), (0, 0, 32), 4096)  # a checkerboard of -1 and 1 in columns: N
    assert problem(values, "full", (64, 64), "zscore") is None
    assert "without zero frequency" in problem(values * 1.01, "full", (64, 64), "zscore")
    values = single((1, 64, 33), (0, 0, 0), 41)
    assert "at zero frequency" in problem(values, "full", (64, 64), "zscore")


def test_the_log_profile_of_one_bin_holds_the_power_of_that_bin():
    sizes = bin_sizes(64, 64).numpy()
    assert sizes.sum() == 64 * 64 - 1 and len(sizes) == bin_count(64, 64) == 11
    lowest = np.full((1, 11), math.log(1e-6))
    # all variance, 1/4, in bin b: n_b m^2 = N / 4
    for place in np.flatnonzero(sizes):
        profile = lowest.copy()
        profile[0, place] = math.log(math.sqrt(4096 / 4 / sizes[place]))
        assert problem(profile, "site_gain", (64, 64)) is None
        profile[0, place] += 0.01
        assert "a log profile of" in problem(profile, "site_gain", (64, 64))
        profile[0, place] += math.log(2) - 0.02  # z-scored: variance 1, so that the amplitude may be twice
        assert problem(profile, "site_gain", (64, 64), "zscore") is None
        profile[0, place] += 0.02
        assert "a log profile of" in problem(profile, "site_gain", (64, 64), "zscore")
    assert "the lowest" in problem(lowest - 0.1, "site_gain", (64, 64))


def test_all_bins_of_a_log_profile_share_one_power():
    sizes = bin_sizes(64, 64).numpy()
    filled = sizes > 0
    profile = np.full((1, 11), -5.0)
    # each bin alone may have a half of the power, all of them together may not
    profile[0, filled] = np.log(np.sqrt(4096 / 4 / 2 / sizes[filled]))
    assert filled.sum() > 3
    assert "a log profile of power" in problem(profile, "site_gain", (64, 64))


@pytest.mark.parametrize("region", ["dc", "low", "full"])
def test_values_below_0_not_finite_or_of_another_shape_are_no_amplitude(region):
    shape = {"dc": (1, 1, 1), "low": (1, 13, 7), "full": (1, 64, 33)}[region]
    assert problem(np.full(shape, -1.0), region, (64, 64)) == "values below 0"
    for value in (np.nan, np.inf):
        assert problem(np.full(shape, value), region, (64, 64), largest=None) == "values that are not finite"
    assert "shape (1, 2, 2), not" in problem(np.zeros((1, 2, 2)), region, (64, 64))


def test_intensities_that_may_be_anything_give_no_bound():
    assert problem(np.full((1, 64, 33), 1e9), "full", (64, 64), "none", largest=None) is None
    assert problem(np.full((1, 11), 9.0), "site_gain", (64, 64), "none", largest=None) is None
    assert problem(np.full((1, 64, 33), 1e9), "full", (64, 64), "zscore", largest=None) is not None


@pytest.mark.parametrize("region", ["dc", "full", "site_gain"])
def test_noise_that_is_said_widens_the_bounds_by_as_much(region):
    generator = np.random.default_rng(0)
    images = extreme_images(64, 64)
    clean = amplitude_spectrum(images, region, 0.1).double().mean(0).numpy()
    sigma = 3.0 if region == "site_gain" else 3e4
    for _ in range(20):
        noised = clean + sigma * generator.standard_normal(clean.shape)
        noised = noised if region == "site_gain" else noised.clip(min=0)
        assert problem(noised, region, (64, 64), sigma=sigma) is None
    assert problem(clean + 20 * sigma, region, (64, 64), sigma=sigma) is not None
    assert problem(clean + 2 * sigma, region, (64, 64)) is not None
