"""HD95 and ASD in mm, against numbers derived by hand and a brute force over all pairs of surface voxels."""

from math import isnan

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harmofl.core.distances import surface_distances

SPACING = (3.0, 0.5, 0.7)


def mask(*boxes: tuple[slice, slice, slice], shape: tuple[int, int, int] = (6, 20, 20)) -> torch.Tensor:
    made = torch.zeros(shape, dtype=torch.uint8)
    for box in boxes:
        made[box] = 1
    return made


def surface(voxels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Places in mm of the voxels with a neighbor outside, of the six; beyond the border lies nothing."""
    padded = np.pad(voxels, 1)
    inside = padded.copy()
    for axis in range(3):
        for step in (-1, 1):
            inside &= np.roll(padded, step, axis)
    return np.argwhere(voxels & ~inside[1:-1, 1:-1, 1:-1]) * np.array(SPACING)


def brute_force(predicted: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    first, second = surface(predicted.numpy() > 0), surface(true.numpy() > 0)
    apart = np.sqrt(((first[:, None] - second[None]) ** 2).sum(-1))
    there, back = apart.min(1), apart.min(0)
    hd95 = max(np.percentile(there, 95), np.percentile(back, 95))
    return float(hd95), float(np.concatenate([there, back]).mean())


def test_equal_masks_have_no_distance() -> None:
    box = mask((slice(1, 4), slice(5, 12), slice(5, 12)))
    assert surface_distances(box, box, SPACING) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("place", "distance"),
    [((4, 5, 5), 2 * 3.0), ((2, 11, 5), 6 * 0.5), ((2, 5, 15), 10 * 0.7), ((3, 9, 5), (3.0**2 + 2.0**2) ** 0.5)],
)
def test_two_voxels_are_as_far_apart_as_their_places(place: tuple[int, int, int], distance: float) -> None:
    """From (2, 5, 5): slices of 3 mm, rows of 0.5 mm, columns of 0.7 mm; one voxel is its own surface."""
    one, other = mask(), mask()
    one[2, 5, 5] = other[place] = 1
    assert surface_distances(one, other, SPACING) == pytest.approx((distance, distance), rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_irregular_masks_against_all_pairs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    fields = torch.nn.functional.avg_pool3d(torch.rand((2, 1, 8, 24, 24), generator=generator), 5, 1, 2)
    predicted, true = ((field[0] > field.median()).to(torch.uint8) for field in fields)
    assert surface_distances(predicted, true, SPACING) == pytest.approx(brute_force(predicted, true), rel=1e-5)


def test_labels_above_one_are_foreground_too() -> None:
    box = mask((slice(1, 4), slice(5, 12), slice(5, 12)))
    assert surface_distances(box * 2, box, SPACING) == (0.0, 0.0)


@pytest.mark.parametrize(("predicted", "true"), [(False, True), (True, False), (False, False)])
def test_an_empty_mask_has_no_surface(predicted: bool, true: bool) -> None:
    full = mask((slice(1, 3), slice(2, 5), slice(2, 5)))
    pair = (full if predicted else mask(), full if true else mask())
    assert all(isnan(value) for value in surface_distances(*pair, SPACING))
