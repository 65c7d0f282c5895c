"""The other processes of a site's training where its settings name several devices: started, watched and ended.

They last for one round, answer to the site's own process alone, and write no state, log or progress.
"""

import atexit
import logging
import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from harmofl.core.device_kinds import kind_of
from harmofl.core.parallel import ProcessGroup
from harmofl.core.training import TrainingError, TrainingStoppedError
from harmofl.data.findings import DataRootError
from harmofl.experiment import Experiment
from harmofl.flare.devices import FullMemoryError
from harmofl.flare.lean_monai import import_lean_monai
from harmofl.flare.progress import FINDINGS
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.tasks import Task, admit, is_outside

PATIENCE = timedelta(minutes=10)  # for another process: it has as much to do, so that this is long
POLL = 0.1  # s between two looks at processes that start
LAST_WORDS = 10.0  # s in which a process that lost its group must say why
# What the executor knows how to say; anything else is told as a failed process.
KNOWN: tuple[type[Exception], ...] = (
    TrainingError,
    DataRootError,
    torch.OutOfMemoryError,
    FullMemoryError,
    MemoryError,
)

Stop = Callable[[], bool]


@dataclass(frozen=True)
class Assignment:
    """What another process needs to take its part in a round.

    Attributes:
        experiment: as the server resolved it.
        site: this site's own settings.
        run_id: issued by the server.
        pool: as a participant gets it.
        task: of the experiment; one from outside the package was admitted in the site's own process only.
        start: what the round begins with, packed.
    """

    experiment: Experiment
    site: SiteConfig
    run_id: str
    pool: Mapping[str, Path | None]
    task: Task
    start: bytes


@dataclass(frozen=True)
class _Failure:
    """Why a process ended: the number of what is KNOWN and its line, else the exception's name, and its trace."""

    known: int | None
    line: str
    trace: str = ""
    by_others: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        known = next((index for index, kind in enumerate(KNOWN) if isinstance(error, kind)), None)
        line = type(error).__name__ if known is None else str(error)
        return cls(known, line, "".join(traceback.format_exception(error)), _lost_the_group(error))

    def explained(self, site: SiteConfig, device: str) -> Exception:
        """What the site's own process raises; a trace, which may name files, goes to the site's findings."""
        if self.known is not None:
            return KNOWN[self.known](self.line)
        if self.trace:
            FINDINGS.warning(f"{site.name}, {device}: {self.trace}")
        return SiteError("local_process", f"site {site.name}: its training process on {device} failed ({self.line})")


class _Companion:
    """One other process, as the site's own sees it."""

    def __init__(self, assignment: Assignment, rank: int, store: str) -> None:
        self.device, self.said = assignment.site.devices[rank], ""
        self._failure: _Failure | None = None
        self.findings: Sequence[str] = ()
        spawn = multiprocessing.get_context("spawn")
        self._reports, theirs = spawn.Pipe(duplex=False)
        # no daemon, which could have no loader processes: it ends with its parent by itself
        self._process = spawn.Process(target=_accompany, args=(pickle.dumps(assignment), rank, store, theirs))
        self._process.start()
        theirs.close()
        atexit.register(self._process.kill)

    def failure(self, wait: float = 0.0) -> _Failure | None:
        """Hear what it says, for a while; why it failed where it did."""
        while self._failure is None and self.said != "done" and self._reports.poll(wait):
            try:
                said = self._reports.recv()
            except EOFError:
                self._process.join(LAST_WORDS)
                said = _Failure(None, f"ended with exit code {self._process.exitcode}; is there enough memory?")
            if isinstance(said, _Failure):
                self._failure = said
            else:
                self.said, self.findings = said
        return self._failure

    def end(self) -> None:
        """End it at once; what it has is not needed."""
        self._process.kill()
        self._process.join()
        atexit.unregister(self._process.kill)


@contextmanager
def shared_round(assignment: Assignment, should_stop: Stop) -> Iterator[tuple[ProcessGroup, Stop]]:
    """The processes of a site's other devices, for one round; the site's own process is number 0 of the group.

    Args:
        assignment: with a site that names several devices.
        should_stop: asked while processes start and by what is yielded.

    Yields:
        The group, and what to ask between batches in place of `should_stop`.

    Raises:
        SiteError: code `local_process`, where another process failed; one line.
        TrainingError, DataRootError: another process failed with such an error.
        TrainingStoppedError: `should_stop` said so while they were waited for.
    """
    devices, threads = assignment.site.devices, torch.get_num_threads()
    each = max(1, threads // len(devices)) if devices[0] == "cpu" else threads
    assignment = replace(assignment, site=replace(assignment.site, threads=each))
    companions: list[_Companion] = []
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(1, len(devices)):
                companions.append(_Companion(assignment, rank, store))  # one by one: each that started is ended
            torch.set_num_threads(each)
            _await(companions, ("ready", "done"), should_stop)
            with _process_group(devices, 0, store) as group:
                yield group, lambda: _failed(companions) or should_stop()
            _await(companions, ("done",), should_stop)
        except (_FailedError, RuntimeError) as error:
            if not isinstance(error, _FailedError) and not _lost_the_group(error):
                raise
            raise _cause(companions, assignment.site) or error from None
        finally:
            for companion in companions:
                companion.end()
            torch.set_num_threads(threads)
    for finding in (finding for companion in companions for finding in companion.findings):
        FINDINGS.warning(f"{assignment.site.name}: {finding}")


class _FailedError(Exception):
    """Another process failed."""


def _failed(companions: Sequence[_Companion]) -> bool:
    if any(companion.failure() for companion in companions):
        raise _FailedError
    return False


def _await(companions: Sequence[_Companion], words: tuple[str, ...], should_stop: Stop) -> None:
    """Wait until all have said one of some words."""
    until = time.monotonic() + PATIENCE.total_seconds()
    while any(companion.said not in words for companion in companions):
        if _failed(companions) or should_stop():
            raise TrainingStoppedError("stopped while the site waited for its other processes")
        if time.monotonic() > until:
            raise TrainingError(f"another process of the site did not answer within {PATIENCE}")
        time.sleep(POLL)


def _cause(companions: Sequence[_Companion], site: SiteConfig) -> Exception | None:
    """The failure of a process that did not fail because of others, in the words of this one."""
    until = time.monotonic() + LAST_WORDS
    found: dict[str, _Failure] = {}
    while time.monotonic() < until:
        for companion in companions:
            failure = companion.failure(POLL)
            if failure and not failure.by_others:
                return failure.explained(site, companion.device)
            if failure:
                found[companion.device] = failure
    return next((failure.explained(site, device) for device, failure in found.items()), None)


def _lost_the_group(error: BaseException) -> bool:
    """Whether an error is what torch says where another process is gone; gloo raises plain RuntimeErrors."""
    return isinstance(error, distributed.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


@contextmanager
def _process_group(devices: Sequence[str], rank: int, store: str) -> Iterator[ProcessGroup]:
    """Open torch's group; processes of one machine need no address that others can reach."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    for backend in ("GLOO", "NCCL") if loopback else ():
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", str(loopback))
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        kind_of(device).backend,
        store=distributed.FileStore(store, len(devices)),
        rank=rank,
        world_size=len(devices),
        timeout=PATIENCE,
    )
    try:
        yield ProcessGroup(rank, len(devices))
    finally:
        distributed.destroy_process_group()


def _accompany(packed: bytes, rank: int, store: str, reports: Connection) -> None:
    """What another process does from start to end."""
    logging.disable()
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        reports.send(("done", _take_part(packed, rank, store, lambda: reports.send(("ready", ())))))
    except BaseException as error:
        reports.send(_Failure.of(error))


def _take_part(packed: bytes, rank: int, store: str, ready: Callable[[], Any]) -> list[str]:
    from harmofl.flare.participant import Participant  # which imports this module

    assignment: Assignment = pickle.loads(packed)
    experiment, site = assignment.experiment, assignment.site
    if is_outside(experiment.task):
        admit(experiment.task, assignment.task)
    else:
        import_lean_monai()
    own = replace(site, device=site.devices[rank])
    participant = Participant(
        experiment, own, assignment.run_id, lambda: False, logging.getLogger(), pool=assignment.pool
    )
    data = participant.data  # read before the others wait
    ready()
    with _process_group(site.devices, rank, store) as group:
        participant.take_part(assignment.start, group)
    return [str(finding) for finding in data.late_findings()]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only spawned processes accompany"
    parent.join()
    os._exit(1)
