"""What a file is by its first bytes, whatever its name says."""

import gzip
import zlib
from pathlib import Path

from harmofl.data.findings import CaseError, refusal

LOOK = 352  # bytes: the longest header that is looked at is NIfTI-1's
GZIP = "gzip"
NIFTI = "a NIfTI volume"
# (offset, bytes, kind), from the definitions of the formats and file(1)
_MARKS = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"II*\x00", "a TIFF picture"),
    (0, b"MM\x00*", "a TIFF picture"),
    (0, b"II+\x00", "a TIFF picture"),
    (0, b"MM\x00+", "a TIFF picture"),
    (0, b"GIF8", "a GIF picture"),
    (0, b"BM", "a BMP picture"),
    (0, b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 picture"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"PK\x05\x06", "a zip archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"\xfd7zXZ\x00", "an xz file"),
    (0, b"BZh", "a bzip2 file"),
    (257, b"ustar", "a tar archive"),
    (128, b"DICM", "a DICOM file"),
    (0, b"NRRD", "an NRRD volume"),
    (0, b"ObjectType", "a MetaImage volume"),
    (0, b"NDims", "a MetaImage volume"),
    (0, b"\x00\x00\x00\x01\x00\x00", "an MGH volume"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (MINC 2, MATLAB 7.3)"),
    (0, b"CDF", "a netCDF file (MINC 1)"),
    (0, b"MATLAB 5.0", "a MATLAB file"),
    (0, b"%PDF", "a PDF document"),
    (0, b"version https://git-lfs", "the pointer that Git LFS keeps in place of a file"),
    (0, b"<!DOCTYPE html", "a web page"),
    (0, b"<html", "a web page"),
    (0, b"<?xml", "an XML text"),
    (0, b"\x1f\x8b", GZIP),
)
_NIFTI_SIZES = {size.to_bytes(4, order) for size in (348, 540) for order in ("little", "big")}  # sizeof_hdr
_CONVERT = "convert it to NIfTI (.nii.gz)"


def kind_of(head: bytes) -> str:
    """What a file is that begins with these bytes; empty where they are of no kind that is known here.

    Args:
        head: the first `LOOK` bytes, fewer where the file has no more.
    """
    for offset, mark, kind in _MARKS:
        if head[offset : offset + len(mark)] == mark:
            return kind
    if head[:4] in _NIFTI_SIZES:
        return NIFTI
    return "a text" if head and _is_text(head) else ""


def kind_of_file(path: Path) -> str:
    """What a file is; empty where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return kind_of(stream.read(LOOK))
    except OSError:
        return ""


def refuse_other_kind(path: Path) -> None:
    """Refuse a file that is to be a volume and whose content is something else.

    Raises:
        CaseError: code `not_gzip` where the name promises gzip, else `not_nifti`; says what the file is.
    """
    name = path.name.casefold()
    if name.endswith((".img", ".hdr")):  # voxels alone may begin with anything
        return
    kind = kind_of_file(path)
    if not name.endswith((".nii", ".nii.gz")):
        if kind not in ("", NIFTI, GZIP):
            raise _other(path, "not_nifti", f"the file is {kind}, not {NIFTI}", kind)
    elif kind == GZIP:
        inner = _kind_inside(path)
        if inner not in ("", NIFTI):
            raise _other(path, "not_nifti", f"what was compressed is {inner}, not {NIFTI}", inner)
    elif name.endswith(".gz"):
        if kind == NIFTI:
            message = "the name ends in .gz but the content is not compressed"
            raise refusal("not_gzip", path.name, message, "rename it to .nii")
        raise _other(path, "not_gzip", f"the name says NIfTI, the file is {kind or 'of no kind that is known'}", kind)
    elif kind not in ("", NIFTI):
        raise _other(path, "not_nifti", f"the name says NIfTI, the file is {kind}", kind)


def _other(path: Path, code: str, message: str, kind: str) -> CaseError:
    again = not kind or kind.startswith(("a text", "a web page", "the pointer", "an XML"))
    return refusal(code, path.name, message, "copy or download it again from its source" if again else _CONVERT)


def _kind_inside(path: Path) -> str:
    try:
        with gzip.open(path) as stream:
            return kind_of(stream.read(LOOK))
    except (OSError, EOFError, zlib.error):  # whoever reads on says how it is damaged
        return ""


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # not a character that ends behind what was read
            return False
        text = head[: error.start].decode("utf-8")
    return all(mark.isprintable() or mark in "\t\r\n\ufeff" for mark in text)
