"""Files and folders that are replaced as a whole, and what a killed process left of one that it was writing."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

PART, LOCK = ".part", ".lock"


@contextmanager
def replaced_file(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """A stream whose content takes the place of `path` at the end, so that a reader sees the old or the new one.

    Nothing is replaced where an exception ends it; only the owner may read the file. See `remove_leftovers` for what a
    killed process leaves.

    Args:
        path: the file; its folder must be there.
        mode: how to open the stream.
        options: of `os.fdopen`.
    """
    handle, temporary = _locked_file(path)
    try:
        with os.fdopen(handle, mode, **options) as stream:
            yield stream
            stream.flush()
            # while it is open, and therefore locked
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def part_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to fill and then rename; it is removed at the end if it is still there.

    What a killed process left of one is removed.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # a file: nothing there holds something else, as callers understand that error
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder.parent)) from None
    remove_leftovers(folder.parent, folder.name)
    while True:
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=PART, dir=folder.parent))
        handle = os.open(part, os.O_RDONLY)
        _lock(handle)
        if part.exists():
            break
        os.close(handle)
    try:
        part.chmod(0o777 & ~current_umask())
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(handle)


@contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """A folder, made for its owner alone if it is missing, that one process at a time has; others wait."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as held:
        _lock(held.fileno())
        yield folder


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left in a folder of the files and folders that they were writing.

    A process that is still writing holds a lock, whatever its number and however long it takes; the lock ends with it.

    Args:
        folder: may be missing.
        name: of the file that was to be written; without one all of them.
    """
    pattern = f".{'*' if name == '*' else _escaped(name)}.*{PART}"
    for part in folder.glob(pattern):
        with suppress(OSError):  # it is gone already, being written, or not ours to remove
            # a lock over a network needs the right to write
            handle = os.open(part, (os.O_RDONLY if part.is_dir() else os.O_RDWR) | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            finally:
                os.close(handle)


def current_umask() -> int:
    """This process's umask, read without changing it for a moment, which other threads would see."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)


def _locked_file(path: Path) -> tuple[int, str]:
    while True:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
        _lock(handle)
        if os.fstat(handle).st_nlink:  # else taken for a leftover before it was locked
            return handle, temporary
        os.close(handle)


def _lock(handle: int) -> None:
    with suppress(OSError):  # a file system without locks: leftovers stay
        fcntl.flock(handle, fcntl.LOCK_EX)


def _escaped(name: str) -> str:
    return "".join(f"[{mark}]" if mark in "*?[" else mark for mark in name)
