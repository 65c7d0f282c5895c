"""The short way of reading plain PNG files gives what the long way does, or leaves the file to it."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from harmofl.data import rasters
from harmofl.data.plain_png import SIGNATURE, read_plain_png
from harmofl.data.rasters import MOST_PIXELS, read_rgb

RANDOM = np.random.default_rng(0)
RGB = RANDOM.integers(0, 256, (9, 7, 3), np.uint8)
RGBA = np.dstack([RGB, np.full((9, 7), 255, np.uint8)])


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def saved(folder: Path, image: Image.Image, between: bytes = b"", **options: object) -> Path:
    """A file with chunks put in after its header."""
    path = folder / "patch.png"
    image.save(path, **options)
    content = path.read_bytes()
    path.write_bytes(content[:33] + between + content[33:])  # signature 8, header 12 + 13
    return path


def the_long_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    with monkeypatch.context() as patched:
        patched.setattr(rasters, "read_plain_png", lambda path, most: None)
        return read_rgb(path, "patch")[0]


@pytest.mark.parametrize("picture", [RGB, RGBA], ids=["RGB", "RGBA"])
@pytest.mark.parametrize(
    "between",
    [b"", chunk(b"pHYs", bytes(9)), chunk(b"gAMA", struct.pack(">I", 200_000)), chunk(b"sRGB", b"\0")],
    ids=["plain", "pHYs", "gAMA", "sRGB"],
)
def test_plain_files_take_the_short_way(tmp_path, monkeypatch, picture: np.ndarray, between: bytes) -> None:
    path = saved(tmp_path, Image.fromarray(picture), between)
    short = read_plain_png(path, MOST_PIXELS)
    assert short is not None and short.flags.writeable and short.dtype == np.uint8
    np.testing.assert_array_equal(short, RGB)
    np.testing.assert_array_equal(the_long_way(path, monkeypatch), RGB)


def see_through() -> Image.Image:
    picture = RGBA.copy()
    picture[3, 3, 3] = 254
    return Image.fromarray(picture)


def with_text() -> PngImagePlugin.PngInfo:
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", "turned")
    return text


EXIF = Image.Exif()
EXIF[rasters.ORIENTATION] = 6


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (see_through(), {}),
        (Image.fromarray(RGB[..., 0]), {}),
        (Image.fromarray(RGB).quantize(8), {}),
        (Image.fromarray(RGB), {"transparency": tuple(RGB[0, 0].tolist())}),
        (Image.fromarray(RGB), {"exif": EXIF}),
        (Image.fromarray(RGB), {"pnginfo": with_text()}),
        (Image.fromarray(RGB), {"save_all": True, "append_images": [Image.fromarray(RGB[::-1].copy())]}),
        (Image.fromarray(RGB[..., 0].astype(np.uint16) * 257), {}),
    ],
    ids=["see-through", "gray", "palette", "transparent color", "turned", "text", "frames", "16 bits"],
)
def test_everything_else_is_left_to_the_long_way(tmp_path, image: Image.Image, options: dict[str, object]) -> None:
    assert read_plain_png(saved(tmp_path, image, **options), MOST_PIXELS) is None


def test_a_file_that_goes_on_after_its_end_is_left_to_the_long_way(tmp_path) -> None:
    path = saved(tmp_path, Image.fromarray(RGB))
    path.write_bytes(path.read_bytes() + b"\0")
    assert read_plain_png(path, MOST_PIXELS) is None


def test_too_many_pixels_are_not_decoded(tmp_path) -> None:
    path = saved(tmp_path, Image.fromarray(RGB))
    assert read_plain_png(path, 9 * 7) is not None
    assert read_plain_png(path, 9 * 7 - 1) is None


@pytest.mark.parametrize("picture", [RGB, RGBA], ids=["RGB", "RGBA"])
def test_no_damage_is_read_as_other_pixels(tmp_path, monkeypatch, picture: np.ndarray) -> None:
    path = saved(tmp_path, Image.fromarray(picture))
    whole = path.read_bytes()
    for index in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[index] ^= 1 << (index % 8)
        path.write_bytes(spoiled)
        assert read_plain_png(path, MOST_PIXELS) is None
        path.write_bytes(whole[:index])
        assert read_plain_png(path, MOST_PIXELS) is None


def test_pixels_that_contradict_their_size_are_left_to_the_long_way(tmp_path) -> None:
    header = struct.pack(">IIBBBBB", 7, 9, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in RGB[:5])
    body = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    (tmp_path / "patch.png").write_bytes(SIGNATURE + b"".join(body))
    assert read_plain_png(tmp_path / "patch.png", MOST_PIXELS) is None
