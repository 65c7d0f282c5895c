"""What a round begins with goes to another process whole, and what cannot be compiled is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harmofl.core.training import state_arrays
from harmofl.experiment import Experiment, set_key
from harmofl.flare.local_amplitude import build_normalization
from harmofl.flare.round_start import RoundStart, failed_to_compile, round_optimizer
from harmofl.flare.site import SiteConfig
from harmofl.tasks import resolve_experiment, untrained_network

SITE = SiteConfig("HK", False, None, Path("/state"), device="cpu", compile=True)


def begun(experiment: Experiment, seed: int) -> RoundStart:
    """A start whose parts all depend on `seed`."""
    network = untrained_network(experiment)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(seed)
    optimizer = round_optimizer(experiment, network)
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + seed)
    optimizer.optimizer.step()
    layer = build_normalization(experiment, 3)
    layer.freeze(torch.full_like(layer.target, 2.0 + seed), 5)
    layer.set_own(torch.full_like(layer.own, 1.0))
    return RoundStart(network, layer, optimizer, {"a": np.full(2, seed)}, seed)


def test_a_start_is_whole_in_another_process(written: dict[str, Any]) -> None:
    set_key(written, "training.optimizer", "adam")
    experiment = resolve_experiment(written)
    sent, other = begun(experiment, 3), begun(experiment, 0)
    got = RoundStart.unpacked(sent.packed(), other.network, other.normalization, other.optimizer)
    np.testing.assert_equal(state_arrays(got.network), state_arrays(sent.network))
    torch.testing.assert_close(got.normalization.state_dict(), sent.normalization.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(got.normalization.gain, sent.normalization.gain, rtol=0, atol=0)
    torch.testing.assert_close(got.optimizer.state_dict(), sent.optimizer.state_dict(), rtol=0, atol=0)
    assert got.seed == 3 and got.previous is not None and got.previous["a"].tolist() == [3, 3]


def test_an_error_of_the_compiler_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    error = failed_to_compile(BackendCompilerFailed(len, ValueError("/home/Jane: no g++\nat all"), None), SITE)
    assert str(error) == (
        "site HK: torch.compile failed (ValueError); install a C++ compiler there or set compile to false in "
        "local/privacy.json"
    )
    assert "Jane" in caplog.text, "the whole of it is in the site's findings"
    assert failed_to_compile(ValueError("another"), SITE) is None
