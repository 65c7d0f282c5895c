"""TIFF files whose JPEG data hold other colors than their tag says."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harmofl.data.findings import refusal

Colors = Literal["RGB", "YCbCr"]
COMPRESSION = 7  # JPEG, as TIFF's technical note 2 has it
PHOTOMETRICS: dict[int, Colors] = {2: "RGB", 6: "YCbCr"}
START_OF_SCAN, JFIF, ADOBE = 0xDA, 0xE0, 0xEE
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of a frame's header
ALONE = frozenset((0x01, *range(0xD0, 0xDA)))  # markers without a length


def decode_contradicting_colors(path: Path, subject: str) -> NDArray[np.uint8] | None:
    """Decode the colors that the JPEG data of a TIFF file say they are, where its tag says another kind.

    libtiff believes the tag: YCbCr shown as RGB is green and pink. The data speak for themselves by a JFIF marker,
    which means YCbCr, by Adobe's marker, by components named R, G and B, and by colors of fewer pixels than brightness,
    which RGB does not have (ITU-T T.871; Adobe technical note 5116; libjpeg decides alike).

    Args:
        path: a TIFF file of one page, or of which the first page counts.
        subject: name of the file in findings.

    Returns:
        (H, W, 3) uint8; None where tag and data agree, or the data do not say.

    Raises:
        CaseError: if they contradict each other and the colors cannot be decoded.
    """
    import tifffile

    with tifffile.TiffFile(path) as file:
        page: Any = file.pages.first
        tagged = PHOTOMETRICS.get(int(page.photometric))
        if page.compression != COMPRESSION or tagged is None or page.samplesperpixel != 3:
            return None
        file.filehandle.seek(page.dataoffsets[0])
        data = file.filehandle.read(page.databytecounts[0])
        said, reason = colors_of_jpeg(data)
        if said is None or said == tagged:
            return None
        # tifffile takes data under the tag RGB for YCbCr where they carry a JFIF marker, and only there
        if tagged == "YCbCr" or page.is_jfif:
            return np.ascontiguousarray(page.asarray())
    message = f"the file's tag says {tagged}, its JPEG data say {said} by {reason}"
    raise refusal("color_mode", subject, message, "save it as 8-bit RGB PNG from its source")


def colors_of_jpeg(data: bytes) -> tuple[Colors | None, str]:
    """Which colors a JPEG stream of three components says that it holds, and by what; None where it does not say."""
    said: Colors | None = None
    reason, start = "", 2
    while start + 4 <= len(data) and data[start] == 0xFF:
        marker = data[start + 1]
        if marker in ALONE:
            start += 2
            continue
        length = int.from_bytes(data[start + 2 : start + 4], "big")
        content = data[start + 4 : start + 2 + length]
        if marker == START_OF_SCAN:
            break
        if marker == JFIF and content.startswith(b"JFIF\0") and not said:
            said, reason = "YCbCr", "a JFIF marker"
        elif marker == ADOBE and content.startswith(b"Adobe") and len(content) >= 12 and not said:
            said, reason = ("YCbCr" if content[11] else "RGB"), "Adobe's marker"
        elif marker in FRAMES and len(content) >= 15 and content[5] == 3 and not said:
            names, sampling = content[6:15:3], set(content[7:15:3])
            if names == b"RGB":
                said, reason = "RGB", "the names of its components"
            elif len(sampling) > 1:
                said, reason = "YCbCr", "colors of fewer pixels than brightness"
        start += 2 + length
    return said, reason
