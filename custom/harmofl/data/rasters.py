"""Pictures of any color mode to 8-bit RGB by stated rules, or refused by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from harmofl.data.file_kinds import kind_of_file
from harmofl.data.findings import CaseError, Finding, refusal
from harmofl.data.jpeg_in_tiff import decode_contradicting_colors
from harmofl.data.library_messages import collect_messages, in_one_line
from harmofl.data.plain_png import read_plain_png
from harmofl.data.whole_pictures import check_whole, check_whole_page

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF")
MOST_PIXELS = 64_000_000  # 8,000 x 8,000; whole slides belong cut into patches
TWELVE_BITS = 4096
APERIO = "Aperio"  # first word of the description of a file by Aperio's ImageScope
ORIENTATION, PHOTOMETRIC, DESCRIPTION = 274, 262, 270  # TIFF and EXIF tags
WHITE_IS_ZERO = 0
JPEG = "jpeg"  # compression of a TIFF file, as Pillow names it
TIFF_MARKS = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")
LOGGERS = ("PIL.TiffImagePlugin", "tifffile")
SAVE_AS_RGB = "save it as 8-bit RGB PNG"
Picture = NDArray[np.uint8]
Result = TypeVar("Result")


def read_rgb(path: Path, subject: str) -> tuple[Picture, list[Finding]]:
    """Decode one PNG, JPEG, TIFF, BMP or GIF file to 8-bit RGB.

    What loses or adds something gives a notice. Embedded color profiles are not applied.

    * RGB and palette: the colors as they are.
    * Gray of 1, 2, 4 or 8 bits: black 0 to white 255, repeated in three channels, with a notice.
    * Alpha or a transparent color (RGBA, LA, palette): laid on white where not opaque, with a notice; refused if
      transparent everywhere.
    * CMYK: (255 - ink) (255 - black) / 255, with a notice. A JPEG must carry Adobe's marker, whose inks are inverted.
    * 16-bit gray, RGB, RGBA: the high byte, which undoes a scaling by 257, with a notice. Refused if no value exceeds
      4095 (12 bits or fewer in 16), if one color is transparent, or if 0 is white.
    * Floating point, 32-bit, signed and Lab: refused.
    * JPEG in TIFF whose tag contradicts the colors that its data say: those, with a notice, or refused.
    * Several pages or frames: refused, but of an Aperio file (svs) the first page, its full resolution, with a notice.
    * Orientation of EXIF or TIFF: applied, with a notice.
    * More than 64 million pixels: refused before they are decoded.
    * PNG and TIFF with fewer rows, strips or tiles than the header says: refused.

    Args:
        path: the file.
        subject: name of the file in findings.

    Returns:
        (H, W, 3) uint8, and the notices about what was converted.

    Raises:
        CaseError: if the file is missing, no image, damaged, or of a form that is refused.
    """
    if path.is_dir():
        raise refusal("not_a_file", subject, "is a folder", "name the files in it")
    if not path.is_file():  # opening a pipe would wait for ever
        raise refusal("missing_image", subject, "there is no such file", "restore it or remove it from the list")
    if path.suffix.casefold() == ".png":
        plain = read_plain_png(path, MOST_PIXELS)
        if plain is not None:
            return plain, []
    (picture, findings), more = decoded_or_refused(path, subject, "unreadable_image", lambda: _decode(path, subject))
    return picture, [*findings, *more]


def decoded_or_refused(
    path: Path, subject: str, code: str, decode: Callable[[], Result]
) -> tuple[Result, list[Finding]]:
    """Decode a picture or a mask; what libraries print meanwhile becomes a notice about the file.

    Args:
        path: the file.
        subject: its name in findings.
        code: of the finding where a decoder fails.
        decode: does it.

    Raises:
        CaseError: from `decode`, or in the place of whatever else it raises.
    """
    said: list[str] = []
    try:
        # libtiff writes to standard error itself
        with collect_messages(*LOGGERS, stderr=is_tiff(path)) as said:
            result = decode()
    except CaseError:
        raise
    except Exception as error:  # decoders raise whatever a damaged file makes them run into
        raise refusal(code, subject, *_unreadable(path, subject, error, said)) from error
    told = in_one_line(said, path, subject)
    return result, [Finding("notice", "decoder_message", subject, f"the decoder says: {told}")] if told else []


def _unreadable(path: Path, subject: str, error: Exception, said: list[str]) -> tuple[str, str]:
    """Why a file could not be decoded, and the fix; `said` is what libraries printed."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file", "restore it"
    if isinstance(error, PermissionError):
        return "the file may not be opened", "check its permissions"
    if path.stat().st_size == 0:
        return "the file is empty", "copy or export it again"
    kind = kind_of_file(path)
    if kind and "picture" not in kind:
        return f"the file is {kind}, no picture", "export it as PNG or TIFF"
    cause = "cut short or of no kind that is known" if isinstance(error, UnidentifiedImageError) else str(error)
    told = in_one_line([f"{type(error).__name__}: {cause}", *said], path, subject)
    return f"not a readable image ({told})", "copy or export it again"


def _decode(path: Path, subject: str) -> tuple[Picture, list[Finding]]:
    """Decode a file that is only read; a TIFF compression that Pillow does not know by tifffile with imagecodecs."""
    try:
        with opened(path) as image:
            return _converted(image, path, subject)
    except Image.DecompressionBombError as error:
        raise _too_large(subject) from error
    except UnidentifiedImageError:
        if not is_tiff(path):
            raise
        return _tiff_by_codec(path, subject), []


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image with Pillow, once its file is found whole: what is damaged or missing decodes too, but wrongly.

    Pillow gets a stream. Given a path it maps the pixels of uncompressed gray and RGBA TIFF into memory, and scrambles
    those whose orientation exchanges rows and columns (Pillow 13.0).

    Raises:
        OSError: if a PNG or TIFF file holds fewer pixels than its header says.
        Exception: whatever Pillow raises; `PIL.UnidentifiedImageError` for a form that it does not know.
    """
    with path.open("rb") as stream:
        with Image.open(stream, formats=FORMATS) as image:
            if image.format == "PNG":
                image.verify()
        stream.seek(0)
        with Image.open(stream, formats=FORMATS) as image:
            if image.width * image.height <= MOST_PIXELS:
                check_whole(image, stream)
            yield image


def _converted(image: Image.Image, path: Path, subject: str) -> tuple[Picture, list[Finding]]:
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(subject)
    findings = _check_pages(image, subject)
    if image.format == "TIFF" and image.info.get("compression") == JPEG:
        colors = decode_contradicting_colors(path, subject)
        if colors is not None:
            findings.append(_converted_notice(subject, "JPEG in TIFF: the colors are what its data say"))
            return _turned_as(image.getexif().get(ORIENTATION, 1), colors, findings, subject)
    deep = image.mode.startswith("I;16") or any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    _check_mode(image, subject, deep)
    turned = image.getexif().get(ORIENTATION, 1) != 1  # a TIFF forgets it when loaded
    image.load()
    if deep:
        image = _high_byte(image, subject)
        findings.append(_converted_notice(subject, "the high byte of 16 bits is used"))
    if image.mode in ("1", "L", "LA"):
        findings.append(_converted_notice(subject, "gray values stand in for red, green and blue"))
    if image.mode == "CMYK":
        findings.append(_converted_notice(subject, "CMYK inks are converted without a color profile"))
    if turned:
        image, more = upright(image, subject)
        findings += more
    if image.has_transparency_data:
        opaque, more = _on_white(np.array(image.convert("RGBA")), subject)
        return opaque, findings + more
    return np.array(image.convert("RGB")), findings


def _check_pages(image: Image.Image, subject: str) -> list[Finding]:
    pages = getattr(image, "n_frames", 1)
    if pages == 1:
        return []
    if str(getattr(image, "tag_v2", {}).get(DESCRIPTION, "")).startswith(APERIO):
        message = f"the first of {pages} pages is read, the full resolution of an Aperio file"
        return [Finding("notice", "first_page", subject, message)]
    raise several_pages(pages, subject)


def several_pages(pages: int, subject: str) -> CaseError:
    """The error for a file with more than one picture."""
    message = f"the file holds {pages} pages or frames"
    return refusal("several_pages", subject, message, "save each page as a file of its own")


def upright(image: Image.Image, subject: str) -> tuple[Image.Image, list[Finding]]:
    """Turn a decoded image as its orientation tag says, with a notice."""
    turned = ImageOps.exif_transpose(image)
    return turned, [_converted_notice(subject, "the image is turned as its orientation tag says")]


def _turned_as(
    orientation: int, colors: Picture, findings: list[Finding], subject: str
) -> tuple[Picture, list[Finding]]:
    """Turn colors (H, W, 3) that were decoded without Pillow as the tag of their file says."""
    if orientation == 1:
        return colors, findings
    image = Image.fromarray(colors)
    image.getexif()[ORIENTATION] = orientation
    turned, more = upright(image, subject)
    return np.array(turned), [*findings, *more]


def _check_mode(image: Image.Image, subject: str, deep: bool) -> None:
    known = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK")
    if image.mode not in known and not deep:
        kind = {"F": "floating point", "I": "32-bit or signed integers"}.get(image.mode, f"color mode {image.mode}")
        raise refusal("color_mode", subject, f"the image holds {kind}, whose range is not known", SAVE_AS_RGB)
    if image.mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        message = "a CMYK JPEG without Adobe's marker does not say whether its inks are inverted"
        raise refusal("color_mode", subject, message, SAVE_AS_RGB)
    if not deep:
        return
    if "transparency" in image.info:
        raise refusal("color_mode", subject, "a transparent color of 16 bits is not read", SAVE_AS_RGB)
    if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO:
        raise refusal("color_mode", subject, "16-bit gray in which 0 is white is not read", SAVE_AS_RGB)


def _high_byte(image: Image.Image, subject: str) -> Image.Image:
    """Return a 16-bit image in 8 bits; Pillow has done so already for all but gray."""
    if image.mode.startswith("I;16"):
        image_16 = np.asarray(image).astype(np.uint16)
        largest = int(image_16.max())
        image = Image.fromarray((image_16 >> 8).astype(np.uint8))
    else:
        colors = np.asarray(image)
        largest = int(colors[..., :3].max()) << 8
    _check_depth(largest, subject)
    return image


def _check_depth(largest: int, subject: str) -> None:
    if largest < TWELVE_BITS:
        message = f"a 16-bit image with no value above {TWELVE_BITS - 1}: 12 bits or fewer in 16, or all black"
        raise refusal("value_range", subject, message, SAVE_AS_RGB)


def _on_white(picture: Picture, subject: str) -> tuple[Picture, list[Finding]]:
    """Lay an RGBA picture on white; an opaque one stays as it is."""
    alpha = picture[..., 3:]
    if alpha.min() == 255:
        return np.ascontiguousarray(picture[..., :3]), []
    if alpha.max() == 0:
        message = "the image is transparent everywhere"
        raise refusal("transparent_image", subject, message, "save it without its alpha channel")
    weight = alpha.astype(np.uint32)
    mixed = (picture[..., :3] * weight + 255 * (255 - weight) + 127) // 255  # rounded
    return mixed.astype(np.uint8), [_converted_notice(subject, "transparent pixels are laid on white")]


def is_tiff(path: Path) -> bool:
    """Whether a file begins as TIFF does."""
    with path.open("rb") as stream:
        return stream.read(4) in TIFF_MARKS


def _tiff_by_codec(path: Path, subject: str) -> Picture:
    """Decode the 8-bit RGB of a TIFF compression that Pillow does not know, such as the JPEG 2000 of whole slides."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        if len(file.pages) > 1 and not page.description.startswith(APERIO):
            raise several_pages(len(file.pages), subject)
        if page.imagewidth * page.imagelength > MOST_PIXELS:
            raise _too_large(subject)
        plain = page.photometric in (tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.YCBCR)
        if page.dtype != np.uint8 or page.shape[2:] != (3,) or not plain:
            kind = getattr(page.photometric, "name", page.photometric)  # a number where tifffile does not know it
            message = f"a TIFF of {page.dtype}, shape {page.shape}, photometric {kind} is not 8-bit RGB"
            raise refusal("color_mode", subject, message, SAVE_AS_RGB)
        if page.tags.valueof("Orientation", default=1) != 1:
            raise refusal("color_mode", subject, "a turned TIFF of this compression is not read", SAVE_AS_RGB)
        if not page.imagewidth * page.imagelength:  # tifffile leaves damaged tags out, those of the size too
            raise refusal("unreadable_image", subject, "a TIFF that does not say its size", "copy or export it again")
        check_whole_page(page)
        return np.ascontiguousarray(page.asarray())


def _too_large(subject: str) -> CaseError:
    message = f"the image has more than {MOST_PIXELS // 1_000_000} million pixels"
    return refusal("too_large", subject, message, "cut it into patches")


def _converted_notice(subject: str, message: str) -> Finding:
    return Finding("notice", "converted_image", subject, message)
