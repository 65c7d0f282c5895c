"""A picture of labels to the labels in it, or refused by name."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from harmofl.data.findings import Finding, refusal
from harmofl.data.mask_meaning import Numbers, check_no_ramps, mask_labels
from harmofl.data.rasters import (
    ORIENTATION,
    PHOTOMETRIC,
    WHITE_IS_ZERO,
    decoded_or_refused,
    is_tiff,
    opened,
    several_pages,
    upright,
)
from harmofl.data.whole_pictures import check_whole_page

LOSSLESS = ("PNG", "TIFF")
LOSSY = ("jpeg", "tiff_jpeg")  # compression of a TIFF file, as Pillow names it
GRAY, COLORS = ("1", "L", "LA", "P", "PA", "I", "F"), ("RGB", "RGBA")
SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange rows and columns
SAVE_LABELS = "save it as gray PNG: 0 for background, whole numbers above for what is marked"
OPAQUE = 255


@dataclass(frozen=True, eq=False)
class LabelPicture:
    """Labels of a picture.

    Attributes:
        labels: (H, W) whole numbers from 0 up, 0 background; of a colored picture its largest channel.
        findings: what was converted.
    """

    labels: Numbers
    findings: tuple[Finding, ...]


def read_label_picture(path: Path, shape: tuple[int, int], image_name: str, *, classes: bool = False) -> LabelPicture:
    """Read the labels of one PNG or TIFF file.

    * Gray of any depth and whole floating point: the values.
    * Palette: the numbers of the colors, except that of black and white alone black is 0; refused if a number above
      0 is black and 0 is not.
    * RGB: gray if its channels are equal; else colors of what is marked, on black. Refused as classes.
    * Alpha: constant, or clear where the labels are 0 and nowhere else; any other says something else than the colors.
    * Orientation of EXIF or TIFF: applied, with a notice, as it is to pictures.
    * Several pages or frames, JPEG compression, gray in which 0 is white, colors of 16 bits, other color modes,
      and values that are no labels (`mask_meaning.mask_labels`): refused.

    Args:
        path: the file.
        shape: rows and columns of the image that it belongs to; a mask of another size is not decoded.
        image_name: name of that image for findings.
        classes: whether the labels are classes; colors then are none.

    Raises:
        CaseError: if the file cannot be read, has another size, or does not say what is marked.
    """
    subject = path.name
    (planes, alpha, findings), more = decoded_or_refused(
        path, subject, "unreadable_annotation", lambda: _decoded(path, shape, image_name)
    )
    for plane in planes:
        mask_labels(plane, subject, SAVE_LABELS, classes=classes)
    labels = planes[0] if len(planes) == 1 else _label_of_colors(planes, subject, classes)
    if alpha is not None:
        _check_alpha(labels, alpha, subject)
    return LabelPicture(np.rint(labels).astype(np.int64) if labels.dtype.kind == "f" else labels, (*findings, *more))


def _decoded(
    path: Path, shape: tuple[int, int], image_name: str
) -> tuple[list[Numbers], NDArray[np.uint8] | None, list[Finding]]:
    """The channels of a picture, its alpha channel where that is not the same everywhere, and what was converted."""
    try:
        with opened(path) as image:
            _check_form(image, path.name)
            orientation = image.getexif().get(ORIENTATION, 1)  # a TIFF forgets it when loaded
            sideways = orientation in SIDEWAYS and image.format != "TIFF"  # whose size Pillow gives as it will be
            size = (image.width, image.height) if sideways else (image.height, image.width)
            _check_size(size, shape, f"{image_name}, {path.name}")
            image.load()
            turned, findings = upright(image, path.name) if orientation != 1 else (image, [])
            return _channels(turned, path.name), _alpha(turned), findings
    except UnidentifiedImageError:
        if not is_tiff(path):
            raise
        return [_numbers_by_tifffile(path, shape, image_name)], None, []


def _check_form(image: Image.Image, subject: str) -> None:
    compression = image.info.get("compression")
    if image.format not in LOSSLESS or compression in LOSSY:
        kind = image.format if image.format not in LOSSLESS else "JPEG in TIFF"
        message = f"the mask is {kind}, which is no form for labels: JPEG changes them"
        raise refusal("mask_form", subject, message, f"{SAVE_LABELS}, from the source of the mask")
    pages = getattr(image, "n_frames", 1)
    if pages > 1:
        raise several_pages(pages, subject)
    if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO:
        message = "a mask in whose gray 0 is white does not say whether black or white is background"
        raise refusal("mask_form", subject, message, SAVE_LABELS)
    gray_16 = image.mode.startswith("I;16")
    deep = any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))  # Pillow keeps the high byte
    if not gray_16 and (image.mode not in (*GRAY, *COLORS) or (deep and image.mode != "I")):
        kind = "colors of 16 bits" if deep else f"color mode {image.mode}"
        raise refusal("mask_form", subject, f"the mask holds {kind}, which are no labels", SAVE_LABELS)


def _check_size(size: tuple[int, int], shape: tuple[int, int], subject: str) -> None:
    if size != shape:
        sizes = " against ".join(f"{columns}x{rows}" for rows, columns in (shape, size))
        message = f"image and mask differ in size ({sizes}, columns x rows)"
        raise refusal("size_mismatch", subject, message, "use the mask of this image")


def _channels(image: Image.Image, subject: str) -> list[Numbers]:
    """One array of gray values or palette numbers, or three of colors that differ."""
    if image.mode in COLORS:
        colors = np.asarray(image)
        red, green, blue = (colors[..., channel] for channel in range(3))
        gray = np.array_equal(red, green) and np.array_equal(red, blue)
        return [red] if gray else [red, green, blue]
    values = np.asarray(image)
    values = values[..., 0] if values.ndim == 3 else values  # without alpha
    return [_palette_labels(values, image, subject) if image.mode in ("P", "PA") else values]


def _palette_labels(numbers: NDArray[np.uint8], image: Image.Image, subject: str) -> Numbers:
    """The numbers, which colors only show, but of black and white alone black is 0.

    Raises:
        CaseError: a number above 0 is shown black and 0 is not, as programs leave it that sort colors.
    """
    palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    present = np.unique(numbers)
    shades = palette[present[present < len(palette)]].tolist()
    black, white = [0] * 3, [OPAQUE] * 3
    if shades == [black, white]:
        return np.asarray(palette[numbers, 0])
    if shades == [white, black]:
        message = "the palette shows its smaller number white and the other black, so which is background is not known"
        raise refusal("mask_colors", subject, message, SAVE_LABELS)
    if black in shades and palette[0].tolist() != black:
        number = int(present[shades.index(black)])
        message = f"the palette shows {number} black and 0 in another color, so which is background is not known"
        raise refusal("mask_colors", subject, message, SAVE_LABELS)
    return numbers


def _alpha(image: Image.Image) -> NDArray[np.uint8] | None:
    if not image.has_transparency_data:
        return None
    alpha = np.asarray(image.convert("RGBA"))[..., 3]
    return None if alpha.min() == alpha.max() else alpha


def _label_of_colors(planes: list[Numbers], subject: str, classes: bool) -> Numbers:
    labels = np.maximum.reduce(planes)
    if classes:
        raise refusal("mask_colors", subject, "the mask holds colors, which are no numbers of classes", SAVE_LABELS)
    if labels.min() > 0:
        message = "the mask holds colors and no black pixel, so which color is background is not known"
        raise refusal("mask_colors", subject, message, SAVE_LABELS)
    return labels


def _check_alpha(labels: Numbers, alpha: NDArray[np.uint8], subject: str) -> None:
    """Refuse an alpha channel that marks something else than the colors do."""
    check_no_ramps(alpha, subject)
    if labels.min() == labels.max():
        message = "the mask has one color everywhere, its shape lies in the alpha channel"
    elif alpha.min() == 0 and ((alpha > 0) != (labels > 0)).any():
        message = "the mask's colors and its alpha channel mark different pixels"
    else:
        return
    raise refusal("mask_alpha", subject, message, f"{SAVE_LABELS}, without alpha channel")


def _numbers_by_tifffile(path: Path, shape: tuple[int, int], image_name: str) -> Numbers:
    """Gray of a type or compression that Pillow does not know, such as 64-bit labels."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        if len(file.pages) > 1:
            raise several_pages(len(file.pages), path.name)
        page = file.pages.first
        # of bits that make no type the type is None, which numpy would take for float64
        is_numeric = page.dtype is not None and page.dtype.kind in "biuf"
        plain = page.photometric == tifffile.PHOTOMETRIC.MINISBLACK and is_numeric
        turned = page.tags.valueof("Orientation", default=1) != 1
        if len(page.shape) != 2 or not plain or turned:
            kind = getattr(page.photometric, "name", page.photometric)  # a number where tifffile does not know it
            message = f"a TIFF of {page.dtype}, shape {page.shape}, photometric {kind} is not a picture of labels"
            raise refusal("mask_form", path.name, message, SAVE_LABELS)
        _check_size((page.imagelength, page.imagewidth), shape, f"{image_name}, {path.name}")
        check_whole_page(page)
        return np.asarray(page.asarray())
