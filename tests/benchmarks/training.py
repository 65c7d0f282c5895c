"""The training step against two passes of the bare network, the perturbation, a site's round against a plain loop.

What trains against the cost of the released code's computation stands in `training_released.py`.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from harmofl.app.job import read_job
from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.kept_memory import kept_memory
from harmofl.core.layout import placed
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import (
    RoundSettings,
    build_optimizer,
    fit_round,
    load_arrays,
    predict,
    seed_of,
    state_arrays,
)
from harmofl.experiment import Experiment
from harmofl.flare.local_amplitude import build_normalization
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig
from harmofl.flare.wire import ModelMessage
from harmofl.tasks import load_task, untrained_network
from tests.benchmarks.rows import Row, ratio

JOBS = Path(__file__).resolve().parents[2] / "jobs"
CPU = torch.device("cpu")
LAYOUTS = (torch.channels_last, torch.contiguous_format)
STEPS = {"harmofl_prostate": ("U-Net 384", 2), "harmofl_camelyon17": ("DenseNet121 96", 16)}  # images of a batch


def measure() -> list[Row]:
    torch.set_num_threads(1)
    rows = [perturbation(job, name) for job, (name, _) in STEPS.items()]
    rows += [step(job, name, batch) for job, (name, batch) in STEPS.items()]
    return [*rows, executor()]


def resolved(job: str, *changes: str, demo: bool = False) -> Experiment:
    return read_job(JOBS / job, list(changes)).resolve(demo=demo)


def perturbation(job: str, name: str) -> Row:
    network = placed(untrained_network(resolved(job)), CPU)
    parameters = list(network.parameters())
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    optimizer = WeightPerturbation(torch.optim.SGD(parameters, lr=0.0), 0.05)

    def perturb() -> None:
        """With the norm of the gradient, which the reference has not."""
        with optimizer.perturbed():
            pass

    @torch.no_grad()
    def add_and_subtract() -> None:
        torch._foreach_add_(parameters, gradients)
        torch._foreach_sub_(parameters, gradients)

    found = ratio(perturb, add_and_subtract)
    target = "one foreach add and subtract"
    return Row(f"perturbation and exact restore, {name}", target, found.median, 2.0, found.noise)


def images_and_targets(experiment: Experiment, count: int) -> tuple[Tensor, Tensor]:
    data, generator = experiment.data, torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, data.height, data.width, generator=generator)
    masks = experiment.network.name == "unet"
    shape = (count, data.height, data.width) if masks else (count,)
    return images, torch.randint(2, shape, generator=generator)


def step(job: str, name: str, batch: int) -> Row:
    """One step of `fit_round` with all that belongs to it, against two passes without loss, optimizer and data.

    The bare network lies as is fastest of all that is known, which need not be the layout that training has.
    """
    experiment = resolved(job, "training.local_epochs=1")
    images, targets = images_and_targets(experiment, batch)
    network = placed(untrained_network(experiment), CPU)
    layer = frozen_normalization(experiment, images)
    fit = fitting(experiment, network, layer, TensorDataset(images, targets), batch)
    with kept_memory(CPU):  # for both: given back between two turns, it would have to be cleared anew in each
        two_passes = fastest([passes(untrained_network(experiment), images, layout) for layout in LAYOUTS])
        found = ratio(lambda: fit(0), two_passes, seconds=60)
    target = "two passes of the bare network"
    return Row(f"training step, {name}, batch {batch}, CPU", target, found.median, 1.05, found.noise)


def passes(network: nn.Module, images: Tensor, layout: torch.memory_format, times: int = 2) -> Callable[[], None]:
    """Forward and backward of a bare network, some times."""
    network, inputs = network.train().to(memory_format=layout), images.contiguous(memory_format=layout)
    with torch.no_grad():
        gradient = torch.randn_like(network(inputs))

    def run() -> None:
        for _ in range(times):
            network.zero_grad(set_to_none=True)
            network(inputs).backward(gradient)

    return run


def fastest(works: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """What of several works takes the least processor time, each run once before."""

    def spent(work: Callable[[], None]) -> float:
        work()
        started = time.process_time()
        work()
        return time.process_time() - started

    return min(works, key=spent)


def fitting(
    experiment: Experiment,
    network: nn.Module,
    normalization: AmplitudeNormalization,
    dataset: Dataset[tuple[Tensor, Tensor]],
    batch: int,
) -> Callable[[int], object]:
    """What trains a network for one round on a data set with a new optimizer."""
    given, loss = experiment.training, load_task(experiment).loss()
    how = RoundSettings(batch, given.local_epochs, given.augmentation, given.clip_norm, given.precision)
    inner = build_optimizer(network, given.optimizer, given.learning_rate, given.momentum, given.weight_decay)
    optimizer = WeightPerturbation(inner, experiment.perturbation.alpha, network)
    return lambda seed: fit_round(network, normalization, optimizer, loss, dataset, settings=how, seed=seed)


def frozen_normalization(experiment: Experiment, images: Tensor) -> AmplitudeNormalization:
    """The experiment's layer with the amplitude of these images."""
    normalization = build_normalization(experiment, images.shape[1])
    statistic = normalization.statistics(images).mean(0)
    normalization.freeze(statistic, len(images))
    if experiment.amplitude.region == "site_gain":
        normalization.set_own(statistic)
    return normalization


def executor() -> Row:
    """A round of a site's participant, which the executor calls, against scoring and `fit_round` alone.

    What the participant adds: hashes, difference and its check, moments kept on disk, progress and counts.
    """
    experiment = resolved("harmofl_prostate", "training.local_epochs=1", "amplitude.minimum_cases=1", demo=True)
    with tempfile.TemporaryDirectory() as folder:
        config = SiteConfig("HK", True, None, Path(folder), device="cpu", workers=0, threads=1, minimum_cases=1)
        site = Participant(experiment, config, "measured", lambda: False, logging.getLogger("benchmark"))
        received = ModelMessage(state_arrays(untrained_network(experiment)), site.estimate_amplitude().amplitude)
        normalization, settings = site.normalization(received.amplitude), experiment.training

        def plain_loop() -> None:
            network = placed(untrained_network(experiment), CPU)
            load_arrays(network, received.weights)
            fit = fitting(experiment, network, normalization, site.data.training, settings.batch_size)
            load_task(experiment).evaluate(
                lambda images: predict(network, normalization, images, settings.batch_size),
                site.data.validation,
                workers=0,
            )
            fit(seed_of(experiment.seed, "HK", 0))

        found = ratio(lambda: site.train(0, received), plain_loop, seconds=90.0)
    target = "plain loop of scoring and fit_round"
    return Row("executor's round, prostate demo, one epoch", target, found.median, 1.05, found.noise)
