"""Files that are replaced as a whole, and what a killed process leaves of them."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harmofl.data.decoded import DecodedCache
from harmofl.evidence.page import replace_text
from harmofl.files import current_umask, part_folder, remove_leftovers, replaced_file
from harmofl.flare.state import SiteState, save_atomically, write_text_atomically

# writes half of a file and half of a folder, says so and waits to be killed
WRITER = """
import sys, time
from pathlib import Path
from harmofl.files import part_folder, replaced_file
folder = Path(sys.argv[1])
with replaced_file(folder / "state.pt") as file, part_folder(folder / "HK") as part:
    file.write(b"half")
    file.flush()
    (part / "Case00.nii.gz").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def parts(folder: Path) -> list[str]:
    return sorted(path.name.split(".")[1] for path in folder.iterdir() if path.name.endswith(".part"))


def test_what_is_being_written_stays_and_what_was_left_goes(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        remove_leftovers(tmp_path)
        assert parts(tmp_path) == ["HK", "state"], "another process is writing them"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert parts(tmp_path) == ["HK", "state"], "this is what a kill leaves"
    remove_leftovers(tmp_path, "state.pt")
    assert parts(tmp_path) == ["HK"]
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


OPENINGS: dict[str, Callable[[Path], object]] = {
    "state of a site": lambda folder: SiteState(folder.parent, folder.name).save_round(0, {}),
    "cache": DecodedCache,
    "checkpoint": lambda folder: save_atomically({}, folder / "left.pt"),
    "text": lambda folder: write_text_atomically("text", folder / "left.pt"),
    "page": lambda folder: replace_text(folder / "left.pt", "text"),
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_the_next_opening_or_writing_removes_what_was_left(tmp_path: Path, opening: str) -> None:
    folder = tmp_path / "run1"
    folder.mkdir()
    (folder / ".left.pt.abc123.part").write_bytes(b"half")
    (folder / "kept.part").write_bytes(b"somebody's own")
    OPENINGS[opening](folder)
    assert not (folder / ".left.pt.abc123.part").exists() and (folder / "kept.part").exists()


def test_half_a_folder_of_a_killed_write_goes_with_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".HK.abc123.part"
    left.mkdir()
    (left / "Case00.nii.gz").write_bytes(b"half")
    with part_folder(tmp_path / "HK") as part:
        assert not left.exists() and stat.S_IMODE(part.stat().st_mode) == 0o777 & ~current_umask()
        (part / "Case00.nii.gz").write_bytes(b"whole")
        part.replace(tmp_path / "HK")
    assert [path.name for path in tmp_path.rglob("*")] == ["HK", "Case00.nii.gz"]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), replaced_file(tmp_path / "a", "w") as file:
        file.write("new")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".a.1.part").symlink_to(tmp_path / "precious")
    remove_leftovers(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


def test_names_with_marks_of_patterns_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in (".a[1].x.part", ".a1.x.part"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, "a[1]")
    assert [path.name for path in tmp_path.iterdir()] == [".a1.x.part"]


def test_the_umask_is_the_processs(tmp_path: Path) -> None:
    held = os.umask(0o027)
    try:
        assert current_umask() == 0o027
        replace_text(tmp_path / "page", "text")
    finally:
        os.umask(held)
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o640
