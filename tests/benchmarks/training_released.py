"""What trains, in each preset as the jobs ship it, against the cost of the released code's computation."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from harmofl.core.kept_memory import kept_memory
from harmofl.core.layout import placed
from harmofl.experiment import Experiment
from harmofl.tasks import untrained_network
from tests.benchmarks.released import ReleasedTraining, ReleasedUNet, released_densenet
from tests.benchmarks.rows import Ratio, Row, ratio
from tests.benchmarks.training import CPU, fitting, frozen_normalization, images_and_targets, passes, resolved

TARGET = "the released code's computation"
PUBLISHED = "amplitude.preset=as_published"
SMALL = ("data.height=96", "data.width=96")
EPOCH = 48  # images: three batches of the job's 16


def measure() -> list[Row]:
    torch.set_num_threads(1)
    prostate, patches = "harmofl_prostate", "harmofl_camelyon17"
    return [
        row("training step, default preset, U-Net 384, batch 2", resolved(prostate), 2, 1.0),
        row("training step, default preset, U-Net 384, batch 2", resolved(prostate), 2, None, alike=True),
        row("training step, as_published, U-Net 384, batch 2", resolved(prostate, PUBLISHED), 2, 1 / 1.1),
        convolutions("U-Net 384, batch 2", resolved(prostate), 2),
        row("training step, default preset, DenseNet121 96, batch 16", resolved(patches), 16, 1 / 1.4),
        row("local epoch, default preset, U-Net 96, batch 16", resolved(prostate, *SMALL), 16, 1 / 1.1, EPOCH),
        row("local epoch, default preset, U-Net 96, batch 16", resolved(prostate, *SMALL), 16, None, EPOCH, alike=True),
        row("local epoch, as_published, U-Net 96, batch 16", resolved(prostate, PUBLISHED, *SMALL), 16, 1 / 1.1, EPOCH),
        convolutions("U-Net 96, batch 16", resolved(prostate, *SMALL), 16),
    ]


def row(
    what: str, experiment: Experiment, batch: int, limit: float | None, count: int | None = None, *, alike: bool = False
) -> Row:
    """`fit_round`, with loader and augmentation, against the released steps on batches at hand."""
    images, targets = images_and_targets(experiment, count or batch)
    network = placed(untrained_network(experiment), CPU)
    layer = frozen_normalization(experiment, images)
    fit = fitting(experiment, network, layer, TensorDataset(images.clone(), targets), batch)
    found = against_released(lambda: fit(0), experiment, images, targets, batch, alike=alike)
    target = f"{TARGET}, with memory kept as well" if alike else TARGET
    return Row(f"{what}, CPU", target, found.median, limit, found.noise)


def convolutions(name: str, experiment: Experiment, batch: int) -> Row:
    """Two passes of the network without norm and activation: what no norm layer can go below."""
    images, targets = images_and_targets(experiment, batch)
    network = untrained_network(experiment)
    for module in list(network.modules()):
        for key, layer in list(module.named_children()):
            if isinstance(layer, nn.InstanceNorm2d | nn.LeakyReLU):
                setattr(module, key, nn.Identity())
    found = against_released(passes(network, images, torch.channels_last), experiment, images, targets, batch)
    return Row(f"convolutions alone, two passes, {name}, CPU", f"{TARGET}, a step", found.median, None, found.noise)


def against_released(
    work: Callable[[], object],
    experiment: Experiment,
    images: Tensor,
    targets: Tensor,
    batch: int,
    *,
    alike: bool = False,
) -> Ratio:
    """The ratio of a work to the released steps over some images.

    Ours has the memory that it keeps within a round, and theirs what the C library gives by itself; `alike` gives
    theirs what ours has.
    """
    masks = experiment.network.name == "unet"
    network = ReleasedUNet() if masks else released_densenet()
    released = ReleasedTraining(network, tuple(images.shape[1:]), experiment.training.optimizer, masks)
    inside = ExitStack()
    network_alone = passes(placed(untrained_network(experiment), CPU), images[:batch], torch.channels_last, 1)

    def keep() -> None:
        inside.close()
        inside.enter_context(kept_memory(CPU))
        network_alone()  # a round has many steps, of which the first clears the pages

    with inside:  # the next row begins without kept memory
        return ratio(
            work,
            lambda: released.epoch(images, targets, batch),
            seconds=60,
            before_measured=keep,
            before_reference=keep if alike else inside.close,
        )
