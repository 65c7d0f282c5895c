"""What a file is by its first bytes; the bytes are those that other programs write, not this project's."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.freesurfer.mghformat import MGHImage
from PIL import Image

from harmofl.data.file_kinds import NIFTI, kind_of_file
from harmofl.data.findings import CaseError
from harmofl.data.nifti import read_scan
from harmofl.data.rasters import read_rgb


def pillow(form: str) -> Callable[[Path], None]:
    return lambda path: Image.new("RGB", (8, 8)).save(path, form)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Case00.nii", b"0")


def taped(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("Case00.nii"), io.BytesIO())


def mgh(path: Path) -> None:
    path.write_bytes(MGHImage(np.zeros((4, 4, 4), np.float32), np.eye(4)).to_bytes())


def nifti(path: Path) -> None:
    path.write_bytes(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)).to_bytes())


def nifti2_big_endian(path: Path) -> None:
    image = nibabel.Nifti2Image(np.zeros((4, 4, 4), np.uint8), np.eye(4), nibabel.Nifti2Header(endianness=">"))
    path.write_bytes(image.to_bytes())


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


# headers as NRRD's and MetaImage's documentation gives them
WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "png": (pillow("PNG"), "a PNG picture"),
    "jpeg": (pillow("JPEG"), "a JPEG picture"),
    "tiff": (pillow("TIFF"), "a TIFF picture"),
    "gif": (pillow("GIF"), "a GIF picture"),
    "bmp": (pillow("BMP"), "a BMP picture"),
    "zip": (zipped, "a zip archive"),
    "tar": (taped, "a tar archive"),
    "dicom": (text(bytes(128) + b"DICM" + bytes(64)), "a DICOM file"),
    "nrrd": (text(b"NRRD0004\ntype: short\ndimension: 3\n"), "an NRRD volume"),
    "mha": (text(b"ObjectType = Image\nNDims = 3\n"), "a MetaImage volume"),
    "mgh": (mgh, "an MGH volume"),
    "html": (text(b"<!DOCTYPE html><html>sign in</html>"), "a web page"),
    "lfs": (text(b"version https://git-lfs.github.com/spec/v1\n"), "the pointer that Git LFS keeps in place of a file"),
    "text": (text("Fälle: 3\n".encode()), "a text"),
    "nifti": (nifti, NIFTI),
    "nifti2": (nifti2_big_endian, NIFTI),
    "noise": (text(bytes(range(128, 256)) * 4), ""),
    "empty": (text(b""), ""),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_kind_is_known_by_its_bytes(tmp_path: Path, name: str) -> None:
    write, kind = WRITERS[name]
    write(tmp_path / "file")
    assert kind_of_file(tmp_path / "file") == kind


OTHERS = sorted(WRITERS.keys() - {"nifti", "nifti2", "noise", "empty", "dicom"})


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("ending", [".nii", ".nii.gz", "packed.nii.gz", ".png"])
def test_another_kind_by_the_name_of_a_volume_is_said_to_be_that(tmp_path: Path, name: str, ending: str) -> None:
    write, kind = WRITERS[name]
    path = tmp_path / f"Case00{ending}"
    write(path)
    if ending.startswith("packed"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(CaseError) as caught:
        read_scan(path)
    told = str(caught.value)
    assert f"is {kind}" in told and "rename" not in told
    again = name in ("html", "lfs", "text")
    assert ("download it again" in told) == again and ("convert it to NIfTI" in told) != again


def test_a_volume_that_is_not_compressed_is_to_be_renamed(tmp_path: Path) -> None:
    nifti(tmp_path / "Case00.nii.gz")
    with pytest.raises(CaseError, match="the content is not compressed; rename it to .nii"):
        read_scan(tmp_path / "Case00.nii.gz")
    (tmp_path / "Case00.nii.gz").rename(tmp_path / "Case00.nii")
    assert read_scan(tmp_path / "Case00.nii").data.shape == (4, 4, 4)


@pytest.mark.parametrize("name", ["dicom", "zip", "mgh", "nifti", "text"])
def test_another_kind_by_the_name_of_a_picture_is_said_to_be_that(tmp_path: Path, name: str) -> None:
    write, kind = WRITERS[name]
    write(tmp_path / "tile.png")
    with pytest.raises(CaseError, match=f"the file is {kind}, no picture; export it as PNG or TIFF"):
        read_rgb(tmp_path / "tile.png", "tile.png")
