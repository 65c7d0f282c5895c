import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from harmofl.data import decoded
from harmofl.data.decoded import Decoded, DecodedCache
from harmofl.data.findings import DataRootError, Finding

LONG_AGO = 1_500_000_000  # seconds; nobody has changed the file a moment ago
ARRAYS = arrays_of.arrays(
    st.sampled_from([np.uint8, np.float16, np.float32, np.int64]),
    arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "site" / "case"
    path.parent.mkdir()
    path.write_bytes(b"content")
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content is hashed from now on; times count as settled when they lie in the past."""
    names: list[str] = []
    original: Callable[[Path], str] = decoded.content_digest

    def counted(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(decoded, "content_digest", counted)
    monkeypatch.setattr(decoded, "SETTLED", -1)
    return names


def held(source: Path, tmp_path: Path, version: int = 1) -> bytes:
    """What a cache holds of a file whose decoded form are its own bytes."""

    def decode() -> Decoded:
        return Decoded({"bytes": np.frombuffer(source.read_bytes(), np.uint8)})

    found = DecodedCache(tmp_path / "cache").read(["bytes", version], [source], decode)
    return found.arrays["bytes"].tobytes()


@given(
    contents=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4),
    about=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.text(max_size=5)),
)
def test_what_is_kept_comes_back(
    tmp_path_factory: pytest.TempPathFactory, contents: dict[str, np.ndarray], about: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("entry")
    finding = Finding("notice", "code", "Fälle/1", "said", "fix")
    with (folder / "entry").open("wb") as stream:
        decoded.write(stream, Decoded(contents, dict(about), (finding,)))
    read = decoded._load(folder / "entry")
    assert read is not None and (read.about, read.findings) == (about, (finding,))
    assert list(read.arrays) == list(contents)
    for name, array in contents.items():
        assert (read.arrays[name].dtype, read.arrays[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read.arrays[name], array)


def test_every_byte_of_an_entry_counts(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with path.open("wb") as stream:
        decoded.write(stream, Decoded({"a": np.arange(13, dtype=np.uint8), "b": np.ones(3)}, {"spacing": [1.0, 2.0]}))
    whole = path.read_bytes()
    loaded = decoded._load(path)
    assert loaded is not None
    padding = 0
    for index in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[index] ^= 0x10
        path.write_bytes(spoiled)
        read = decoded._load(path)
        if read is not None:  # only between the parts
            padding += 1
            assert read.about == loaded.about
            assert all(np.array_equal(read.arrays[name], loaded.arrays[name]) for name in "ab")
    # 64 bytes of mark, lengths and checksum use 32; arrays of 13 and 24 bytes fill up to 64 each
    assert padding == 32 + (64 - 13) + (64 - 24)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert decoded._load(path) is None


def test_arrays_may_be_written_to_and_the_entry_stays(source: Path, tmp_path: Path) -> None:
    held(source, tmp_path)
    read = DecodedCache(tmp_path / "cache").read(["bytes", 1], [source], lambda: pytest.fail("decoded again"))
    read.arrays["bytes"][:] = 0
    assert held(source, tmp_path) == b"content"


def test_content_is_hashed_once(source: Path, tmp_path: Path, hashed: list[str]) -> None:
    assert held(source, tmp_path) == held(source, tmp_path) == b"content"
    assert hashed == ["case"]
    assert held(source, tmp_path, version=2) == b"content"
    assert hashed == ["case"]


def test_another_content_of_the_same_size_and_time_is_seen(source: Path, tmp_path: Path, hashed: list[str]) -> None:
    held(source, tmp_path)
    source.write_bytes(b"CONTENT")
    os.utime(source, (LONG_AGO, LONG_AGO))  # as a copy that keeps times; that of the status change cannot be set back
    assert held(source, tmp_path) == b"CONTENT"
    replaced = source.with_name("new")
    replaced.write_bytes(b"cONTENT")
    os.utime(replaced, (LONG_AGO, LONG_AGO))
    replaced.replace(source)
    assert held(source, tmp_path) == b"cONTENT"
    assert hashed == ["case"] * 3


def test_a_file_that_was_just_changed_is_hashed_again(
    source: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoded, "SETTLED", 3_600_000_000_000)  # an hour: the file was made a moment ago
    held(source, tmp_path)
    held(source, tmp_path)
    assert hashed == ["case", "case"]


@pytest.mark.parametrize("note", [b"", b"{}", b'{"identity": 1}', b"\xff"])
def test_a_damaged_note_is_written_anew(source: Path, tmp_path: Path, hashed: list[str], note: bytes) -> None:
    held(source, tmp_path)
    (path,) = (tmp_path / "cache").glob("*.hashed")
    path.write_bytes(note)
    held(source, tmp_path)
    held(source, tmp_path)
    assert hashed == ["case", "case"]


def test_a_cache_that_cannot_be_written_says_so_once(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    cache = DecodedCache(tmp_path / "file")
    found = [cache.read([number], [source], lambda: Decoded({})).findings for number in range(3)]
    assert [[finding.code for finding in findings] for findings in found] == [["cache_not_written"], [], []]


def test_the_cache_never_lies_in_the_data_folder(source: Path) -> None:
    with pytest.raises(DataRootError, match="never written to"):
        DecodedCache(source.parent / "cache").read([], [source], lambda: Decoded({}))


def test_words_that_have_changed_places_are_noticed(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**63, 4096 + 5, dtype=np.uint64)  # eight rows of words, and a rest
    path = tmp_path / "entry"
    with path.open("wb") as stream:
        decoded.write(stream, Decoded({"values": values}))
    whole = path.read_bytes()
    start = whole.index(values.tobytes())
    for first, second in (
        (0, 1),
        (0, 512),
        (3, 1030),
        (4096, 4100),
        (5, 4097),
    ):  # in a row, a column, neither, the rest
        moved = values.copy()
        moved[[first, second]] = values[[second, first]]
        path.write_bytes(whole[:start] + moved.tobytes() + whole[start + values.nbytes :])
        assert decoded._load(path) is None
    path.write_bytes(whole)
    assert decoded._load(path) is not None


def test_entries_in_use_keep_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with path.open("wb") as stream:
        decoded.write(stream, Decoded({"values": np.arange(100)}))
    kept = [decoded._load(path) for _ in range(50)]
    with path.open("rb"):
        assert open_files().count(str(path)) == 1  # it would be seen
    assert open_files().count(str(path)) == 0
    assert all(entry is not None and entry.arrays["values"][99] == 99 for entry in kept)


def open_files() -> list[str]:
    """Where the descriptors of this process lead."""
    return [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
