"""Every color mode is converted by its stated rule or refused in one line."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from harmofl.data import rasters
from harmofl.data.rasters import read_rgb
from tests.pictures import png_bytes, refused

GRADIENT = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5  # 0 to 235, H = W = 4


def saved(folder: Path, image: Image.Image, name: str = "patch.png", **options: Any) -> Path:
    path = folder / name
    image.save(path, **options)
    return path


def read(path: Path) -> np.ndarray:
    picture, _ = read_rgb(path, path.name)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    return picture


def notices(path: Path) -> str:
    _, findings = read_rgb(path, path.name)
    assert {finding.severity for finding in findings} <= {"notice"}
    assert {finding.subject for finding in findings} <= {path.name}
    return " ".join(finding.message for finding in findings)


@pytest.mark.parametrize("name", ["patch.png", "patch.tif", "patch.bmp"])
def test_rgb_stays_as_it_is_and_can_be_written_to(tmp_path, name):
    path = saved(tmp_path, Image.fromarray(GRADIENT), name)
    picture = read(path)
    assert np.array_equal(picture, GRADIENT)
    assert picture.flags.writeable
    assert picture.flags.c_contiguous
    assert notices(path) == ""


def test_the_file_is_only_read(tmp_path):
    path = saved(tmp_path, Image.fromarray(GRADIENT))
    path.chmod(0o444)
    before = path.read_bytes(), path.stat().st_mtime_ns
    read(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_gray_is_repeated_with_a_notice(tmp_path, mode):
    gray = np.array([[0, 255], [255, 0]], np.uint8)
    path = saved(tmp_path, Image.fromarray(gray).convert(mode))
    assert np.array_equal(read(path), np.repeat(gray[..., np.newaxis], 3, axis=2))
    assert "gray" in notices(path)


def test_opaque_rgba_as_in_the_public_patches_loses_its_alpha_silently(tmp_path):
    path = saved(tmp_path, Image.fromarray(GRADIENT).convert("RGBA"))
    assert np.array_equal(read(path), GRADIENT)
    assert notices(path) == ""


def test_transparency_is_laid_on_white(tmp_path):
    rgba = np.array([[[100, 0, 255, 255], [100, 0, 255, 51], [100, 0, 255, 0]]], np.uint8)
    path = saved(tmp_path, Image.fromarray(rgba))
    # alpha 51 / 255 = 0.2: 0.2 * 100 + 0.8 * 255 = 224, 0.8 * 255 = 204, 255
    assert read(path).tolist() == [[[100, 0, 255], [224, 204, 255], [255, 255, 255]]]
    assert "white" in notices(path)


def test_palette_with_and_without_a_transparent_color(tmp_path):
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), mode="L").convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    plain = saved(tmp_path, palette, "plain.png")
    clear = saved(tmp_path, palette, "clear.png", transparency=1)
    assert read(plain).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert notices(plain) == ""
    assert read(clear).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert "white" in notices(clear)


@pytest.mark.parametrize(
    ("image", "color"), [(Image.new("RGB", (2, 1), (9, 8, 7)), (9, 8, 7)), (Image.new("L", (2, 1), 9), 9)]
)
def test_a_transparent_color_counts_as_transparency(tmp_path, image, color):
    image.putpixel((1, 0), (1, 2, 3) if image.mode == "RGB" else 1)
    picture = read(saved(tmp_path, image, transparency=color))
    assert picture[0, 0].tolist() == [255, 255, 255]
    assert picture[0, 1].tolist() == ([1, 2, 3] if image.mode == "RGB" else [1, 1, 1])


def test_transparent_everywhere_is_refused(tmp_path):
    refused(saved(tmp_path, Image.new("RGBA", (4, 4), (1, 2, 3, 0))), "transparent_image")


def test_cmyk_tiff_by_the_stated_formula(tmp_path):
    path = saved(tmp_path, Image.new("CMYK", (2, 2), (51, 0, 255, 51)), "patch.tif")
    # cyan 51: 204 * 204 / 255 = 163.2; magenta 0: 255 * 204 / 255 = 204; yellow 255: 0
    assert read(path)[0, 0].tolist() == [163, 204, 0]
    assert "CMYK" in notices(path)


def jpeg_of_cmyk(folder: Path) -> Path:
    """A bright red in CMYK: no cyan, no black, all magenta and yellow."""
    return saved(folder, Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "patch.jpg", quality=100)


def test_cmyk_jpeg_with_inverted_inks_is_not_shown_as_its_negative(tmp_path):
    path = jpeg_of_cmyk(tmp_path)
    assert b"Adobe" in path.read_bytes()
    assert np.abs(read(path).astype(int) - [255, 0, 0]).max() <= 2  # lossy


def test_cmyk_jpeg_without_the_marker_is_refused(tmp_path):
    path = jpeg_of_cmyk(tmp_path)
    content = path.read_bytes()
    start = content.index(b"\xff\xee")  # APP14, the length that follows counts itself
    length = 2 + int.from_bytes(content[start + 2 : start + 4], "big")
    path.write_bytes(content[:start] + content[start + length :])
    assert "Adobe" in refused(path, "color_mode")


def test_16_bit_gray_gives_its_high_byte(tmp_path):
    values = np.array([[0, 257, 255, 256], [65535, 65279, 257 * 100, 4096]], np.uint16)
    path = saved(tmp_path, Image.fromarray(values))
    # 257 n becomes n; 255 / 256 and 65279 / 256 = 254.99 are rounded down
    assert read(path)[..., 0].tolist() == [[0, 1, 0, 1], [255, 254, 100, 16]]
    assert "16 bits" in notices(path)


def png_16(folder: Path, color_type: int, values: np.ndarray, *chunks: tuple[bytes, bytes]) -> Path:
    """A PNG of 16-bit samples, by hand: Pillow writes none in color."""
    rows, columns = values.shape[:2]
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", columns, rows, 16, color_type, 0, 0, 0)
    path = folder / "deep.png"
    path.write_bytes(png_bytes(header, *chunks, (b"IDAT", zlib.compress(raw))))
    return path


@pytest.mark.parametrize(("color_type", "channels"), [(2, 3), (6, 4)])
def test_16_bit_color_png_gives_its_high_byte(tmp_path, color_type, channels):
    values = np.full((2, 2, channels), 65535, np.uint16)
    values[0, 0, :3] = 257 * 7, 257 * 8, 257 * 9 + 200
    path = png_16(tmp_path, color_type, values)
    # 257 * 9 + 200 = 2513 = 9 * 256 + 209
    assert read(path)[0, 0].tolist() == [7, 8, 9]
    assert "16 bits" in notices(path)


def test_16_bit_color_tiff_gives_its_high_byte(tmp_path):
    values = (np.arange(48, dtype=np.uint16) * 1300).reshape(4, 4, 3)  # up to 61100
    path = tmp_path / "deep.tif"
    tifffile.imwrite(path, values, photometric="rgb")
    assert np.array_equal(read(path), values // 256)
    assert "16 bits" in notices(path)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 3)])
def test_12_bits_in_16_would_be_nearly_black_and_are_refused(tmp_path, shape):
    kind = 0 if len(shape) == 2 else 2
    assert "12 bits" in refused(png_16(tmp_path, kind, np.full(shape, 4095, np.uint16)), "value_range")
    read(png_16(tmp_path, kind, np.full(shape, 4096, np.uint16)))


def test_a_transparent_color_of_16_bits_is_refused(tmp_path):
    path = png_16(tmp_path, 0, np.full((2, 2), 60000, np.uint16), (b"tRNS", struct.pack(">H", 60000)))
    refused(path, "color_mode")


def test_16_bit_gray_with_white_at_zero_is_refused(tmp_path):
    path = tmp_path / "white.tif"
    tifffile.imwrite(path, np.full((2, 2), 60000, np.uint16), photometric="miniswhite")
    assert "0 is white" in refused(path, "color_mode")


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_values_of_unknown_range_are_refused(tmp_path, dtype):
    path = tmp_path / "values.tif"
    tifffile.imwrite(path, np.ones((4, 4), dtype))
    refused(path, "color_mode")
    tifffile.imwrite(path, np.ones((4, 4, 3), dtype), photometric="rgb")  # which Pillow does not know
    kind = np.dtype(dtype)
    assert refused(path, "color_mode") == f"a TIFF of {kind}, shape (4, 4, 3), photometric RGB is not 8-bit RGB"


def test_lab_is_refused(tmp_path):
    refused(saved(tmp_path, Image.new("LAB", (4, 4)), "lab.tif"), "color_mode")


@pytest.mark.parametrize("name", ["moving.gif", "moving.png", "pages.tif"])
def test_several_pages_or_frames_are_refused(tmp_path, name):
    pages = [Image.new("RGB", (4, 4), (value, 0, 0)) for value in (10, 200)]
    path = saved(tmp_path, pages[0], name, save_all=True, append_images=pages[1:])
    assert "2 pages" in refused(path, "several_pages")


def aperio(folder: Path, description: str = "Aperio Image Library v11", **options: Any) -> Path:
    """A file with a full and a small page, as ImageScope writes them."""
    path = folder / "region.svs"
    large = np.tile(GRADIENT, (8, 8, 1))
    with tifffile.TiffWriter(path) as file:
        file.write(large, photometric="rgb", description=description, metadata=None, **options)
        file.write(large[::4, ::4], photometric="rgb", metadata=None, **options)
    return path


def test_of_an_aperio_file_the_first_page_is_read(tmp_path):
    path = aperio(tmp_path)
    assert np.array_equal(read(path), np.tile(GRADIENT, (8, 8, 1)))
    assert "first of 2 pages" in notices(path)
    refused(aperio(tmp_path, "pages of somebody else"), "several_pages")


@pytest.mark.parametrize("compression", ["lzw", "zlib", "packbits", "jpeg2000"])
def test_compressed_tiff(tmp_path, compression):
    path = tmp_path / "tile.tif"
    tifffile.imwrite(path, np.tile(GRADIENT, (8, 8, 1)), photometric="rgb", compression=compression)
    assert np.array_equal(read(path), np.tile(GRADIENT, (8, 8, 1)))


def test_what_tifffile_decodes_keeps_to_the_rules(tmp_path, monkeypatch):
    path = aperio(tmp_path, compression="jpeg2000")
    assert np.array_equal(read(path), np.tile(GRADIENT, (8, 8, 1)))
    refused(aperio(tmp_path, "pages of somebody else", compression="jpeg2000"), "several_pages")
    gray = tmp_path / "gray.tif"
    tifffile.imwrite(gray, np.zeros((32, 32), np.uint8), compression="jpeg2000")
    refused(gray, "color_mode")
    monkeypatch.setattr(rasters, "MOST_PIXELS", 1023)
    refused(aperio(tmp_path, compression="jpeg2000"), "too_large")


@pytest.mark.parametrize("name", ["turned.png", "turned.tif", "turned.jpg"])
def test_orientation_is_applied_with_a_notice(tmp_path, name):
    exif = Image.Exif()
    exif[rasters.ORIENTATION] = 6  # the top row is the right column
    picture = np.zeros((16, 32, 3), np.uint8)
    picture[:8] = 255
    path = saved(tmp_path, Image.fromarray(picture), name, exif=exif)
    turned = read(path)
    assert turned.shape == (32, 16, 3)
    assert turned[:, 9:].min() > 250
    assert turned[:, :7].max() < 5
    assert "orientation" in notices(path)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "I;16"])
def test_turned_tiff_of_any_mode_is_not_scrambled(tmp_path, mode):
    """Pillow scrambles some uncompressed TIFF files whose orientation exchanges rows and columns."""
    exif = Image.Exif()
    exif[rasters.ORIENTATION] = 6  # the top row is the right column
    gray = np.arange(40, 240, 4, dtype=np.uint8).reshape(5, 10)
    stored = Image.fromarray(gray.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(gray).convert(mode)
    path = saved(tmp_path, stored, "turned.tif", exif=exif)
    assert np.array_equal(read(path)[..., 0], gray[::-1].T)
