"""Scores of a job round by round in one process, without FLARE, for studies of many runs."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from harmofl.experiment import Experiment
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.wire import ModelMessage
from harmofl.tasks import load_task


def scores_by_round(experiment: Experiment, sites: Iterable[str], folder: Path) -> list[dict[str, float]]:
    """Mean key score on the test cases by site, of the initial model and after every round, on demo data."""
    federation, key = InProcessFederation(experiment, sites, folder), load_task(experiment).key_score
    if federation.run_state.gathers_before_training:
        federation.gather_amplitude()
    scores = [_mean_scores(federation, key)]
    for round_number in range(experiment.federation.rounds):
        federation.train_round(round_number)
        scores.append(_mean_scores(federation, key))
    return scores


def _mean_scores(federation: InProcessFederation, key_score: str) -> dict[str, float]:
    """Mean of a score of the present model over the test cases of each site."""
    run = federation.run_state
    received, scores = ModelMessage(run.for_sites(federation.weights), run.amplitude), {}
    for site in federation.run_state.expected:
        numbers = federation.participants[site].evaluate(received, federation.run_state.best_round).numbers
        pooled = numbers["pooled"]["final"].get(key_score)
        scores[site] = float(pooled["value"] if pooled else np.nanmean(numbers["test"]["final"][key_score]))
    return scores
