"""Batches are the items of the data set, whatever type it keeps them in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from harmofl.core.loading import batches
from harmofl.data.nuclei import NucleiImage
from harmofl.data.patches import Patches
from harmofl.data.tiles import NucleiTiles
from harmofl.data.volumes import Volume
from harmofl.data.windows import SliceWindows
from tests.wilds import write_site

RANDOM = np.random.default_rng(0)


class InBytes(Dataset[tuple[Tensor, Tensor]]):
    """Ten one-pixel images, 0 to 9 of 255."""

    def __init__(self) -> None:
        self.floats_asked = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        self.floats_asked += 1
        return torch.full((1, 1, 1), item / 255), torch.tensor(item)

    def stored(self, item: int) -> tuple[Tensor, Tensor]:
        return torch.full((1, 1, 1), item, dtype=torch.uint8), torch.tensor(item, dtype=torch.uint8)


def test_what_is_stored_is_gathered_in_place_of_floats() -> None:
    dataset = InBytes()
    images, targets = next(batches(dataset, 10, None))
    assert dataset.floats_asked == 0
    assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
    # a byte k stands for the float32 that is nearest to k / 255
    assert torch.equal(images.flatten(), torch.from_numpy((np.arange(10) / 255).astype(np.float32)))
    assert targets.tolist() == list(range(10))


def test_the_order_depends_on_the_generator_alone() -> None:
    plain = TensorDataset(torch.arange(10.0), torch.arange(10))
    of_both = [
        [int(target) for _, batch in batches(data, 3, torch.Generator().manual_seed(4)) for target in batch]
        for data in (InBytes(), plain)
    ]
    assert of_both[0] == of_both[1] != sorted(of_both[0]) == list(range(10))


def test_targets_that_are_floats_stay() -> None:
    _, targets = next(batches(TensorDataset(torch.zeros(2), torch.tensor([0.5, 1.5])), 2, None))
    assert targets.tolist() == [0.5, 1.5]


def windows(tmp_path: Path) -> SliceWindows:
    def volume(name: str, depth: int, dtype: type) -> Volume:
        image = RANDOM.random((depth, 6, 4)).astype(dtype)
        return Volume(name, image, RANDOM.integers(0, 2, (depth, 6, 4), np.uint8), (1.0, 1.0, 1.0), ())

    return SliceWindows([volume("a", 5, np.float16), volume("b", 1, np.float16), volume("c", 2, np.float16)], "all")


def tiles(tmp_path: Path) -> NucleiTiles:
    picture, target = RANDOM.integers(0, 256, (9, 13, 3), np.uint8), RANDOM.integers(0, 2, (9, 13), np.uint8)
    small = NucleiImage("b", "b", picture[:4].copy(), target[:4].copy(), ())
    return NucleiTiles([NucleiImage("a", "a", picture, target, ()), small], 8)


def patches(tmp_path: Path) -> Patches:
    index = write_site(tmp_path, 5)
    return Patches(index, np.arange(len(index)), 6, 8)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [windows, tiles, patches])
def test_every_data_set_gives_its_items_bit_for_bit(tmp_path: Path, make, workers: int) -> None:
    dataset = make(tmp_path)
    images, targets = (torch.stack(part) for part in zip(*(dataset[item] for item in range(len(dataset))), strict=True))
    assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
    for size in (2, len(dataset)):
        parts = list(batches(dataset, size, None, workers))
        assert torch.equal(torch.cat([part for part, _ in parts]), images)
        assert torch.equal(torch.cat([part for _, part in parts]), targets)
