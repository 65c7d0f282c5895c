"""A small classifier, its losses and closures for the tests of the weight perturbation."""

import torch
from torch import nn

OPTIMIZERS = {
    "sgd": lambda parameters, **options: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=1e-2, **options
    ),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-2, weight_decay=1e-2, **options),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(seed: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def loss_of(model: nn.Module, seed: int):
    inputs, labels = batch(seed)
    return lambda: nn.functional.cross_entropy(model(inputs), labels)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(model: nn.Module, saved: list[torch.Tensor]) -> bool:
    return all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), saved, strict=True))


class Sequence:
    """A closure that takes the next of several losses at every pass."""

    def __init__(self, *losses):
        self.losses = list(losses)
        self.passes = 0

    def __call__(self):
        self.passes += 1
        return self.losses[self.passes - 1]()


def scaled(closure, factor: float):
    return lambda: closure() * factor


def interrupted() -> torch.Tensor:
    raise KeyboardInterrupt
