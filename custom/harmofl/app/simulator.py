"""FLARE's simulator as a watched process: it may hang when a site's process dies, and exit 0 when all sites failed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import FrameType

import psutil

from harmofl.job_folder import SERVER

GRACE = 15.0  # seconds in which a run that cannot go on may end by itself
KEPT = {"startup", "local"}  # what FLARE itself keeps of an old workspace
# errors of these loggers mean that a site's process is gone or never became a site
LOST_SITE = {"SimulatorClientRunner", "ClientTaskWorker"}
FATAL = "Aborting current RUN"
_ENTRY = re.compile(r"(?P<time>\d{4}-\d\d-\d\d [\d:,]+) - (?P<logger>\S+) - (?:ERROR|CRITICAL) - (?:\[[^\]]*\] - )?")


@dataclass(frozen=True)
class LoggedError:
    """An error in a log: when, in whose log (a site or the server), by which logger, and its message."""

    time: str
    place: str
    logger: str
    message: str

    @property
    def ends_the_run(self) -> bool:
        """Whether the run cannot succeed after this."""
        return self.logger in LOST_SITE or self.message.startswith(FATAL)


@dataclass(frozen=True)
class Ending:
    """How the simulator ended: its exit code and, where it had to be ended, the log that stood still longest."""

    code: int
    stalled: str | None = None
    seconds: int = 0


def clear_workspace(workspace: Path) -> None:
    """Take away what an earlier run left, as FLARE does, so that its logs are not taken for this run's."""
    for entry in workspace.iterdir() if workspace.is_dir() else ():
        if entry.name not in KEPT and entry.is_dir():
            shutil.rmtree(entry)


def flare_command(job: Path, workspace: Path, threads: int) -> list[str]:
    """The command that `nvflare simulator` stands for, without its notice of deprecation."""
    module = "nvflare.private.fed.app.simulator.simulator"
    return [sys.executable, "-m", module, str(job), "-w", str(workspace), "-t", str(threads)]


def watch(command: Sequence[str], environment: Mapping[str, str], workspace: Path, patience: float) -> Ending:
    """Run the simulator, its lines going to this process's own output, until it ends or cannot go on.

    It is ended with all its processes when no log moved for `patience` seconds, when it outlives an error that ends
    the run by `GRACE`, and when this process is interrupted or terminated.

    Args:
        command: see `flare_command`.
        environment: of the simulator and all sites.
        workspace: has one folder with logs for the server and for each site.
        patience: seconds.
    """
    sys.stdout.flush()
    started = time.time()
    process = subprocess.Popen(command, env=dict(environment), stderr=subprocess.STDOUT, start_new_session=True)
    family: set[psutil.Process] = set()
    hopeless: float | None = None
    try:
        with _terminated_like_interrupted():
            while process.poll() is None:
                family |= _descendants(process.pid)
                stalled, moved = _stillest_log(workspace, started)
                if time.time() - moved > patience:
                    return Ending(1, stalled, int(time.time() - moved))
                if hopeless is None and any(error.ends_the_run for error in logged_errors(workspace)):
                    hopeless = time.time()
                if hopeless is not None and time.time() - hopeless > GRACE:
                    return Ending(1)
                time.sleep(0.5)
        return Ending(process.returncode)
    finally:
        _end(process, family)


def logged_errors(workspace: Path) -> list[LoggedError]:
    """All errors in the logs of server and sites, oldest first; of a traceback only the line that says what it was."""
    return sorted(
        (error for path in workspace.glob("*/error_log.txt") for error in _errors_of(path)),
        key=lambda error: error.time,
    )


def _errors_of(path: Path) -> Iterator[LoggedError]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    starts = list(_ENTRY.finditer(text))
    for start, following in zip_longest(starts, starts[1:]):
        lines = text[start.end() : following.start() if following else None].strip().splitlines() or [""]
        line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        yield LoggedError(start["time"], path.parent.name, start["logger"], line.strip())


def _stillest_log(workspace: Path, started: float) -> tuple[str, float]:
    """Whose log has stood still longest, and when any log last moved."""
    moved = {}
    for path in workspace.glob("*/log.txt"):
        try:
            moved[path.parent.name] = max(started, path.stat().st_mtime)
        except OSError:
            continue
    sites = [name for name in moved if name != SERVER]
    return min(sites, key=moved.__getitem__, default=SERVER), max(moved.values(), default=started)


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()


def _end(process: "subprocess.Popen[bytes]", family: set[psutil.Process]) -> None:
    """End what is left: sites run in sessions of their own, so that the process group alone would miss them."""
    if process.poll() is None:
        family = family | _descendants(process.pid)
    else:
        psutil.wait_procs(family, timeout=3)
    for member in family:
        _send(member, signal.SIGTERM)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=5)
    for member in alive:
        _send(member, signal.SIGKILL)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _send(member: psutil.Process, number: signal.Signals) -> None:
    try:
        member.send_signal(number)  # psutil makes sure that the number was not given to another process since
    except psutil.Error:
        return


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the simulator too: it has a session of its own and would go on without us."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    held = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, held, strict=True):
            signal.signal(number, handler)
