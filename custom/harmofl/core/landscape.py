"""The loss around a model along random filter-normalized directions (Li et al., NeurIPS 2018, section 4)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Direction = Mapping[str, Tensor]


def filter_normalized_direction(network: nn.Module, seed: int) -> dict[str, Tensor]:
    """A random direction whose filters have the lengths of the network's own.

    Every filter (first index of a weight with two or more dimensions) of a Gaussian direction is scaled to the norm of
    the same filter of the network, so that models of different scale can be compared. Biases and norm layers, which
    have one dimension, stay where they are, as in the authors' plots.

    Args:
        network: its parameters as they are now; a filter of zeros gets a direction of zeros.
        seed: two calls with one seed differ in the lengths of their filters only.

    Returns:
        A tensor for each parameter by name, on the CPU in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = {}
    for name, parameter in network.named_parameters():
        held = parameter.detach().float().cpu()
        drawn = torch.randn(held.shape, generator=generator)
        if held.dim() < 2:
            direction[name] = torch.zeros_like(held)
            continue
        own, theirs = held.flatten(1).norm(dim=1), drawn.flatten(1).norm(dim=1)
        scale = own / theirs.clamp_min(torch.finfo(torch.float32).tiny)
        direction[name] = drawn * scale.view(-1, *[1] * (held.dim() - 1))
    return direction


@torch.no_grad()
def loss_along(
    network: nn.Module, loss: Callable[[], float], directions: Sequence[Direction], places: Sequence[Sequence[float]]
) -> list[float]:
    """The loss of `network` at several places around its weights, which are restored at the end.

    Args:
        network: moved in place while `loss` is asked.
        loss: of the network as it is.
        directions: see `filter_normalized_direction`.
        places: for each place how far to go along each direction.
    """
    parameters = dict(network.named_parameters())
    held = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    losses = []
    try:
        for place in places:
            for name, parameter in parameters.items():
                parameter.copy_(held[name])
                for distance, direction in zip(place, directions, strict=True):
                    parameter.add_(direction[name].to(parameter), alpha=distance)
            losses.append(loss())
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(held[name])
    return losses


def sharpness(surface: Sequence[Sequence[float | None]], step: int) -> float | None:
    """How much the loss rises at `step` places from the center, mean over both ways along both directions.

    Args:
        surface: losses on a square grid of odd size around the model; None where one is not finite.
        step: places from the center.

    Returns:
        None where a loss that is needed is not finite.
    """
    middle = len(surface) // 2
    center = surface[middle][middle]
    around = [
        surface[middle - step][middle],
        surface[middle + step][middle],
        surface[middle][middle - step],
        surface[middle][middle + step],
    ]
    finite = [value for value in around if value is not None]
    if center is None or len(finite) < len(around):
        return None
    return sum(finite) / len(finite) - center
