"""Picture files that hold fewer pixels than their header says: decoders leave the rest black and say nothing."""

import struct
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, BinaryIO

from PIL import Image

PLANAR, SEPARATE = 284, 2  # TIFF tag, and its value where each channel is stored for itself
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a pixel, by the color type of PNG
# Adam7 of the PNG specification: first column and row of each pass, and their steps
PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
AT_ONCE = 1 << 20  # bytes
TRUNCATED = "image file is truncated: it holds fewer pixels than its header says"


def check_whole(image: Image.Image, stream: BinaryIO) -> None:
    """Refuse a PNG or TIFF file that ends, by its own account, before its last pixel.

    Args:
        image: as Pillow opened it, not decoded.
        stream: its file; where it stands is kept.

    Raises:
        OSError: fewer rows, strips or tiles than the picture has.
    """
    place = stream.tell()
    whole = {"PNG": lambda: _holds_all_rows(stream), "TIFF": lambda: _is_covered(image)}
    is_whole = whole.get(str(image.format), lambda: True)()
    stream.seek(place)
    if not is_whole:
        raise OSError(TRUNCATED)


def check_whole_page(page: Any) -> None:
    """The same of the page of a TIFF file, as tifffile opened it.

    Raises:
        OSError: fewer strips or tiles than the picture has, or empty ones.
    """
    counts = page.databytecounts
    if len(counts) < prod(page.chunked) or 0 in counts:
        raise OSError(TRUNCATED)


def _holds_all_rows(stream: BinaryIO) -> bool:
    """Whether the compressed rows of a PNG file reach to the last one; what is inflated is counted and not kept."""
    stream.seek(16)
    width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", stream.read(13))
    left = _png_size(width, height, depth * CHANNELS[color], bool(interlaced))
    stream.seek(8)
    inflater = zlib.decompressobj()
    for packed in _data_chunks(stream):
        rest = packed
        while rest and left > 0:
            left -= len(inflater.decompress(rest, AT_ONCE))
            rest = inflater.unconsumed_tail
    return left <= 0


def _data_chunks(stream: BinaryIO) -> Iterator[bytes]:
    while len(head := stream.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IDAT":
            yield stream.read(length)
            stream.seek(4, 1)  # the checksum
        else:
            stream.seek(length + 4, 1)


def _png_size(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Bytes of all rows, each with the one that names its filter."""
    size = 0
    for column, row, step, down in PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -((column - width) // step), -((row - height) // down)
        if columns > 0 and rows > 0:
            size += rows * (1 + (columns * bits + 7) // 8)
    return size


def _is_covered(image: Any) -> bool:
    """Whether the strips or tiles of a TIFF file reach over the whole picture, in each channel that is stored alone."""
    areas: dict[Any, int] = {}
    for _, (left, top, right, bottom), _, arguments in image.tile:
        mode = arguments[0] if isinstance(arguments, tuple) else arguments
        areas[mode] = areas.get(mode, 0) + (right - left) * (bottom - top)
    alone = len(image.getbands()) if image.tag_v2.get(PLANAR) == SEPARATE else 1
    return len(areas) >= min(alone, len(image.tile)) and all(
        area >= image.width * image.height for area in areas.values()
    )
