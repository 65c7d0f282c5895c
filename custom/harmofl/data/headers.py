"""What a NIfTI header leaves open or says twice and not alike, each as a finding that names the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.data.findings import Finding, refusal
from harmofl.data.geometry import (
    GRID_TOLERANCE,
    Affine,
    axis_codes,
    corner_distance,
    file_affine,
    grid_in_frame,
    in_voxels,
    is_usable,
    skew,
)

CONVERT_AGAIN = "convert the series again from DICOM"
NEITHER = "voxel sizes"  # stands for the affine that is made of nothing else
SPACING_TOLERANCE = 0.01  # of a voxel size; a form printed with three decimals is off by a tenth of it
PLAUSIBLE_SPACING = (0.05, 20.0)  # mm
# Degrees from a right angle. Two decimals in a form of 0.5 mm voxels make 0.6 degrees.
SKEW_TOLD = 1.0
# At 10 degrees a neighbor 3 mm away lies 0.53 mm aside, a whole pixel of 0.5 mm: the three slices of one input no
# longer show the same place, and a distance measured along the axes is wrong by up to 9 %.
SKEW_REFUSED = 10.0
FIRST_VOXEL = {b"n+1": 352, b"n+2": 544}  # bytes; where the voxels of a single file begin at the earliest
MOST_EXTENSIONS = 1 << 24  # bytes between a header and its voxels; a whole DICOM header takes some 100 kB


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a header puts the voxels.

    Attributes:
        affine: the one that is used, (4, 4), from the indices of the voxels as stored.
        form: where it comes from: `sform`, `qform` or `voxel sizes`.
        others: what else the header says, by name; each contradicts the one that is used.
    """

    affine: Affine
    form: str
    others: dict[str, Affine]


def raw_header(path: Path) -> Any:
    """The header as it lies in the file, which nibabel fixes when it opens it; None if it is not of NIfTI."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header
    from nibabel.openers import Opener

    with Opener(path) as stream:
        block = stream.read(Nifti2Header.sizeof_hdr)
    for kind in (Nifti1Header, Nifti2Header):
        if kind.may_contain_header(block):
            return kind(block[: kind.sizeof_hdr], check=False)
    return None


def check_raw_header(path: Path, raw: Any) -> None:
    """Refuse a header by which nibabel would read other bytes than voxels, or more than there can be.

    Raises:
        CaseError: the voxels begin in the header, the extensions between both do not end before them, or the only form
            is a qform that is not a rotation.
    """
    fix = "copy the file again from its source or convert it again"
    magic, offset = raw["magic"].item(), float(raw["vox_offset"])
    if magic not in FIRST_VOXEL:
        return
    if not FIRST_VOXEL[magic] <= offset <= MOST_EXTENSIONS:
        message = f"the header says that the voxels begin at byte {offset:g}"
        raise refusal("bad_header", path.name, message, fix)
    if not _extensions_fit(path, raw, int(offset)):
        message = f"the extensions of the header do not end at byte {offset:g}, where the voxels begin"
        raise refusal("bad_header", path.name, message, fix)
    if raw["sform_code"] <= 0 < raw["qform_code"]:
        try:
            # nibabel's own limit, which for NIfTI-2 is so narrow that it may refuse a half turn that it wrote itself
            raw.get_qform_quaternion()
        except ValueError:
            message = "the qform of the header is not a rotation (b, c and d of its quaternion are longer than 1)"
            raise refusal("bad_affine", path.name, message, f"set its sform, or {CONVERT_AGAIN}") from None


def placement_of(path: Path, raw: Any, image: Any) -> Placement:
    """Which affine of a header is used, and what contradicts it.

    Args:
        path: the file, for its name.
        raw: the header as it lies in the file.
        image: opened by nibabel.

    Raises:
        CaseError: no affine with three independent axes, or one whose axes are far from right angles.
    """
    affine = file_affine(image)
    codes = int(image.header["sform_code"]), int(image.header["qform_code"])
    form = "sform" if codes[0] else "qform" if codes[1] else NEITHER
    sizes = np.asarray(raw["pixdim"][1:4], dtype=np.float64)
    if form != "sform" and not np.abs(sizes).min() > 0:
        message = f"the header gives voxel sizes of {_sizes(sizes)} mm, so spacing is unknown"
        raise refusal("bad_affine", path.name, message, CONVERT_AGAIN)
    if not is_usable(affine):
        message = f"the {form} of the header places no voxel (singular or no lengths in mm)"
        raise refusal("bad_affine", path.name, message, CONVERT_AGAIN)
    if skew(affine) > SKEW_REFUSED:
        message = f"the axes of its {form} are {skew(affine):.3g} degrees from right angles"
        fix = "resample image and mask to one grid of right angles"
        raise refusal("axes_not_orthogonal", path.name, message, fix)
    others = {}
    if form == "sform" and codes[1]:
        others["qform"] = _qform(image)
    elif form == "sform" and np.isfinite(sizes).all() and sizes.min() > 0:
        # an unset qform says nothing, but voxel sizes are part of the header in any case
        others[NEITHER] = affine @ np.diag([*(sizes / _lengths(affine)), 1.0])
    shape = image.shape
    return Placement(affine, form, {name: one for name, one in others.items() if _apart(affine, one, shape)})


def header_findings(path: Path, raw: Any, image: Any, placement: Placement) -> tuple[Finding, ...]:
    """What a person should know about a header that is used."""
    return (
        *_form_findings(path, image, placement),
        *_skew_finding(path, placement),
        *_spacing_finding(path, image, placement),
        *_scaling_finding(path, raw),
    )


def _extensions_fit(path: Path, raw: Any, offset: int) -> bool:
    """Whether the sizes of the extensions, one behind the other, end before the voxels: nibabel reads what they say."""
    from nibabel.openers import Opener

    start = raw.sizeof_hdr + 4
    with Opener(path) as stream:
        between = stream.read(offset)
    if len(between) < start or between[raw.sizeof_hdr] == 0:
        return True
    # nibabel takes what is shorter than the smallest extension for padding
    while start + 16 <= offset:
        size = between[start : start + 4]
        if len(size) < 4 or np.frombuffer(size, f"{raw.endianness}i4")[0] < 8:
            return False
        start += int(np.frombuffer(size, f"{raw.endianness}i4")[0])
    return start <= offset


def _apart(used: Affine, other: Affine, shape: tuple[int, ...]) -> bool:
    if not is_usable(other):
        return True
    return _sizes_differ(used, other) or corner_distance(used, other, shape) > GRID_TOLERANCE


def _sizes_differ(first: Affine, second: Affine) -> bool:
    return bool(np.abs(_lengths(second) / _lengths(first) - 1).max() > SPACING_TOLERANCE)


def _lengths(affine: Affine) -> np.ndarray:
    """Voxel sizes in mm, in the order of the axes."""
    return np.linalg.norm(affine[:3, :3], axis=0)


def _qform(image: Any) -> Affine:
    try:
        return np.asarray(image.get_qform(), dtype=np.float64)
    except Exception:  # a quaternion longer than 1, a sign that is none
        return np.full((4, 4), np.nan)


def _form_findings(path: Path, image: Any, placement: Placement) -> list[Finding]:
    if placement.form == NEITHER:
        message = "the header holds neither sform nor qform, orientation and place are assumed"
        return [Finding("warning", "orientation_unknown", path.name, message, CONVERT_AGAIN)]
    used, found = placement.affine, []
    for name, other in placement.others.items():
        if name == NEITHER:
            own, said = _sizes(_lengths(used)), _sizes(_lengths(other))
            message = f"the header's voxel sizes ({said} mm) contradict its sform ({own} mm), the sform is used"
            fix = "compare both with the series, or convert it again"
            found.append(Finding("warning", "spacing_disagrees", path.name, message, fix))
        else:
            how = _difference(used, other, image.shape) if is_usable(other) else ", the qform is no affine"
            message = f"sform and qform disagree{how}, the sform is used"
            fix = "check left and right, or convert it again"
            found.append(Finding("warning", "forms_disagree", path.name, message, fix))
    return found


def _difference(used: Affine, other: Affine, shape: tuple[int, ...]) -> str:
    """By how much two affines of one grid differ, and in what if it is more than a shift."""
    apart = f" by {in_voxels(corner_distance(used, other, shape))}"
    if axis_codes(used) != axis_codes(other):
        return f"{apart} (axes run to {axis_codes(used)} against {axis_codes(other)})"
    if _sizes_differ(used, other):
        return f"{apart} (voxels of {_sizes(_lengths(used))} against {_sizes(_lengths(other))} mm)"
    return apart


def _skew_finding(path: Path, placement: Placement) -> list[Finding]:
    if skew(placement.affine) <= SKEW_TOLD:
        return []
    message = f"the axes are {skew(placement.affine):.2g} degrees from right angles, distances in mm are approximate"
    fix = "check that the series was not tilted or sheared"
    return [Finding("warning", "axes_not_orthogonal", path.name, message, fix)]


def _spacing_finding(path: Path, image: Any, placement: Placement) -> list[Finding]:
    low, high = PLAUSIBLE_SPACING
    spacing = grid_in_frame(placement.affine, image.shape).spacing
    if all(low <= size <= high for size in spacing):
        return []
    message = f"a voxel of {_sizes(np.array(spacing))} mm (slice, row, column) is hardly a clinical one"
    fix = "check the unit of the header's spacing"
    return [Finding("warning", "implausible_spacing", path.name, message, fix)]


def _scaling_finding(path: Path, raw: Any) -> list[Finding]:
    """A slope of 0 says by the standard that voxels are as stored; with an intercept, or no number, it is a mistake."""
    slope, intercept = float(raw["scl_slope"]), float(raw["scl_inter"])
    if np.isfinite(slope) and (slope != 0 or intercept == 0):
        return []
    message = f"scl_slope is {slope:g} and scl_inter {intercept:g}, the voxels are taken as stored"
    fix = "check the intensities, or convert it again"
    return [Finding("warning", "scaling_ignored", path.name, message, fix)]


def _sizes(sizes: np.ndarray) -> str:
    return " x ".join(f"{size:.4g}" for size in sizes)
