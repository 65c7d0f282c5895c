"""The folder of a comparison: where it may lie, whose it is, and that one command at a time writes into it."""

import fcntl
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from harmofl.app.job import JobError

CELLS = "cells"
SHARED = "shared_data"  # demo data and decoded images while cells run
OWNER_FILE = "job.txt"  # holds the job's name; locked as long as a command works in the folder


def usable_output(output: Path, roots: Mapping[str, Path]) -> Path:
    """The absolute path of a new, empty or earlier comparison's folder; nothing is written yet.

    Raises:
        JobError: it lies in a data root or holds something else.
    """
    output = output.absolute()
    for root in roots.values():
        if output.resolve().is_relative_to(root.resolve()):
            raise JobError(f"-o {output}: lies in the data root {root}, which is never written to; name another")
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not (output / CELLS).is_dir())):
        raise JobError(f"-o {output}: holds something else than a comparison; name a new or empty folder")
    return output


def hold_folder(output: Path, name: str) -> IO[str]:
    """Make the folder and take it for a job until the returned file is closed, or the process ends however it ends.

    Two commands in one folder would empty each other's unfinished cells.

    Args:
        output: see `usable_output`.
        name: of the job.

    Raises:
        JobError: another command works in it, it is another job's, or it cannot be written.
    """
    try:
        (output / CELLS).mkdir(parents=True, exist_ok=True)
        held = (output / OWNER_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise JobError(f"-o {output}: cannot be written ({error.strerror}); name another folder") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.seek(0)
        owner = held.read().strip()
        if owner and owner != name:
            raise JobError(f"-o {output}: holds the comparison of job {owner}, not of {name}; name another folder")
        if not owner:
            held.write(f"{name}\n")
            held.flush()
    except BlockingIOError:
        held.close()
        raise JobError(f"-o {output}: another harmofl compare works in it; wait for it or name another") from None
    except JobError:
        held.close()
        raise
    except OSError as error:
        held.close()
        raise JobError(f"-o {output}: cannot be locked ({error.strerror}); name a folder on a local disk") from None
    return held
