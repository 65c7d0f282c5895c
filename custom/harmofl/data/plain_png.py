"""Plain 8-bit PNG files, as patches are, in one pass over the file; whatever else there is takes the long way."""

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 64_000_000
SIGNATURE = b"\x89PNG\r\n\x1a\n"
HEADER = struct.Struct(">IIBBBBB")
COLORS = {2: 3, 6: 4}  # color type to channels: RGB, RGBA
# Chunks that change no pixel and no orientation. Text may carry EXIF, other chunks frames or a transparent color.
HARMLESS = frozenset((b"IHDR", b"IDAT", b"IEND", b"pHYs", b"gAMA", b"cHRM", b"sRGB", b"sBIT", b"bKGD", b"tIME"))


def read_plain_png(path: Path, most_pixels: int) -> NDArray[np.uint8] | None:
    """Decode a PNG file of 8-bit RGB, or RGBA that is opaque everywhere, whose chunks and checksums are in order.

    Returns:
        (H, W, 3) uint8, of RGBA a view; None where the file is anything else or cannot be read, the caller then finds
        out what.
    """
    from imagecodecs import png_decode

    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        content = path.read_bytes()
        shape = _plain_shape(content)
        if shape is None or shape[0] * shape[1] > most_pixels:
            return None
        picture: NDArray[np.uint8] = png_decode(content)
    except Exception:  # decoders raise whatever a damaged file makes them run into
        return None
    if picture.shape != shape or picture.dtype != np.uint8:
        return None
    opaque = shape[2] == 3 or picture[..., 3].min() == 255
    return picture[..., :3] if opaque else None


def _plain_shape(content: bytes) -> tuple[int, int, int] | None:
    """Rows, columns and channels, or None unless every chunk is harmless and whole and the last one ends the file."""
    if content[:8] != SIGNATURE or content[12:16] != b"IHDR":
        return None
    width, height, depth, color, _, _, _ = HEADER.unpack_from(content, 16)
    start, kind, view = 8, b"", memoryview(content)
    while start < len(content):
        length, kind = struct.unpack_from(">I4s", content, start)
        end = start + 12 + length
        if kind not in HARMLESS or end > len(content):
            return None
        if zlib.crc32(view[start + 4 : end - 4]) != struct.unpack_from(">I", content, end - 4)[0]:
            return None
        if kind == b"IEND" and end != len(content):
            return None
        start = end
    return (height, width, COLORS[color]) if kind == b"IEND" and depth == 8 and color in COLORS else None
