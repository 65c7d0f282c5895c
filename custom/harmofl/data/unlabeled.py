"""An image without annotation: read as training reads it, and the answer brought back to its own grid and file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harmofl.data.findings import Finding
from harmofl.data.nifti_masks import write_labels, wrote_labels
from harmofl.data.pairs import ImagePair, read_image
from harmofl.data.volumes import VolumeSettings, fit_image

__all__ = ["FittedScan", "fit_pair_image", "labels_on_grid", "read_fitted_scan", "write_labels", "wrote_labels"]


@dataclass(frozen=True, eq=False)
class FittedScan:
    """A volume at the size and range of an experiment, with the grid that it came from.

    Attributes:
        image: (S, H, W), as `volumes.fit_image` leaves it.
        shape: slices, rows, columns on its own grid, in the common frame.
        voxel_ml: volume of a voxel of its own grid in mL.
        findings: warnings and notices about the file.
    """

    image: np.ndarray
    shape: tuple[int, int, int]
    voxel_ml: float
    findings: tuple[Finding, ...]


def read_fitted_scan(path: Path, settings: VolumeSettings) -> FittedScan:
    """Read one NIfTI volume by the rules that hold for the images of training cases.

    Raises:
        CaseError: the file cannot be read, its slices are not axial, or the numbers in it cannot be used.
    """
    scan = read_image(path)
    return _fitted(scan.data, scan.grid.voxel_ml, scan.findings, settings, path.name)


def fit_pair_image(pair: ImagePair, settings: VolumeSettings, subject: str) -> FittedScan:
    """The image of a pair as `read_fitted_scan` reads it, with the findings of the pair."""
    return _fitted(pair.image, pair.voxel_ml, pair.findings, settings, subject)


def _fitted(
    image: np.ndarray, voxel_ml: float, findings: tuple[Finding, ...], settings: VolumeSettings, subject: str
) -> FittedScan:
    fitted, more = fit_image(image, settings, subject)
    slices, rows, columns = image.shape
    return FittedScan(fitted, (slices, rows, columns), voxel_ml, (*findings, *more))


def labels_on_grid(probabilities_SKHW: Tensor, rows: int, columns: int) -> Tensor:
    """Most probable class of each pixel of a grid of another size.

    Probabilities are interpolated linearly with the pixel centers of the resize before the network, so that outlines
    are not stepped as those of a resized mask; where the size is the same they are taken as they are.

    Args:
        probabilities_SKHW: of K classes, (S, K, H, W).
        rows: of the grid.
        columns: of the grid.

    Returns:
        (S, rows, columns) uint8.
    """
    sized = torch.nn.functional.interpolate(probabilities_SKHW, (rows, columns), mode="bilinear", align_corners=False)
    return sized.argmax(1).to(torch.uint8)
