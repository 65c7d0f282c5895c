"""From the sites' differences to the next global model: plain mean, FedNova and FedAdam."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from harmofl.core.aggregation import ContributionError, StreamingMean
from harmofl.experiment import FederationSettings, TrainingSettings

Arrays = Mapping[str, np.ndarray]
Moments = dict[str, dict[str, Tensor]]


def local_steps(steps: int, momentum: float) -> float:
    """FedNova's tau: how much of a gradient's length a round of SGD steps moves the weights, in learning rates.

    With momentum rho the gradient of step k is applied in every step from k on, by rho^0, rho^1, ..., so that
    tau = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) for K steps (Wang et al., NeurIPS 2020, section 4), where the
    round begins without momentum; K itself for momentum 0.

    Raises:
        ContributionError: less than one step was taken.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ContributionError(f"number of training steps is {steps!r}")
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class RoundMean:
    """The mean of one round's differences, by steps where the rule asks for it; a refused one leaves no trace.

    With `tau`, parameters are averaged as FedNova does: the weighted mean of d_i / tau_i times the weighted mean of
    tau_i. All other entries are averaged as they are: a running statistic is no sum of gradients.
    """

    def __init__(self, reference: Arrays, parameters: frozenset[str], tau: Callable[[int], float] | None) -> None:
        """Prepare for differences with the names and shapes of `reference`."""
        self._parameters, self._tau = parameters, tau
        self._mean = StreamingMean(reference)
        self._weighted_steps: list[float] = []
        self._weights: list[float] = []

    @property
    def count(self) -> int:
        """How many differences are in it."""
        return self._mean.count

    def add(self, difference: Arrays, weight: float, steps: int) -> None:
        """Check a whole difference, then add it.

        Args:
            difference: name -> change of the entry.
            weight: in the mean.
            steps: training steps that moved the weights.

        Raises:
            ContributionError: see `StreamingMean.check`; also no number of steps where the rule needs one.
        """
        if self._tau is None:
            self._mean.add(difference, weight)
            return
        self._mean.check(difference, weight)
        tau = self._tau(steps)
        per_step = {
            name: np.asarray(value, np.float64) / tau if name in self._parameters else value
            for name, value in difference.items()
        }
        self._mean.add(per_step, weight)
        self._weighted_steps.append(weight * tau)
        self._weights.append(weight)

    def mean(self) -> dict[str, np.ndarray]:
        """The mean difference.

        Raises:
            ContributionError: nothing was added.
        """
        if self._tau is None or not self._weights:
            return self._mean.mean()
        # fsum rounds once, so that the order of arrival changes nothing
        effective = math.fsum(self._weighted_steps) / math.fsum(self._weights)
        return self._mean.mean(dict.fromkeys(self._parameters, effective))


class ServerRule:
    """How a run's server makes the next global model.

    `average` moves parameters by the server's learning rate times the mean difference (Algorithm 1). `nova` does so
    with FedNova's mean: for SGD, tau is that of `local_steps` with its momentum; for Adam, whose steps have about equal
    lengths, the number of steps. With `training.keep_moments` older gradients still move the weights, which tau leaves
    out. `adam` is FedAdam (Reddi et al., ICLR 2021, algorithm 2) in the form of torch.optim.Adam: the pseudo-gradient
    is minus the mean difference, both moments are corrected for their start at 0 (the paper does not correct them), and
    epsilon, the paper's tau, is added to the square root of the corrected second moment. Entries that are no
    parameters, running statistics and counters, take the whole of the mean difference whatever the rule: they have no
    gradient, and a rate above 1 would put a variance beyond the sites' own, below 0.

    Attributes:
        moments: of `adam`, by parameter what torch.optim.Adam keeps; what a checkpoint must hold.
    """

    def __init__(
        self, federation: FederationSettings, training: TrainingSettings, parameters: frozenset[str] = frozenset()
    ) -> None:
        """Choose the rule.

        Args:
            federation: names rule, rate and Adam's numbers.
            training: the sites' optimizer, which decides FedNova's tau.
            parameters: entries that gradients move (`Partition.parameters`); rate and rule are for these alone.
        """
        self._settings, self._parameters = federation, parameters
        momentum = training.momentum if training.optimizer == "sgd" else 0.0
        self._tau = partial(local_steps, momentum=momentum) if federation.server_optimizer == "nova" else None
        self.moments: Moments = {}

    def open_round(self, weights: Arrays) -> RoundMean:
        """The mean of a round that began with these weights."""
        return RoundMean(weights, self._parameters, self._tau)

    def next_model(
        self, weights: Mapping[str, np.ndarray], difference: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The weights after a round.

        Args:
            weights: those that the round began with.
            difference: what `RoundMean.mean` gave.

        Raises:
            ValueError: they are not finite, and must not become the global model.
        """
        rate = self._settings.server_learning_rate
        if self._settings.server_optimizer != "adam":
            return apply_difference(weights, difference, rate, self._parameters)
        moved = apply_difference(weights, difference, 1.0, self._parameters)
        parameters = {
            name: torch.nn.Parameter(torch.as_tensor(np.array(value)))
            for name, value in weights.items()
            if name in self._parameters
        }
        optimizer = torch.optim.Adam(
            parameters.values(), lr=rate, betas=self._settings.server_betas, eps=self._settings.server_epsilon
        )
        for name, parameter in parameters.items():
            parameter.grad = -torch.as_tensor(np.array(difference[name]))
            if self.moments:
                optimizer.state[parameter] = self.moments[name]
        optimizer.step()
        self.moments = {name: dict(optimizer.state[parameter]) for name, parameter in parameters.items()}
        return moved | {name: _finite(name, value.detach().numpy()) for name, value in parameters.items()}


def apply_difference(
    weights: Arrays, difference: Arrays, rate: float, parameters: frozenset[str]
) -> dict[str, np.ndarray]:
    """Weights moved by the difference, in float32: parameters by `rate` times it, all other entries by the whole of it.

    Raises:
        ValueError: the moved weights are not finite, and must not become the global model.
    """
    moved: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        change = difference[name]
        if np.issubdtype(value.dtype, np.floating):
            share = np.asarray(rate if name in parameters else 1.0, value.dtype)
            moved[name] = _finite(name, value + share * change)
        else:
            moved[name] = (value + change).astype(value.dtype)
    return moved


def _finite(name: str, value: np.ndarray) -> np.ndarray:
    if not np.isfinite(value).all():
        raise ValueError(f"the global model would not be finite in {name}; lower federation.server_learning_rate")
    return value
