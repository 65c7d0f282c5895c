"""Two processes that share each batch take the steps that one process takes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_processes import Pair
from toy_segmentation import dataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.loss_terms import ProximalTerm
from harmofl.core.networks import build_network
from harmofl.core.parallel import ALONE, ProcessGroup
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, build_optimizer, fit_round

SIZE, BATCH = 64, 5
IMAGES = 11  # batches of 5, 5 and 1: shards of 3 and 2, and a batch that is too small to split
STEPS = 3
# Weights are below 2 in size, where float32 has steps of 2^-23: an optimizer step rounds to half of one, and a gradient
# that is rounded differently may move it by one more.
TOLERANCE = STEPS * 1.5 * 2.0**-23

# LeakyReLU of slope 1 is the identity; instance norm alone makes the network nonlinear then.
SMOOTH = {nn.LeakyReLU: lambda: nn.LeakyReLU(1.0), nn.MaxPool2d: lambda: nn.AvgPool2d(2)}


def smooth(network: nn.Module) -> nn.Module:
    """Put smooth layers in place of those with kinks, where rounding decides between two gradients."""
    for module in list(network.modules()):
        for name, layer in module.named_children():
            if type(layer) in SMOOTH:
                setattr(module, name, SMOOTH[type(layer)]())
    return network


def dice_of_the_batch(logits: Tensor, targets: Tensor) -> Tensor:
    """One minus the Dice of the foreground over all pixels of the batch: no mean over images."""
    shares = logits.double().softmax(1)[:, 1]
    return 1 - 2 * (shares * targets).sum() / (shares.sum() + targets.sum())


def trained(
    group: ProcessGroup = ALONE,
    *,
    alpha: float = 0.05,
    clip_norm: float | None = None,
    region: Any = "off",
    estimation: Any = "before_training",
    mu: float = 0.0,
    precision: str = "float32",
) -> dict[str, Any]:
    """One round of a small U-Net."""
    network = build_network("unet", 3, (0.5, 0.5), width=2, norm="instance", seed=0)
    network = smooth(network)
    layer = AmplitudeNormalization(
        intensity="zscore",
        region=region,
        low_fraction=0.1,
        estimation=estimation,
        momentum=0.3,
        channels=3,
        height=SIZE,
        width=SIZE,
    )
    data = dataset(IMAGES, SIZE)
    if region != "off" and estimation == "before_training":
        layer.observe(data.tensors[0])
        own = layer.local_statistic
        layer.freeze(0.9 * own, 1)
        if region == "site_gain":
            layer.set_own(own)
    optimizer = WeightPerturbation(build_optimizer(network, "sgd", 0.05, 0.9, 1e-4), alpha, network)
    before = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    result = fit_round(
        network,
        layer,
        optimizer,
        dice_of_the_batch,
        data,
        settings=RoundSettings(BATCH, 1, "flip_rotate", clip_norm, precision),
        seed=3,
        terms=[ProximalTerm(network, mu)] if mu else [],
        group=group,
    )
    after = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    return {
        "weights": after.numpy(),
        "moved": float((after - before).abs().max()),
        "result": result,
        "amplitude": None if layer.local_statistic is None else layer.local_statistic.numpy(),
        "images": layer.local_images,
        "weights of images": layer.local.state_dict()["weights"].numpy(),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    both = Pair(tmp_path_factory.mktemp("store"))
    yield both
    both.close()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"alpha": 0.0},
        {"clip_norm": 0.05},
        {"mu": 10.0},
        {"region": "site_gain"},
        {"region": "full", "estimation": "running_mean"},
        {"region": "low", "estimation": "first_batch"},
    ],
    ids=["perturbed", "plain", "clipped", "proximal", "frozen site gain", "running mean", "first batch"],
)
def test_two_processes_take_the_steps_of_one(pair: Pair, given: dict[str, Any]) -> None:
    one = trained(**given)
    first, second = pair(trained, **given)
    assert one["moved"] > 1000 * TOLERANCE, "else nothing would be compared"
    np.testing.assert_allclose(first["weights"], one["weights"], rtol=0, atol=TOLERANCE)
    assert np.array_equal(first["weights"], second["weights"]), "no drift between processes, not by one bit"
    assert (first["result"].steps, first["result"].images) == (STEPS, IMAGES)
    assert first["result"].loss == second["result"].loss == pytest.approx(one["result"].loss, abs=1e-6)


@pytest.mark.parametrize(("region", "estimation"), [("full", "running_mean"), ("low", "first_batch")])
def test_each_process_estimates_the_amplitude_of_whole_batches(pair: Pair, region: str, estimation: str) -> None:
    given = {"region": region, "estimation": estimation}
    one = trained(**given)
    for process in pair(trained, **given):
        assert process["images"] == one["images"] == (IMAGES if estimation == "running_mean" else BATCH)
        assert np.array_equal(process["weights of images"], one["weights of images"])
        # means of float32 statistics in float64, rounded to float32 once: equal but for the last bit
        np.testing.assert_allclose(process["amplitude"], one["amplitude"], rtol=2.0**-23)


def test_the_loss_scaler_sees_the_gradient_of_the_whole_batch(pair: Pair) -> None:
    one = trained(precision="float16")
    first, second = pair(trained, precision="float16")
    assert np.array_equal(first["weights"], second["weights"])
    # convolutions in float16 round at 2^-11: an image may round otherwise beside other images
    np.testing.assert_allclose(first["weights"], one["weights"], rtol=0, atol=one["moved"] * 2.0**-11)


def gradient(group: ProcessGroup = ALONE, count: int = BATCH) -> np.ndarray:
    """Of the whole batch's loss with a mean over images as a term, in float64."""
    network = smooth(build_network("unet", 3, (0.5, 0.5), width=2, norm="instance", seed=0)).double()
    images, targets = (part[:count][group.rows(count)] for part in dataset(IMAGES, SIZE).tensors)
    model = group.wrapped(network)
    logits = model(images.double())
    loss = dice_of_the_batch(group.gathered(logits, count), group.gathered(targets, count))
    group.total(loss, [logits.square().mean((1, 2, 3)).mean()], count).backward()
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()]).numpy()


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_the_gradient_is_that_of_the_whole_batch(pair: Pair, count: int) -> None:
    one = gradient(count=count)
    for process in pair(gradient, count=count):
        # sums of some 10^4 float64 numbers in another order: 10^4 times 2^-53 of the largest
        np.testing.assert_allclose(process, one, rtol=0, atol=1e4 * 2.0**-53 * np.abs(one).max())
