"""Time that work takes of the processor, which other programs do not lengthen, and the share of a core that it got."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

from harmofl.data.findings import count_text

Result = TypeVar("Result")
Clock = Callable[[], float]

BUSY = 0.9  # share of a core: a machine that gives less has other work to do


@dataclass(frozen=True)
class Clocks:
    """Seconds on the wall, of the processor for all threads of this process, and of it for the thread that asks."""

    wall: Clock = time.perf_counter
    process: Clock = time.process_time
    thread: Clock = time.thread_time


CLOCKS = Clocks()


@dataclass(frozen=True)
class Spent:
    """Seconds of a piece of work by the three clocks."""

    wall: float
    process: float
    thread: float

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.process + other.process, self.thread + other.thread)

    @property
    def threads(self) -> float:
        """How many threads were at work on average; the one that asked is at work from beginning to end."""
        return self.process / self.thread if self.thread else 1.0

    @property
    def idle(self) -> float:
        """Seconds on the wall of a machine that does nothing else: processor time over the threads at work.

        Holds where threads that wait for each other sleep (`OMP_WAIT_POLICY=passive`): waiting threads that spin take
        processor time as well, on a busy machine 20 times that of the work.
        """
        return self.process / self.threads

    @property
    def share(self) -> float:
        """Of a core, what the thread that asked got of it while it worked; 1 on a machine that does nothing else."""
        return min(1.0, self.thread / self.wall) if self.wall else 1.0


def spent(work: Callable[[], Result], clocks: Clocks = CLOCKS) -> tuple[Result, Spent]:
    """Do a piece of work; its result and what it took."""
    wall, process, thread = clocks.wall(), clocks.process(), clocks.thread()
    result = work()
    return result, Spent(clocks.wall() - wall, clocks.process() - process, clocks.thread() - thread)


def busy_line(share: float, now: str) -> str | None:
    """What to say where the machine had other work to do; None where it had none.

    Args:
        share: of a core, what a thread got of it.
        now: what takes how long while that lasts, the end of a sentence.
    """
    if share >= BUSY:
        return None
    load, cores = psutil.getloadavg()[0], count_text(psutil.cpu_count() or 1, "core")
    return (
        f"this machine is busy: its load is {load:.1f} on {cores}, and a thread got {share:.0%} of a core. The times "
        f"above are those of the idle machine. While it stays busy, {now}."
    )
