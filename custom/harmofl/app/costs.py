"""What training will cost a site: memory from the network's saved activations, time from a few real steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harmofl.app.processor_time import CLOCKS, Clocks, Spent, spent
from harmofl.core.layout import placed
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, build_optimizer, fit_round, predict
from harmofl.data.findings import count_text
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
MOST_STEPS = 10
PASSES = 6  # a step is twice a forward and a backward pass, and a backward pass costs two forward ones


@dataclass(frozen=True)
class Pace:
    """Seconds an image takes on a machine that does nothing else, and how that was measured.

    Attributes:
        training: of an image, both passes.
        prediction: of an image.
        how: of what, in words.
        first: what the first steps and the first prediction of a process take more: they load code and take memory.
        share: of a core, what the work got while it was measured; 1 on a GPU, whose share nobody tells.
    """

    training: float
    prediction: float
    how: str
    first: float = 0.0
    share: float = 1.0

    @property
    def as_busy(self) -> "Pace":
        """The pace while the machine is as busy as it was when this was measured."""
        training, prediction, first = (value / self.share for value in (self.training, self.prediction, self.first))
        return replace(self, training=training, prediction=prediction, first=first)


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


def measure_pace(experiment: Experiment, clocks: Clocks = CLOCKS) -> Pace:
    """Time real training steps on random images of the experiment's size, for a few seconds.

    Batches shrink to one image where a whole one would take long: time grows in proportion to the images. The first
    step of the process and of each size is left out. On a CPU it is processor time that counts (`Spent.idle`); a GPU's
    cannot be told from outside, so there it is the time on the wall until the GPU has done its work.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = placed(_network(experiment), device)

    def step(images: int, steps: int = 1) -> Spent:
        return _timed(_training(experiment, network, shape, images, steps), device, clocks)

    def seconds(taken: Spent) -> float:
        return taken.idle if device.type == "cpu" else taken.wall

    shape, looked = spent(lambda: _answer_shape(experiment, network), clocks)
    first, second = looked + step(1), step(1)
    once = [seconds(first) - seconds(second)]
    slow = seconds(second) > LONGEST_MEASUREMENT
    batch = experiment.training.batch_size
    images = batch if batch * seconds(second) < LONGEST_MEASUREMENT else 1
    steps = 1 if slow else max(1, min(MOST_STEPS, int(LONGEST_MEASUREMENT / (images * seconds(second)))))
    larger = step(images) if images > 1 else None
    taken = second if slow else step(images, steps)
    if larger:
        once.append(seconds(larger) - seconds(taken) / steps)
    training, measured = seconds(taken) / (images * steps), first + second + taken
    if slow:
        prediction = training / PASSES
    else:
        predict_all = _prediction(experiment, network, images)
        early, predicted = (_timed(predict_all, device, clocks) for _ in range(2))
        prediction, measured = seconds(predicted) / images, measured + predicted
        once.append(seconds(early) - seconds(predicted))
    share = measured.share if device.type == "cpu" else 1.0
    how = _how(images, steps, device, taken)
    if slow:
        how += f"; it took {training:.0f} s, so no more were measured"
    return Pace(training, prediction, how, sum(max(0.0, more) for more in once), share)


def _timed(work: Callable[[], object], device: torch.device, clocks: Clocks) -> Spent:
    def until_done() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return spent(until_done, clocks)[1]


def _how(images: int, steps: int, device: torch.device, taken: Spent) -> str:
    done = f"{count_text(steps, 'step')} of {count_text(images, 'image')} after the first"
    if device.type == "cuda":
        return f"{done}, by the clock on {torch.cuda.get_device_name()}, other work on it included"
    threads = torch.get_num_threads()
    at_work = f", {taken.threads:.1f} of them at work" if threads > 1 else ""
    return f"{done}, processor time on {count_text(threads, 'thread')}{at_work}"


def _network(experiment: Experiment) -> nn.Module:
    try:
        return untrained_network(experiment)
    except ValueError as error:
        raise ExperimentError(str(error)) from None


def _random_images(experiment: Experiment, count: int) -> Tensor:
    channels, data = load_task(experiment).in_channels, experiment.data
    return torch.rand(count, channels, data.height, data.width, generator=torch.Generator().manual_seed(0))


def _answer_shape(experiment: Experiment, network: nn.Module) -> torch.Size:
    """Classes, and places where there are any, of what the network answers of an image."""
    with torch.no_grad():
        answer: Tensor = network(_random_images(experiment, 1).to(next(network.parameters()).device))
    return answer.shape[1:]


def _training(
    experiment: Experiment, network: nn.Module, shape: torch.Size, images: int, steps: int
) -> Callable[[], object]:
    """Steps of the code that trains, augmentation and normalization included."""
    task, settings = load_task(experiment), experiment.training
    inputs = _random_images(experiment, images)
    targets = (torch.rand(images, *shape[1:]) > 0.5).long()
    round_settings = RoundSettings(images, steps, settings.augmentation, settings.clip_norm, settings.precision)
    normalization = build_normalization(experiment, task.in_channels).to(next(network.parameters()).device)

    def train() -> None:
        base = build_optimizer(
            network, settings.optimizer, settings.learning_rate, settings.momentum, settings.weight_decay
        )
        fit_round(
            network,
            normalization,
            WeightPerturbation(base, experiment.perturbation.alpha, network),
            task.loss(),
            TensorDataset(inputs, targets),
            settings=round_settings,
            seed=0,
        )

    return train


def _prediction(experiment: Experiment, network: nn.Module, images: int) -> Callable[[], object]:
    task, precision = load_task(experiment), experiment.training.precision
    normalization = build_normalization(experiment, task.in_channels).to(next(network.parameters()).device)
    inputs = _random_images(experiment, images)
    return lambda: predict(network, normalization, inputs, images, precision)
