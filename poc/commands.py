"""Commands of a rehearsal: one at a time, in an environment that tells everything they start, and ended with it."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

PATIENCE = 3.0  # seconds that a process has to end by itself


class RehearsalError(Exception):
    """Why the rehearsal cannot go on, in one line."""


class Commands:
    """Runs commands below `folder`, whose home folder is `folder`/home.

    The home folder is what the processes of a rehearsal are known by: whatever they start has it too, and nothing else
    on the machine does.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Make the home folder."""
        self._folder = folder
        self._environment = {**environment, "HOME": str(home_of(folder))}
        home_of(folder).mkdir(parents=True)

    def run(self, command: Sequence[str], step: str, *, quiet: bool, patience: float | None = None) -> str:
        """Run a command to its end and return what it printed; it is shown unless `quiet` and the command succeeds.

        Args:
            command: the words.
            step: what to call it.
            quiet: keep its lines for when it fails.
            patience: seconds after which it is ended.

        Raises:
            RehearsalError: it failed, or took too long.
        """
        lines = []
        with subprocess.Popen(
            command,
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            with _time_limit(process.pid, patience) as expired:
                for line in process.stdout:
                    lines.append(line)
                    if not quiet:
                        sys.stdout.write(line)
                        sys.stdout.flush()
        if expired.is_set():
            raise RehearsalError(f"{step} did not end within {patience:.0f} s")
        if process.returncode:
            if quiet:
                sys.stdout.write("".join(lines[-15:]))
            raise RehearsalError(f"{step} failed")
        return "".join(lines)

    def end_all(self) -> None:
        """End whatever of this rehearsal still runs."""
        for _ in range(3):  # a script may start its server again before it is ended itself
            left = processes_of(self._folder)
            if not left:
                return
            end(left)


@contextmanager
def _time_limit(pid: int, patience: float | None) -> Iterator[threading.Event]:
    """End a command with all that it started where it takes too long, which the event tells, or is interrupted."""
    expired = threading.Event()

    def give_up() -> None:
        expired.set()
        end_family(pid)

    watchdog = threading.Timer(patience or threading.TIMEOUT_MAX, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield expired
    except BaseException:
        end_family(pid)
        raise
    finally:
        watchdog.cancel()


def home_of(folder: Path) -> Path:
    """The home folder of all processes of a rehearsal."""
    return folder / "home"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything that runs for the rehearsal in a folder, and what this process started."""
    found = {process for process in psutil.process_iter(["environ"]) if _belongs(process, folder)}
    return sorted(found | set(psutil.Process().children(recursive=True)), key=lambda process: process.pid)


def _belongs(process: psutil.Process, folder: Path) -> bool:
    return (process.info["environ"] or {}).get("HOME") == str(home_of(folder))


def end_family(pid: int) -> None:
    """End a process and what it started."""
    try:
        process = psutil.Process(pid)
        end([process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        pass


def end(processes: Sequence[psutil.Process]) -> None:
    """Ask processes to end, then end them."""
    left = list(processes)
    for ask in ("terminate", "kill"):
        for process in left:
            try:
                getattr(process, ask)()
            except psutil.Error:
                continue
        _, left = psutil.wait_procs(left, timeout=PATIENCE)
