"""Start of a client process: what a site's task imports against torch and nvflare alone."""

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
# What the first step of a task makes: the network of the job and its loss, from MONAI.
MADE = """
import json
from pathlib import Path
from harmofl.tasks import load_task, resolve_experiment, untrained_network
experiment = resolve_experiment(json.loads(Path("jobs/{job}/app/config/experiment.json").read_text()))
untrained_network(experiment), load_task(experiment).loss()
"""


def measure() -> list[Row]:
    rows = [started("executor, participant and MONAI", EXECUTOR)]
    for job in ("harmofl_prostate", "harmofl_camelyon17", "harmofl_nuclei"):
        rows.append(started(f"and network and loss of {job}", f"{EXECUTOR}\n{MADE.format(job=job)}"))
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
