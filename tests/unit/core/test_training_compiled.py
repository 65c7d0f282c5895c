"""Training through torch.compile is the same training."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toy_segmentation import cross_entropy, dataset, network, normalization, settings

from harmofl.core.loss_terms import ContrastiveTerm
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import autocast, build_optimizer, fit_round, state_arrays

pytestmark = pytest.mark.slow  # C++ is compiled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


def fitted(model: nn.Module, compiled: bool, data: TensorDataset, *terms: ContrastiveTerm, batch_size: int = 4) -> None:
    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 1e-4), 0.05, model)
    how = replace(settings(batch_size=batch_size), compile=compiled)
    fit_round(model, normalization(), optimizer, cross_entropy, data, settings=how, seed=1, terms=terms)


def test_compiled_training_is_plain_training(tmp_path: Path) -> None:
    plain, compiled = network("batch"), network("batch")
    fitted(plain, False, dataset())  # batches of 4, 4 and 2: compiled for one size, then for any
    fitted(compiled, True, dataset())
    assert list(tmp_path.rglob("*.so")), "nothing was compiled"
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for name, value in plain.state_dict().items():
        # sums of a few hundred float32 numbers in another order, in 3 steps of rate 0.05 and gradients below 1
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=0, atol=3 * 0.05 * 300 * 2.0**-24)
    assert int(compiled.state_dict()["1.num_batches_tracked"]) == 3, "the second pass of a step is not recorded"


def test_features_are_those_of_the_compiled_pass() -> None:
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.rand(8, 3, 16, 16, generator=generator), torch.arange(8) % 2)
    trained = []
    for compiled in (False, True):
        models = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            models.append(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 2)))
        cast = partial(autocast, torch.device("cpu"), "float32")
        term = ContrastiveTerm(models[0], state_arrays(models[1]), weight=5.0, temperature=0.5, cast=cast)
        fitted(models[0], compiled, data, term)
        trained.append(models[0].state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-5, atol=1e-6)
