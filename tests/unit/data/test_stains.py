"""Staining and scanning: the light obeys Beer's and Lambert's law, and every laboratory looks like itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skimage.color import separate_stains

from harmofl.data.stains import HOSPITALS, LABORATORIES, ORGAN_LABORATORIES, absorb, scan, stain_slide

AMOUNT = st.floats(0, 1.2)


@given(st.sampled_from(sorted(LABORATORIES)), AMOUNT, AMOUNT)
def test_color_deconvolution_gives_back_the_stains(name, hematoxylin, eosin):
    """Separation by scikit-image, which knows nothing of this code, after the background is divided out."""
    laboratory = LABORATORIES[name]
    planes = [np.full((2, 3), amount, np.float32) for amount in (hematoxylin, eosin)]
    transmitted = absorb(laboratory, *planes).astype(np.float64) / laboratory.background
    vectors = np.array((laboratory.hematoxylin, laboratory.eosin))
    third = np.cross(*vectors)
    to_stains = np.linalg.inv(np.vstack((vectors, third / np.linalg.norm(third))))
    # scikit-image measures densities in units of log(1e-6): 6 decades
    amounts = 6 * separate_stains(transmitted, to_stains)
    expected = np.array((hematoxylin, eosin)) * laboratory.strengths
    assert amounts[..., :2] == pytest.approx(np.broadcast_to(expected, (2, 3, 2)), abs=1e-4)


def test_bare_glass_has_the_background_and_stain_only_darkens():
    nothing, much = np.zeros((4, 4), np.float32), np.ones((4, 4), np.float32)
    for laboratory in LABORATORIES.values():
        bare = absorb(laboratory, nothing, nothing)
        assert np.allclose(bare, laboratory.background)
        assert np.all(absorb(laboratory, much, nothing) < bare) and np.all(absorb(laboratory, nothing, much) < bare)


@pytest.mark.parametrize("name", sorted(LABORATORIES))
def test_nuclei_are_blue_violet_and_fibers_pink(name):
    laboratory = LABORATORIES[name]
    for vector in (laboratory.hematoxylin, laboratory.eosin):
        assert np.linalg.norm(vector) == pytest.approx(1, abs=0.05)
    nothing, much = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    nucleus, fiber = absorb(laboratory, much, nothing)[0, 0], absorb(laboratory, nothing, much)[0, 0]
    assert nucleus[2] > nucleus[0] and nucleus[2] > nucleus[1]  # blue passes best
    assert fiber[0] > fiber[2] > fiber[1]  # red passes best, green worst
    assert nucleus.sum() < fiber.sum()


def test_slides_of_a_laboratory_differ_less_than_laboratories():
    rng = np.random.default_rng(0)
    slides = {
        name: np.log([stain_slide(laboratory, rng).strengths for _ in range(200)])
        for name, laboratory in HOSPITALS.items()
    }
    # 200 draws estimate a standard deviation of 0.12 within 5 % (one standard error): 4 of them
    within = np.array([logs.std(axis=0) for logs in slides.values()])
    assert within == pytest.approx(np.full((5, 2), 0.12), rel=0.2)
    between = np.std([logs.mean(axis=0) for logs in slides.values()], axis=0)
    assert np.all(between > 2 * 0.12)


def test_the_scanner_blurs_adds_noise_and_depends_on_the_generator_alone():
    stripes = np.zeros((64, 64), np.float32)
    stripes[:, ::8] = 1
    flat = np.zeros_like(stripes)
    sharp = replace(HOSPITALS["red_pink"], blur=0.0, noise=0.0, quality=95)
    soft, grainy = replace(sharp, blur=2.0), replace(sharp, noise=6.0)

    def contrast(laboratory, **options):
        return scan(laboratory, stripes, flat, 1.0, rng=np.random.default_rng(1), **options).std()

    assert contrast(soft) < 0.3 * contrast(sharp)
    # a defocus of 2 micrometers does what a scanner with that blur does
    assert contrast(sharp, defocus=2.0) == contrast(soft)
    # pixels of 4 micrometers: the same blur is half a pixel
    assert scan(soft, stripes, flat, 4.0, rng=np.random.default_rng(1)).std() > 2 * contrast(soft)
    gray = scan(grainy, flat, flat, 1.0, rng=np.random.default_rng(1)).std(axis=(0, 1))
    assert np.all(gray > 1) and np.all(scan(sharp, flat, flat, 1.0, rng=np.random.default_rng(1)).std(axis=(0, 1)) < 1)
    first, again, other = (scan(grainy, stripes, flat, 1.0, rng=np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first.shape == (64, 64, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_compression_softens_the_detail():
    flat = np.zeros((64, 64), np.float32)
    laboratory = replace(HOSPITALS["red_pink"], blur=0.0, noise=6.0)

    def detail(quality):
        pixels = scan(replace(laboratory, quality=quality), flat, flat, 1.0, rng=np.random.default_rng(0))
        return np.diff(pixels.astype(int), axis=1).std()

    # independent noise of 6 differs by 6 sqrt(2) = 8.5 from pixel to pixel; color is stored at half the resolution
    assert detail(40) < 0.8 * detail(98) < 8.5


def test_there_are_five_hospitals_and_six_organ_sites_without_a_shared_look():
    assert len(HOSPITALS) == 5 and len(ORGAN_LABORATORIES) == 6 and len(LABORATORIES) == 11
    assert len(set(map(repr, LABORATORIES.values()))) == 11
