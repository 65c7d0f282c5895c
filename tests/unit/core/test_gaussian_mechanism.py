"""Noise that is exactly large enough, and a mean over patients that no patient moves by more than twice the clip."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import kstest

from harmofl.core.contrast import has_contrast
from harmofl.core.gaussian_mechanism import (
    ClippedMean,
    ClippingCenter,
    calibrate_sigma,
    clipping_center,
    gaussian_delta,
    gaussian_noise,
)
from harmofl.core.spectra import amplitude_spectrum, statistic_shape, zscore

EPSILONS = [1e-3, 0.1, 0.5, 0.99, 1.0, 3.0, 10.0]
DELTAS = [1e-8, 1e-5, 1e-2, 0.3]


def normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
def test_delta_is_theorem_8_of_balle_and_wang(epsilon, sigma):
    # e^10 = 22026, so plain float64 keeps eleven digits behind the point
    plain = normal_cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * normal_cdf(-0.5 / sigma - epsilon * sigma)
    assert gaussian_delta(epsilon, sigma, 1.0) == pytest.approx(plain, abs=1e-11)
    assert gaussian_delta(epsilon, 7 * sigma, 7.0) == pytest.approx(gaussian_delta(epsilon, sigma, 1.0))


@pytest.mark.parametrize(("epsilon", "sigma"), [(0.5, 1.0), (1.0, 2.0), (2.0, 0.7)])
def test_delta_is_what_the_definition_leaves_beyond_epsilon(epsilon, sigma):
    # the smallest delta with P(A) <= e^epsilon Q(A) + delta for all A is the integral of max(0, p - e^epsilon q),
    # p and q normal around 1 and 0; p > e^epsilon q where x > 1 / 2 + epsilon sigma^2
    def excess(x: float) -> float:
        p, q = (math.exp(-((x - mean) ** 2) / (2 * sigma**2)) for mean in (1, 0))
        return (p - math.exp(epsilon) * q) / (sigma * math.sqrt(2 * math.pi))

    start = 0.5 + epsilon * sigma**2
    assert gaussian_delta(epsilon, sigma, 1.0) == pytest.approx(quad(excess, start, start + 40 * sigma)[0], rel=1e-7)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_sigma_suffices_and_is_no_larger_than_needed(epsilon, delta):
    sigma = calibrate_sigma(epsilon, delta, 2.5)
    assert gaussian_delta(epsilon, sigma, 2.5) <= delta
    assert gaussian_delta(epsilon, sigma * (1 - 1e-6), 2.5) > delta
    if epsilon < 1:  # the classical bound, Dwork and Roth 2014, Theorem A.1
        assert sigma <= 2.5 * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(1e-9, 1e-12), (500.0, 1e-5), (1e5, 1e-9), (1e-6, 0.999)])
def test_far_settings_are_calibrated_too(epsilon, delta):
    sigma = calibrate_sigma(epsilon, delta, 1.0)
    assert math.isfinite(sigma) and sigma > 0
    assert gaussian_delta(epsilon, sigma, 1.0) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("bad", [(0, 0.1, 1), (1, 0, 1), (1, 1, 1), (1, 0.1, 0), (math.nan, 0.1, 1), (1, math.nan, 1)])
def test_what_has_no_meaning_is_refused(bad):
    with pytest.raises(ValueError, match="above 0"):
        calibrate_sigma(*bad)


@pytest.mark.parametrize("bad", [(1.0, 1e-5, 1e308), (1e-9, 1e-5, 1e305), (1.0, 1e-5, math.inf)])
def test_infinite_noise_is_refused(bad):
    with pytest.raises(ValueError, match=r"^the noise would be infinite: lower relative_clip") as caught:
        calibrate_sigma(*bad)
    assert "\n" not in str(caught.value)


def test_noise_is_normal_and_no_seed_gives_it_back():
    draws = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        draws.append(gaussian_noise((4, 100, 100), 2.0))
    assert draws[0].shape == (4, 100, 100) and not np.array_equal(*draws)
    values = np.concatenate(draws).ravel()
    # of 80000 draws the deviation is within 0.25 % with one sigma
    assert abs(values.std() / 2.0 - 1) < 0.05 and abs(values.mean()) < 0.05
    assert kstest(values / 2.0, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(draws[0].ravel(), draws[1].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(("height", "width"), [(64, 64), (96, 80), (65, 67), (4, 4), (5, 6), (3, 2)])
def test_the_center_of_a_profile_is_a_1_over_f_image_of_power_1(height, width):
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None]
    radius = np.hypot(rows, columns)
    with np.errstate(divide="ignore"):
        amplitude = np.where(radius > 0, 1 / radius, 0.0)
    amplitude *= math.sqrt((height * width - 1) / (amplitude**2).sum())
    octaves = max(6, math.ceil(math.log2(max(height, width))))
    with np.errstate(divide="ignore"):
        position = np.clip(np.round(2 * (np.log2(radius) + octaves)), 0, 2 * octaves - 2)
    expected = {}
    for place in range(2 * octaves - 1):
        inside = (position == place) & (radius > 0)
        if inside.any():
            expected[place] = math.log(amplitude[inside].mean())
    center = clipping_center("site_gain", 3, height, width, 0.1, intensity="zscore").values.numpy()
    # few coefficients show what DC would add to the power, which is left out
    assert center.shape == (3, 2 * octaves - 1) and (center == center[:1]).all()
    assert [center[0, place] for place in expected] == pytest.approx(list(expected.values()), abs=1e-4)


def test_z_scored_pink_noise_lies_near_the_center():
    # real images are what is meant; for Gaussian ones the mean of |F| is sqrt(pi) / 2 of its root mean square
    rng = np.random.default_rng(0)
    radius = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.rfftfreq(64)[None])
    radius[0, 0] = np.inf
    spectra = np.fft.rfft2(rng.standard_normal((200, 1, 64, 64))) / radius
    images = zscore(torch.from_numpy(np.fft.irfft2(spectra, s=(64, 64))))
    profile = amplitude_spectrum(images, "site_gain", 0.1).mean(0)
    center = clipping_center("site_gain", 1, 64, 64, 0.1, intensity="zscore").values + math.log(math.sqrt(math.pi) / 2)
    assert (profile - center).abs().max() < 0.25


def image_of_the_center(height: int, width: int, mean: float, deviation: float) -> np.ndarray:
    """An image with the amplitude that the center describes, its phase that of any other image."""
    spectrum = np.fft.fft2(np.random.default_rng(0).random((height, width)))
    radius = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    with np.errstate(divide="ignore"):
        amplitude = np.where(radius > 0, 1 / radius, 0.0)
    image = np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum))).real
    return mean + deviation * (image - image.mean()) / image.std()


@pytest.mark.parametrize(
    ("intensity", "mean", "deviation"), [("zscore", 0, 1), ("window", 0.5, 12**-0.5), ("none", 0.5, 12**-0.5)]
)
@pytest.mark.parametrize("size", [(64, 64), (65, 78), (96, 80)])
@pytest.mark.parametrize("region", ["dc", "low", "full", "site_gain"])
def test_the_center_is_the_amplitude_of_an_image_and_the_scale_its_norm(region, size, intensity, mean, deviation):
    """By the image itself: both follow from its spectrum, taken by the code that measures real images."""
    image = torch.from_numpy(image_of_the_center(*size, mean, deviation)).expand(1, 3, -1, -1)
    center = clipping_center(region, 3, *size, 0.1, intensity=intensity)
    own = amplitude_spectrum(image, region, 0.1)[0].double()
    assert center.values.shape == own.shape == statistic_shape(region, 3, *size, 0.1)
    # a center has mean power 1 over the H W - 1 coefficients beside DC, the image has deviation 1: 1 / 8192 apart
    close = {"rtol": 2e-4, "atol": 2e-4 if region == "site_gain" else 0.5}
    torch.testing.assert_close(center.values, own, **close)
    # Parseval: the squares of all 3 H W coefficients sum to 3 H W times the sum of the squared intensities
    norm = float((torch.fft.fft2(image).abs() ** 2).sum().sqrt())
    assert center.scale == pytest.approx(norm if region != "site_gain" else own.numel() ** 0.5, rel=1e-6)


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["even", "binary", "smooth", "bright", "dark"]))
@settings(max_examples=40, deadline=None)
def test_no_image_lies_farther_from_the_center_than_a_site_may_set(seed, kind):
    """relative_clip ends at 2: intensities 0 to 1 lie within 1 of the scale, z-scored ones within sqrt 2."""
    rng = np.random.default_rng(seed)
    image = rng.random((1, 3, 64, 64))
    image = {
        "even": image,
        "binary": np.round(image),
        "smooth": np.cumsum(image, 3) / 64,
        "bright": image**0.01,
        "dark": image**100,
    }[kind]
    for region in ("dc", "low", "full"):
        for intensity, most in (("window", 1.0), ("zscore", math.sqrt(2))):
            images = zscore(torch.from_numpy(image)) if intensity == "zscore" else torch.from_numpy(image)
            center = clipping_center(region, 3, 64, 64, 0.2, intensity=intensity)
            distance = torch.linalg.vector_norm(amplitude_spectrum(images, region, 0.2)[0].double() - center.values)
            assert float(distance) <= most * center.scale * (1 + 1e-6)


def oracle(patients: list[np.ndarray], center: np.ndarray, clip: float) -> np.ndarray:
    """Mean over patients of each one's clipped mean, in NumPy and without a running sum."""
    moved = []
    for images in patients:
        move = images.mean(0) - center
        norm = np.sqrt((move**2).sum())
        moved.append(center + move * min(1.0, clip / norm) if norm else center)
    return np.mean(moved, axis=0)


SCALE = 2.5


def clipped_mean(patients: list[np.ndarray], center: np.ndarray, clip: float, batch: int) -> np.ndarray:
    """At a distance `clip`, whatever the scale."""
    mean = ClippedMean(ClippingCenter(torch.from_numpy(center), SCALE), clip / SCALE, len(patients))
    images = torch.from_numpy(np.concatenate(patients))
    names = [f"patient{number}" for number, held in enumerate(patients) for _ in held]
    for start in range(0, len(images), batch):
        mean.add(images[start : start + batch], names[start : start + batch])
    assert mean.images == len(images)
    return mean.result().numpy()


def cohort(rng: np.random.Generator, sizes: list[int], scale: float) -> list[np.ndarray]:
    return [rng.normal(rng.normal(0, scale), scale, (size, 2, 5)) for size in sizes]


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    clip=st.floats(1e-3, 1e3),
    scale=st.sampled_from([0.0, 0.1, 10.0]),
    batch=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_one_patient_moves_the_mean_by_no_more_than_its_sensitivity(seed, sizes, clip, scale, batch):
    rng = np.random.default_rng(seed)
    center = rng.normal(0, 1, (2, 5))
    patients = cohort(rng, sizes, scale)
    before = clipped_mean(patients, center, clip, batch)
    np.testing.assert_allclose(before, oracle(patients, center, clip), rtol=1e-9, atol=1e-12)
    other = list(patients)
    other[int(rng.integers(len(sizes)))] = rng.normal(0, 1e4, (int(rng.integers(1, 5)), 2, 5))
    after = clipped_mean(other, center, clip, batch)
    assert np.linalg.norm(after - before) <= 2 * clip / len(sizes) * (1 + 1e-9) + 1e-12


def test_the_bound_is_reached_by_opposite_patients():
    center = np.zeros((1, 2))
    means = [clipped_mean([np.full((1, 1, 2), 0.0), np.full((3, 1, 2), far)], center, 3.0, 2) for far in (-9e9, 9e9)]
    assert np.linalg.norm(means[1] - means[0]) == pytest.approx(2 * 3.0 / 2)


def test_a_patient_without_a_readable_image_counts_as_the_center():
    mean = ClippedMean(ClippingCenter(torch.tensor([10.0]), 1.0), 100.0, patients=2)
    mean.add(torch.tensor([[4.0], [6.0]]), ["A", "A"])
    assert mean.result().tolist() == [7.5]  # (5 + 10) / 2
    assert (mean.moved, mean.shown, mean.clipped) == (1, 1, 0)


def test_a_channel_without_contrast_counts_as_the_center_and_clipped_patients_are_counted():
    center = ClippingCenter(torch.tensor([[10.0], [20.0]]), 2.0)
    mean = ClippedMean(center, 1.5, patients=4)  # at a distance of 3
    statistics = torch.tensor([[[12.0], [99.0]], [[14.0], [21.0]], [[77.0], [77.0]], [[15.0], [24.0]]])
    contrast = torch.tensor([[True, False], [True, True], [False, False], [False, True]])
    mean.add(statistics, ["A", "A", "B", "C"], contrast)
    # A: (12 + 14) / 2 = 13 and 21, moves 3 and 1, norm sqrt 10, clipped to 3; B shows nothing, D has no image; C: 4 in
    # channel 1, clipped to 3
    shrunk = 3 / math.sqrt(10)
    assert mean.result().flatten().tolist() == pytest.approx([10 + 3 * shrunk / 4, 20 + (shrunk + 3) / 4])
    assert (mean.clipped, mean.moved, mean.shown, mean.images) == (2, 2, 1, 3)


@given(
    seed=st.integers(0, 2**32 - 1),
    region=st.sampled_from(["dc", "low", "full", "site_gain"]),
    relative_clip=st.sampled_from([1e-3, 0.3, 0.8, 2.0]),
)
@settings(max_examples=30, deadline=None)
def test_neighboring_data_sets_differ_by_no_more_than_the_sensitivity_in_every_region(seed, region, relative_clip):
    """Brute force: every patient in turn is replaced by others, blank, black and far ones among them, of any number."""
    rng = np.random.default_rng(seed)
    center = clipping_center(region, 2, 16, 16, 0.2)
    sizes = rng.integers(1, 4, 3).tolist()
    cohort_images = [torch.from_numpy(rng.random((size, 2, 16, 16)) * rng.choice([0.1, 1.0, 30.0])) for size in sizes]

    def released(patients: list[torch.Tensor]) -> torch.Tensor:
        mean = ClippedMean(center, relative_clip, len(patients))
        for name, images in enumerate(patients):
            mean.add(amplitude_spectrum(images, region, 0.2), [name] * len(images), has_contrast(images))
        return mean.result()

    before = released(cohort_images)
    others = [
        torch.zeros(1, 2, 16, 16),
        torch.full((2, 2, 16, 16), 0.5),
        torch.cat([torch.zeros(1, 1, 16, 16), torch.rand(1, 1, 16, 16) * 1e4], 1),
        torch.eye(16).expand(3, 2, -1, -1) * 1e5,
    ]
    for place in range(3):
        for other in others:
            after = released([*cohort_images[:place], other, *cohort_images[place + 1 :]])
            moved = float(torch.linalg.vector_norm(after - before))
            assert moved <= 2 * relative_clip * center.scale / 3 * (1 + 1e-9)


def test_images_that_are_not_finite_or_out_of_order_are_refused():
    mean = ClippedMean(ClippingCenter(torch.zeros(1), 1.0), 1.0, patients=2)
    with pytest.raises(ValueError, match="not finite"):
        mean.add(torch.tensor([[math.nan]]), ["A"])
    mean.add(torch.ones(3, 1), ["A", "B", "B"])
    with pytest.raises(ValueError, match="in a row"):
        mean.add(torch.ones(1, 1), ["A"])
