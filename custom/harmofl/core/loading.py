"""Batches of a data set: gathered in the type that it keeps, made float32 on the device."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from harmofl.core.device_kinds import kind_of
from harmofl.core.parallel import ALONE, ProcessGroup, ShardSampler

CPU = torch.device("cpu")


class _AsStored(Dataset[tuple[Tensor, Tensor]]):
    """The items of a data set in the type that it keeps them in."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = self._dataset.stored(item)
        return stored


class Numbered(Dataset[tuple[Tensor, Tensor, int]]):
    """The items of a data set in the type that it keeps them in, each with its number."""

    def __init__(self, dataset: "Dataset[tuple[Tensor, Tensor]]") -> None:
        """Wrap a data set; nothing is read."""
        self._dataset: Any = _AsStored(dataset) if hasattr(dataset, "stored") else dataset

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._dataset)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor, int]:
        """Return image, target and number of an item."""
        image, target = self._dataset[item]
        return image, target, item


def batches(
    dataset: "Dataset[Any]",
    batch_size: int,
    generator: torch.Generator | None,
    workers: int = 0,
    device: torch.device = CPU,
    *,
    group: ProcessGroup = ALONE,
) -> Iterator[tuple[Tensor, ...]]:
    """Batches of a data set, shuffled by `generator` or, without one, in order; the last one may be smaller.

    Where a data set has a method `stored(item)`, which gives an item in the type that it keeps (uint8 stands for
    0..1, float16), batches are gathered, handed on by workers and copied to the device in that type. Of several
    processes each gets its part of every batch and decodes no other image. The batches depend on data set, size and
    generator alone: of as many processes as there may be, each must give an item as the others do, so that no data set
    may draw random numbers.

    Args:
        dataset: items (image, target), images float32.
        batch_size: images.
        generator: decides the order, and serves nothing else until the last batch is taken: processes draw ahead.
        workers: processes that decode.
        device: of the batches.
        group: the processes that share the batches.

    Returns:
        Images (B, C, H, W) float32 and targets, int64 where they are integers, and of a `Numbered` data set the numbers
        of the items, int64, all on the device.
    """
    items: Any = dataset
    shuffled = generator is not None and len(items) > 0  # a shuffle of nothing raises
    order = RandomSampler(items, generator=generator) if shuffled else SequentialSampler(items)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        _AsStored(dataset) if hasattr(dataset, "stored") else dataset,
        batch_sampler=ShardSampler(BatchSampler(order, batch_size, drop_last=False), group),
        generator=_worker_seeds(generator),
        num_workers=workers,
        pin_memory=kind_of(device).pinned_copies,
    )
    # by map: no batch is held here while the next one is made, and its memory serves again
    return map(partial(_placed, device=device), loader)


def _worker_seeds(order: torch.Generator | None) -> torch.Generator:
    """What torch draws the seeds of loader processes from, with or without any: else from the order's or its own."""
    return torch.Generator().manual_seed(0 if order is None else order.initial_seed())


def _placed(batch: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    images, *others = (part.to(device, non_blocking=True) for part in batch)
    return (_float32(images), *map(_labels, others))


def _float32(images: Tensor) -> Tensor:
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


def _labels(targets: Tensor) -> Tensor:
    return targets if targets.is_floating_point() else targets.long()
