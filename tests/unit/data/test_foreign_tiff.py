"""TIFF files whose directory is damaged: refused, never a picture without pixels. Found by tests.benchmarks.fuzz."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile

from harmofl.data.findings import CaseError
from harmofl.data.rasters import read_rgb

WIDTH, LENGTH = 256, 257  # tags


@pytest.mark.parametrize("damage", ["another type", "another tag", "value beyond the file"])
@pytest.mark.parametrize("tag", [WIDTH, LENGTH])
@pytest.mark.parametrize("compression", ["jpeg2000", "lzw", None])
def test_a_tiff_without_its_size_is_refused(tmp_path: Path, compression: str | None, tag: int, damage: str) -> None:
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.full((24, 20, 3), 90, np.uint8), photometric="rgb", compression=compression)
    content = bytearray(stream.getvalue())
    (start,) = struct.unpack_from("<I", content, 4)
    (entries,) = struct.unpack_from("<H", content, start)
    places = [start + 2 + 12 * number for number in range(entries)]
    (place,) = [place for place in places if struct.unpack_from("<H", content, place)[0] == tag]
    if damage == "another type":
        struct.pack_into("<H", content, place + 2, 14)  # TIFF has 13
    elif damage == "another tag":
        struct.pack_into("<H", content, place, 65000)
    else:
        struct.pack_into("<II", content, place + 4, 100, 2**31 - 1)
    path = tmp_path / "tile.tif"
    path.write_bytes(content)
    with pytest.raises(CaseError) as caught:
        read_rgb(path, path.name)
    assert caught.value.finding.subject == "tile.tif" and "\n" not in str(caught.value)
