"""Which entries of a network's state are averaged, kept at a site, or taken as the maximum: by type, never by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Entry = TypeVar("Entry")

LocalLayers = Literal["none", "norm", "all"]

# MONAI's networks are made of these; its ADN blocks hold them as they are. _NormBase: batch norm and instance norm.
NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Partition:
    """The names of a network's state entries by what happens to them, each in the order of the state.

    Attributes:
        averaged: float entries of which the sites' mean is taken.
        maximum: integer and boolean entries, such as counters of batches, which a mean would break.
        local: entries that never leave a site.
        parameters: those of `averaged` that training moves along gradients; the others are `statistics`.
        variances: those of the statistics that are never below 0.
    """

    averaged: tuple[str, ...]
    maximum: tuple[str, ...]
    local: tuple[str, ...]
    parameters: frozenset[str]
    variances: frozenset[str] = frozenset()

    @property
    def shared(self) -> frozenset[str]:
        """What travels: all that is not local."""
        return frozenset(self.averaged + self.maximum)

    @property
    def statistics(self) -> frozenset[str]:
        """Running means and variances: averaged whatever the server's rule and rate for gradients, never rounded."""
        return frozenset(self.averaged) - self.parameters


def partition_of(network: nn.Module, local_layers: LocalLayers) -> Partition:
    """Sort the state entries of a network.

    Args:
        network: any module.
        local_layers: `none`; `norm` for the parameters and statistics of its norm layers (FedBN: Li et al., ICLR 2021,
            section 3, for any norm layer); `all`.
    """
    state = network.state_dict()
    local = set(state) if local_layers == "all" else _norm_entries(network) if local_layers == "norm" else set()
    floats = {name for name, value in state.items() if value.is_floating_point()}
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    return Partition(
        averaged=tuple(name for name in state if name in floats and name not in local),
        maximum=tuple(name for name in state if name not in floats and name not in local),
        local=tuple(name for name in state if name in local),
        parameters=frozenset((parameters & floats) - local),
        variances=frozenset(_variances(network) & (floats - local)),
    )


def select(state: Mapping[str, Entry], names: "frozenset[str] | tuple[str, ...]") -> dict[str, Entry]:
    """The entries of a state that are named, in the state's order."""
    wanted = frozenset(names)
    return {name: value for name, value in state.items() if name in wanted}


def _variances(network: nn.Module) -> set[str]:
    """Running variances, by the type of their module."""
    return {
        f"{path}.running_var" if path else "running_var"
        for path, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_var is not None
    }


def _norm_entries(network: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in network.named_modules()
        if isinstance(module, NORM_LAYERS)
        for name in module.state_dict()
    }
