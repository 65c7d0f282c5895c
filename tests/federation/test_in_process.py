"""A run in one process is FLARE's run, bit for bit.

Two settings between them have what methods are made of: shared amplitude before training or out of the first round,
perturbation, a proximal term, layers that stay at the site, Adam at the server, weights by samples, and a round
that does not score the received model.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.evidence.results import read_results, read_rounds
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.site import simulated_threads
from tests.federation.conftest import RunJob
from tests.federation.test_invariants import assert_same_bits, experiment_of, saved_weights

SITES = ["BIDMC", "HK"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "amplitude.preset": "as_described",
            "network.norm": "batch",
            "training.proximal_mu": 0.01,
            "federation.local_layers": "norm",
            "federation.server_optimizer": "adam",
            "federation.server_learning_rate": 0.03,
            "federation.weights": "samples",
            "federation.exchange": "float16",
            "federation.validate_every": 2,
        },
    ],
    ids=["harmofl", "amplitude_of_the_first_round_local_norm_proximal_term_server_adam_float16_unscored_round"],
)
def test_weights_best_round_and_scores_are_those_of_flare(
    run_job: RunJob, tmp_path: Path, settings: dict[str, Any]
) -> None:
    run = run_job(SITES, {"federation.rounds": 3, "training.local_epochs": 2, **settings})
    assert run.code == 0, run.output
    federation = InProcessFederation(experiment_of(run), SITES, tmp_path / "cell", threads=simulated_threads())
    finished = federation.run()
    held = saved_weights(run)  # with the initial values of layers that stay at the sites, which the federation has not
    assert_same_bits({name: held[name] for name in federation.weights}, federation.received_weights)
    folder = tmp_path / "cell" / "run"
    for name in ("FL_global_model.pt", "best_FL_global_model.pt"):
        assert_same_bits(saved_weights(run, name), _saved(folder / name))
    results, rounds = read_results(folder / "results.json"), read_rounds(folder / "round_metrics.jsonl")
    same = {"best_round", "best_reason", "mean_over_sites", "mean_over_sites_final_model", "experiment_hash", "demo"}
    assert results.model_dump(include=same) == run.results.model_dump(include=same)
    assert {site: result.model_dump(exclude={"bytes_sent"}) for site, result in results.sites.items()} == {
        site: result.model_dump(exclude={"bytes_sent"}) for site, result in run.results.sites.items()
    }
    assert [record.validation for record in rounds] == [record.validation for record in run.rounds]
    assert [record.loss for record in rounds] == [record.loss for record in run.rounds]
    assert [record.model_sha256 for record in rounds] == [record.model_sha256 for record in run.rounds]
    assert len(finished.drift) == 3 and set(finished.differences) == set(SITES)


def _saved(path: Path) -> dict[str, Any]:
    return {name: value.numpy() for name, value in torch.load(path, weights_only=True)["model"].items()}
