"""Which entries of a network's state are averaged over sites and which take the maximum."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """Names of a state dict's entries by what the server does with them."""

    averaged: tuple[str, ...]
    maximum: tuple[str, ...]

    @property
    def shared(self) -> tuple[str, ...]:
        """Every entry that travels."""
        return self.averaged + self.maximum


def partition_state(state: dict[str, Tensor]) -> Partition:
    """Split a state dict: floating entries are averaged, counters and flags take the maximum over sites.

    A counter such as `num_batches_tracked` averaged as a float would come back as a fraction.
    """
    averaged = tuple(name for name, value in state.items() if torch.is_floating_point(value))
    maximum = tuple(name for name, value in state.items() if not torch.is_floating_point(value))
    return Partition(averaged, maximum)
