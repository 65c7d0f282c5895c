"""A federation without FLARE whose sites are new objects for every task, as new processes would be."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from harmofl.core.layout import placed
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, arrays_sha256, build_optimizer, fit_round, seed_of
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import Experiment
from harmofl.flare.local_amplitude import build_normalization
from harmofl.flare.participant import Participant
from harmofl.flare.round_norms import add_difference, open_round
from harmofl.flare.server_run import ServerRun
from harmofl.flare.site import SiteConfig
from harmofl.flare.wire import ModelMessage, UpdateMessage, pack_update, unpack_update
from harmofl.tasks import load_task, untrained_network
from tests.loose_limits import LOOSE
from tests.rounded_mean import rounded_mean

Arrays = dict[str, np.ndarray]
SITES = ("BIDMC", "HK")


def write_two_sites(folder: Path) -> Path:
    """Data of `SITES`, four cases each, with scanners that differ."""
    for site, scanner in zip(SITES, ("ge_3t_endorectal", "siemens_1.5t_endorectal"), strict=True):
        write_prostate_site(folder / site, scanner, 4, 0, matrix=64, slices=3)
    return folder


class ToyRounds:
    """The rounds of a run, its weights and what the sites answered last."""

    def __init__(self, experiment: Experiment, root: Path | None, folder: Path, sites: tuple[str, ...]) -> None:
        """Sites find their data below `root`, or make demo data where it is None."""
        self.experiment, self.root, self.folder = experiment, root, folder
        (folder / "server").mkdir(parents=True)
        self.run = ServerRun(experiment, root is None, folder / "server", sorted(sites), run_id="toy")
        self.weights: Arrays = self.run.initial_weights()
        self.updates: dict[str, UpdateMessage] = {}

    def site(self, name: str) -> Participant:
        """A site as a new process would build it."""
        simulated = self.root is None or self.experiment.federation.pooled_data
        config = SiteConfig(name, simulated, self.root, self.folder / name, "cpu", minimum_cases=1, settings=LOOSE)
        pool = {site: self.root for site in self.run.header(0).pooled_sites}
        return Participant(self.experiment, config, "toy", lambda: False, logging.getLogger(name), pool=pool)

    def round(self, number: int) -> None:
        """Train one round at every site, with the answers packed as they leave, and move the weights."""
        received = self.run.as_received(self.weights)
        self.run.model_sha256 = arrays_sha256(received)
        mean, message = open_round(self.run, received), ModelMessage(self.run.for_sites(self.weights))
        for name in self.run.expected:
            update = self.site(name).train(number, message, self.run.header(number).best_round)
            update = unpack_update(pack_update(update))
            self.updates[name] = update
            assert update.numbers["received_sha256"] == self.run.model_sha256
            if update.difference is not None:
                add_difference(mean, name, update, self.run)
        self.weights = self.run.rule.next_model(self.weights, mean.mean())

    def rounds(self, count: int, start: int = 0) -> None:
        """Several rounds."""
        for number in range(start, start + count):
            self.round(number)

    def state(self, name: str, file: str) -> dict[str, torch.Tensor]:
        """A file of a site's state."""
        held: dict[str, torch.Tensor] = torch.load(self.folder / name / "state" / "toy" / file, weights_only=True)
        return held


class HandRounds:
    """The same by objects that live through all rounds: entries named `local` are simply never overwritten."""

    def __init__(self, experiment: Experiment, data: Mapping[str, object], local: tuple[str, ...]) -> None:
        """Give every site of `data` (its training set) a network and an optimizer of its own."""
        self.experiment, self.data, self.local = experiment, data, set(local)
        self.networks = {name: placed(untrained_network(experiment), "cpu") for name in data}
        training = experiment.training
        self.optimizers = {
            name: WeightPerturbation(
                build_optimizer(network, training.optimizer, training.learning_rate, training.momentum, 1e-4), 0.0
            )
            for name, network in self.networks.items()
        }

    def round(self, number: int) -> None:
        """Train everywhere, then give every network the mean of what is shared, as the server rounds it."""
        before = {name: value.clone() for name, value in next(iter(self.networks.values())).state_dict().items()}
        for name, network in self.networks.items():
            self._train(name, network, number)
        states = [network.state_dict() for network in self.networks.values()]
        shared = {key: value for key, value in before.items() if key not in self.local}
        differences = [{key: (state[key] - value).numpy() for key, value in shared.items()} for state in states]
        mean = rounded_mean({key: value.numpy() for key, value in shared.items()}, differences)
        for key, value in shared.items():
            for state in states:
                state[key].copy_(value + torch.as_tensor(mean[key]))

    def _train(self, name: str, network: nn.Module, number: int) -> None:
        training = self.experiment.training
        fit_round(
            network,
            build_normalization(self.experiment, 3),
            self.optimizers[name],
            load_task(self.experiment).loss(),
            self.data[name],  # type: ignore[arg-type]
            settings=RoundSettings(training.batch_size, training.local_epochs, training.augmentation, None, "float32"),
            seed=seed_of(self.experiment.seed, name, number),
        )
