"""Several processes that train on the batches of one site together, by torch's DistributedDataParallel.

A process takes the images rank::size of a batch. Loss, amplitude statistics and gradient are those of the whole batch
in every process, so that N processes take the steps that one would take, up to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, Sampler


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those that share a site's batches; with more than one, torch's process group is open.

    A batch with fewer images than processes is not split: each takes all of it, and the mean of equal gradients is
    that gradient.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    def splits(self, count: int) -> bool:
        """Whether a batch of `count` images is split."""
        return 1 < self.size <= count

    def rows(self, count: int) -> slice:
        """Which images of a batch of `count` this process takes."""
        return slice(self.rank, None, self.size) if self.splits(count) else slice(None)

    def gathered(self, own: Tensor, count: int) -> Tensor:
        """The rows of a whole batch in its order, from those that each process has; gradient flows to the own ones.

        Args:
            own: (b, ...), the rows `rows(count)` of the batch; other dimensions and type are those of all processes.
            count: images of the batch.

        Returns:
            (count, ...), equal in all processes.
        """
        if not self.splits(count):
            return own
        most = -(-count // self.size)
        padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])]).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(parts, padded.detach())
        parts[self.rank] = padded
        # row i of process r is image i * size + r; what was padded comes last
        return torch.stack(parts, dim=1).flatten(0, 1)[:count]

    def total(self, loss: Tensor, terms: Sequence[Tensor], count: int) -> Tensor:
        """The loss of a whole batch with a method's terms; its mean gradient over processes is that of the whole batch.

        Args:
            loss: of the gathered logits, a scalar that is equal in all processes.
            terms: scalars, each the mean of something over the own images or a function of the weights alone.
            count: images of the batch.
        """
        if not self.splits(count):
            return sum(terms, start=loss)
        share = len(range(count)[self.rows(count)]) / count
        own = share * sum(terms, start=torch.zeros_like(loss))
        value = own.detach().clone()
        if terms:
            distributed.all_reduce(value)
        # the gradients are divided by the number of processes where they are summed
        weighted: Tensor = _Valued.apply(self.size * (loss + own), loss.detach() + value)
        return weighted

    def wrapped(self, network: nn.Module) -> nn.Module:
        """The network for forward passes whose gradients are the mean over processes; parameters stay the same ones.

        All processes begin with the weights of process 0. Batch norm layers become synchronized ones in place, which
        take the statistics of the whole batch; torch has them for GPUs only. In a batch that is not split they count
        each image once a process, which the running variance shows where few values stand behind it.
        """
        if self.size == 1:
            return network
        if has_batch_norm(network):
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        return nn.parallel.DistributedDataParallel(network, forward_sync_buffers=False)


ALONE = ProcessGroup()


class ShardSampler(Sampler[list[int]]):
    """Of each batch of another sampler the items that a process takes, in the batch's order."""

    def __init__(self, whole: BatchSampler, group: ProcessGroup) -> None:
        """Bind to the sampler of whole batches, which is drawn from as without this one."""
        self._whole, self._group = whole, group

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._whole:
            yield batch[self._group.rows(len(batch))]

    def __len__(self) -> int:
        return len(self._whole)


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network has layers that mix the images of a batch."""
    return any(isinstance(module, _BatchNorm) for module in network.modules())


class _Valued(torch.autograd.Function):
    """Passes the gradient to the loss, and shows another value, also where the loss is not finite."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
