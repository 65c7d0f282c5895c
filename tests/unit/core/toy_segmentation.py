"""A network of a few layers, masks that can be learned, and one round of training on them."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, build_optimizer, fit_round

SIZE, IMAGES, BATCH = 16, 10, 4
STEPS = 3  # batches of 4, 4 and 2 images


def network(norm="instance"):
    """A network of a few layers: convolution, norm layer, convolution."""
    layer = nn.BatchNorm2d(4) if norm == "batch" else nn.InstanceNorm2d(4, affine=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer, nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


def normalization(region="off", intensity="zscore", estimation="running_mean"):
    return AmplitudeNormalization(
        intensity=intensity,
        region=region,
        low_fraction=0.1,
        estimation=estimation,
        momentum=0.1,
        channels=3,
        height=SIZE,
        width=SIZE,
    )


def dataset(count=IMAGES, size=SIZE):
    generator = torch.Generator().manual_seed(7)
    images = torch.rand(count, 3, size, size, generator=generator)
    return TensorDataset(images, (images[:, 1] > 0.5).long())


def settings(augmentation="flip_rotate", epochs=1, batch_size=BATCH, precision="float32", clip_norm=None, *, workers=0):
    return RoundSettings(batch_size, epochs, augmentation, clip_norm, precision, workers)


cross_entropy = nn.functional.cross_entropy


def fitted(
    data=None, *, norm="instance", alpha=0.05, layer=None, seed=1, loss=cross_entropy, rounds=1, name="sgd", **given
):
    """Train; returns network, normalization, optimizer and the last result."""
    model, layer = network(norm), layer or normalization()
    optimizer = WeightPerturbation(build_optimizer(model, name, 0.05, 0.9, 1e-4), alpha, model)
    for _ in range(rounds):
        result = fit_round(
            model, layer, optimizer, loss, dataset() if data is None else data, settings=settings(**given), seed=seed
        )
    return model, layer, optimizer, result


def equal(first, second):
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
