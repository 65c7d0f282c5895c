"""Federated rounds in one process, without FLARE: the participants and the mean of a job, for studies of many runs."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.core.aggregation import StreamingMean
from harmofl.core.server_rules import apply_difference
from harmofl.core.training import state_arrays
from harmofl.experiment import Experiment
from harmofl.flare.aggregator import AmplitudeGathering
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig
from harmofl.flare.wire import AmplitudeStatistic, ModelMessage, UpdateMessage
from harmofl.tasks import load_task, untrained_network


class InMemoryFederation:
    """All sites of an experiment side by side on their demo data; their state lies under `folder`."""

    def __init__(self, experiment: Experiment, sites: Iterable[str], folder: Path) -> None:
        self.experiment, self.key_score = experiment, load_task(experiment).key_score
        self.weights = state_arrays(untrained_network(experiment))
        self.amplitude: AmplitudeStatistic | None = None
        self.participants = {
            site: Participant(
                experiment,
                SiteConfig(site, simulated=True, data_root=None, state_root=folder / site, device="cpu", threads=1),
                "study",
                lambda: False,
                logging.getLogger(site),
            )
            for site in sites
        }

    def run(self) -> list[dict[str, float]]:
        """Mean key score on the test cases by site, of the initial model and after every round."""
        settings, federation = self.experiment.amplitude, self.experiment.federation
        if settings.region != "off" and settings.estimation == "before_training":
            self._freeze(one.estimate_amplitude() for one in self.participants.values())
        scores = [self.scores()]
        for round_number in range(federation.rounds):
            received = ModelMessage(self.weights, self.amplitude)
            updates = [one.train(round_number, received) for one in self.participants.values()]
            if settings.region != "off" and self.amplitude is None:
                self._freeze(updates)
            mean = StreamingMean(self.weights)
            for update in updates:
                assert update.difference is not None
                weight = update.numbers["images"] if federation.weights == "samples" else 1
                mean.add(update.difference, weight)
            self.weights = apply_difference(self.weights, mean.mean(), federation.server_learning_rate)
            scores.append(self.scores())
        return scores

    def scores(self) -> dict[str, float]:
        """Mean key score of the present model on the test cases of each site."""
        received = ModelMessage(self.weights, self.amplitude)
        return {site: self._score(one.evaluate(received).numbers) for site, one in self.participants.items()}

    def _score(self, numbers: dict[str, Any]) -> float:
        pooled = numbers["pooled"]["final"].get(self.key_score)
        return float(pooled[0] if pooled else np.nanmean(numbers["test"]["final"][self.key_score]))

    def _freeze(self, updates: Iterable[UpdateMessage]) -> None:
        gathering = AmplitudeGathering(self.experiment)
        for site, update in zip(self.participants, updates, strict=True):
            if update.amplitude is not None:
                gathering.add(site, update.amplitude)
        self.amplitude = gathering.result()
