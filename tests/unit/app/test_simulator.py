"""Watching a process: a stand-in for FLARE that writes logs, hangs, or dies."""

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harmofl.app import simulator
from harmofl.app.simulator import Ending, clear_workspace, logged_errors, watch

START = """
import os, subprocess, sys, time
from pathlib import Path
for name in ("server", "HK"):
    Path(name).mkdir()
    Path(name, "log.txt").write_text("started\\n")
def error(place, logger, message, context="[identity=server, run=simulate_job] - "):
    with Path(place, "error_log.txt").open("a") as log:
        log.write(f"2026-01-01 00:00:0{len(message) % 10},123 - {logger} - ERROR - {context}{message}\\n")
"""


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stand_in(body: str) -> list[str]:
    return [sys.executable, "-c", START + textwrap.dedent(body)]


def test_the_exit_code_comes_back(tmp_path: Path) -> None:
    assert watch(stand_in("sys.exit(3)"), os.environ, tmp_path, patience=60) == Ending(3)


def test_lines_stream_to_the_own_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch(stand_in("print('to out'); print('to err', file=sys.stderr)"), os.environ, tmp_path, patience=60)
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "to err", "to out"] and err == ""


def test_still_logs_end_the_run_and_name_the_stillest_site(tmp_path: Path) -> None:
    body = """
    os.utime("HK/log.txt", (time.time() - 1, time.time() - 1))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    time.sleep(600)
    """
    ending = watch(stand_in(body), os.environ, tmp_path, patience=2)
    assert (ending.code, ending.stalled) == (1, "HK") and ending.seconds >= 2
    # the site's process has a session of its own, and goes all the same
    assert not psutil.pid_exists(int(Path("child").read_text()))


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ("SimulatorClientRunner", "Communication error with client HK: "),
        ("ServerRunner", "Aborting current RUN due to FATAL_SYSTEM_ERROR received: no"),
    ],
)
def test_an_error_without_hope_ends_a_hanging_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, message: str
) -> None:
    monkeypatch.setattr(simulator, "GRACE", 0.5)
    command = stand_in(f"error('server', {logger!r}, {message!r}); time.sleep(600)")
    assert watch(command, os.environ, tmp_path, patience=600) == Ending(1)


def test_another_error_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "GRACE", 0.0)
    command = stand_in("error('server', 'Cell', 'late message'); time.sleep(1.5); sys.exit(0)")
    assert watch(command, os.environ, tmp_path, patience=600) == Ending(0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler: a process started in the background of a script ignores SIGINT."""
    held = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, held)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_the_whole_run_along(tmp_path: Path, number: signal.Signals) -> None:
    body = """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    """

    def interrupt() -> None:
        while not Path("pids").exists() or not Path("pids").read_text():
            time.sleep(0.1)
        time.sleep(0.6)  # one look of the watch, which then knows the child
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        watch(stand_in(body), os.environ, tmp_path, patience=60)
    assert not [pid for pid in map(int, Path("pids").read_text().split()) if psutil.pid_exists(pid)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_errors_are_read_in_order_of_time_with_the_last_line_of_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "HK").mkdir()
    (tmp_path / "server").mkdir()
    (tmp_path / "HK/error_log.txt").write_text(
        "2026-01-01 10:00:02,000 - JsonScanner - ERROR - Traceback (most recent call last):\n"
        '  File "x.py", line 1, in x\n'
        "TypeError: no such class\n"
        "2026-01-01 10:00:03,000 - HarmoFLExecutor - ERROR - [identity=HK, run=1] - second - line\n"
    )
    (tmp_path / "server/error_log.txt").write_text(
        "2026-01-01 10:00:01,500 - ServerRunner - ERROR - [identity=server] - Aborting current RUN due to X: y\n"
        "2026-01-01 10:00:09,000 - Cell - CRITICAL - [a\n"  # half a line, as a killed process leaves it
    )
    errors = logged_errors(tmp_path)
    assert [(error.place, error.logger, error.message) for error in errors] == [
        ("server", "ServerRunner", "Aborting current RUN due to X: y"),
        ("HK", "JsonScanner", "TypeError: no such class"),
        ("HK", "HarmoFLExecutor", "second - line"),
        ("server", "Cell", "[a"),
    ]
    assert [error.ends_the_run for error in errors] == [True, False, False, False]


def test_an_old_workspace_is_emptied_but_for_what_flare_keeps(tmp_path: Path) -> None:
    for name in ("local", "startup", "server", "HK"):
        (tmp_path / "ws" / name).mkdir(parents=True)
    clear_workspace(tmp_path / "ws")
    clear_workspace(tmp_path / "not there")
    assert {path.name for path in (tmp_path / "ws").iterdir()} == {"local", "startup"}
