"""An image without annotation: read as training reads it, and the answer brought back to its own grid and file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmofl.data.findings import Finding
from harmofl.data.nifti import FRAME, read_scan
from harmofl.data.pairs import ImagePair, check_axial, depth_findings
from harmofl.data.volumes import VolumeSettings, fit_image
from harmofl.data.voxels import check_contrast, finite_image

WRITER = b"labels by harmofl"  # in the header of every mask that was predicted


@dataclass(frozen=True, eq=False)
class FittedScan:
    """A volume at the size and range of an experiment, with the grid that it came from.

    Attributes:
        image: (S, H, W), as `volumes.fit_image` leaves it.
        shape: slices, rows, columns on its own grid, in the common frame.
        spacing: mm on its own grid, order slice, row, column.
        findings: warnings and notices about the file.
    """

    image: np.ndarray
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    findings: tuple[Finding, ...]


def read_fitted_scan(path: Path, settings: VolumeSettings) -> FittedScan:
    """Read one NIfTI volume by the rules that hold for the images of training cases.

    Raises:
        CaseError: the file cannot be read, its slices are not axial, or the numbers in it cannot be used.
    """
    scan = read_scan(path)
    check_axial(path.name, scan)
    intensities, findings = finite_image(scan.data, path.name)
    check_contrast(intensities, path.name)
    about = (*scan.findings, *findings, *depth_findings(path.name, scan))
    return _fitted(intensities, scan.spacing, about, settings, path.name)


def fit_pair_image(pair: ImagePair, settings: VolumeSettings, subject: str) -> FittedScan:
    """The image of a pair as `read_fitted_scan` reads it, with the findings of the pair."""
    return _fitted(pair.image, pair.spacing, pair.findings, settings, subject)


def _fitted(
    image: np.ndarray,
    spacing: tuple[float, float, float],
    findings: tuple[Finding, ...],
    settings: VolumeSettings,
    subject: str,
) -> FittedScan:
    fitted, more = fit_image(image, settings, subject)
    slices, rows, columns = image.shape
    return FittedScan(fitted, (slices, rows, columns), spacing, (*findings, *more))


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


def write_labels(labels_SHW: np.ndarray, source: Path, target: Path) -> None:
    """Write labels as NIfTI on the grid of the image that they belong to.

    The header is the image's: shape, sform, qform and their codes; voxels are uint8.

    Args:
        labels_SHW: (S, rows, columns) uint8 in the common frame.
        source: the image, which is only read.
        target: the file to write, which appears when it is complete.
    """
    import nibabel
    from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform

    image: Any = nibabel.load(source)
    back = ornt_transform(axcodes2ornt(FRAME), io_orientation(image.affine))
    labels = np.ascontiguousarray(apply_orientation(labels_SHW.transpose(2, 1, 0), back))
    header = image.header.copy()
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1, 0)
    header["cal_min"], header["cal_max"] = 0, 1
    header["descrip"] = WRITER
    header.extensions.clear()
    part = target.with_name(f".part-{target.name}")
    try:
        nibabel.save(type(image)(labels, image.affine, header), part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def wrote_labels(path: Path) -> bool:
    """Whether a file is one that `write_labels` left, and no mask drawn by hand."""
    import nibabel

    try:
        image: Any = nibabel.load(path)
        return image.header["descrip"].item() == WRITER
    except Exception:  # whatever is no such file
        return False
