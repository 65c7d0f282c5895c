"""What a site's network consists of: entries received and entries that stay here, across rounds and restarts."""

from collections.abc import Callable, Mapping
from logging import Logger, LoggerAdapter
from typing import Any

import numpy as np
import torch
from torch import nn

from harmofl.core.exchange import exchange_types, from_exchange_types
from harmofl.core.partition import Partition, partition_of, select
from harmofl.core.training import NotFiniteError, TrainingError, array_difference, load_arrays, state_arrays
from harmofl.experiment import Experiment
from harmofl.flare.state import SiteState
from harmofl.flare.wire import Arrays, in_exchange_type
from harmofl.sections import one_line
from harmofl.tasks import untrained_network

_LOCAL, _TRAINED = "local", "trained"


class LocalModel:
    """Builds the site's network for a task. Local layers lie in the site's state, by the round that trained them.

    Those of the best round are kept until the evaluation, which scores the best model with them. A site that has none
    of its own, because it joins late or lost its state, begins with the initial ones: what others have cannot be
    averaged for it, since it never leaves them. Such a network is trained but not scored.

    Attributes:
        begins_anew: whether the network built last has initial values where others have what they trained.
    """

    def __init__(self, experiment: Experiment, state: SiteState, logger: Logger | LoggerAdapter[Logger]) -> None:
        """Bind to a site's state; nothing is read yet."""
        self._experiment, self._state, self._logger = experiment, state, logger
        self._exchange = experiment.federation.exchange
        self.begins_anew = False

    def before_round(self, received: Arrays, round_number: int) -> nn.Module:
        """The model received, with this site's layers as it had them before a round."""

        def find() -> dict[str, Any] | None:
            return self._state.latest_round(round_number - 1) if round_number else {}

        return self._network(received, find, self._exchange)

    def last(self, received: Arrays) -> nn.Module:
        """The model received, with the layers that this site trained last.

        Raises:
            TrainingError: layers stay here and this site has trained none, so that there is nothing to score.
        """
        return self._network(received, lambda: _trained(self._state.latest_round()), self._exchange)

    def of_weights(self, weights: Arrays) -> nn.Module:
        """A float32 model that no message brought, with the layers that this site trained last.

        Raises:
            TrainingError: as `last`.
        """
        return self._network(weights, lambda: _trained(self._state.latest_round()), "float32")

    def best(self, received: Arrays, best_round: int | None) -> nn.Module:
        """The best round's model, with the layers that this site had after it; with its last ones if it joined later.

        Raises:
            TrainingError: as `last`.
        """

        def find() -> dict[str, Any]:
            held = None if best_round is None else self._of_round(best_round)
            return held or _trained(self._state.latest_round())

        return self._network(received, find, self._exchange)

    def shared(self, network: nn.Module) -> dict[str, np.ndarray]:
        """What of a network travels, as copies."""
        return select(state_arrays(network), self._partition(network).shared)

    def change(self, before: Arrays, network: nn.Module) -> Arrays:
        """What training added to what travels, in the type in which it travels."""
        statistics = self._partition(network).statistics
        return in_exchange_type(array_difference(before, self.shared(network)), self._exchange, statistics)

    def remembered(self, network: nn.Module) -> dict[str, Any]:
        """What the next task needs of a trained network, for the site's state."""
        state = {name: torch.as_tensor(value) for name, value in state_arrays(network).items()}
        kept = {_LOCAL: select(state, self._partition(network).local)}
        return kept | ({_TRAINED: state} if self._experiment.training.contrastive_weight > 0 else {})

    def previous(self, round_number: int) -> Arrays | None:
        """MOON's: the whole of this site's model after it last trained before a round, None where it has not yet."""
        if self._experiment.training.contrastive_weight == 0 or round_number == 0:
            return None
        held = self._state.latest_round(round_number - 1)
        return {name: value.numpy() for name, value in held[_TRAINED].items()} if held else None

    def keep_best(self, best_round: int | None) -> None:
        """Put the layers of the best round aside, before later rounds push them out."""
        if self._experiment.federation.local_layers == "none" or best_round is None:
            return
        held = self._of_round(best_round)
        if held is not None and self._state.load_marked(best_round) is None:
            self._state.keep_marked(best_round, {_LOCAL: held[_LOCAL]})

    def _of_round(self, round_number: int) -> dict[str, Any] | None:
        """A site that took no part in that round had the layers of the one before."""
        return self._state.load_marked(round_number) or self._state.latest_round(round_number)

    def _network(self, weights: Arrays, find: Callable[[], dict[str, Any] | None], exchange: str) -> nn.Module:
        """The network of weights that have the types of an exchange, with this site's own layers."""
        network = untrained_network(self._experiment)
        partition = self._partition(network)
        expected = select(state_arrays(network), partition.shared)
        _refuse_misfit(weights, expected, exchange_types(expected, exchange, partition.statistics))
        held = find() if partition.local else {}
        own = select(state_arrays(network), partition.local)
        self.begins_anew = held is None
        if self.begins_anew:
            self._logger.warning("no local layers of an earlier round are kept here; the initial ones are trained")
        if held:
            own = {name: value.numpy() for name, value in held[_LOCAL].items()}
        load_arrays(network, {**own, **from_exchange_types(weights)})
        return network

    def _partition(self, network: nn.Module) -> Partition:
        return partition_of(network, self._experiment.federation.local_layers)


def _refuse_misfit(received: Arrays, expected: Arrays, types: Mapping[str, np.dtype[np.generic]]) -> None:
    """Hold a model that came from the server against the network before anything of it is copied.

    Raises:
        TrainingError: other names, shapes or types, or values that are not finite; gives the first three.
    """
    wrong = sorted(expected.keys() ^ received.keys())
    wrong += [
        name
        for name, value in received.items()
        if name in expected and (value.shape, value.dtype) != (expected[name].shape, types[name])
    ]
    if wrong:
        shown = ", ".join(one_line(name)[:60] for name in wrong[:3])
        raise TrainingError(f"the model received does not fit this network: {shown}")
    spoiled = [name for name, value in received.items() if not np.isfinite(value).all()]
    if spoiled:
        raise NotFiniteError(f"the model received is not finite in {', '.join(spoiled[:3])}")


def _trained(held: dict[str, Any] | None) -> dict[str, Any]:
    if held is None:
        raise TrainingError(
            "there is no model to score: federation.local_layers keeps layers at each site, and this one trained none"
        )
    return held
