"""An image and its mask on one grid, checked as a pair."""

from dataclasses import dataclass

import numpy as np

from harmofl.data.findings import CaseError, Finding, refusal
from harmofl.data.layout import Case
from harmofl.data.nifti import GRID_TOLERANCE, Scan, corner_distance, read_scan
from harmofl.data.voxels import binary_mask, check_contrast, finite_image

CLEARLY_THICKER = 1.5  # ratio of spacings from which an axis is taken for the slice axis
THIN = 3  # slices that one 2.5D window wants


@dataclass(frozen=True, eq=False)
class ImagePair:
    """One case on its native grid, in the common frame.

    Attributes:
        image: (S, H, W) float32, finite.
        mask: (S, H, W) uint8, 1 inside the prostate.
        spacing: mm, order slice, row, column.
        orientation: axis codes of the image file as stored.
        labels: labels above 0 found in the mask file.
        findings: warnings and notices of both files.
    """

    image: np.ndarray
    mask: np.ndarray
    spacing: tuple[float, float, float]
    orientation: str
    labels: tuple[int, ...]
    findings: tuple[Finding, ...]


def read_pair(case: Case) -> ImagePair:
    """Read image and mask of one case.

    Raises:
        CaseError: if a file cannot be read, the two grids differ, the slices are not axial, or the numbers in them
            cannot be used.
    """
    image, mask = read_scan(case.image), read_scan(case.mask)
    _check_grid(case, image, mask)
    check_axial(case.image.name, image)
    intensities, image_findings = finite_image(image.data, case.image.name)
    check_contrast(intensities, case.image.name)
    binary, labels, mask_findings = binary_mask(mask.data, case.mask.name)
    return ImagePair(
        image=intensities,
        mask=binary,
        spacing=image.spacing,
        orientation=image.orientation,
        labels=labels,
        findings=(
            *image.findings,
            *mask.findings,
            *image_findings,
            *mask_findings,
            *depth_findings(case.image.name, image),
        ),
    )


def _check_grid(case: Case, image: Scan, mask: Scan) -> None:
    if image.data.shape != mask.data.shape:
        sizes = " against ".join("x".join(map(str, scan.data.shape)) for scan in (image, mask))
        raise _mismatch(case, f"image and mask differ in size ({sizes}, slices x rows x columns)")
    slices, rows, columns = image.data.shape
    distance = corner_distance(image.affine, mask.affine, (columns, rows, slices))
    if distance <= GRID_TOLERANCE:
        return
    placed = " against ".join(_placement(scan) for scan in (image, mask))
    raise _mismatch(case, f"image and mask lie up to {distance:.2g} voxels apart ({placed})")


def _placement(scan: Scan) -> str:
    origin = ", ".join(f"{value:.6g}" for value in scan.affine[:3, 3])
    spacing = " x ".join(f"{value:.6g}" for value in scan.spacing)
    return f"origin {origin} spacing {spacing} mm"


def _mismatch(case: Case, message: str) -> CaseError:
    subject = f"{case.image.name}, {case.mask.name}"
    return refusal("geometry_mismatch", subject, message, "resample the mask to the image's grid, nearest neighbor")


def check_axial(subject: str, image: Scan) -> None:
    """Refuse a volume whose slices are coronal or sagittal.

    Raises:
        CaseError: another axis than the one through the slices has clearly thicker voxels.
    """
    slice_spacing, *in_plane = image.spacing
    if max(in_plane) <= CLEARLY_THICKER * slice_spacing:
        return
    view = "coronal" if in_plane[0] > in_plane[1] else "sagittal"
    sizes = " x ".join(f"{value:.4g}" for value in image.spacing)
    message = f"the slices are {view}, not axial (voxel {sizes} mm along head, posterior, left)"
    raise refusal("not_axial", subject, message, "use the axial series of this patient")


def depth_findings(subject: str, image: Scan) -> list[Finding]:
    """A notice where a volume has fewer slices than one window."""
    slices = len(image.data)
    if slices >= THIN:
        return []
    message = f"the volume has {slices} slice{'s' * (slices > 1)}, border slices stand in for missing neighbors"
    return [Finding("notice", "thin_volume", subject, message)]
