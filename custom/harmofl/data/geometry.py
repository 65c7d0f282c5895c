"""Where the voxels of a volume lie: one affine a file, and all that is measured with it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The frame in which scanners store axial slices: rows run to posterior, columns to the patient's left, so that a
# slice drawn as it is looks as it does in the reading room.
FRAME = "LPS"
# Of a voxel at the worst corner of a grid. Headers of one real 640 x 640 grid written by two tools differ by 0.14; a
# shift by half a voxel is a misplaced mask.
GRID_TOLERANCE = 0.25
LARGEST, SMALLEST = 1e6, 1e-6  # mm; a header in meters or micrometers lies between them
LEAST_VOLUME = 1e-3  # of three axes of length 1
Affine = NDArray[np.float64]


def file_affine(image: Any) -> Affine:
    """The affine of a file, which everything that reads, measures or writes on its grid takes from here.

    It is nibabel's: the sform if its code is above 0, else the qform if its code is above 0, else the voxel sizes
    alone, with the first axis to the left and the origin in the middle of the volume.

    Args:
        image: opened by nibabel.

    Returns:
        (4, 4), from the indices of the voxels as stored to world coordinates in mm (right, anterior, superior).
    """
    return np.array(image.affine, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Grid:
    """The voxels of a volume in the common frame.

    Attributes:
        affine: (4, 4), from (column, row, slice) indices to world coordinates in mm.
        shape: slices, rows, columns.
    """

    affine: Affine
    shape: tuple[int, int, int]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Distance of neighbors in mm, order slice, row, column: lengths of the affine's columns."""
        column, row, thickness = np.linalg.norm(self.affine[:3, :3], axis=0).tolist()
        return thickness, row, column

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel in mL: the determinant, which for oblique angles is less than the product of lengths."""
        return float(abs(np.linalg.det(self.affine[:3, :3])) / 1000)

    def distance_to(self, other: "Grid") -> float:
        """By how many voxels of this grid the two disagree at the worst corner; infinite for another shape."""
        if self.shape != other.shape:
            return float("inf")
        slices, rows, columns = self.shape
        return corner_distance(self.affine, other.affine, (columns, rows, slices))


def grid_in_frame(affine: Affine, shape: tuple[int, ...]) -> Grid:
    """The grid of a file in the common frame, from its affine and its shape as stored."""
    from nibabel.orientations import inv_ornt_aff

    turn = _turn_to_frame(affine)
    columns, rows, slices = (shape[axis] for axis in np.argsort(turn[:, 0]))
    return Grid(affine @ inv_ornt_aff(turn, shape[:3]), (slices, rows, columns))


def in_frame(stored: NDArray[Any], affine: Affine) -> NDArray[Any]:
    """Turn voxels as stored into the common frame, (slices, rows, columns)."""
    from nibabel.orientations import apply_orientation

    return np.ascontiguousarray(apply_orientation(stored, _turn_to_frame(affine)).transpose(2, 1, 0))


def as_stored(framed: NDArray[Any], affine: Affine) -> NDArray[Any]:
    """Turn (slices, rows, columns) of the common frame into the order in which the file with this affine stores."""
    from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform

    back = ornt_transform(axcodes2ornt(FRAME), io_orientation(affine))
    return np.ascontiguousarray(apply_orientation(framed.transpose(2, 1, 0), back))


def axis_codes(affine: Affine) -> str:
    """Where the axes of a file run, such as ``LAS``."""
    from nibabel import aff2axcodes

    return "".join(aff2axcodes(affine))


def is_usable(affine: Affine) -> bool:
    """Whether an affine places voxels at all: numbers that can be lengths in mm, and three independent axes."""
    if not np.isfinite(affine).all() or np.abs(affine).max() > LARGEST:
        return False
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if lengths.min() < SMALLEST:
        return False
    return bool(abs(np.linalg.det(affine[:3, :3] / lengths)) > LEAST_VOLUME)


def skew(affine: Affine) -> float:
    """Largest departure in degrees of the angle between two axes from a right angle."""
    axes = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    cosines = [axes[:, first] @ axes[:, second] for first, second in ((0, 1), (0, 2), (1, 2))]
    return float(np.degrees(np.arcsin(min(1.0, max(map(abs, cosines))))))


def corner_distance(first: Affine, second: Affine, shape: tuple[int, ...]) -> float:
    """Return by how many voxels two affines of one grid disagree at the worst corner.

    Args:
        first: (4, 4), its voxels are the unit.
        second: (4, 4).
        shape: number of voxels along the three axes, in the order of the affines.
    """
    corners = np.stack(np.meshgrid(*[(0, size - 1) for size in shape[:3]], indexing="ij"), axis=-1).reshape(-1, 3)
    homogeneous = np.concatenate([corners, np.ones((len(corners), 1))], axis=1).T
    moved = np.linalg.solve(first, second @ homogeneous)
    return float(np.abs(moved - homogeneous)[:3].max())


def in_voxels(distance: float) -> str:
    """A distance in words, with two digits and no power of ten."""
    number = f"{distance:.2g}" if distance < 10 else f"{distance:.0f}"
    return f"{number} voxel{'s' * (number != '1')}"


def _turn_to_frame(affine: Affine) -> NDArray[Any]:
    from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform

    turn: NDArray[Any] = ornt_transform(io_orientation(affine), axcodes2ornt(FRAME))
    return turn
