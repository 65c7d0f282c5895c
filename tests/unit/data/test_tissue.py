"""Tissue on a grid: nuclei are where their outlines say, and lie on one another nowhere."""

import numpy as np
import pytest
from scipy import ndimage
from skimage.draw import polygon2mask
from skimage.measure import label, regionprops

from harmofl.data.tissue import KINDS, Section


def filled(kind, seed=0, size=96, pixel=1.0, spacing=14.0, **options):
    """A section of bare glass full of nuclei of one kind."""
    section = Section(np.random.default_rng(seed), size, pixel)
    number = section.cover(np.full((size, size), -1, np.float32), 0.0, 0.0)
    section.crowd(kind, number, spacing, **options)
    section.settle()
    return section


def drawn(nucleus, size):
    """Pixels whose center lies within an outline, by scikit-image: rows are y."""
    return polygon2mask((size, size), nucleus.outline[:, ::-1])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_stain_lies_within_the_outlines(kind):
    section = filled(kind, pixel=0.5, size=128)
    assert len(section.nuclei) >= 10 and {nucleus.kind for nucleus in section.nuclei} == {kind}
    inside = np.logical_or.reduce([drawn(nucleus, 128) for nucleus in section.nuclei])
    core, far = ndimage.binary_erosion(inside, iterations=2), ~ndimage.binary_dilation(inside, iterations=3)
    assert core.any() and far.any()
    assert section.hematoxylin[core].mean() > 0.6 * KINDS[kind].darkness
    # cytoplasm holds a trace of hematoxylin (0.06), bare glass none; the soft edge of a spindle's tip ends by 3 pixels
    assert section.hematoxylin[far].max() <= 0.061


@pytest.mark.parametrize("kind", ["lymphocyte", "epithelial", "tumor"])
def test_crowded_nuclei_hardly_overlap(kind):
    section = filled(kind, spacing=2.2 * KINDS[kind].radius)
    cover = np.sum([drawn(nucleus, 96) for nucleus in section.nuclei], axis=0)
    # elongated and wavy shapes may touch, centers keep 0.95 of the sum of both radii
    assert np.count_nonzero(cover > 1) < 0.06 * np.count_nonzero(cover)
    assert cover.max() <= 3


def test_nuclei_go_on_beyond_the_border():
    section = filled("tumor")
    outlines = np.concatenate([nucleus.outline for nucleus in section.nuclei])
    assert outlines.min() < -1 and outlines.max() > 97
    # every one of them is seen: more than the 6 pixels below which a piece is left out, less what rounding takes
    assert min(drawn(nucleus, 96).sum() for nucleus in section.nuclei) >= 3


def shapes(kind):
    """Equivalent diameter in micrometers and axis ratio of each whole nucleus."""
    section = filled(kind, size=400, pixel=0.25, spacing=30)
    found = regionprops(label(np.logical_or.reduce([drawn(nucleus, 400) for nucleus in section.nuclei])))
    whole = [p for p in found if min(p.bbox[:2]) > 0 and max(p.bbox[2:]) < 400]
    sizes = np.array([0.25 * p.equivalent_diameter_area for p in whole])
    return sizes, np.array([p.axis_major_length / p.axis_minor_length for p in whole])


def test_tumor_nuclei_are_larger_and_more_varied_than_lymphocytes():
    (small, round_shapes), (large, varied_shapes) = shapes("lymphocyte"), shapes("tumor")
    # radii of 3.3 and 6.0 micrometers
    assert np.median(small) == pytest.approx(6.6, rel=0.15) and np.median(large) == pytest.approx(12, rel=0.25)
    assert np.std(np.log(large)) > 2 * np.std(np.log(small))
    assert np.mean(varied_shapes) > np.mean(round_shapes)


def test_spindles_lie_along_the_given_direction():
    section = filled("fibroblast", spacing=22.0, along=0.6)
    angles = []
    for nucleus in section.nuclei:
        spread = np.linalg.eigh(np.cov((nucleus.outline - nucleus.outline.mean(0)).T))[1][:, 1]
        angles.append(np.arctan2(spread[1], spread[0]) - 0.6)
    doubled = 2 * np.array(angles)  # an axis has no sign
    # normal with a standard deviation of 0.25: the mean resultant length of the doubled angle is exp(-0.5 * 0.5^2)
    assert np.hypot(np.cos(doubled).mean(), np.sin(doubled).mean()) > 0.7
    assert abs(np.arctan2(np.sin(doubled).mean(), np.cos(doubled).mean())) < 0.4


def test_a_compartment_painted_later_takes_the_nuclei_of_the_earlier_one():
    section = Section(np.random.default_rng(0), 96, 1.0)
    first = section.cover(np.full((96, 96), -1, np.float32), 0.0, 0.5)
    section.crowd("lymphocyte", first, 8)
    second = section.cover(section.x - 48, 0.0, 0.1)  # the left half
    section.crowd("tumor", second, 14)
    section.settle()
    left = {n.kind for n in section.nuclei if n.outline[:, 0].max() < 40}
    right = {n.kind for n in section.nuclei if n.outline[:, 0].min() > 56}
    assert left == {"tumor"} and right == {"lymphocyte"}
    assert (second, first) == (2, 1) and set(np.unique(section.owner)) == {1, 2}


def test_a_vacuole_is_pale_and_inside_its_nucleus():
    section = filled("tumor", pixel=0.5, size=128, spacing=20)
    index = max(range(len(section.nuclei)), key=lambda i: drawn(section.nuclei[i], 128).sum())
    before = section.hematoxylin.copy()
    section.hollow(index, 0.5)
    hole, nucleus = section.nuclei[index].hole, section.nuclei[index]
    assert hole is not None
    within = polygon2mask((128, 128), hole[:, ::-1])
    assert within.any() and not (within & ~drawn(nucleus, 128)).any()
    core = ndimage.binary_erosion(within)
    assert core.any() and section.hematoxylin[core] == pytest.approx(0.1 * before[core], rel=0.01)
    far = ~ndimage.binary_dilation(within, iterations=2)
    assert np.array_equal(section.hematoxylin[far], before[far])


def test_one_generator_decides_everything():
    first, again, other = (filled("tumor", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.hematoxylin, again.hematoxylin)
    assert not np.array_equal(first.hematoxylin, other.hematoxylin)


def test_noise_varies_over_the_length_asked_for():
    section = Section(np.random.default_rng(0), 256, 1.0)
    fine, coarse = section.noise(4.0), section.noise(30.0)
    assert fine.shape == coarse.shape == (256, 256)
    assert 0.6 < fine.std() < 1.4
    # neighbors at 6 micrometers: independent for the fine noise, nearly equal for the coarse one
    correlations = [np.corrcoef(n[:, :-6].ravel(), n[:, 6:].ravel())[0, 1] for n in (fine, coarse)]
    assert correlations[0] < 0.3 and correlations[1] > 0.8
