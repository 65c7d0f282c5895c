"""Two processes: as two sites that share one card, and as two devices of a site that share each batch."""

import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from harmofl.experiment import Experiment
from harmofl.flare.local_processes import _process_group
from tests.benchmarks.device_clock import medians_ms, wait
from tests.benchmarks.gpu_step import Step

PATIENCE = 120.0  # s for a process that starts
ROUND = 4  # batches


@dataclass(frozen=True)
class _Part:
    """What both processes get."""

    experiment: Experiment
    device: str
    devices: list[str]
    store: str
    batch: int
    seconds: float
    barrier: Barrier


def two_processes(experiment: Experiment, device: torch.device, batch: int, seconds: float) -> dict[str, Any]:
    """Steps of one process and of two at a time on one device, and rounds that two devices share.

    Sites of `harmofl simulate` share a card as the first two; a round is shared by two cards, or by two processes on
    the CPU, as the product has it.
    """
    devices = [str(device)] * 2 if device.type == "cpu" else [f"cuda:{n}" for n in range(torch.cuda.device_count())][:2]
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2, timeout=PATIENCE)
    ends = [spawn.Pipe(duplex=False) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        part = _Part(experiment, str(device), devices, str(Path(folder) / "store"), batch, seconds, barrier)
        processes = [
            spawn.Process(target=_take_part, args=(rank, ends[rank][1], part), daemon=True) for rank in range(2)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()  # so that a process that ends without a word is noticed
        told = [mine.recv() for mine, _ in ends]
        for process in processes:
            process.join()
    alone, both = told[0]["alone"], sum(each["beside"] for each in told)
    shared = told[0]["shared"]
    return {
        "steps_per_second_of_one": round(alone, 3),
        "steps_per_second_of_two": round(both, 3),
        "two_over_one": round(both / alone, 3),
        "devices_of_a_shared_round": devices if shared else None,  # None: one card alone, which nothing shares
        "shared_round_over_one_process": round(shared, 3) if shared else None,
    }


def _take_part(rank: int, told: Connection, part: _Part) -> None:
    torch.set_num_threads(1)
    step = Step(part.experiment, torch.device(part.device), part.batch, "float32")
    step.whole()
    part.barrier.wait()
    alone = _steps_per_second(step, part.seconds) if rank == 0 else None
    part.barrier.wait()
    beside = _steps_per_second(step, part.seconds)
    part.barrier.wait()
    shared = _shared_round(rank, part) if len(part.devices) == 2 else None
    told.send({"alone": alone, "beside": beside, "shared": shared})


def _steps_per_second(step: Step, seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() < start + seconds:
        step.whole()
        count += 1
    wait(step.device)
    return count / (time.perf_counter() - start)


def _shared_round(rank: int, part: _Part) -> float:
    """Time of a round that two processes share over that of the same round in one; equal counts in both processes."""
    step = Step(part.experiment, torch.device(part.devices[rank]), part.batch, "float32")
    rounds = medians_ms({"alone": lambda: step.round_of(ROUND)}, device=step.device, seconds=0)
    with _process_group(part.devices, rank, part.store) as group:
        rounds |= medians_ms({"shared": lambda: step.round_of(ROUND, group)}, device=step.device, seconds=0)
    return rounds["shared"] / rounds["alone"]
