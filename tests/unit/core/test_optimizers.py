"""The optimizers against torch's own: the same bits, and nothing of torch.compile in the process."""

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from harmofl.core.optimizers import SGD, Adam

ADAM = {"lr": 0.02, "weight_decay": 0.1}
KINDS = [
    pytest.param(Adam, torch.optim.Adam, ADAM | {"fused": True}, id="adam fused"),
    pytest.param(Adam, torch.optim.Adam, ADAM | {"betas": (0.5, 0.9), "eps": 1e-3}, id="adam"),
    pytest.param(SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}, id="sgd"),
]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def trained(network: nn.Module, build: Callable[..., Any]) -> tuple[list[torch.Tensor], Any]:
    """Weights and optimizer after six steps, with a new optimizer of the same state after three, and a layer frozen."""
    network = copy.deepcopy(network)
    network[0].bias.requires_grad_(False)
    optimizer, generator = build(network.parameters()), torch.Generator().manual_seed(3)
    for number in range(6):
        if number == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build(network.parameters())
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        network(torch.randn(2, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    return list(network.parameters()), optimizer


@pytest.mark.parametrize(("ours", "theirs", "settings"), KINDS)
def test_weights_and_moments_are_those_of_torch_to_the_bit(
    network: nn.Module, ours: Any, theirs: Any, settings: dict[str, Any]
) -> None:
    found, optimizer = trained(network, partial(ours, **settings))
    expected, reference = trained(network, partial(theirs, **settings))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], network[0].weight)
    state, other = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert state.keys() == other.keys() == {0, 2, 3}
    for index, entries in other.items():
        assert state[index].keys() == entries.keys()
        assert all(torch.equal(state[index][name], torch.as_tensor(value)) for name, value in entries.items())


@pytest.mark.parametrize(("ours", "theirs", "settings"), KINDS)
def test_what_works_with_torchs_optimizers_works_with_these(
    network: nn.Module, ours: Any, theirs: Any, settings: dict[str, Any]
) -> None:
    optimizer, seen = ours(network.parameters(), **settings), []
    assert isinstance(optimizer, theirs)
    assert inspect.signature(ours.step) == inspect.signature(theirs.step)
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    network(torch.ones(1, 5)).sum().backward()
    loss = optimizer.step(lambda: network(torch.ones(1, 5)).sum())
    schedule.step()
    assert seen == [True] and torch.is_grad_enabled()
    assert optimizer.param_groups[0]["lr"] == settings["lr"] / 2
    assert loss.requires_grad  # torch, too, calls the closure with gradients


@pytest.mark.parametrize(
    ("build", "imports_it"),
    [
        ("from harmofl.core.optimizers import Adam as Optimizer", False),
        ("from harmofl.core.optimizers import SGD as Optimizer", False),
        # without ours torch still imports it: the day it does not, `harmofl.core.optimizers` can go
        ("from torch.optim import Adam as Optimizer", True),
    ],
)
def test_a_step_does_not_import_the_tracer(build: str, imports_it: bool) -> None:
    script = f"""
import sys, torch
{build}
weights = torch.ones(3, requires_grad=True)
optimizer = Optimizer([weights], lr=0.1, fused=True)
weights.sum().backward()
optimizer.step(), optimizer.zero_grad(), optimizer.load_state_dict(optimizer.state_dict())
assert float(weights[0]) != 1
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == str(imports_it)
