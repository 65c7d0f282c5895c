"""The training step of each job on a GPU: time, share of its parts, images a second, memory, against two references.

    python -m tests.benchmarks.gpu [--json FILE] [--seconds 2]
    python -m tests.benchmarks.gpu --device cpu --tiny      (only shows that it runs)

References are two passes of the bare network, and the same step with an amplitude step on the CPU: images one at a time
through NumPy's complex fft2, amplitude and phase apart, recombined, and sent to the device. Prints JSON; takes up to
three minutes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmofl.app.job import read_job
from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.augmentation import flip_and_rotate
from harmofl.core.perturbation import WeightPerturbation, gradient_norm
from harmofl.core.training import autocast, build_optimizer
from harmofl.experiment import Experiment
from harmofl.tasks import load_task, untrained_network

JOBS = Path(__file__).resolve().parents[2] / "jobs"
BATCHES = {"harmofl_prostate": 16, "harmofl_camelyon17": 128, "harmofl_nuclei": 16}
PRECISIONS = ("float32", "bfloat16")
TINY = ("data.height=64", "data.width=64", "network.width=4")
FEWEST, MOST = 3, 50  # repetitions


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda unless set")
    parser.add_argument("--tiny", action="store_true", help="small images, batches and networks")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no CUDA device is visible to torch: run this where nvidia-smi lists one, or --device cpu\n")
        return 1
    rows = []
    for job, batch in BATCHES.items():
        experiment = read_job(JOBS / job, list(TINY) if options.tiny else []).resolve(demo=False)
        for precision in PRECISIONS:
            step = Step(experiment, device, 2 if options.tiny else batch, precision)
            rows.append({"job": job, "precision": precision, "batch": step.batch} | step.measured(options.seconds))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    told = json.dumps({"device": name, "torch": torch.__version__, "tiny": options.tiny, "rows": rows}, indent=2)
    sys.stdout.write(told + "\n")
    if options.json:
        options.json.write_text(told + "\n", encoding="utf-8")
    return 0


class Step:
    """One training step of a job on random images, as a whole, in parts, and as its references."""

    def __init__(self, experiment: Experiment, device: torch.device, batch: int, precision: str) -> None:
        self.experiment, self.device, self.batch, self.precision = experiment, device, batch, precision
        data, settings = experiment.data, experiment.training
        self.random = torch.Generator().manual_seed(0)
        self.images = torch.rand(batch, 3, data.height, data.width, generator=self.random).to(device)
        masks = experiment.network.name == "unet"
        shape = (batch, data.height, data.width) if masks else (batch,)
        self.targets = torch.randint(2, shape, generator=self.random).to(device)
        self.loss = load_task(experiment).loss()
        self.network = untrained_network(experiment).to(device, memory_format=torch.channels_last).train()
        inner = build_optimizer(
            self.network, settings.optimizer, settings.learning_rate, settings.momentum, settings.weight_decay
        )
        self.optimizer = WeightPerturbation(inner, experiment.perturbation.alpha, self.network)
        self.layer = self.full_amplitude()

    def full_amplitude(self) -> AmplitudeNormalization:
        """The costliest region, which the CPU formulation computes too."""
        data = self.experiment.data
        layer = AmplitudeNormalization(
            intensity="window", region="full", low_fraction=0.1, estimation="before_training", momentum=0.1,
            channels=3, height=data.height, width=data.width,
        ).to(self.device)  # fmt: skip
        layer.freeze(layer.statistics(self.images).mean(0), self.batch)
        return layer

    def measured(self, seconds: float) -> dict[str, Any]:
        """Milliseconds, and what follows from them; step, references and parts run in turns."""
        reset_peak(self.device)
        self.whole()
        peak = peak_mib(self.device)
        target = self.layer.target.cpu().numpy()
        works: dict[str, Callable[[], object]] = {
            "step": self.whole,
            "two passes": self.two_bare_passes,
            "step with CPU FFT": lambda: self.whole(partial(amplitude_on_cpu, target=target, device=self.device)),
            "augmentation": lambda: flip_and_rotate(self.images, self.targets, self.random),
            "amplitude": lambda: self.layer(self.images),
            "perturbation": self.perturb,
            "optimizer": self.optimizer.optimizer.step,
        }
        found = medians_ms(works, device=self.device, seconds=seconds * len(works))
        whole, bare, on_cpu = (found.pop(name) for name in ("step", "two passes", "step with CPU FFT"))
        return {
            "step_ms": round(whole, 3),
            "images_per_second": round(1000 * self.batch / whole, 1),
            "peak_mib": peak,
            "bare_two_passes_ms": round(bare, 3),
            "step_over_bare": round(whole / bare, 3),
            "step_with_cpu_fft_ms": round(on_cpu, 3),
            "cpu_fft_over_step": round(on_cpu / whole, 3),
            "share": {name: round(spent / whole, 4) for name, spent in {"two passes": bare, **found}.items()},
        }

    def whole(self, amplitude: Callable[[Tensor], Tensor] | None = None) -> None:
        """What `fit_round` does with one batch on the device."""
        images, targets = flip_and_rotate(self.images, self.targets, self.random)
        inputs = (amplitude or self.layer)(images).contiguous(memory_format=torch.channels_last)
        self.optimizer.step(lambda: self.loss(self.logits(inputs).float(), targets))

    def logits(self, inputs: Tensor) -> Tensor:
        with autocast(self.device, self.precision):
            found: Tensor = self.network(inputs)
        return found

    def two_bare_passes(self) -> None:
        inputs = self.images.contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            self.network.zero_grad(set_to_none=True)
            self.logits(inputs).float().sum().backward()

    def perturb(self) -> None:
        parameters = self.optimizer._parameters()
        with self.optimizer._ascended(parameters, (self.optimizer.alpha / gradient_norm(parameters))):
            pass


def amplitude_on_cpu(images: Tensor, target: np.ndarray, device: torch.device) -> Tensor:
    """Amplitude replaced image by image on the CPU, in the polar form."""
    width = images.shape[-1]
    mirrored = target[:, np.r_[0, target.shape[1] - 1 : 0 : -1], 1 : (width + 1) // 2][..., ::-1]
    amplitude = np.concatenate([target, mirrored], axis=-1)  # the whole plane of a real image's spectrum
    replaced = []
    for image in images.cpu().numpy():
        spectrum = np.fft.fft2(image, axes=(-2, -1))
        replaced.append(np.fft.ifft2(amplitude * np.exp(1j * np.angle(spectrum)), axes=(-2, -1)).real)
    return torch.from_numpy(np.stack(replaced).astype(np.float32)).to(device)


def medians_ms(works: Mapping[str, Callable[[], object]], *, device: torch.device, seconds: float) -> dict[str, float]:
    """Medians over repetitions of all works in turns, the device waited for at the ends of each."""
    for work in works.values():
        work()
    spent: dict[str, list[float]] = {name: [] for name in works}
    end = time.monotonic() + seconds
    count = 0
    while count < FEWEST or (time.monotonic() < end and count < MOST):
        count += 1
        for name, work in works.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            spent[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in spent.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated(device) / 2**20, 1) if device.type == "cuda" else None


if __name__ == "__main__":
    sys.exit(main())
