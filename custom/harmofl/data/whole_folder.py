"""Folders of synthetic data that are complete or not there."""

from collections.abc import Callable, Set
from pathlib import Path

from harmofl.files import part_folder


def write_whole(folder: Path, wanted: Set[str], write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside `folder` and rename it at the end; keep a folder that holds what is wanted.

    Args:
        folder: appears under its name only when all files are in it; must be missing, empty or complete.
        wanted: paths of all files below it.
        write: gets the folder to fill.

    Raises:
        FileExistsError: the folder holds something else.
    """
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if present:
        if present != wanted:
            raise FileExistsError(f"{folder} already holds other files; delete it to write synthetic cases there")
        return
    with part_folder(folder) as part:
        write(part)
        part.replace(folder)
