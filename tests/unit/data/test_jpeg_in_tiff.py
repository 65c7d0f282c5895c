"""TIFF files of JPEG data: the colors that were stored, whatever the tag says, or a refusal that says why."""

import io
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from harmofl.data.jpeg_in_tiff import colors_of_jpeg
from harmofl.data.rasters import read_rgb
from tests.pictures import refused

RGB, YCBCR = 2, 6  # values of the tag
ROWS, COLUMNS = np.mgrid[:64, :96]
# smooth, so that halved colors lose little; pink as H&E
TISSUE = np.stack([190 + ROWS // 2, 100 + COLUMNS // 2, 150 + (ROWS + COLUMNS) // 4], axis=-1).astype(np.uint8)
LOSS = 3  # of JPEG


def jfif(subsampling: str) -> bytes:
    return imagecodecs.jpeg_encode(TISSUE, level=95, subsampling=subsampling)


def without_jfif(subsampling: str) -> bytes:
    data = jfif(subsampling)
    start = data.index(b"\xff\xe0")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


def as_rgb() -> bytes:
    """Red, green and blue stored as they are, which Adobe's marker says."""
    stream = io.BytesIO()
    Image.fromarray(TISSUE).save(stream, "JPEG", quality=95, keep_rgb=True)
    return stream.getvalue()


def tiff(folder: Path, data: bytes, tag: int, **options: Any) -> Path:
    path = folder / "tile.tif"
    shape = TISSUE.shape
    tifffile.imwrite(
        path, iter([data]), shape=shape, dtype=np.uint8, photometric="rgb", compression="jpeg", rowsperstrip=shape[0]
    )
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags["PhotometricInterpretation"].overwrite(tag)
    return path


@pytest.mark.parametrize(
    ("data", "tag", "noticed"),
    [
        (jfif("444"), RGB, True),
        (jfif("420"), RGB, True),
        (jfif("422"), RGB, True),
        (as_rgb(), YCBCR, True),
        (as_rgb(), RGB, False),
        (jfif("420"), YCBCR, False),
        (without_jfif("420"), YCBCR, False),
    ],
)
def test_the_data_say_which_colors_they_are(tmp_path: Path, data: bytes, tag: int, noticed: bool) -> None:
    picture, findings = read_rgb(tiff(tmp_path, data, tag), "tile.tif")
    assert np.abs(picture.astype(int) - TISSUE).mean() < LOSS
    assert [(f.severity, f.code) for f in findings] == [("notice", "converted_image")] * noticed


def test_halved_colors_without_a_marker_are_refused_under_the_tag_of_rgb(tmp_path: Path) -> None:
    message = refused(tiff(tmp_path, without_jfif("420"), RGB), "color_mode")
    assert message.startswith("the file's tag says RGB, its JPEG data say YCbCr by colors of fewer pixels")


@pytest.mark.parametrize(("orientation", "turns"), [(3, 2), (6, 3), (8, 1)])
def test_the_orientation_of_such_a_file_is_applied(tmp_path: Path, orientation: int, turns: int) -> None:
    path = tmp_path / "tile.tif"
    options: Any = {"photometric": "rgb", "compression": "jpeg", "rowsperstrip": TISSUE.shape[0]}
    tags = [(274, "H", 1, orientation, True)]
    tifffile.imwrite(path, iter([jfif("444")]), shape=TISSUE.shape, dtype=np.uint8, extratags=tags, **options)
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags["PhotometricInterpretation"].overwrite(RGB)
    picture, findings = read_rgb(path, "tile.tif")
    assert np.abs(picture.astype(int) - np.rot90(TISSUE, turns)).mean() < LOSS
    assert len(findings) == 2 and "orientation" in findings[1].message


def test_a_file_of_libtiff_is_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "tile.tif"
    Image.fromarray(TISSUE).save(path, compression="jpeg", quality=95)
    picture, findings = read_rgb(path, "tile.tif")
    assert np.abs(picture.astype(int) - TISSUE).mean() < LOSS and findings == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (jfif("444"), "YCbCr"),
        (as_rgb(), "RGB"),
        (without_jfif("444"), None),
        (without_jfif("420"), "YCbCr"),
        (b"", None),
        (b"\xff\xd8", None),
        (b"\xff\xd8\xff\xe0", None),
        (b"\xff\xd8\xff\xc0\x00\x02", None),
        (b"\xff\xd8" + b"\xff\xc4\x00\x00" * 3, None),  # a length that does not count itself
        (b"no JPEG at all", None),
    ],
)
def test_what_a_stream_says(data: bytes, said: str | None) -> None:
    assert colors_of_jpeg(data)[0] == said
