"""The training step on a device as a whole and in parts, against the bare network and the released computation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.augmentation import flip_and_rotate
from harmofl.core.layout import memory_format, placed
from harmofl.core.parallel import ALONE, ProcessGroup
from harmofl.core.perturbation import WeightPerturbation, gradient_norm
from harmofl.core.training import RoundSettings, autocast, build_optimizer, fit_round
from harmofl.experiment import Experiment
from harmofl.tasks import load_task, untrained_network
from tests.benchmarks.device_clock import medians_ms, peak_mib
from tests.benchmarks.released import ReleasedTraining, ReleasedUNet, aligned, released_densenet
from tests.benchmarks.training import frozen_normalization, images_and_targets

REGIONS = ("dc", "full", "site_gain")


class Step:
    """One training step of a job, in its own preset, on random images."""

    def __init__(self, experiment: Experiment, device: torch.device, batch: int, precision: str) -> None:
        self.experiment, self.device, self.batch, self.precision = experiment, device, batch, precision
        self.random = torch.Generator().manual_seed(0)
        self.host_images, self.host_targets = images_and_targets(experiment, batch)
        self.images, self.targets = self.host_images.to(device), self.host_targets.to(device)
        self.loss = load_task(experiment).loss()
        self.network = placed(untrained_network(experiment), device).train()
        self.layout = memory_format(self.network)
        self.layer = frozen_normalization(experiment, self.host_images).to(device)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> WeightPerturbation:
        given = self.experiment.training
        inner = build_optimizer(self.network, given.optimizer, given.learning_rate, given.momentum, given.weight_decay)
        return WeightPerturbation(inner, self.experiment.perturbation.alpha, self.network)

    def measured(self, seconds: float) -> dict[str, Any]:
        """Milliseconds, and what follows from them; step, reference and parts run in turns."""
        peak = peak_mib(self.whole, self.device)
        works: dict[str, Callable[[], object]] = {
            "step": self.whole,
            "two passes": self.two_bare_passes,
            "augmentation": lambda: flip_and_rotate(self.images, self.targets, self.random),
            "amplitude": lambda: self.layer(self.images),
            "perturbation": self.perturb,
            "optimizer": self.optimizer.optimizer.step,
        }
        found = medians_ms(works, device=self.device, seconds=seconds * len(works))
        whole, bare = found.pop("step"), found.pop("two passes")
        return {
            "step_ms": round(whole, 3),
            "images_per_second": round(1000 * self.batch / whole, 1),
            "peak_mib": peak,
            "step_over_two_passes": round(whole / bare, 3),
            "share": {name: round(spent / whole, 4) for name, spent in {"two passes": bare, **found}.items()},
        }

    def whole(self) -> None:
        """What `fit_round` does with one batch on the device."""
        images, targets = flip_and_rotate(self.images, self.targets, self.random)
        inputs = self.layer(images).contiguous(memory_format=self.layout)
        self.optimizer.step(lambda: self.loss(self.logits(inputs).float(), targets))

    def round_of(self, batches: int, group: ProcessGroup = ALONE) -> None:
        """`fit_round` over so many batches, from images in the memory of the machine."""
        given = self.experiment.training
        how = RoundSettings(self.batch, 1, given.augmentation, given.clip_norm, self.precision)
        images, targets = self.host_images.repeat(batches, 1, 1, 1), torch.cat([self.host_targets] * batches)
        data = TensorDataset(images, targets)
        fit_round(self.network, self.layer, self.optimizer, self.loss, data, settings=how, seed=0, group=group)

    def logits(self, inputs: Tensor) -> Tensor:
        with autocast(self.device, self.precision):
            found: Tensor = self.network(inputs)
        return found

    def two_bare_passes(self) -> None:
        inputs = self.images.contiguous(memory_format=self.layout)
        for _ in range(2):
            self.network.zero_grad(set_to_none=True)
            self.logits(inputs).float().sum().backward()

    def perturb(self) -> None:
        parameters = self.optimizer._parameters()
        with self.optimizer._ascended(parameters, (self.optimizer.alpha / gradient_norm(parameters))):
            pass


def amplitude_steps(step: Step, seconds: float) -> dict[str, Any]:
    """The amplitude step of each region on the device, and the released one, which runs on the CPU, over it."""
    data, works = step.experiment.data, {}
    for region in REGIONS:
        layer = AmplitudeNormalization(
            intensity="none", region=region, low_fraction=0.1, estimation="before_training", momentum=0.1,
            channels=3, height=data.height, width=data.width,
        ).to(step.device)  # fmt: skip
        statistic = layer.statistics(step.images).mean(0)
        layer.freeze(statistic, step.batch)
        if region == "site_gain":
            layer.set_own(statistic)
        works[region] = lambda layer=layer: layer(step.images)
    found = medians_ms(works, device=step.device, seconds=seconds * len(works))
    target = torch.ones(data.height, data.width, 3).numpy()
    copies = {"released": lambda: aligned(step.images.cpu().clone(), target).to(step.device)}
    released = medians_ms(copies, device=step.device, seconds=seconds)["released"]
    return {
        region: {"ms": round(spent, 4), "released_over_ours": round(released / spent, 2)}
        for region, spent in found.items()
    }


class _Sent(nn.Module):
    """A network on a device for batches that the amplitude step left on the CPU."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.network, self.device = network.to(device), device

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.to(self.device))
        return logits


def released_ms(experiment: Experiment, device: torch.device, batch: int, seconds: float) -> float:
    """A step of the released computation, at its own width: network on the device, amplitude step on the CPU."""
    images, targets = images_and_targets(experiment, batch)
    masks = experiment.network.name == "unet"
    network = _Sent(ReleasedUNet() if masks else released_densenet(), device)
    training = ReleasedTraining(network, tuple(images.shape[1:]), experiment.training.optimizer, masks)
    there = targets.to(device)
    return medians_ms({"step": lambda: training.step(images, there)}, device=device, seconds=seconds)["step"]
