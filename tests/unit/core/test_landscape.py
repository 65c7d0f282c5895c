"""Filter-normalized directions and losses along them."""

import numpy as np
import pytest
import torch
from torch import nn

from harmofl.core.landscape import filter_normalized_direction, loss_along, sharpness


def small_network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), nn.Linear(12, 2))


def test_every_filter_has_the_length_of_the_networks_own() -> None:
    network = small_network()
    with torch.no_grad():
        network[0].weight[1] = 0
    direction = filter_normalized_direction(network, 3)
    for name, parameter in network.named_parameters():
        own, drawn = parameter.detach().numpy(), direction[name].numpy()
        if own.ndim < 2:
            assert not drawn.any(), "biases and norm layers stay"
            continue
        for filter_own, filter_drawn in zip(own, drawn, strict=True):
            assert np.sqrt((filter_drawn**2).sum()) == pytest.approx(np.sqrt((filter_own**2).sum()), rel=1e-5)


def test_a_seed_gives_one_direction_for_networks_of_any_scale() -> None:
    network, larger = small_network(), small_network()
    with torch.no_grad():
        for parameter in larger.parameters():
            parameter.mul_(10)
    one, other = (filter_normalized_direction(held, 5)["0.weight"] for held in (network, larger))
    torch.testing.assert_close(one * 10, other)
    assert not torch.equal(one, filter_normalized_direction(network, 6)["0.weight"])


def test_losses_are_taken_at_the_places_and_the_weights_come_back() -> None:
    network = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, 2.0]]))
    directions = [{"weight": torch.tensor([[1.0, 0.0]])}, {"weight": torch.tensor([[0.0, 10.0]])}]
    losses = loss_along(network, lambda: float(network.weight.sum()), directions, [(0, 0), (0.5, 0), (0.5, -0.1)])
    assert losses == pytest.approx([3.0, 3.5, 2.5])  # 1 + 2, 1.5 + 2, 1.5 + 1
    assert network.weight.tolist() == [[1.0, 2.0]]


def test_weights_come_back_when_the_loss_raises() -> None:
    network = nn.Linear(2, 1, bias=False)
    held = network.weight.detach().clone()

    def fails() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        loss_along(network, fails, [{"weight": torch.ones(1, 2)}], [(1.0,)])
    assert torch.equal(network.weight, held)


def test_sharpness_of_a_parabola() -> None:
    places = np.linspace(-0.5, 0.5, 9)
    surface = [[float(3 * x * x + y * y) for y in places] for x in places]
    # two places are 0.25 away: (3 + 3 + 1 + 1) / 4 * 0.25^2
    assert sharpness(surface, 2) == pytest.approx(0.125)
    surface[6][4] = None
    assert sharpness(surface, 2) is None
