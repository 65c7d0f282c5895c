"""2.5D windows: every slice with its neighbors as channels, gathered when asked for."""

from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from harmofl.data.splits import SliceKey
from harmofl.data.volumes import Volume
from harmofl.data.voxels import blank_slices

SliceChoice = Literal["all", "foreground", "published"]


class SliceWindows(Dataset[tuple[Tensor, Tensor]]):
    """The slices of several volumes, each as (2 n + 1, H, W) float32 with its (H, W) int64 mask.

    Stacking the windows beforehand would take three times the memory. The border slice stands in for neighbors that
    do not exist.

    Args:
        volumes: volumes of one size.
        slices: ``all``; ``foreground``, slices that hold prostate; ``published``, as the released loader: those
            without the first and the last slice of each volume.
        neighbors: slices on each side.
        only: further restriction to these (case, slice) pairs, as a slice-wise split gives them.

    Attributes:
        keys: the (case, slice) of each window.
        without_window: names of the volumes that give none.
    """

    def __init__(
        self,
        volumes: Sequence[Volume],
        slices: SliceChoice = "foreground",
        neighbors: int = 1,
        only: Collection[SliceKey] | None = None,
    ) -> None:
        self.volumes = list(volumes)
        self.neighbors = neighbors
        chosen = None if only is None else set(only)
        self._index = [
            (position, index)
            for position, volume in enumerate(self.volumes)
            for index in chosen_slices(volume, slices)
            if chosen is None or (volume.name, index) in chosen
        ]
        self.keys: list[SliceKey] = [(self.volumes[position].name, index) for position, index in self._index]
        giving = {position for position, _ in self._index}
        self.without_window = tuple(v.name for position, v in enumerate(self.volumes) if position not in giving)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._index)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        """Return image (2 n + 1, H, W) float32 and mask (H, W) int64 of one window."""
        image, mask = self.stored(item)
        return image.float(), mask.long()

    def stored(self, item: int) -> tuple[Tensor, Tensor]:
        """Return the same window in the types of the volume, a view of it where no border is near."""
        position, index = self._index[item]
        volume, reach = self.volumes[position], self.neighbors
        inside = reach <= index < len(volume.image) - reach
        taken = slice(index - reach, index + reach + 1) if inside else _neighborhood(index, len(volume.image), reach)
        return torch.from_numpy(volume.image[taken]), torch.from_numpy(volume.mask[index])


def volume_windows(volume: Volume, neighbors: int = 1) -> Tensor:
    """Return all windows of one volume in order, (S, 2 n + 1, H, W) float32, for evaluation by case."""
    return image_windows(volume.image, neighbors)


def image_windows(image: np.ndarray, neighbors: int = 1) -> Tensor:
    """Return all windows of an image (S, H, W) in order, (S, 2 n + 1, H, W) float32."""
    depth = len(image)
    taken = np.stack([_neighborhood(index, depth, neighbors) for index in range(depth)])
    return torch.from_numpy(image).float()[torch.from_numpy(taken)]


def background_where_blank(labels_SHW: Tensor, image: np.ndarray) -> Tensor:
    """Set the labels of slices without contrast to 0, in place: a network answers from the neighbors of such a slice.

    Args:
        labels_SHW: of any size H, W.
        image: (S, H, W) as the network got its slices.

    Returns:
        The labels.
    """
    labels_SHW[list(blank_slices(image))] = 0
    return labels_SHW


def chosen_slices(volume: Volume, slices: SliceChoice) -> list[int]:
    """Return the slices of a volume that a choice keeps, from feet to head."""
    return slices_of(len(volume.mask), foreground_slices(volume), slices)


def foreground_slices(volume: Volume) -> list[int]:
    """Return the slices of a volume that hold prostate, from feet to head."""
    found: list[int] = np.flatnonzero(volume.mask.reshape(len(volume.mask), -1).any(axis=1)).tolist()
    return found


def slices_of(depth: int, foreground: Sequence[int], slices: SliceChoice) -> list[int]:
    """Return which of `depth` slices a choice keeps, where these hold prostate."""
    if slices == "all":
        return list(range(depth))
    if slices == "published":
        return [index for index in foreground if 0 < index < depth - 1]
    return list(foreground)


def _neighborhood(index: int, depth: int, neighbors: int) -> np.ndarray:
    return np.clip(np.arange(index - neighbors, index + neighbors + 1), 0, depth - 1)
