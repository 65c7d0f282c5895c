"""Evidence that somebody else wrote or damaged: refused in one line with the file's name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harmofl.evidence.results import ResultsError, read_results, read_rounds

READERS: dict[str, Callable[[Path], object]] = {"results.json": read_results, "round_metrics.jsonl": read_rounds}


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe{}", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", b'{"a\\nb\\u001b": 1}', b"{", b"PK\x03\x04"],
    ids=["no UTF-8", "too deep", "too many digits", "a key of several lines", "cut", "another file"],
)
@pytest.mark.parametrize("name", READERS)
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ResultsError) as caught:
        READERS[name](tmp_path / name)
    told = str(caught.value)
    assert told.startswith(str(tmp_path / name)) and "\n" not in told and told.isprintable()
