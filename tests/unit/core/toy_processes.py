"""Two processes that share batches over gloo, and answer as long as the tests of a module need them."""

import multiprocessing
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from harmofl.core.parallel import ProcessGroup

SIZE = 2
PATIENCE = timedelta(seconds=60)
Job = Callable[..., Any]


class Pair:
    """Calls a function in both processes with their group as its first argument."""

    def __init__(self, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(SIZE):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(there, rank, folder / "store"), daemon=True)
            process.start()
            there.close()  # an end that only the process holds tells here when it dies
            self._pipes.append(here)
            self._processes.append(process)

    def __call__(self, job: Job, *given: Any, **named: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((job, given, named))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, store: Path) -> None:
    import os

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(store), SIZE), rank=rank, world_size=SIZE, timeout=PATIENCE
    )
    while True:
        job, given, named = pipe.recv()
        try:
            pipe.send(job(ProcessGroup(rank, SIZE), *given, **named))
        except Exception as error:
            pipe.send(RuntimeError(f"process {rank}: {type(error).__name__}: {error}"))
