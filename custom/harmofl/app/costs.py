"""What training will cost a site: memory from the network's saved activations, time from a few real steps."""

import time
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harmofl.core.layout import placed
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, build_optimizer, fit_round, predict
from harmofl.experiment import Experiment, ExperimentError
from harmofl.flare.local_amplitude import build_normalization
from harmofl.tasks import load_task, untrained_network

PROCESS_BYTES = 700 * 2**20  # of a site's process with torch, MONAI and FLARE before any data
# Measured on a CPU at 384 x 384: convolutions need about a quarter more than what autograd keeps.
WORKSPACE = 1.25
COPIES = 5  # of the parameters: weights, gradients, two moments, the weights before the perturbation
CONTEXT_BYTES = 512 * 2**20  # of a process on a GPU before any data
SPARED = 0.8  # share of the free memory that training may fill; the sites' volumes need the rest
LONGEST_MEASUREMENT = 5.0  # seconds
PASSES = 6  # a step is twice a forward and a backward pass, and a backward pass costs two forward ones


@dataclass(frozen=True)
class Pace:
    """Seconds an image takes in training (both passes) and in prediction, and how that was measured."""

    training: float
    prediction: float
    how: str


def training_bytes(experiment: Experiment) -> int:
    """Memory of training one batch, beside the process itself and the site's volumes; nothing is computed for it."""
    task, settings, data = load_task(experiment), experiment.training, experiment.data
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (tensor, storage.nbytes())  # the tensor is held so that no address is used twice
        return tensor

    with torch.device("meta"):
        network = _network(experiment)
        images = torch.zeros(settings.batch_size, task.in_channels, data.height, data.width)
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = network(images)  # the graph must outlive the sum
    activations = sum(size for address, (_, size) in kept.items() if address not in weights)
    del output
    halved = 2 if settings.precision in ("bfloat16", "float16") else 1  # auto may be float32
    parameters = sum(parameter.numel() * 4 for parameter in network.parameters())
    # FedProx keeps the parameters received, MOON the model received and the site's own of the round before
    copies = COPIES + (settings.proximal_mu > 0) + 2 * (settings.contrastive_weight > 0)
    return int(copies * parameters + WORKSPACE * activations / halved)


def fitting_processes(experiment: Experiment, beside: int = 0, *, together: int = 0) -> int:
    """How many processes can train at a time in the memory that is free on this machine and its GPU, at least 1.

    Args:
        experiment: that they train.
        beside: bytes that each of them holds besides training.
        together: bytes that all of them hold once.
    """
    training, usable = training_bytes(experiment), SPARED * psutil.virtual_memory().available - together
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        on_device = int(SPARED * free / (CONTEXT_BYTES + training))
        return max(1, min(on_device, int(usable / (PROCESS_BYTES + beside))))
    return max(1, int(usable / (PROCESS_BYTES + beside + training)))


def measure_pace(experiment: Experiment) -> Pace:
    """Time real training steps on random images of the experiment's size, for a few seconds.

    Batches shrink to one image where a whole one would take long: time grows in proportion to the images.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    place = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    network = placed(_network(experiment), device)
    first = _step_seconds(experiment, network, images=1, steps=1)
    if first > LONGEST_MEASUREMENT:
        how = f"one step with one image, which took {first:.0f} s, so no more were measured; {place}"
        return Pace(first, first / PASSES, how)
    batch = experiment.training.batch_size
    second = _step_seconds(experiment, network, images=1, steps=1)  # the first one also warmed up
    images = batch if batch * second < LONGEST_MEASUREMENT else 1
    steps = max(1, min(10, int(LONGEST_MEASUREMENT / (images * second))))
    seconds = _step_seconds(experiment, network, images, steps) / images
    how = f"{steps} step{'s' * (steps > 1)} with {images} image{'s' * (images > 1)}; {place}"
    return Pace(seconds, _prediction_seconds(experiment, network), how)


def _network(experiment: Experiment) -> nn.Module:
    try:
        return untrained_network(experiment)
    except ValueError as error:
        raise ExperimentError(str(error)) from None


def _random_images(experiment: Experiment, count: int) -> Tensor:
    channels, data = load_task(experiment).in_channels, experiment.data
    return torch.rand(count, channels, data.height, data.width, generator=torch.Generator().manual_seed(0))


def _step_seconds(experiment: Experiment, network: nn.Module, images: int, steps: int) -> float:
    """Mean seconds of a step of the code that trains, augmentation and normalization included."""
    task, settings = load_task(experiment), experiment.training
    inputs = _random_images(experiment, images)
    with torch.device("meta"):
        classes_and_places = _network(experiment)(torch.zeros(1, *inputs.shape[1:])).shape
    targets = (torch.rand(images, *classes_and_places[2:]) > 0.5).long()
    base = build_optimizer(
        network, settings.optimizer, settings.learning_rate, settings.momentum, settings.weight_decay
    )
    round_settings = RoundSettings(images, steps, settings.augmentation, settings.clip_norm, settings.precision)
    normalization = build_normalization(experiment, task.in_channels).to(next(network.parameters()).device)
    optimizer = WeightPerturbation(base, experiment.perturbation.alpha, network)
    started = time.perf_counter()
    fit_round(
        network,
        normalization,
        optimizer,
        task.loss(),
        TensorDataset(inputs, targets),
        settings=round_settings,
        seed=0,
    )
    return (time.perf_counter() - started) / steps


def _prediction_seconds(experiment: Experiment, network: nn.Module) -> float:
    task, precision = load_task(experiment), experiment.training.precision
    normalization = build_normalization(experiment, task.in_channels).to(next(network.parameters()).device)
    started = time.perf_counter()
    predict(network, normalization, _random_images(experiment, 1), 1, precision)
    return time.perf_counter() - started
