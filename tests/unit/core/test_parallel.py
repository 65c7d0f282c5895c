"""Which images of a batch a process takes, and how batches come together again."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from harmofl.core import parallel
from harmofl.core.augmentation import flip_and_rotate
from harmofl.core.parallel import ALONE, ProcessGroup, ShardSampler, has_batch_norm
from harmofl.core.training import RoundSettings, _augmented_batches

COUNTS = st.integers(1, 40)
SIZES = st.integers(1, 6)


def groups(size: int) -> list[ProcessGroup]:
    return [ProcessGroup(rank, size) for rank in range(size)]


@given(COUNTS, st.integers(1, 9), SIZES)
def test_shards_are_the_batches_in_their_order(items: int, batch_size: int, size: int) -> None:
    whole = BatchSampler(SequentialSampler(range(items)), batch_size, drop_last=False)
    shards = [list(ShardSampler(whole, group)) for group in groups(size)]
    for number, batch in enumerate(whole):
        parts = [shard[number] for shard in shards]
        if len(batch) < size:
            assert all(part == batch for part in parts)
            continue
        assert sorted(item for part in parts for item in part) == batch
        assert all(part == sorted(part) for part in parts)
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 1
    assert {len(ShardSampler(whole, group)) for group in groups(size)} == {len(whole)}


@given(COUNTS, SIZES)
def test_what_was_split_comes_together_in_order(count: int, size: int) -> None:
    rows = torch.arange(2 * count).reshape(count, 2)
    sent: list[Tensor] = []

    def all_gather(parts: list[Tensor], own: Tensor) -> None:
        sent.append(own)
        for part, held in zip(parts, sent, strict=False):
            part.copy_(held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel.distributed, "all_gather", all_gather)
        for group in groups(size):  # the last one gets what all sent
            whole = group.gathered(rows[group.rows(count)], count)
    assert torch.equal(whole, rows)


class Counted(TensorDataset):
    """Notes what is decoded."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.asked: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_processes_decode_their_images_of_the_batches_of_one(workers: int) -> None:
    def seen(group: ProcessGroup, workers: int) -> list[tuple[Tensor, Tensor, int, Tensor]]:
        settings = RoundSettings(4, 2, "flip_rotate", None, "float32", workers)
        return list(_augmented_batches(data, settings, 4, torch.device("cpu"), group))

    images = torch.rand(10, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = Counted(images, torch.arange(10))
    whole = seen(ALONE, 0)
    assert [count for _, _, count, _ in whole] == [4, 4, 2, 4, 4, 2]
    for group in groups(2):
        data.asked.clear()
        for own, (of_all, labels, count, items) in zip(seen(group, workers), whole, strict=True):
            (images, targets, own_count, own_items), rows = own, group.rows(count)
            assert torch.equal(own_items, items[rows])
            assert own_count == count and torch.equal(targets, labels[rows]) and torch.equal(images, of_all[rows])
        if workers == 0:
            assert len(data.asked) == 2 * 5, "no image of the other process"


@pytest.mark.parametrize("shape", [(8, 8), (8, 4)])
@pytest.mark.parametrize("count", [1, 5])
def test_an_image_is_turned_as_in_the_whole_batch(count: int, shape: tuple[int, int]) -> None:
    images = torch.rand(count, 3, *shape, generator=torch.Generator().manual_seed(0))
    masks = (images[:, 0] > 0.5).long()
    whole = flip_and_rotate(images, masks, torch.Generator().manual_seed(1))
    for group in groups(2):
        rows, generator = group.rows(count), torch.Generator().manual_seed(1)
        own = flip_and_rotate(images[rows], masks[rows], generator, count, rows)
        assert all(torch.equal(part, of_all[rows]) for part, of_all in zip(own, whole, strict=True))


def test_one_process_changes_nothing() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert ALONE.wrapped(network) is network and type(network[1]) is nn.BatchNorm1d
    assert has_batch_norm(network) and not has_batch_norm(nn.InstanceNorm2d(2))
    loss, terms = torch.tensor(1.0), [torch.tensor(2.0), torch.tensor(4.0)]
    assert float(ALONE.total(loss, terms, 3)) == 7
