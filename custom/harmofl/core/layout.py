"""How networks and batches lie in memory, one rule for all that trains or predicts."""

import torch
from torch import nn

from harmofl.core.instance_norm import InstanceNorm


def memory_format(network: nn.Module, is_compiled: bool = False) -> torch.memory_format:
    """The layout of a network's weights and batches, for the network where it lies now.

    channels_last, but for two: a network that torch.compile runs, see `harmofl.core.training.compiled`, and one with
    instance norm and without transposed convolutions on a CPU, which here is DenseNet121.

    Measured on one core (AVX-512, torch 2.13, CPU time, forward and backward in turns in one process), as the speed
    relative to channels_last with torch's own instance norm:

    | network, images | torch's norm: contiguous | by image: channels_last | by groups: contiguous |
    |---|---|---|---|
    | U-Net of width 32, 1 x 384 x 384, instance | 1.35 | **1.61** | 1.46 |
    | U-Net of width 8, 4 x 64 x 64, instance | 1.00 | **1.21** | 1.15 |
    | U-Net of width 8, 16 x 64 x 64, instance | 1.00 | **1.23** | 1.08 |
    | DenseNet121 of width 32, 16 x 96 x 96, instance | 1.15 | 1.25 | **1.37** |
    | DenseNet121 of width 8, 8 x 96 x 96, instance | 1.10 | 1.01 | **1.37** |

    With 121 norm layers, most of them of small maps, a call per image costs a DenseNet more than channels_last spares
    its convolutions. Batch norm by channels_last over contiguous: 1.3 to 1.5 times faster on each of these networks
    but the U-Net of width 32 at 384, where it is 1.0 to 1.1.
    """
    if is_compiled:
        return torch.contiguous_format
    on_cpu = next(network.parameters()).device.type == "cpu"
    kinds = {type(module) for module in network.modules()}
    if on_cpu and InstanceNorm in kinds and nn.ConvTranspose2d not in kinds:
        return torch.contiguous_format
    return torch.channels_last


def placed(network: nn.Module, device: torch.device | str, is_compiled: bool = False) -> nn.Module:
    """The network on a device, in the layout for it there."""
    network = network.to(device)
    return network.to(memory_format=memory_format(network, is_compiled))
