"""What the jobs cost on a GPU: step, amplitude, loader, evaluation, server, two processes on one card, memory.

    python -m tests.benchmarks.gpu [--json FILE] [--seconds 1]
    python -m tests.benchmarks.gpu --device cpu --tiny      (only shows that it runs)

References are two passes of the bare network and the released code's computation, whose amplitude step runs on the CPU.
Prints ratios and one JSON; three minutes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harmofl.app.job import read_job
from harmofl.core.device_kinds import precision_in_effect
from harmofl.experiment import Experiment
from tests.benchmarks.gpu_parts import loading, prediction, serving
from tests.benchmarks.gpu_processes import two_processes
from tests.benchmarks.gpu_step import Step, amplitude_steps, released_ms

JOBS = Path(__file__).resolve().parents[2] / "jobs"
BATCHES = {"harmofl_prostate": 16, "harmofl_camelyon17": 128, "harmofl_nuclei": 16}
PRECISIONS = ("float32", "tf32", "bfloat16")
TINY = ("data.height=64", "data.width=64", "network.width=4")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda unless set")
    parser.add_argument("--tiny", action="store_true", help="small images, batches and networks")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no CUDA device is visible to torch: run this where nvidia-smi lists one, or --device cpu\n")
        return 1
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "tiny": options.tiny, "jobs": {}}
    for job, batch in BATCHES.items():
        experiment = read_job(JOBS / job, list(TINY) if options.tiny else []).resolve(demo=False)
        found["jobs"][job] = measured(experiment, device, 2 if options.tiny else batch, options.seconds)
        show(job, found["jobs"][job])
    experiment = read_job(JOBS / "harmofl_prostate", list(TINY) if options.tiny else []).resolve(demo=False)
    found["two_processes"] = two_processes(experiment, device, 2 if options.tiny else 4, options.seconds)
    show("two processes", found["two_processes"])
    told = json.dumps(found, indent=2)
    sys.stdout.write(told + "\n")
    if options.json:
        options.json.write_text(told + "\n", encoding="utf-8")
    return 0


def measured(experiment: Experiment, device: torch.device, batch: int, seconds: float) -> dict[str, Any]:
    """All figures of one job."""
    with computing_in("tf32"):  # as torch leaves it, which the released code does not change
        released = released_ms(experiment, device, batch, seconds)
    steps = {}
    for precision in PRECISIONS:
        with computing_in(precision) as asked:
            step = Step(experiment, device, batch, asked)
            steps[precision] = {"in_effect": precision_in_effect(device, asked)} | step.measured(seconds)
            steps[precision]["released_over_step"] = round(released / steps[precision]["step_ms"], 3)
            steps[precision] |= prediction(step, seconds)
    with computing_in("tf32") as asked:
        step = Step(experiment, device, batch, asked)
        return {
            "batch": batch,
            "released_ms": round(released, 3),
            "steps": steps,
            "amplitude": amplitude_steps(step, seconds),
            "loader": loading(step, seconds),
            "server": serving(step, seconds),
        }


@contextmanager
def computing_in(precision: str) -> Iterator[str]:
    """Let convolutions round float32 to TF32 or not; yields the setting of `training.precision` that goes with it."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield "float32" if precision == "tf32" else precision
    finally:
        torch.backends.cudnn.allow_tf32 = before


def show(name: str, figures: Mapping[str, Any]) -> None:
    """One line a ratio."""
    for key, value in ratios(figures):
        sys.stdout.write(f"{name:<20} {key:<48} {value:8.3f}\n")


def ratios(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """The ratios, at any depth: entries whose name is of the form `a_over_b`."""
    for key, value in figures.items():
        name = f"{above} {key}".strip()
        if isinstance(value, Mapping):
            yield from ratios(value, name)
        elif "_over_" in key and value is not None:
            yield name, float(value)


if __name__ == "__main__":
    sys.exit(main())
