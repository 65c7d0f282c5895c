"""Networks by name, from MONAI, with the norm layer selectable and seeded Kaiming initialization."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from harmofl.core.instance_norm import InstanceNorm

Norm = Literal["instance", "batch", "batch_stats"]

# `batch_stats` is what the released code uses: a prediction then depends on the other images of its batch.
_NORMS: dict[str, tuple[str, dict[str, bool]]] = {
    "instance": ("instance", {"affine": True}),
    "batch": ("batch", {"affine": True, "track_running_stats": True}),
    "batch_stats": ("batch", {"affine": False, "track_running_stats": False}),
}


def build_network(
    name: str, in_channels: int, class_prior: Sequence[float], *, width: int, norm: Norm, seed: int, even: bool = False
) -> nn.Module:
    """Build a 2-D network for inputs (B, in_channels, H, W), H and W at least 64 pixels.

    `unet` is MONAI's BasicUNet with widths w, 2w, 4w, 8w, 16w (7.8 million parameters at w = 32) and returns logits
    (B, classes, H, W). `densenet121` has growth rate w and 2w features before the first block (7.0 million parameters
    at w = 32, the published one, 0.45 million at w = 8) and returns logits (B, classes). PyTorch's default
    initialization leaves about one run in four of the small networks untrained, hence Kaiming; two calls with one seed
    give equal weights.

    Args:
        name: `unet` or `densenet121`.
        in_channels: channels of an image.
        class_prior: share of each class in the targets, positive, with sum 1; the network starts out predicting it.
        width: features of the first level of a `unet`; growth rate of a `densenet121`, at least 4.
        norm: norm layer.
        seed: of the initial weights.
        even: height and width of all images are multiples of 16, so that a `unet` has nothing to pad.

    Raises:
        ValueError: an unknown name, a combination that MONAI cannot build, or a width below that of DenseNet121.
    """
    classes = len(class_prior)
    if norm not in _NORMS:
        raise ValueError(f"network.norm: {norm!r} is none of {', '.join(_NORMS)}")
    options = _NORMS[norm]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "unet":
            from monai.networks.nets.basic_unet import BasicUNet

            features = (width, 2 * width, 4 * width, 8 * width, 16 * width, width)
            network: nn.Module = BasicUNet(2, in_channels, classes, features=features, norm=options)
            _copy_no_map(network, even)
        elif name == "densenet121":
            from monai.networks.nets.densenet import DenseNet121

            if norm == "batch_stats":
                raise ValueError(
                    "network.norm: DenseNet121 cannot have 'batch_stats' norm layers; use 'instance' or 'batch'"
                )
            if width < 4:
                raise ValueError(f"network.width: DenseNet121 needs a growth rate of at least 4, not {width}")
            network = DenseNet121(2, in_channels, classes, init_features=2 * width, growth_rate=width, norm=options)
        else:
            raise ValueError(f"network.name: {name!r} is none of unet, densenet121")
        _put_instance_norm(network)
        initialize(network, class_prior)
    return network


def _copy_no_map(unet: nn.Module, even: bool) -> None:
    """Leave out MONAI's padding of odd sizes, which copies each map of the decoder also where nothing is to pad."""
    for module in unet.modules():
        if hasattr(module, "is_pad"):
            module.is_pad = not even


def _put_instance_norm(network: nn.Module) -> None:
    """Put the faster layer in place of torch's: same function, same names in the state."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.InstanceNorm2d:
                setattr(module, name, InstanceNorm(layer.num_features, layer.eps))


def initialize(network: nn.Module, class_prior: Sequence[float]) -> None:
    """Kaiming initialization by fan in for ReLU-like activations; the last biases give the prior of each class.

    Where one class is rare, a network that starts at even odds first spends its steps on learning that it is rare and
    may stay there (Lin et al., Focal Loss, section 4.1).
    """
    biases = []
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
                biases.append(module.bias)
    logits = torch.tensor([math.log(share) for share in class_prior])
    with torch.no_grad():
        biases[-1].copy_(logits - logits.mean())
