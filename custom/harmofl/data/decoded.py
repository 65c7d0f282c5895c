"""What was decoded from a site's files, kept on its own disk and mapped into memory: one decode a content."""

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from harmofl.data.findings import CaseError, DataRootError, Finding
from harmofl.files import remove_leftovers, replaced_file

MARK = b"HarmoFL decoded\x01"  # 16 bytes; the last one is the version of this layout
ALIGNMENT = 64
_ROW = 512  # words
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError)  # the last one is torch's
SETTLED = 3_000_000_000  # ns since a file's last change after which another change would show in its times


@dataclass(frozen=True, eq=False)
class Decoded:
    """Arrays of one case, what else is known of it as JSON, and its findings."""

    arrays: dict[str, NDArray[Any]]
    about: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


class DecodedCache:
    """Decoded cases of one site on its own disk, keyed by the content of their files.

    An entry is mapped into memory: processes of one machine share its pages, and what is not used is not read twice.
    Content is hashed again only where size, times or number of a file changed. Stands in for MONAI's
    PersistentDataset, whose import takes longer than reading a site's cache, whose write is not atomic between file
    systems, and which stops at a truncated entry instead of decoding again.

    Args:
        folder: where entries are kept; only the owner may read it, for they are patient images.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        remove_leftovers(folder)
        self._told = False

    def read(self, recipe: Sequence[Any], files: Sequence[Path], decode: Callable[[], Decoded]) -> Decoded:
        """Return what the files hold from the cache, or decode and keep it.

        Args:
            recipe: what else decides the result (version, settings, names), as JSON.
            files: the case's files.
            decode: decodes them; called where there is no whole entry.

        Raises:
            CaseError: if the case cannot be used; this too is remembered.
            DataRootError: if the cache lies in the folder of the case.
        """
        if any(self.folder.resolve().is_relative_to(path.parent.resolve()) for path in files):
            raise DataRootError(f"the cache {self.folder} lies in the data folder, which is never written to; move it")
        try:
            entry = self.folder / f"{content_key(recipe, self._digests(files))}.decoded"
        except OSError:  # no content, no key: decoding says what is wrong
            return decode()
        stored = _load(entry)
        if stored is None:
            return self._decode(decode, entry)
        if "refusal" in stored.about:
            raise CaseError(Finding(**stored.about["refusal"]))
        return stored

    def _decode(self, decode: Callable[[], Decoded], entry: Path) -> Decoded:
        try:
            decoded = decode()
        except CaseError as error:
            refused = Decoded({}, {"refusal": asdict(error.finding)})
            self._keep(entry, lambda stream: write(stream, refused))
            raise
        problem = self._keep(entry, lambda stream: write(stream, decoded))
        if problem and not self._told:  # once for all cases
            self._told = True
            return replace(decoded, findings=(*decoded.findings, problem))
        return _load(entry) or decoded

    def _keep(self, path: Path, fill: Callable[[IO[bytes]], None]) -> Finding | None:
        """Write a file under another name first, so that no reader ever sees half of one."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replaced_file(path) as stream:
                fill(stream)
        except OSError as error:
            message = f"decoded images cannot be kept ({error.strerror}), each process decodes again"
            return Finding("warning", "cache_not_written", self.folder.name, message, "free or open this folder")
        return None

    def _digests(self, files: Sequence[Path]) -> list[str]:
        """Hash the content of files, or recall it where nothing about them changed since."""
        name = hashlib.blake2b("\0".join(str(path.resolve()) for path in files).encode(), digest_size=20).hexdigest()
        note, seen = self.folder / f"{name}.hashed", [_identity(path) for path in files]
        try:
            known = json.loads(note.read_bytes())
            if known["identity"] == seen:
                return [str(digest) for digest in known["digests"]]
        except UNREADABLE:
            pass
        digests = [content_digest(path) for path in files]
        if seen == [_identity(path) for path in files] and all(_settled(identity) for identity in seen):
            self._keep(note, lambda stream: _write_note(stream, {"identity": seen, "digests": digests}))
        return digests


def content_digest(path: Path) -> str:
    """Return a hash of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def content_key(recipe: Sequence[Any], digests: Sequence[str]) -> str:
    """Return the name of an entry: a hash of what decides it."""
    return hashlib.blake2b(json.dumps([*recipe, *digests]).encode(), digest_size=20).hexdigest()


def write(stream: IO[bytes], decoded: Decoded) -> None:
    """Write an entry: mark, length and checksum of the header, header in JSON, then each array at a multiple of 64."""
    arrays = {name: np.asarray(array, order="C") for name, array in decoded.arrays.items()}
    places: dict[str, Any] = {}
    offset = 0  # from the end of the header
    for name, array in arrays.items():
        places[name] = [array.dtype.str, list(array.shape), offset, _checksum(array.reshape(-1).view(np.uint8))]
        offset += _aligned(array.nbytes)
    findings = [asdict(finding) for finding in decoded.findings]
    header = json.dumps({"arrays": places, "about": decoded.about, "findings": findings, "size": offset}).encode()
    header = header.ljust(_aligned(len(header)))
    stream.write((MARK + len(header).to_bytes(8, "little") + zlib.crc32(header).to_bytes(8, "little")).ljust(ALIGNMENT))
    stream.write(header)
    for array in arrays.values():
        stream.write(array.tobytes().ljust(_aligned(array.nbytes), b"\0"))


def _load(entry: Path) -> Decoded | None:
    """Return what an entry holds; None if it is missing or damaged. Writing to its arrays does not change the file."""
    try:
        # torch maps a file and closes it; Python's mmap and NumPy's memmap keep one open for each entry
        size = entry.stat().st_size
        content = torch.from_file(str(entry), shared=False, size=size, dtype=torch.uint8).numpy()
        start = content[:ALIGNMENT].tobytes()
        end = ALIGNMENT + int.from_bytes(start[16:24], "little")
        text = content[ALIGNMENT:end].tobytes()
        if start[:16] != MARK or zlib.crc32(text) != int.from_bytes(start[24:32], "little"):
            return None
        header = json.loads(text)
        if len(content) != end + header["size"]:
            return None
        arrays = {}
        for name, (dtype, shape, offset, checksum) in header["arrays"].items():
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            data = content[end + offset : end + offset + count]
            if _checksum(data) != checksum:
                return None
            arrays[name] = data.view(dtype).reshape(shape)
        return Decoded(arrays, header["about"], tuple(Finding(**finding) for finding in header["findings"]))
    except UNREADABLE:
        return None


def _checksum(data: NDArray[np.uint8]) -> int:
    """A checksum of the sums of 64-bit words by row and by column, which costs little more than reading the memory."""
    whole = len(data) // (8 * _ROW) * 8 * _ROW
    words = data[:whole].view(np.uint64).reshape(-1, _ROW)
    known = zlib.crc32(words.sum(axis=0, dtype=np.uint64).tobytes())
    known = zlib.crc32(words.sum(axis=1, dtype=np.uint64).tobytes(), known)
    return zlib.crc32(data[whole:].tobytes(), known)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _identity(path: Path) -> list[int]:
    """What changes with a file's content, whether or not somebody sets its time back."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _settled(identity: list[int]) -> bool:
    """Whether another change would get another time: times of a file are as coarse as the system's clock tick."""
    return time.time_ns() - max(identity[1], identity[2]) > SETTLED


def _write_note(stream: IO[bytes], note: dict[str, Any]) -> None:
    stream.write(json.dumps(note).encode())
