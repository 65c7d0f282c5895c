"""Does torch.compile pay on this machine: a step of the small U-Net, plain and compiled.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.compiled [--steps 10]

Prints JSON: seconds of the first compiled step, median seconds of a step either way, their ratio, and after how many
steps the time for the compilation is won back (null where it never is). Compiled code of earlier runs is not used.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from harmofl.core.layout import memory_format, placed
from harmofl.core.losses import DiceLossIgnoring
from harmofl.core.networks import build_network
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import build_optimizer, compiled

WIDTH, SIZE, BATCH = 8, 96, 16
WARM = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="of which the median is taken (10)")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the network ({WIDTH})")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        told = measure(options.width, options.steps)
    sys.stdout.write(json.dumps(told, indent=2) + "\n")
    return 0


def measure(width: int, steps: int) -> dict[str, float | None]:
    """A perturbed step, both its passes, plain and compiled, in turns."""
    plain, faster = step_of(width, compile=False), step_of(width, compile=True)
    first = seconds(faster)
    for _ in range(WARM):
        seconds(plain), seconds(faster)
    pairs = [(seconds(plain), seconds(faster)) for _ in range(steps)]
    slow, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "first_step_seconds": round(first, 1),
        "plain_step_seconds": round(slow, 4),
        "compiled_step_seconds": round(fast, 4),
        "ratio": round(fast / slow, 3),
        "steps_until_it_pays": round((first - fast) / (slow - fast)) if fast < slow else None,
    }


def step_of(width: int, *, compile: bool) -> Callable[[], object]:
    """What `fit_round` does with a batch at hand."""
    network = build_network("unet", 3, (0.9, 0.1), width=width, norm="instance", seed=0)
    network = placed(network, "cpu", compile)
    images = torch.rand(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=memory_format(network, compile)
    )
    targets = (images[:, 0] > 0.9).long()
    loss: nn.Module = DiceLossIgnoring(ignored=255)
    optimizer = WeightPerturbation(build_optimizer(network, "adam", 1e-3, 0.9, 0.0), 0.05, network)
    called = compiled(network) if compile else network
    return lambda: optimizer.step(lambda: loss(called(images), targets))


def seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
