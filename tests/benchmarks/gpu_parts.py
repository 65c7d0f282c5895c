"""What stands around the training step where a device trains: loader, evaluation, and the server's part."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from harmofl.core.aggregation import StreamingMean
from harmofl.core.device_kinds import kind_of
from harmofl.core.loading import batches
from harmofl.core.training import array_difference, load_arrays, predict, state_arrays
from tests.benchmarks.device_clock import medians_ms
from tests.benchmarks.gpu_step import Step

BATCHES = 4  # of a measured epoch


class _Stored(Dataset[tuple[Tensor, Tensor]]):
    """Images that are kept in half precision, as the package's tasks keep theirs."""

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.images, self.targets = images.half(), targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        return self.images[item].float(), self.targets[item]

    def stored(self, item: int) -> tuple[Tensor, Tensor]:
        return self.images[item], self.targets[item]


def loading(step: Step, seconds: float) -> dict[str, Any]:
    """Batches to the device by the loader against bare copies, and a round with all of it against its steps alone."""
    images, targets = step.host_images.repeat(BATCHES, 1, 1, 1), torch.cat([step.host_targets] * BATCHES)
    data, half = _Stored(images, targets), step.host_images.half()
    pinned = half.pin_memory() if kind_of(step.device).pinned_copies else half

    def loaded() -> None:
        for _ in batches(data, step.batch, None, 0, step.device):
            pass

    def copied(source: Tensor) -> None:
        for _ in range(BATCHES):
            source.to(step.device, non_blocking=True).float()

    works = {
        "loader": loaded,
        "pinned": lambda: copied(pinned),
        "pageable": lambda: copied(half),
        "round": lambda: step.round_of(BATCHES),
        "steps": lambda: [step.whole() for _ in range(BATCHES)],
    }
    found = medians_ms(works, device=step.device, seconds=seconds * len(works))
    return {
        "batches": BATCHES,
        "loader_ms": round(found["loader"], 3),
        "loader_over_pinned_copy": round(found["loader"] / found["pinned"], 3),
        "pageable_over_pinned_copy": round(found["pageable"] / found["pinned"], 3),
        "round_over_its_steps": round(found["round"] / found["steps"], 3),
    }


def prediction(step: Step, seconds: float) -> dict[str, Any]:
    """Logits of images in the machine's memory, back there, against the bare network on the device."""

    @torch.no_grad()
    def bare() -> None:
        step.network.eval()
        step.logits(step.images.contiguous(memory_format=step.layout))
        step.network.train()

    works = {
        "predict": lambda: predict(step.network, step.layer, step.host_images, step.batch, step.precision),
        "bare": bare,
    }
    found = medians_ms(works, device=step.device, seconds=seconds * len(works))
    return {
        "predicted_images_per_second": round(1000 * step.batch / found["predict"], 1),
        "predict_over_bare_pass": round(found["predict"] / found["bare"], 3),
    }


def serving(step: Step, seconds: float) -> dict[str, Any]:
    """A contribution's way: off the device, as a difference, into the server's sum, and the next model back."""
    arrays = state_arrays(step.network)
    difference = array_difference(arrays, arrays)
    mean = StreamingMean(arrays)
    works = {
        "off_the_device": lambda: state_arrays(step.network),
        "onto_the_device": lambda: load_arrays(step.network, arrays),
        "sum": lambda: mean.add(difference, 1),
        "read": lambda: sum(float(array.sum()) for array in difference.values()),
    }
    found = medians_ms(works, device=step.device, seconds=seconds * len(works))
    over = round(found["sum"] / found["read"], 3)
    return {f"{name}_ms": round(spent, 3) for name, spent in found.items()} | {"sum_over_one_read": over}
