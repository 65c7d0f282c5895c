"""Time and memory of work on a device that may run ahead of whoever starts it."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from tests.benchmarks.rows import peak_allocated

Work = Callable[[], object]
FEWEST, MOST = 3, 50  # repetitions


def medians_ms(works: Mapping[str, Work], *, device: torch.device, seconds: float) -> dict[str, float]:
    """Medians over repetitions of all works in turns, the device waited for at the ends of each.

    Args:
        works: by name; each runs once before anything is timed.
        device: that they run on.
        seconds: of all works together, three repetitions at least; 0 repeats nothing.
    """
    for work in works.values():
        work()
    spent: dict[str, list[float]] = {name: [] for name in works}
    end = time.monotonic() + seconds
    count, fewest = 0, FEWEST if seconds else 1
    while count < fewest or (time.monotonic() < end and count < MOST):
        count += 1
        for name, work in works.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            spent[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in spent.items()}


def wait(device: torch.device) -> None:
    """Return once the device has done what was queued; at once on a CPU."""
    torch.get_device_module(device).synchronize()


def peak_mib(work: Work, device: torch.device) -> float:
    """MiB that torch holds on the device at most at one time while the work runs, with what was there before it."""
    if device.type == "cpu":
        return round(peak_allocated(work) / 2**20, 1)
    memory = torch.get_device_module(device)
    work()
    memory.reset_peak_memory_stats(device)
    work()
    return round(memory.max_memory_allocated(device) / 2**20, 1)
