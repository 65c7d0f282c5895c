"""What libraries say about a file is collected, and what others say stays on the console."""

import logging
import os
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import tifffile

from harmofl.data.findings import CaseError
from harmofl.data.library_messages import MOST_LETTERS, collect_messages, in_one_line
from harmofl.data.rasters import read_rgb

LOGGER = "a.library"


class _Printing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        os.write(2, f"{record.getMessage()}\n".encode())


@pytest.fixture(autouse=True)
def _printing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger prints on standard error, as that of nibabel does."""
    monkeypatch.setattr(logging.getLogger(LOGGER), "handlers", [_Printing()])


def test_warnings_of_loggers_and_of_python_are_collected(capfd: pytest.CaptureFixture[str]) -> None:
    with collect_messages(LOGGER) as messages:
        logging.getLogger(LOGGER).warning("setting %d dims", 3)
        logging.getLogger(LOGGER).info("not worth a line")
        warnings.warn("a damaged tag", stacklevel=1)
        warnings.warn("about the code", DeprecationWarning, stacklevel=1)
    assert messages == ["setting 3 dims", "a damaged tag"]
    logging.getLogger(LOGGER).warning("outside")
    assert capfd.readouterr() == ("", "outside\n")


def test_other_threads_keep_their_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with collect_messages(LOGGER) as messages:
        thread = threading.Thread(target=lambda: logging.getLogger(LOGGER).warning("of another file"))
        thread.start()
        thread.join()
    assert messages == [] and capfd.readouterr().err == "of another file\n"


def test_messages_of_an_inner_file_are_its_own() -> None:
    with collect_messages(LOGGER) as outer:
        logging.getLogger(LOGGER).warning("outer")
        with collect_messages(LOGGER) as inner:
            logging.getLogger(LOGGER).warning("inner")
        logging.getLogger(LOGGER).warning("outer again")
    assert (outer, inner) == (["outer", "outer again"], ["inner"])


def test_what_c_code_writes_is_collected_also_where_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="decoder"), collect_messages(stderr=True) as messages:
        os.write(2, b"Module: Improper factors\n")
        raise ValueError("decoder")
    os.write(2, b"outside\n")
    assert messages == ["Module: Improper factors"] and capfd.readouterr().err == "outside\n"


def test_a_process_without_standard_error_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with collect_messages(stderr=True) as messages:
        pass
    assert messages == []


def test_one_line_of_bounded_length() -> None:
    path = Path("/data/Jane Doe/a.png")
    assert in_one_line(["a\n  b", "a b", "", "c\x1b[31m"], path, "a.png") == "a b; c?[31m"
    assert len(in_one_line(["x" * 1000], path, "a.png")) == MOST_LETTERS + len(" ...")


@pytest.mark.parametrize("before", [0, MOST_LETTERS - 30, MOST_LETTERS - 10, MOST_LETTERS])
def test_no_part_of_a_path_is_left_where_a_line_is_cut(before: int) -> None:
    path = Path("/data/Jane  Doe/a.png")
    assert "Jane" not in in_one_line(["x" * before + f" no file {path} ", f"{path}: tag 7"], path, "a.png")


def test_libtiff_says_nothing_without_the_name_of_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """JPEG with colors of half resolution in a TIFF whose tag says RGB, of which libtiff complains in two lines."""
    path = tmp_path / "colors.tif"
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    tifffile.imwrite(path, picture, photometric="rgb", tile=(64, 64), compression="jpeg", subsampling=(2, 2))
    with tifffile.TiffFile(path, mode="r+b") as file:
        file.pages[0].tags["PhotometricInterpretation"].overwrite(2)  # type: ignore[union-attr]
    try:
        lines = [str(finding) for finding in read_rgb(path, path.name)[1]]
    except CaseError as error:
        lines = [str(error)]
    assert all("colors.tif: " in line and str(tmp_path) not in line for line in lines)
    assert capfd.readouterr() == ("", "")


def test_two_threads_leave_the_warnings_of_the_process_as_they_were() -> None:
    """Python keeps one list of filters for all threads: who enters second and leaves last would restore the first's."""
    before, entered, leave = (warnings.filters[:], warnings.showwarning), threading.Event(), threading.Event()

    def first() -> None:
        with collect_messages():
            entered.set()
            leave.wait(5)

    def second() -> None:
        entered.wait(5)
        threading.Timer(0.05, leave.set).start()
        with collect_messages():
            thread.join(0.5)

    thread = threading.Thread(target=first)
    other = threading.Thread(target=second)
    thread.start()
    other.start()
    thread.join()
    other.join()
    assert (warnings.filters, warnings.showwarning) == before
