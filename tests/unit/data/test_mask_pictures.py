"""Which pictures say what is marked, in which pixels, and which are refused by name."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tifffile
from PIL import Image

from harmofl.data.findings import CaseError, Finding
from harmofl.data.mask_pictures import read_label_picture
from harmofl.data.rasters import ORIENTATION
from tests.pictures import png_bytes

SHAPE = (40, 48)
Save = Callable[..., Path]


def drawn(value: int = 1, kind: type = np.uint8) -> np.ndarray:
    """Two nuclei without symmetry."""
    mask: np.ndarray = np.zeros(SHAPE, kind)
    mask[4:14, 6:20] = value
    mask[20:26, 30:41] = value
    return mask


def numbered(kind: type = np.uint16) -> np.ndarray:
    mask = drawn(1, kind)
    mask[20:26, 30:41] = np.iinfo(kind).max if np.dtype(kind).itemsize < 4 else 70_000
    return mask


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(picture: Image.Image | np.ndarray, name: str = "a_mask.png", **options: Any) -> Path:
        path = tmp_path / name
        image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
        image.save(path, **options)
        return path

    return write


def labels_of(path: Path, shape: tuple[int, int] = SHAPE, *, classes: bool = False) -> np.ndarray:
    return read_label_picture(path, shape, "a.png", classes=classes).labels


def refused(path: Path, shape: tuple[int, int] = SHAPE, *, classes: bool = False) -> Finding:
    with pytest.raises(CaseError) as caught:
        read_label_picture(path, shape, "a.png", classes=classes)
    finding = caught.value.finding
    assert finding.severity == "error" and path.name in finding.subject and finding.fix
    assert str(path.parent) not in str(finding) and "\n" not in str(finding)
    return finding


@pytest.mark.parametrize(
    "mask",
    [
        drawn(),
        drawn(255),
        drawn(1, bool),
        numbered(),
        np.repeat(drawn(7)[..., None], 3, axis=2),
        np.dstack([drawn(7)] * 3 + [np.full(SHAPE, 255, np.uint8)]),
        np.dstack([drawn(7)] * 3 + [np.zeros(SHAPE, np.uint8)]),  # alpha the same everywhere says nothing
    ],
)
def test_png_of_any_depth(save: Save, mask: np.ndarray) -> None:
    np.testing.assert_array_equal(labels_of(save(mask), classes=True), mask if mask.ndim == 2 else mask[..., 0])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int16, np.uint32, np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_of_any_type(tmp_path: Path, kind: type, order: Literal["<", ">"]) -> None:
    mask = numbered(kind) if np.dtype(kind).kind != "f" else numbered().astype(kind)
    path = tmp_path / "a_mask.tif"
    tifffile.imwrite(path, mask, byteorder=order, photometric="minisblack")
    np.testing.assert_array_equal(labels_of(path), mask)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a_mask.png", "a_mask.tif"])
def test_orientation_is_applied_as_to_pictures(save: Save, orientation: int, name: str) -> None:
    """Stored so that the viewer of the picture, who turns it as the tag says, sees what was drawn."""
    # by EXIF's table: where the first stored row and column lie in the picture
    stored = {
        1: lambda seen: seen,  # top, left
        2: lambda seen: seen[:, ::-1],  # top, right
        3: lambda seen: seen[::-1, ::-1],  # bottom, right
        4: lambda seen: seen[::-1],  # bottom, left
        5: lambda seen: seen.T,  # left, top
        6: lambda seen: seen[:, ::-1].T,  # right, top
        7: lambda seen: seen[::-1, ::-1].T,  # right, bottom
        8: lambda seen: seen[::-1].T,  # left, bottom
    }
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    for mask in (drawn(255), numbered()):
        path = save(np.ascontiguousarray(stored[orientation](mask)), name, exif=exif)
        read = read_label_picture(path, SHAPE, "a.png")
        np.testing.assert_array_equal(read.labels, mask)
        assert [finding.code for finding in read.findings] == ["converted_image"] * (orientation > 1)


def palette(numbers: np.ndarray, *colors: tuple[int, int, int]) -> Image.Image:
    image = Image.frombytes("P", numbers.shape[::-1], numbers.astype(np.uint8).tobytes())
    image.putpalette([part for color in colors for part in color])
    return image


BLACK, WHITE, RED = (0, 0, 0), (255, 255, 255), (200, 0, 0)


def test_numbers_of_a_palette_are_the_labels(save: Save) -> None:
    for colors in ((BLACK, WHITE, RED), (RED, BLACK, WHITE), (WHITE, BLACK, RED), (RED, RED, RED)):
        np.testing.assert_array_equal(labels_of(save(palette(drawn(2), *colors))), drawn(2))


def test_of_black_and_white_black_is_background(save: Save) -> None:
    np.testing.assert_array_equal(labels_of(save(palette(drawn(), BLACK, WHITE))) > 0, drawn() > 0)
    np.testing.assert_array_equal(labels_of(save(palette(1 + drawn(), RED, BLACK, WHITE))) > 0, drawn() > 0)
    # by its numbers the white is background, by its colors the black
    assert refused(save(palette(drawn(), WHITE, BLACK))).code == "mask_colors"


def test_a_palette_that_shows_another_number_than_0_black_is_refused(save: Save) -> None:
    """As programs leave it that sort colors by their brightness or number: nuclei would be background."""
    finding = refused(save(palette(1 - drawn(), RED, BLACK)))
    assert finding.code == "mask_colors" and finding.message.startswith("the palette shows 1 black and 0 in another")
    colors = np.zeros((*SHAPE, 3), np.uint8)
    colors[4:14, 6:20], colors[20:26, 30:41] = (90, 180, 70), (200, 30, 0)
    assert refused(save(Image.fromarray(colors).quantize(8))).code == "mask_colors"
    # 0 is black too: the others have no color of their own
    np.testing.assert_array_equal(labels_of(save(palette(drawn(2), BLACK, RED, BLACK))), drawn(2))


def test_colors_of_nuclei_on_black(save: Save) -> None:
    colors = np.zeros((*SHAPE, 3), np.uint8)
    colors[4:14, 6:20], colors[20:26, 30:41] = (0, 0, 9), (200, 30, 0)
    np.testing.assert_array_equal(labels_of(save(colors)) > 0, drawn() > 0)
    clear = np.dstack([colors, drawn(128)])  # an overlay, half transparent
    np.testing.assert_array_equal(labels_of(save(clear)) > 0, drawn() > 0)
    assert refused(save(colors), classes=True).code == "mask_colors"


def test_colors_without_black_say_nothing(save: Save) -> None:
    purple_and_yellow = np.where(drawn()[..., None] > 0, (253, 231, 37), (68, 1, 84)).astype(np.uint8)
    finding = refused(save(purple_and_yellow))
    assert finding.code == "mask_colors" and "which color is background" in finding.message


def rgba(color: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.dstack([color] * 3 + [alpha]).astype(np.uint8)


@pytest.mark.parametrize(
    ("mask", "code", "said"),
    [
        (rgba(np.full(SHAPE, 255), drawn(255)), "mask_alpha", "its shape lies in the alpha channel"),
        (rgba(np.zeros(SHAPE), drawn(255)), "mask_alpha", "its shape lies in the alpha channel"),
        (rgba(np.full(SHAPE, 255), drawn(155) + 100), "mask_alpha", "its shape lies in the alpha channel"),
        (rgba(drawn(255), np.roll(drawn(255), 3, axis=1)), "mask_alpha", "mark different pixels"),
        (rgba(drawn(255), 255 - drawn(255)), "mask_alpha", "mark different pixels"),
    ],
)
def test_a_shape_in_the_alpha_channel_is_refused(save: Save, mask: np.ndarray, code: str, said: str) -> None:
    finding = refused(save(mask))
    assert finding.code == code and said in finding.message


def test_an_alpha_channel_that_agrees_is_accepted(save: Save) -> None:
    for alpha in (drawn(255), np.where(drawn() > 0, 100, 255)):
        np.testing.assert_array_equal(labels_of(save(rgba(drawn(255), alpha))), drawn(255))
    clear = palette(drawn(), BLACK, RED)
    np.testing.assert_array_equal(labels_of(save(clear, transparency=0)), drawn())  # background is clear
    assert refused(save(clear, transparency=1)).code == "mask_alpha"


@pytest.mark.parametrize("pages", ["a_mask.tif", "a_mask.png"])
def test_several_pages_are_refused(save: Save, pages: str) -> None:
    finding = refused(save(drawn(255), pages, save_all=True, append_images=[Image.fromarray(drawn(9))]))
    assert finding.code == "several_pages"


def test_several_pages_of_a_type_that_pillow_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "a_mask.tif"
    tifffile.imwrite(path, np.stack([drawn(1, np.int64)] * 2), photometric="minisblack")
    assert refused(path).code == "several_pages"


@pytest.mark.parametrize("bits", [0, 7, 65535])
def test_a_tiff_of_no_type_is_refused(tmp_path: Path, bits: int) -> None:
    """tifffile knows no type of so many bits a pixel and reads no pixel."""
    path = tmp_path / "a_mask.tif"
    tifffile.imwrite(path, drawn(1, np.int64), photometric="minisblack")
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.tags["BitsPerSample"].overwrite(bits)
    assert refused(path).code in {"mask_form", "unreadable_annotation"}


@pytest.mark.parametrize("name", ["a_mask.png", "a_mask.tif"])
def test_jpeg_by_another_name_is_refused(save: Save, name: str) -> None:
    kind = {"format": "JPEG"} if name.endswith("png") else {"compression": "jpeg"}
    finding = refused(save(drawn(255), name, **kind))
    assert finding.code == "mask_form" and "JPEG" in finding.message


def test_ramps_are_refused_in_any_channel(save: Save) -> None:
    soft = np.asarray(Image.fromarray(drawn(255)).resize((96, 80), Image.Resampling.BILINEAR))
    for mask in (soft, np.dstack([soft] * 3), np.dstack([soft * 0, soft * 0, soft]), rgba(soft > 0, soft)):
        assert refused(save(mask), (80, 96)).code == "mask_ramps"
    assert refused(save(palette(soft, *[(n, n, n) for n in range(256)])), (80, 96)).code == "mask_ramps"


def test_a_picture_in_the_place_of_a_mask_is_refused(save: Save) -> None:
    rng = np.random.default_rng(0)
    assert refused(save(rng.integers(0, 255, (*SHAPE, 3)).astype(np.uint8))).code == "mask_ramps"


def test_white_at_zero_does_not_say_what_is_background(tmp_path: Path) -> None:
    path = tmp_path / "a_mask.tif"
    tifffile.imwrite(path, drawn(255), photometric="miniswhite")
    assert refused(path).code == "mask_form"


def test_numbers_in_colors_of_16_bits_would_vanish(tmp_path: Path) -> None:
    """Pillow keeps the high byte: numbers below 256 would all be background."""
    path = tmp_path / "a_mask.tif"
    tifffile.imwrite(path, np.dstack([drawn(9, np.uint16)] * 3), photometric="rgb")
    assert refused(path).code == "mask_form"
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in np.dstack([drawn(9, np.uint16)] * 3))
    path = tmp_path / "a_mask.png"
    path.write_bytes(
        png_bytes(struct.pack(">IIBBBBB", SHAPE[1], SHAPE[0], 16, 2, 0, 0, 0), (b"IDAT", zlib.compress(raw)))
    )
    assert refused(path).code == "mask_form"


@pytest.mark.parametrize("mode", ["CMYK", "LAB"])
def test_other_color_modes_are_refused(save: Save, mode: str) -> None:
    assert refused(save(Image.new(mode, SHAPE[::-1]), "a_mask.tif")).code == "mask_form"


def test_a_damaged_png_is_refused_even_where_it_decodes(save: Save) -> None:
    path = save(drawn(255), compress_level=0)
    content = bytearray(path.read_bytes())
    place = content.index(b"IDAT") + 200
    content[place] ^= 0xFF  # a pixel; only the checksum tells
    path.write_bytes(content)
    assert refused(path).code == "unreadable_annotation"


@pytest.mark.parametrize(
    ("content", "said", "fix"),
    [
        (b"", "the file is empty", "copy or export it again"),
        (b"nuclei: 12", "the file is a text, no picture", "export it as PNG or TIFF"),
        (b"PK\x03\x04" + bytes(40), "the file is a zip archive, no picture", "export it as PNG or TIFF"),
    ],
    ids=("empty", "text", "zip"),
)
def test_what_is_no_picture_is_said(tmp_path: Path, content: bytes, said: str, fix: str) -> None:
    path = tmp_path / "a_mask.png"
    path.write_bytes(content)
    finding = refused(path)
    assert (finding.code, finding.message, finding.fix) == ("unreadable_annotation", said, fix)
    path.unlink()
    path.symlink_to(tmp_path / "gone.png")
    assert refused(path).message == "there is no such file"


def test_of_another_size_is_refused_before_it_is_decoded(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(drawn(), "a_mask.tif")
    monkeypatch.setattr("PIL.TiffImagePlugin.TiffImageFile.load", lambda _: pytest.fail("decoded"))
    finding = refused(path, (40, 47))
    assert (finding.code, finding.subject) == ("size_mismatch", "a.png, a_mask.tif")
