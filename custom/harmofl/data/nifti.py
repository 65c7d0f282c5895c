"""One NIfTI file to one array in one frame, or a finding that names the file."""

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.data.file_kinds import refuse_other_kind
from harmofl.data.findings import CaseError, Finding, refusal
from harmofl.data.layout import CONVERSION, DICOM_MARK

# The frame in which scanners store axial slices: rows run to posterior, columns to the patient's left, so that a
# slice drawn as it is looks as it does in the reading room.
FRAME = "LPS"
# Of a voxel at the worst corner of a grid. Headers of one real 640 x 640 grid written by two tools differ by 0.14; a
# shift by half a voxel is a misplaced mask.
GRID_TOLERANCE = 0.25
GZIP_MARK = b"\x1f\x8b"
PLAUSIBLE_SPACING = (0.05, 20.0)  # mm
COPY_AGAIN = "copy the file again from its source or take the case away"


@dataclass(frozen=True, eq=False)
class Scan:
    """One volume of one file, reoriented to left-posterior-superior.

    Attributes:
        data: (S, H, W) float32, slices from feet to head.
        spacing: distance of voxels in mm, order slice, row, column.
        affine: (4, 4) float64, from (column, row, slice) indices to world coordinates in mm.
        orientation: axis codes of the file as stored, such as ``LAS``.
        findings: what a person should know about the file.
    """

    data: np.ndarray
    spacing: tuple[float, float, float]
    affine: np.ndarray
    orientation: str
    findings: tuple[Finding, ...]


def read_scan(path: Path) -> Scan:
    """Read one NIfTI volume and bring it to the common frame.

    Raises:
        CaseError: if the file is missing, damaged, not a NIfTI volume, or not three-dimensional.
    """
    header = open_volume(path)
    try:
        scan = _loader()({"scan": str(path)})["scan"]
    except Exception as error:  # decoders raise a dozen types, and one bad file must not end a site's training
        raise decode_refusal(path, error) from error
    columns, rows, slices = (float(size) for size in scan.pixdim)
    return Scan(
        data=np.ascontiguousarray(scan.numpy()[0].transpose(2, 1, 0)),
        spacing=(slices, rows, columns),
        affine=scan.affine.numpy().astype(np.float64),
        orientation=_axis_codes(header.affine),
        findings=header_findings(path, header, (slices, rows, columns)),
    )


def open_volume(path: Path) -> Any:
    """Open one NIfTI volume with nibabel and look at all but its voxels.

    Raises:
        CaseError: if the file is missing, damaged, not a NIfTI volume, or not three-dimensional.
    """
    image = _open(path)
    _check_shape(path, image.shape)
    _check_kind(path, image)
    _check_affine(path, image.affine)
    return image


def header_findings(path: Path, image: Any, spacing: tuple[float, float, float]) -> tuple[Finding, ...]:
    """What a person should know about the header of a volume; `spacing` in mm, order slice, row, column."""
    return (*_form_findings(path, image), *_spacing_findings(path, spacing))


def decode_refusal(path: Path, error: BaseException) -> CaseError:
    """The error for voxels that a decoder stopped at."""
    message = f"its voxels cannot be decoded, the file is damaged or cut short ({_cause(error)})"
    return refusal("damaged_file", path.name, message, COPY_AGAIN)


def corner_distance(first: np.ndarray, second: np.ndarray, shape: tuple[int, int, int]) -> float:
    """Return by how many voxels two affines of one grid disagree at the worst corner.

    Args:
        first: (4, 4), its voxels are the unit.
        second: (4, 4).
        shape: number of voxels along the three axes, in the order of the affines.
    """
    corners = np.stack(np.meshgrid(*[(0, size - 1) for size in shape], indexing="ij"), axis=-1).reshape(-1, 3)
    homogeneous = np.concatenate([corners, np.ones((len(corners), 1))], axis=1).T
    moved = np.linalg.solve(first, second @ homogeneous)
    return float(np.abs(moved - homogeneous)[:3].max())


@cache
def _loader() -> Callable[[dict[str, Any]], dict[str, Any]]:
    # MONAI takes seconds to import, so only a process that decodes pays for it.
    from monai.data import NibabelReader
    from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, Orientationd

    labels = (("L", "R"), ("P", "A"), ("I", "S"))
    return Compose(
        [
            LoadImaged("scan", reader=NibabelReader(squeeze_non_spatial_dims=True)),
            EnsureChannelFirstd("scan", channel_dim="no_channel"),
            Orientationd("scan", axcodes=FRAME, labels=labels),
        ]
    )


def _open(path: Path) -> Any:
    import nibabel
    from nibabel.nifti1 import Nifti1Pair

    head = _first_bytes(path)
    if not head:
        raise refusal("empty_file", path.name, "the file has no bytes", COPY_AGAIN)
    if head.endswith(DICOM_MARK):
        raise refusal("dicom", path.name, "this is a DICOM file", CONVERSION)
    refuse_other_kind(path)
    if head.startswith(GZIP_MARK):
        _check_stream(path)
    try:
        image: Any = nibabel.load(path)
    except Exception as error:  # damaged headers raise many types
        raise refusal(
            "not_an_image", path.name, f"no image can be read from it ({_cause(error)})", COPY_AGAIN
        ) from None
    if not isinstance(image, Nifti1Pair):
        found = type(image).__name__
        raise refusal("not_nifti", path.name, f"not a NIfTI volume but {found}", "convert it to NIfTI (.nii.gz)")
    data_file = Path(image.file_map["image"].filename)
    if not data_file.is_file():
        raise refusal(
            "missing_file", path.name, f"the header is there, its voxels ({data_file.name}) are not", COPY_AGAIN
        )
    return image


def _check_stream(path: Path) -> None:
    """Read a gzip stream to its end: decoders stop at the last voxel, before the checksum that tells of damage."""
    try:
        with gzip.open(path) as stream:
            while stream.read(1 << 22):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise decode_refusal(path, error) from None


def _check_shape(path: Path, shape: tuple[int, ...]) -> None:
    size = "x".join(str(length) for length in shape)
    if len(shape) < 3:
        raise refusal("not_three_dimensional", path.name, f"the image is {size}, not a volume", "store all slices")
    if any(length != 1 for length in shape[3:]):
        mend = "store one volume a file, for example with fslsplit"
        raise refusal("not_three_dimensional", path.name, f"the file holds several volumes ({size})", mend)
    if 0 in shape:
        raise refusal("no_voxels", path.name, f"the volume has no voxels ({size})", COPY_AGAIN)


def _check_kind(path: Path, image: Any) -> None:
    kind = image.get_data_dtype()
    if kind.kind not in "iufb":
        raise refusal("not_scalar", path.name, f"voxels are {kind}, not single numbers", "store one number a voxel")


def _check_affine(path: Path, affine: np.ndarray) -> None:
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        message = "the header's affine is singular, so spacing and orientation are unknown"
        raise refusal("bad_affine", path.name, message, "convert the series again from DICOM")


def _form_findings(path: Path, image: Any) -> list[Finding]:
    sform, sform_code = image.get_sform(coded=True)
    qform, qform_code = image.get_qform(coded=True)
    if not sform_code and not qform_code:
        message = "the header holds neither sform nor qform, orientation is assumed"
        return [Finding("warning", "orientation_unknown", path.name, message, "convert it again from DICOM")]
    if not sform_code or not qform_code:
        return []
    try:
        distance = corner_distance(sform, qform, image.shape[:3])
    except np.linalg.LinAlgError:
        distance = np.inf
    if distance <= GRID_TOLERANCE:
        return []
    message = f"sform and qform disagree by {distance:.2g} voxels, the sform is used"
    return [Finding("warning", "forms_disagree", path.name, message, "check left and right, or convert it again")]


def _spacing_findings(path: Path, spacing: tuple[float, float, float]) -> list[Finding]:
    low, high = PLAUSIBLE_SPACING
    if all(low <= size <= high for size in spacing):
        return []
    sizes = " x ".join(f"{size:.4g}" for size in spacing)
    message = f"a voxel of {sizes} mm (slice, row, column) is hardly a clinical one"
    return [Finding("warning", "implausible_spacing", path.name, message, "check the unit of the header's spacing")]


def _axis_codes(affine: np.ndarray) -> str:
    import nibabel

    return "".join(nibabel.aff2axcodes(affine))


def _first_bytes(path: Path) -> bytes:
    """Return the preamble of the file and the four bytes behind it, where DICOM puts its mark."""
    try:
        with path.open("rb") as stream:
            return stream.read(132)
    except FileNotFoundError:
        raise refusal("missing_file", path.name, "the file is missing", "restore it or take the case away") from None
    except OSError as error:
        message = f"the file cannot be opened ({error.strerror})"
        raise refusal("unreadable_file", path.name, message, "check its permissions") from None


def _cause(error: BaseException) -> str:
    """Name the innermost error: transforms wrap what the decoder said."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__
