"""Start of a client process: what a site's task imports until its first step, against torch and nvflare alone."""

import resource
import subprocess
import sys
from collections.abc import Callable

from tests.benchmarks.rows import Row, ratio

ALONE = "import torch, nvflare"
EXECUTOR = """
import harmofl.flare.executor, harmofl.flare.participant
from harmofl.flare.lean_monai import import_lean_monai
import_lean_monai()
"""
# What a task makes before its first batch: the network of the job, its loss from MONAI, its optimizer.
MADE = """
import json, torch
from pathlib import Path
from harmofl.flare.round_start import round_optimizer
from harmofl.tasks import load_task, resolve_experiment, untrained_network
experiment = resolve_experiment(json.loads(Path("jobs/{job}/app/config/experiment.json").read_text()), demo=True)
network, loss = untrained_network(experiment), load_task(experiment).loss()
optimizer = round_optimizer(experiment, network)
"""
# Two images: what a first step costs once, and little of what every step costs.
STEPPED = """
images = torch.rand(2, 3, 64, 64)
answer = network(images)
labels = torch.ones((2, *answer.shape[2:]), dtype=torch.int64)
assert not optimizer.step(lambda: loss(network(images), labels)).skipped
"""


def measure() -> list[Row]:
    rows = [started("executor, participant and MONAI", EXECUTOR)]
    for job in ("harmofl_prostate", "harmofl_camelyon17", "harmofl_nuclei"):
        script = f"{EXECUTOR}\n{MADE.format(job=job)}\n{STEPPED}"
        rows.append(started(f"and network, loss, optimizer and one step of the demo of {job}", script))
    return rows


def started(what: str, script: str) -> Row:
    found = ratio(process(script), process(ALONE), seconds=40, clock=spent_by_processes)
    return Row(f"start of a client process: {what}", "torch + nvflare alone", found.median, 2.0, found.noise)


def process(script: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", script], check=True)


def spent_by_processes() -> float:
    """CPU time of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
