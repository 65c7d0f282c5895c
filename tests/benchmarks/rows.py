"""What the benchmarks print, and how they measure: ratios of two pieces of work that run in turns in one process."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]
Clock = Callable[[], float]

NARROW = 0.02  # half the interval of a ratio that is taken for measured
LEAST, MOST = 15, 400  # pairs


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: is measured.
        target: what it is compared with, in words.
        measured: a ratio, or another number that does not depend on the machine's speed.
        limit: largest value that passes; None for what is printed beside other rows to say what bounds them.
        noise: half the 95 % interval of what was measured, as a part of it; None for what is measured once.
    """

    what: str
    target: str
    measured: float
    limit: float | None
    noise: float | None = None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.measured <= self.limit


@dataclass(frozen=True)
class Ratio:
    """A median of ratios and half its 95 % interval, as a part of it."""

    median: float
    noise: float


def ratio(
    measured: Work,
    reference: Work,
    *,
    seconds: float = 10.0,
    clock: Clock = time.process_time,
    before_measured: Work = lambda: None,
    before_reference: Work = lambda: None,
) -> Ratio:
    """How many times the time of `reference` the work `measured` takes.

    Both run in turns, each first in every second pair, until the interval of the median is narrow or the time is up.
    Process time does not count when a shared machine gives the core to others; give `time.perf_counter` where waiting
    or other processes are part of the work. What runs before is not timed.
    """
    for before, work in ((before_measured, measured), (before_reference, reference)):
        before()
        work()  # first calls load code and grow pools of memory
    pairs: list[float] = []
    end = time.monotonic() + seconds
    while len(pairs) < MOST:
        turns = [(before_measured, measured), (before_reference, reference)]
        if len(pairs) % 2:
            turns.reverse()
        spent = {}
        for before, work in turns:
            before()
            start = clock()
            work()
            spent[work] = clock() - start
        pairs.append(spent[measured] / spent[reference])
        late = time.monotonic() > end
        if len(pairs) >= LEAST and (late or interval(pairs) < NARROW):
            break
        if late and len(pairs) >= 5:
            break
    return Ratio(statistics.median(pairs), interval(pairs))


def interval(values: list[float]) -> float:
    """Half the 95 % interval of the median, as a part of it, from the order of the values (binomial, normal limit)."""
    ordered, count = sorted(values), len(values)
    reach = 1.96 * math.sqrt(count) / 2
    low = ordered[max(0, math.floor(count / 2 - reach))]
    high = ordered[min(count - 1, math.ceil(count / 2 + reach) - 1)]
    return (high - low) / 2 / statistics.median(ordered)


def peak_allocated(work: Work) -> int:
    """Bytes that torch allocates on the CPU at most at one time while the work runs, its result included."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
