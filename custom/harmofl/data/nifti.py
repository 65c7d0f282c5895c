"""One NIfTI file to one array in one frame, or a finding that names the file."""

import gzip
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.data.file_kinds import refuse_other_kind
from harmofl.data.findings import CaseError, Finding, count_text, refusal
from harmofl.data.geometry import Affine, Grid, axis_codes, grid_in_frame, in_frame, is_usable
from harmofl.data.headers import Placement, check_raw_header, header_findings, placement_of, raw_header
from harmofl.data.layout import CONVERSION, DICOM_MARK
from harmofl.data.library_messages import collect_messages, in_one_line

GZIP_MARK = b"\x1f\x8b"
COPY_AGAIN = "copy the file again from its source or take the case away"
MOST_VOXELS = 128_000_000  # 1024 x 1024 x 122 or 512 x 512 x 488; float32 takes 0.5 GB
MOST_SLICES = 1000  # each becomes an image of the experiment's size, however small it is in the file
MOST_BEHIND = 1 << 20  # bytes that may follow the last voxel
CHUNK = 1 << 22
LOGGER = "nibabel.global"


@dataclass(frozen=True, eq=False)
class Scan:
    """One volume of one file, reoriented to left-posterior-superior.

    Attributes:
        data: (S, H, W) float32, slices from feet to head.
        grid: where its voxels lie.
        orientation: axis codes of the file as stored, such as ``LAS``.
        findings: what a person should know about the file.
        form: where the affine comes from: `sform`, `qform` or `voxel sizes`.
        others: what contradicts it in the header, by name.
    """

    data: np.ndarray
    grid: Grid
    orientation: str
    findings: tuple[Finding, ...]
    form: str
    others: dict[str, Grid]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Distance of voxels in mm, order slice, row, column."""
        return self.grid.spacing

    @property
    def affine(self) -> Affine:
        """(4, 4) float64, from (column, row, slice) indices to world coordinates in mm."""
        return self.grid.affine


@dataclass(frozen=True, eq=False)
class OpenVolume:
    """A volume whose header was read and checked, and none of its voxels.

    Attributes:
        image: of nibabel.
        placement: where its voxels lie, as stored.
        findings: about the header.
    """

    image: Any
    placement: Placement
    findings: tuple[Finding, ...]


def read_scan(path: Path) -> Scan:
    """Read one NIfTI volume and bring it to the common frame.

    Raises:
        CaseError: if the file is missing, damaged, not a NIfTI volume, too large, or not three-dimensional.
    """
    volume = open_volume(path)
    image, affine = volume.image, volume.placement.affine
    behind = _check_length(path, image)
    with collect_messages(LOGGER) as messages:
        try:
            # scaled as nibabel does it, then rounded once
            stored = np.asanyarray(image.dataobj).astype(np.float32).reshape(image.shape[:3])
        except Exception as error:  # decoders raise a dozen types, and one bad file must not end a site's training
            raise _decode_refusal(path, error) from error
    others = volume.placement.others.items()
    return Scan(
        data=in_frame(stored, affine),
        grid=grid_in_frame(affine, image.shape),
        orientation=axis_codes(affine),
        findings=(*volume.findings, *behind, *_messages(path, messages)),
        form=volume.placement.form,
        others={name: grid_in_frame(other, image.shape) for name, other in others if is_usable(other)},
    )


def open_volume(path: Path) -> OpenVolume:
    """Open one NIfTI volume with nibabel and look at all but its voxels.

    Raises:
        CaseError: if the file is missing, damaged, not a NIfTI volume, too large, or not three-dimensional.
    """
    with collect_messages(LOGGER) as messages:
        raw, image = _open(path)
        _check_shape(path, image.shape)
        _check_kind(path, image)
        placement = placement_of(path, raw, image)
        _check_planes(path, grid_in_frame(placement.affine, image.shape))
        found = header_findings(path, raw, image, placement)
    return OpenVolume(image, placement, (*found, *_messages(path, messages)))


def _open(path: Path) -> tuple[Any, Any]:
    """The header as it lies in the file, and the image of nibabel."""
    import nibabel
    from nibabel.nifti1 import Nifti1Pair

    head = _first_bytes(path)
    if not head:
        raise refusal("empty_file", path.name, "the file has no bytes", COPY_AGAIN)
    if head.endswith(DICOM_MARK):
        raise refusal("dicom", path.name, "this is a DICOM file", CONVERSION)
    refuse_other_kind(path)
    try:
        raw = raw_header(path) if path.suffix.casefold() != ".img" else None
        if raw is not None:
            check_raw_header(path, raw)
        image: Any = nibabel.load(path)
    except CaseError:
        raise
    except Exception as error:  # damaged headers raise many types
        raise _open_refusal(path, error, compressed=head.startswith(GZIP_MARK)) from None
    if not isinstance(image, Nifti1Pair):
        found = type(image).__name__
        raise refusal("not_nifti", path.name, f"not a NIfTI volume but {found}", "convert it to NIfTI (.nii.gz)")
    data_file = _file_of(image, "image")
    if not data_file.is_file():
        message = f"the header is there, its voxels ({data_file.name}) are not"
        raise refusal("missing_file", path.name, message, COPY_AGAIN)
    return raw_header(_file_of(image, "header")) if raw is None else raw, image


def _file_of(image: Any, part: str) -> Path:
    held = image.file_map.get(part) or image.file_map["image"]
    return Path(held.filename)


def _open_refusal(path: Path, error: BaseException, *, compressed: bool) -> CaseError:
    """The error for a file that nibabel does not open."""
    if compressed:
        try:
            for _ in _chunks(path, MOST_BEHIND):
                pass
        except (OSError, EOFError, zlib.error) as damage:
            return _decode_refusal(path, damage)
    cause = _cause(error)
    if cause == "HeaderDataError":
        cause = f"{cause}: {in_one_line([str(error)], path, path.name)}"
    return refusal("not_an_image", path.name, f"no image can be read from it ({cause})", COPY_AGAIN)


def _check_length(path: Path, image: Any) -> list[Finding]:
    """Compare the length of a file with what its header says, and read a gzip stream to its end.

    Decoders stop at the last voxel, before the checksum that tells of damage, and before what a wrong header leaves
    out. Nothing is kept, and no more is decompressed than the header says.
    """
    end = int(image.dataobj.offset) + int(np.prod(image.shape)) * image.get_data_dtype().itemsize
    file, length = _file_of(image, "image"), 0
    try:
        with file.open("rb") as stream:
            compressed = stream.read(2) == GZIP_MARK
        for chunk in _chunks(file, end + MOST_BEHIND + 1) if compressed else ():
            length += chunk
        length = length if compressed else file.stat().st_size
    except (OSError, EOFError, zlib.error) as error:
        raise _decode_refusal(path, error) from None
    if length < end:
        message = f"the file is cut short: {count_text(length, 'byte')}, {end} by its header"
        raise refusal("damaged_file", path.name, message, COPY_AGAIN)
    if length > end + MOST_BEHIND:
        message = f"the file goes on behind the last voxel that its header tells of (byte {end})"
        raise refusal("bad_header", path.name, message, "convert it again, or store one volume a file")
    if length == end:
        return []
    rest = "1 byte follows" if length - end == 1 else f"{length - end} bytes follow"
    message = f"{rest} the last voxel, not read"
    return [
        Finding("warning", "trailing_bytes", path.name, message, "check the size of the volume, or convert it again")
    ]


def _chunks(file: Path, most: int) -> Iterable[int]:
    """Lengths of the parts of a gzip stream, which is left where it is longer than `most` bytes."""
    with gzip.open(file) as stream:
        while most > 0 and (read := len(stream.read(min(CHUNK, most)))):
            most -= read
            yield read


def _messages(path: Path, messages: list[str]) -> list[Finding]:
    told = in_one_line(messages, path, path.name)
    fix = "check image and mask in a viewer, or convert it again"
    return [Finding("warning", "header_repaired", path.name, f"nibabel says: {told}", fix)] if told else []


def _decode_refusal(path: Path, error: BaseException) -> CaseError:
    message = f"its voxels cannot be decoded, the file is damaged or cut short ({_cause(error)})"
    return refusal("damaged_file", path.name, message, COPY_AGAIN)


def _check_shape(path: Path, shape: tuple[int, ...]) -> None:
    size = "x".join(str(length) for length in shape)
    if len(shape) < 3:
        raise refusal("not_three_dimensional", path.name, f"the image is {size}, not a volume", "store all slices")
    if min(shape) <= 0:
        raise refusal("no_voxels", path.name, f"the volume has no voxels ({size})", COPY_AGAIN)
    if any(length != 1 for length in shape[3:]):
        fix = "store one volume a file, for example with fslsplit"
        raise refusal("not_three_dimensional", path.name, f"the file holds several volumes ({size})", fix)
    if int(np.prod(shape, dtype=object)) > MOST_VOXELS:
        message = f"the volume has {size} voxels, more than {MOST_VOXELS // 1_000_000} million"
        raise refusal("too_large", path.name, message, "crop it to the pelvis, or check its header")


def _check_kind(path: Path, image: Any) -> None:
    kind = image.get_data_dtype()
    if kind.kind not in "iufb":
        what = "colors" if kind.names else f"of type {kind}"
        raise refusal("not_scalar", path.name, f"voxels are {what}, not single numbers", "store one number a voxel")


def _check_planes(path: Path, grid: Grid) -> None:
    slices, rows, columns = grid.shape
    if min(rows, columns) == 1:
        message = f"an axial slice has {rows} x {columns} pixels (rows x columns)"
        raise refusal("not_three_dimensional", path.name, message, "use the axial series of this patient")
    if slices > MOST_SLICES:
        message = f"the volume has {slices} slices, more than {MOST_SLICES}"
        raise refusal("too_large", path.name, message, "crop it to the pelvis, or check its header")


def _first_bytes(path: Path) -> bytes:
    """Return the preamble of the file and the four bytes behind it, where DICOM puts its mark."""
    try:
        with path.open("rb") as stream:
            return stream.read(132)
    except FileNotFoundError:
        raise refusal("missing_file", path.name, "the file is missing", "restore it or take the case away") from None
    except IsADirectoryError:
        raise refusal("not_a_file", path.name, "is a folder", "name the files in it") from None
    except OSError as error:
        message = f"the file cannot be opened ({error.strerror})"
        raise refusal("unreadable_file", path.name, message, "check its permissions") from None


def _cause(error: BaseException) -> str:
    """Name the innermost error: libraries wrap what the decoder said."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__
