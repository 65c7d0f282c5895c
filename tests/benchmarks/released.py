"""The cost of the released code's training, written from its description: its layers, its layout, its loops.

../shared/reference/harmofl-method.md (section 3) and performance.md describe it. Where they are silent, the cheaper
way is taken, so that what is measured against it is not flattered: no loader, no augmentation, no copy of a batch. What
is learned is not the point here; that the layers are those described is checked by their number of parameters.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

UNET_PARAMETERS, DENSENET_PARAMETERS = 7_757_186, 6_872_258

Network = Callable[[Tensor], Tensor]


def norm(channels: int) -> nn.Module:
    """Statistics of the batch, nothing learned, nothing remembered."""
    return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)


class ReleasedUNet(nn.Module):
    """32 to 512 channels, convolutions without bias, transposed convolutions; the decoder halves the channels."""

    def __init__(self) -> None:
        """Two classes."""
        super().__init__()
        wide = [32 * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(_block, [3, *wide[:-1]], wide))
        self.raise_ = nn.ModuleList(
            nn.ConvTranspose2d(2 * one, one, 2, stride=2) for one in wide[:-1]
        )  # fmt: skip
        self.up = nn.ModuleList(_block(2 * one, one) for one in wide[:-1])
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(32, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        held: list[Tensor] = []
        for level, block in enumerate(self.down):
            images = block(self.pool(images) if level else images)
            held.append(images)
        for level in (3, 2, 1, 0):
            images = self.up[level](torch.cat([self.raise_[level](images), held[level]], 1))
        logits: Tensor = self.last(images)
        return logits


def _block(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        layers += [convolution, norm(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def released_densenet() -> nn.Module:
    """DenseNet121 with the same norm layers and two pixels of zeros around the maps after the first block."""
    from monai.networks.nets.densenet import DenseNet121

    network: nn.Module = DenseNet121(2, 3, 2)
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.BatchNorm2d):
                setattr(module, name, norm(layer.num_features))
    network.features.denseblock1.append(nn.ZeroPad2d(2))  # type: ignore[union-attr, operator]
    return network


def aligned(images: Tensor, target: np.ndarray) -> Tensor:
    """The amplitude step: complex transforms in NumPy, image by image, polar form, one coefficient replaced.

    Args:
        images: (B, C, H, W), overwritten with the result as the released code overwrites a batch on a CPU.
        target: (H, W, C) amplitude, zero frequency in the middle.
    """
    middle = target.shape[0] // 2, target.shape[1] // 2
    for image in images.numpy():
        spectrum = np.fft.fft2(image.transpose(1, 2, 0).astype(np.float64), axes=(0, 1))
        amplitude, phase = np.abs(spectrum), np.angle(spectrum)
        shifted = np.fft.fftshift(amplitude, axes=(0, 1))
        shifted[middle] = target[middle]
        amplitude = np.fft.ifftshift(shifted, axes=(0, 1))
        back = np.fft.ifft2(amplitude * np.exp(1j * phase), axes=(0, 1))
        image[:] = back.real.transpose(2, 0, 1)
    return images


class ReleasedTraining:
    """Steps of the released code: two passes, each through the amplitude step, and loops over the parameters."""

    def __init__(self, network: nn.Module, shape: tuple[int, ...], optimizer: str, masks: bool) -> None:
        """Train a network on images of a shape (C, H, W) with targets that are masks or one class an image."""
        self.network, self.masks = network.train(), masks
        parameters = list(network.parameters())
        if optimizer == "adam":
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, lr=1e-4, weight_decay=1e-4)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
        self.target = np.ones((*shape[1:], shape[0]))

    def step(self, images: Tensor, targets: Tensor) -> float:
        """One step: ascend along the gradient, take the gradient there, go back, step."""
        parameters = list(self.network.parameters())
        self.optimizer.zero_grad()
        loss = self._loss(images, targets)
        loss.backward()
        with torch.no_grad():
            length = torch.norm(torch.stack([one.grad.norm() for one in _with_gradients(parameters)]))
            moved = {}
            for one in _with_gradients(parameters):
                moved[one] = (one.grad * (0.05 / (length + 1e-12))).clone()
                one.add_(moved[one])
        self.optimizer.zero_grad()
        self._loss(images, targets).backward()
        with torch.no_grad():
            for one in _with_gradients(parameters):
                one.sub_(moved[one])
        self.optimizer.step()
        return loss.item()

    def epoch(self, images: Tensor, targets: Tensor, batch: int) -> None:
        """Steps over all images in their order."""
        for part, wanted in zip(images.split(batch), targets.split(batch), strict=True):
            self.step(part, wanted)

    def _loss(self, images: Tensor, targets: Tensor) -> Tensor:
        logits = self.network(aligned(images, self.target))
        loss = nn.functional.cross_entropy(logits, targets)
        return (loss + _dice(logits, targets)) / 2 if self.masks else loss


def _with_gradients(parameters: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    return (one for one in parameters if one.grad is not None)


def _dice(logits: Tensor, targets: Tensor) -> Tensor:
    """Soft Dice loss over the batch with three planes of one-hot targets, as the released code builds them."""
    planes = torch.stack([targets == label for label in range(3)], 1).float()
    shares = logits.softmax(1)
    losses = []
    for label in range(2):
        share, plane = shares[:, label], planes[:, label]
        losses.append(1 - (2 * (share * plane).sum() + 1e-5) / ((share**2).sum() + (plane**2).sum() + 1e-5))
    return sum(losses, torch.zeros(())) / 2
