"""What tests of picture files share: the refusal of one, and PNG files by hand."""

import struct
import zlib
from pathlib import Path

import pytest

from harmofl.data.findings import CaseError
from harmofl.data.rasters import read_rgb


def refused(path: Path, code: str) -> str:
    with pytest.raises(CaseError) as caught:
        read_rgb(path, "site/patch")
    finding = caught.value.finding
    assert (finding.severity, finding.code, finding.subject) == ("error", code, "site/patch")
    assert finding.fix
    assert "\n" not in str(finding)
    assert str(path) not in str(finding)
    return finding.message


def png_bytes(header: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    parts = [(b"IHDR", header), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
