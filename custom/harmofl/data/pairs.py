"""An image and its mask on one grid, checked as a pair."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harmofl.data.findings import Finding, refusal
from harmofl.data.geometry import GRID_TOLERANCE, Grid, grid_in_frame, in_voxels
from harmofl.data.headers import NEITHER, SPACING_TOLERANCE
from harmofl.data.layout import Case
from harmofl.data.nifti import Scan, read_scan
from harmofl.data.voxels import binary_mask, usable_intensities

CLEARLY_THICKER = 1.5  # ratio of spacings from which an axis is taken for the slice axis
THIN = 3  # slices that one 2.5D window wants


@dataclass(frozen=True, eq=False)
class ImagePair:
    """One case on its native grid, in the common frame.

    Attributes:
        image: (S, H, W) float32, finite.
        mask: (S, H, W) uint8, 1 inside the prostate.
        spacing: mm, order slice, row, column.
        voxel_ml: volume of a voxel in mL.
        orientation: axis codes of the image file as stored.
        labels: labels above 0 found in the mask file.
        findings: warnings and notices of both files.
    """

    image: np.ndarray
    mask: np.ndarray
    spacing: tuple[float, float, float]
    voxel_ml: float
    orientation: str
    labels: tuple[int, ...]
    findings: tuple[Finding, ...]


def read_pair(case: Case) -> ImagePair:
    """Read image and mask of one case.

    Raises:
        CaseError: if a file cannot be read, the two grids differ, the slices are not axial, or the numbers in them
            cannot be used.
    """
    image, mask = read_image(case.image), read_scan(case.mask)
    _check_grid(case, image, mask)
    binary, labels, mask_findings = binary_mask(mask.data, case.mask.name)
    return ImagePair(
        image=image.data,
        mask=binary,
        spacing=image.spacing,
        voxel_ml=image.grid.voxel_ml,
        orientation=image.orientation,
        labels=labels,
        findings=(*image.findings, *mask.findings, *mask_findings),
    )


def read_image(path: Path) -> Scan:
    """Read one image by the rules that hold in training, prediction and export.

    Returns:
        A scan whose intensities are finite and without padding, with all findings about the file.

    Raises:
        CaseError: if the file cannot be read, its slices are not axial, or the numbers in it cannot be used.
    """
    scan = read_scan(path)
    check_axial(path.name, scan)
    intensities, findings = usable_intensities(scan.data, path.name)
    return replace(scan, data=intensities, findings=(*scan.findings, *findings, *depth_findings(path.name, scan)))


def _check_grid(case: Case, image: Scan, mask: Scan) -> None:
    subject = f"{case.image.name}, {case.mask.name}"
    if image.grid.shape == mask.grid.shape:
        distance = image.grid.distance_to(mask.grid)
        if distance <= GRID_TOLERANCE:
            return
        placed = " against ".join(_placement(scan) for scan in (image, mask))
        message = f"image and mask lie up to {in_voxels(distance)} apart ({placed})"
    else:
        sizes = " against ".join("x".join(map(str, scan.grid.shape)) for scan in (image, mask))
        message = f"image and mask differ in size ({sizes}, slices x rows x columns)"
    cause, fix = next(_suspects(image, mask), ("", "resample the mask to the image's grid, nearest neighbor"))
    raise refusal("geometry_mismatch", subject, f"{message}{cause}", fix)


def _suspects(image: Scan, mask: Scan) -> Iterator[tuple[str, str]]:
    """Which of two headers is the cause of a mismatch, and the fix; the surest first."""
    if sorted(image.grid.shape) != sorted(mask.grid.shape):
        return  # no place, however it was assumed, makes two numbers of voxels one
    convert, save = "convert the image again from DICOM", "save the mask again with the header of the image"
    either = f"compare both with the series, then {convert}, or {save}"
    both = (("image", image, mask, convert), ("mask", mask, image, save))
    for name, scan, partner, fix in both:
        if scan.form == NEITHER and partner.form != NEITHER:
            yield f"; the {name}'s header holds neither sform nor qform, so that its place is assumed", fix
    agreeing = [
        (f"; by the {other} of the {name}'s header they agree, its {scan.form} says otherwise", fix)
        for name, scan, partner, fix in both
        for other, grid in scan.others.items()
        if partner.grid.distance_to(grid) <= GRID_TOLERANCE
    ]
    if len(agreeing) > 1:
        yield "; both headers contradict themselves, and by either they can agree", either
    yield from agreeing
    for name, scan, partner, fix in both:
        if _is_unset(scan) and not _is_unset(partner):
            yield f"; the {name}'s {scan.form} is the identity, as programs leave it that know no place", fix
    if image.grid.shape == mask.grid.shape and _sizes_differ(image.grid, mask.grid):
        yield "; as many voxels of another size: one of the headers is wrong", either


def _is_unset(scan: Scan) -> bool:
    """Whether a form says no more than the number of the voxel: as stored it is the identity."""
    stored_in_frame = grid_in_frame(np.eye(4), scan.grid.shape[::-1])
    return bool(np.allclose(scan.affine, stored_in_frame.affine))


def _sizes_differ(first: Grid, second: Grid) -> bool:
    ratios = np.array(second.spacing) / np.array(first.spacing)
    return bool(np.abs(ratios - 1).max() > SPACING_TOLERANCE)


def _placement(scan: Scan) -> str:
    origin = ", ".join(f"{value:.6g}" for value in scan.affine[:3, 3])
    spacing = " x ".join(f"{value:.6g}" for value in scan.spacing)
    return f"origin {origin} spacing {spacing} mm"


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
