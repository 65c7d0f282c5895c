"""Federated rounds in one process, without FLARE: the sites, rounds and mean of a job, for studies of many runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harmofl.core.aggregation import StreamingMean
from harmofl.core.networks import build_network
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import (
    RoundSettings,
    build_optimizer,
    fit_round,
    load_arrays,
    predict,
    seed_of,
    state_arrays,
)
from harmofl.experiment import Experiment
from harmofl.flare.generator import apply_difference
from harmofl.flare.participant import build_normalization
from harmofl.tasks import SiteData, load_task


def demo_sites(experiment: Experiment, names: list[str], folder: Path) -> dict[str, SiteData]:
    """Write and read the synthetic data of all sites."""
    task = load_task(experiment)
    for name in names:
        task.write_demo(folder / name, name, experiment)
    return {name: task.open_site(folder / name, experiment, folder / "cache" / name) for name in names}


class InMemoryFederation:
    """All sites of an experiment side by side; `run` trains them and returns the scores of every round's model."""

    def __init__(self, experiment: Experiment, sites: dict[str, SiteData]) -> None:
        self.experiment, self.sites = experiment, sites
        self.task = load_task(experiment)
        settings, training = experiment.network, experiment.training
        self.network = build_network(
            settings.name,
            self.task.in_channels,
            self.task.classes,
            width=settings.width,
            norm=settings.norm,
            seed=experiment.seed,
        ).to(memory_format=torch.channels_last)
        self.normalizations = {name: build_normalization(experiment, self.task.in_channels) for name in sites}
        self.moments: dict[str, dict[str, Any]] = {}
        self.settings = RoundSettings(
            training.batch_size,
            training.local_epochs,
            training.augmentation,
            training.clip_norm,
            training.precision,
        )

    def run(self) -> list[dict[str, float]]:
        """Mean key score on the test cases by site, of the initial model and after every round."""
        self._gather_amplitude()
        weights = state_arrays(self.network)
        scores = [self.scores(weights)]
        for round_number in range(self.experiment.federation.rounds):
            mean = StreamingMean(weights)
            for name in self.sites:
                mean.add(self._difference(name, weights, round_number), 1)
            weights = apply_difference(weights, mean.mean(), self.experiment.federation.server_learning_rate)
            scores.append(self.scores(weights))
        return scores

    def scores(self, weights: dict[str, np.ndarray]) -> dict[str, float]:
        """Mean key score on the test cases of each site."""
        load_arrays(self.network, weights)
        return {name: self._score(name) for name in self.sites}

    def _score(self, name: str) -> float:
        def logits(images: Tensor) -> Tensor:
            return predict(self.network, self.normalizations[name], images, self.settings.batch_size)

        score = self.task.evaluate(logits, self.sites[name].test).key_score
        return float("nan") if score is None else score

    def _gather_amplitude(self) -> None:
        if self.experiment.amplitude.region == "off":
            return
        if self.experiment.amplitude.estimation != "before_training":
            raise ValueError("in memory the amplitude is gathered before training only")
        own: dict[str, Tensor] = {}
        for name, site in self.sites.items():
            images = torch.stack([image for image, _ in site.training])  # type: ignore[attr-defined]
            own[name] = self.normalizations[name].statistics(images).double().mean(0).float()
        target = torch.stack(list(own.values())).double().mean(0).float()
        for name, normalization in self.normalizations.items():
            normalization.freeze(target, len(self.sites))
            if self.experiment.amplitude.region == "site_gain":
                normalization.set_own(own[name])

    def _difference(self, name: str, weights: dict[str, np.ndarray], round_number: int) -> dict[str, np.ndarray]:
        training = self.experiment.training
        load_arrays(self.network, weights)
        base = build_optimizer(
            self.network, training.optimizer, training.learning_rate, training.momentum, training.weight_decay
        )
        optimizer = WeightPerturbation(base, self.experiment.perturbation.alpha, self.network)
        if name in self.moments and training.keep_moments:
            optimizer.load_state_dict(self.moments[name])
        fit_round(
            self.network,
            self.normalizations[name],
            optimizer,
            self.task.loss(),
            self.sites[name].training,
            settings=self.settings,
            seed=seed_of(self.experiment.seed, name, round_number),
        )
        self.moments[name] = optimizer.state_dict()
        after = state_arrays(self.network)
        return {entry: after[entry] - weights[entry] for entry in weights}
