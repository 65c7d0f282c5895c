"""A picture file that holds fewer pixels than its header says is refused, and whole ones of every form are read."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from harmofl.data.findings import CaseError
from harmofl.data.mask_pictures import read_label_picture
from harmofl.data.rasters import read_rgb
from tests.pictures import png_bytes, refused

SAID = "it holds fewer pixels than its header says"
# color type to depths in bits
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 4: (8, 16), 6: (8, 16)}
KINDS = [(color, depth) for color, depths in DEPTHS.items() for depth in depths]


def png(folder: Path, color: int, depth: int, stored: int, size: tuple[int, int] = (9, 13)) -> Path:
    """A file of `size` (columns, rows), not interlaced, of which the first `stored` rows are there, every one at its
    brightest."""
    columns, rows = size
    of_a_row = (columns * depth * {0: 1, 2: 3, 4: 2, 6: 4}[color] + 7) // 8
    header = struct.pack(">IIBBBBB", columns, rows, depth, color, 0, 0, 0)
    path = folder / "patch.png"
    path.write_bytes(png_bytes(header, (b"IDAT", zlib.compress((b"\0" + b"\xff" * of_a_row) * stored))))
    return path


@pytest.mark.parametrize(("color", "depth"), KINDS)
def test_a_png_without_its_last_row_is_refused(tmp_path: Path, color: int, depth: int) -> None:
    picture, _ = read_rgb(png(tmp_path, color, depth, 13), "patch")
    assert picture.shape == (13, 9, 3) and picture.min() == 255
    assert SAID in refused(png(tmp_path, color, depth, 12), "unreadable_image")
    # by the header it would take 120 MB
    assert SAID in refused(png(tmp_path, color, depth, 12, (9, 4_000_000)), "unreadable_image")


def test_a_mask_without_its_last_row_is_refused(tmp_path: Path) -> None:
    """The missing row would be background."""
    assert read_label_picture(png(tmp_path, 0, 8, 13), (13, 9), "a.png").labels.all()
    with pytest.raises(CaseError, match=SAID) as caught:
        read_label_picture(png(tmp_path, 0, 8, 12), (13, 9), "a.png")
    assert caught.value.finding.code == "unreadable_annotation"


# by Adam7, of 8 bits: in pictures of one column or row some passes are empty
@pytest.mark.parametrize(
    ("columns", "rows", "size"),
    # pass by pass, rows x (1 + columns): of 9 x 13 the passes have 2 x 2, 2 x 1, 2 x 3, 4 x 2, 3 x 5, 7 x 4 and 6 x 9
    # pixels
    [(1, 1, 2), (2, 1, 2 + 2), (1, 2, 2 + 2), (9, 13, 2 * 3 + 2 * 2 + 2 * 4 + 4 * 3 + 3 * 6 + 7 * 5 + 6 * 10)],
)
def test_interlaced_png(tmp_path: Path, columns: int, rows: int, size: int) -> None:
    path, header = tmp_path / "patch.png", struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 1)
    path.write_bytes(png_bytes(header, (b"IDAT", zlib.compress(bytes(size)))))
    assert read_rgb(path, "patch")[0].shape == (rows, columns, 3)
    path.write_bytes(png_bytes(header, (b"IDAT", zlib.compress(bytes(size - 1)))))
    assert SAID in refused(path, "unreadable_image")


def test_rows_in_several_chunks_are_counted_together(tmp_path: Path) -> None:
    path, header = tmp_path / "patch.png", struct.pack(">IIBBBBB", 9, 13, 8, 0, 0, 0, 0)
    for rows in (12, 13):
        noise = np.random.default_rng(0).integers(0, 256, (rows, 1 + 9), np.uint8)
        noise[:, 0] = 0  # no filter
        packed = zlib.compress(noise.tobytes())
        chunks = [(b"IDAT", packed[start : start + 7]) for start in range(0, len(packed), 7)]
        path.write_bytes(png_bytes(header, *chunks[:3], (b"IDAT", b""), *chunks[3:]))
        if rows == 12:
            assert SAID in refused(path, "unreadable_image")
    assert read_rgb(path, "patch")[0].shape == (13, 9, 3)


def tissue(channels: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (40, 48, channels), np.uint8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rowsperstrip": 7},
        {"tile": (16, 16)},
        {"tile": (32, 32)},
        {"rowsperstrip": 7, "planarconfig": "separate"},
        {"rowsperstrip": 7, "compression": "lzw"},
        {"tile": (16, 32), "compression": "zlib"},
    ],
)
def test_tiff_of_every_layout_is_read(tmp_path: Path, options: dict[str, Any]) -> None:
    colors, path = tissue(3), tmp_path / "patch.tif"
    stored = np.moveaxis(colors, -1, 0) if "planarconfig" in options else colors
    tifffile.imwrite(path, stored, photometric="rgb", **options)
    np.testing.assert_array_equal(read_rgb(path, "patch")[0], colors)


@pytest.mark.parametrize("options", [{"rowsperstrip": 40}, {"rowsperstrip": 8}, {"tile": (16, 16)}])
@pytest.mark.parametrize("gray", [False, True])
def test_a_tiff_with_fewer_strips_than_rows_is_refused(tmp_path: Path, gray: bool, options: dict[str, Any]) -> None:
    path, pixels = tmp_path / "patch.tif", tissue(3)[..., 0] if gray else tissue(3)
    tifffile.imwrite(path, pixels, photometric="minisblack" if gray else "rgb", **options)
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.tags["ImageLength"].overwrite(80)
    assert SAID in refused(path, "unreadable_image")


@pytest.mark.parametrize("change", ["longer", "empty strip"])
def test_what_tifffile_reads_is_whole_too(tmp_path: Path, change: str) -> None:
    """JPEG 2000 and numbers of 64 bits; tifffile takes strips that are not there for black ones."""
    colors, labels = tmp_path / "a.tif", tmp_path / "a_mask.tif"
    tifffile.imwrite(colors, tissue(3), photometric="rgb", tile=(16, 16), compression="jpeg2000")
    tifffile.imwrite(labels, np.full((40, 48), 7, np.int64), photometric="minisblack", rowsperstrip=8)
    assert read_rgb(colors, "a.tif")[0].shape == (40, 48, 3)
    assert read_label_picture(labels, (40, 48), "a.tif").labels.min() > 0
    for path in (colors, labels):
        with tifffile.TiffFile(path, mode="r+") as file:
            tags = file.pages.first.tags
            counts = tags.get("TileByteCounts") or tags["StripByteCounts"]
            tag, value = (tags["ImageLength"], 80) if change == "longer" else (counts, [0, *counts.value[1:]])
            tag.overwrite(value)
    assert SAID in refused(colors, "unreadable_image")
    with pytest.raises(CaseError, match=SAID):
        read_label_picture(labels, (80 if change == "longer" else 40, 48), "a.tif")


def test_pictures_of_other_formats_are_left_to_their_decoders(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.fromarray(tissue(3)).save(stream, "BMP")
    path = tmp_path / "patch.bmp"
    path.write_bytes(stream.getvalue()[:-100])
    assert "truncated" in refused(path, "unreadable_image")
