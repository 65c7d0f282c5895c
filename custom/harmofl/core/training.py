"""One round of local training and the prediction that goes with it."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.augmentation import flip_and_rotate
from harmofl.core.device_kinds import kind_of, precision_in_effect
from harmofl.core.kept_memory import kept_memory
from harmofl.core.layout import memory_format
from harmofl.core.loading import Numbered, batches
from harmofl.core.optimizers import SGD, Adam
from harmofl.core.parallel import ALONE, ProcessGroup
from harmofl.core.perturbation import WeightPerturbation

Arrays = Mapping[str, np.ndarray]

Loss = Callable[[Tensor, Tensor], Tensor]
LossTerm = Callable[[Tensor], Tensor]
# Of a batch that is predicted on a CPU. Measured with one thread: U-Net at 384 x 384 one image at a time 1.3 times as
# fast as 8, at 256 x 256 4 images 1.1 times as fast as 16, DenseNet at 96 x 96 32 images 1.6 times as fast as 128;
# twice as many pixels are slower for all three, half as many for the DenseNet.
PREDICTED_PIXELS = 2**18
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line without paths or patient names."""


class NotFiniteError(TrainingError):
    """A model gives logits that are not finite, from which no class follows."""


class TrainingStoppedError(RuntimeError):
    """The abort signal was seen between two batches."""


@dataclass(frozen=True)
class RoundSettings:
    """What one round of local training needs to know."""

    batch_size: int
    epochs: int
    augmentation: str
    clip_norm: float | None
    precision: str
    workers: int = 0
    compile: bool = False


@dataclass(frozen=True)
class RoundResult:
    """What one round of local training did; the loss, with a method's terms, is that of the unperturbed weights."""

    steps: int
    skipped_steps: int
    images: int
    loss: float


def seed_of(seed: int, site: str, round_number: int) -> int:
    """A 63-bit seed that depends on run seed, site and round alone, equal on every platform."""
    digest = hashlib.sha256(f"{seed}/{site}/{round_number}/train".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream_seed(seed: int, purpose: str, epoch: int = 0) -> int:
    """A 63-bit seed for one purpose within a round, so that what is drawn for another purpose moves nothing.

    Args:
        seed: of the round, see `seed_of`.
        purpose: what is drawn, such as `order`.
        epoch: of the round, from 0.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def build_optimizer(network: nn.Module, name: str, learning_rate: float, momentum: float, decay: float) -> Any:
    """Adam or SGD over all parameters, in the fused form where the device has one."""
    parameters = list(network.parameters())
    if name == "adam":
        return Adam(parameters, lr=learning_rate, weight_decay=decay, fused=True)
    return SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=decay, fused=True)


def autocast(device: torch.device, precision: str) -> Any:
    """Mixed precision where `precision_in_effect` is `bfloat16` or `float16`, else nothing."""
    dtype = _DTYPES.get(precision_in_effect(device, precision))
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def compiled(network: nn.Module) -> nn.Module:
    """A network whose forward pass runs through torch.compile, with the same parameters; compiled when first called.

    Neither network nor compiler may choose channels_last: the code that torch 2.13 makes for the gradient of the
    U-Net's padding expects the other layout and stops.
    """
    return cast(nn.Module, torch.compile(network, options={"layout_optimization": False}))


def fit_round(
    network: nn.Module,
    normalization: AmplitudeNormalization,
    optimizer: WeightPerturbation,
    loss: Loss,
    dataset: "Dataset[tuple[Tensor, Tensor]]",
    *,
    settings: RoundSettings,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    terms: Sequence[LossTerm] = (),
    group: ProcessGroup = ALONE,
) -> RoundResult:
    """Train `network` in place for one round (Algorithm 1, inner loop).

    A batch is augmented, observed once by the amplitude statistics, normalized once, and used by both passes of the
    perturbed step.

    Args:
        network: as `harmofl.core.layout.placed` leaves it, with `settings.compile`.
        normalization: on the same device; its statistics move unless it is frozen.
        optimizer: around the network's parameters.
        loss: scalar loss of logits in float32 and targets.
        dataset: items (image (C, H, W) float32, target).
        settings: batch size, epochs and precision.
        seed: decides the order of the images, the augmentation and whatever network and loss draw from torch's own
            generators (dropout, noise), each by a generator of its own; nothing else does, the number of loader
            processes neither. Torch's generators are left as they were.
        should_stop: asked before every batch.
        terms: added to the loss of each pass, called with the normalized batch after the network has seen it; each the
            mean of something over images or a function of the weights alone.
        group: the processes that share each batch, all of which call this with equal arguments; the result is that
            of one process up to rounding, and equal in all.

    Raises:
        TrainingError: the data set is empty, or not one step had finite loss and gradients above 0.
        TrainingStoppedError: `should_stop` said so.
    """
    device = next(network.parameters()).device
    scaler = torch.amp.GradScaler(device.type) if settings.precision == "float16" else None
    model = group.wrapped(compiled(network) if settings.compile else network)
    layout = memory_format(network, settings.compile)

    def batch_loss(inputs: Tensor, targets: Tensor, count: int) -> Tensor:
        with autocast(device, settings.precision):
            logits = model(inputs)
        own = loss(group.gathered(logits.float(), count), targets)
        return group.total(own, [term(inputs) for term in terms], count)

    losses: list[Tensor] = []
    skipped: int | Tensor = 0
    images_seen = 0
    network.train()
    with kept_memory(device), _own_random_state(device, stream_seed(seed, "network")):
        for images, targets, count, items in _augmented_batches(dataset, settings, seed, device, group):
            if should_stop():
                raise TrainingStoppedError("stopped between two batches")
            normalization.observe(images, partial(group.gathered, count=count), items)
            normalized = normalization(images).contiguous(memory_format=layout)
            closure = partial(batch_loss, normalized, group.gathered(targets, count), count)
            outcome = optimizer.step(closure, scaler, settings.clip_norm)
            skipped = skipped + outcome.skipped
            losses.append(outcome.loss)
            images_seen += count
    return _finished(losses, int(skipped), images_seen)


@contextmanager
def _own_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's own generators, on the CPU and on a device, seeded for a while and then as before."""
    with torch.random.fork_rng(devices=[device] if kind_of(device).own_generator else []):
        torch.manual_seed(seed)
        yield


def _finished(losses: list[Tensor], skipped: int, images: int) -> RoundResult:
    """What a round did; loss and skipped steps stay on the device until here, for to read them is to wait."""
    if not losses:
        raise TrainingError("no training image: the training split is empty")
    if skipped == len(losses):
        raise TrainingError(
            f"none of {skipped} steps had finite loss and gradients above 0; lower training.learning_rate, or, where "
            "the loss is 0, do the targets hold anything that counts?"
        )
    every = torch.stack(losses)
    # a step whose loss is not finite was skipped, and says nothing of the others
    return RoundResult(len(losses), skipped, images, float(torch.where(every.isfinite(), every, torch.nan).nanmean()))


def _augmented_batches(
    dataset: "Dataset[tuple[Tensor, Tensor]]",
    settings: RoundSettings,
    seed: int,
    device: torch.device,
    group: ProcessGroup,
) -> Iterator[tuple[Tensor, Tensor, int, Tensor]]:
    """This process's part of the shuffled batches of all epochs of a round, augmented on the device.

    With each come the number of images of the whole batch, and of each image of the part its number in the data set.
    """
    numbered = Numbered(dataset)
    for epoch in range(settings.epochs):
        # Loaders draw ahead of what is trained on, as far as they have processes: nothing may share their generator.
        order, augmentation = (
            torch.Generator().manual_seed(stream_seed(seed, purpose, epoch)) for purpose in ("order", "augmentation")
        )
        left = len(numbered)
        of_epoch = batches(numbered, settings.batch_size, order, settings.workers, device, group=group)
        for images, targets, items in of_epoch:
            count = min(settings.batch_size, left)
            left -= count
            if settings.augmentation == "flip_rotate":
                yield *flip_and_rotate(images, targets, augmentation, count, group.rows(count)), count, items
            else:
                yield images, targets, count, items


@torch.no_grad()
def predict(
    network: nn.Module,
    normalization: AmplitudeNormalization,
    images_BCHW: Tensor,
    batch_size: int,
    precision: str = "float32",
) -> Tensor:
    """Logits of images in order, on the CPU in float32, with network and normalization left as they are.

    Batches are cut to equal composition for a given input, but only networks with `instance` or tracked `batch` norm
    give one image alone the same answer as in a batch; theirs are smaller on a CPU where that is faster.

    Raises:
        NotFiniteError: a logit is not finite; the largest of such logits may be any class, so that it is no answer.
    """
    device, layout = next(network.parameters()).device, memory_format(network)
    was_training = network.training
    network.eval()
    try:
        parts = []
        for part in images_BCHW.split(_predicted_at_once(network, images_BCHW, batch_size, device)):
            normalized = normalization(part.to(device)).contiguous(memory_format=layout)
            with autocast(device, precision):
                logits = network(normalized)
            parts.append(logits.float().cpu())
        return finite_logits(torch.cat(parts))
    finally:
        network.train(was_training)


def _predicted_at_once(network: nn.Module, images_BCHW: Tensor, batch_size: int, device: torch.device) -> int:
    """How many images to predict at a time: on a CPU so many that what lies between two layers stays in its caches."""
    batch_norms = (module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    if device.type != "cpu" or any(module.running_mean is None for module in batch_norms):
        return batch_size
    pixels = images_BCHW.shape[-2] * images_BCHW.shape[-1]
    return max(1, min(batch_size, PREDICTED_PIXELS // pixels))


def finite_logits(logits: Tensor) -> Tensor:
    """Logits (B, classes, ...) as they are.

    Raises:
        NotFiniteError: one of them is not finite; says of how many images.
    """
    usable = logits.flatten(1).isfinite().all(1)
    if bool(usable.all()):
        return logits
    raise NotFiniteError(f"the model's output is not finite for {int((~usable).sum())} of {len(logits)} images")


def state_arrays(network: nn.Module) -> dict[str, np.ndarray]:
    """The network's state as NumPy copies: float entries in float32, counters in their own type."""
    arrays = {}
    for name, entry in network.state_dict().items():
        value = entry.detach().cpu()
        arrays[name] = (value.float() if value.is_floating_point() else value).contiguous().numpy().copy()
    return arrays


def arrays_sha256(arrays: Arrays) -> str:
    """SHA-256 over names, types, shapes and bytes of a model's entries, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def load_arrays(network: nn.Module, arrays: Arrays) -> None:
    """Load NumPy entries into a network, each in its own shape and type.

    Raises:
        TrainingError: names or shapes differ; gives the first three.
    """
    state = network.state_dict()
    differing = sorted(set(state) ^ set(arrays))
    differing += [name for name in state if name in arrays and np.shape(arrays[name]) != tuple(state[name].shape)]
    if differing:
        raise TrainingError(f"the model received does not fit this network: {', '.join(differing[:3])}")
    network.load_state_dict(
        {name: torch.as_tensor(np.asarray(arrays[name])).reshape(v.shape).to(v.dtype) for name, v in state.items()}
    )


def array_difference(before: Arrays, after: Arrays) -> dict[str, np.ndarray]:
    """What training added, entry by entry, in the entry's own type.

    Raises:
        TrainingError: an entry is not finite, which must not leave the site.
    """
    difference = {}
    for name, old in before.items():
        change = after[name] - old
        if not math.isfinite(float(np.sum(change, dtype=np.float64))):
            raise TrainingError(f"training left values that are not finite in {name}; lower training.learning_rate")
        difference[name] = change
    return difference
