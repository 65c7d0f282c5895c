"""Scores of a job round by round in one process, without FLARE, for studies of many runs."""

from collections.abc import Iterable
from pathlib import Path

from harmofl.experiment import Experiment
from harmofl.flare.in_process import InProcessFederation
from harmofl.tasks import load_task


def scores_by_round(experiment: Experiment, sites: Iterable[str], folder: Path) -> list[dict[str, float]]:
    """Mean key score on the test cases by site, of the initial model and after every round, on demo data."""
    federation, key = InProcessFederation(experiment, sites, folder), load_task(experiment).key_score
    if federation.run_state.gathers_before_training:
        federation.gather_amplitude()
    scores = [federation.mean_scores(key)]
    for round_number in range(experiment.federation.rounds):
        federation.train_round(round_number)
        scores.append(federation.mean_scores(key))
    return scores
