"""From the sites' differences to the next global model: plain mean, FedNova and FedAdam."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from harmofl.core.aggregation import ContributionMean, Measured, StreamingMean
from harmofl.core.contributions import ContributionError
from harmofl.core.coordinatewise import CoordinatewiseMean
from harmofl.core.norm_rule import NormRule, SentDifference, whole_norm
from harmofl.core.partial_sum import PartialSum
from harmofl.experiment import FederationSettings, TrainingSettings

Arrays = Mapping[str, np.ndarray]
Moments = dict[str, dict[str, Tensor]]
Tau = Callable[[int], int]
_ROUNDED = 1e-6  # a part of the number: float32 has 24 bits
_TAU_UNITS = 2**20  # in a step: tau is a whole number of them, so that sums of weight times tau are exact
_LONGER = 1.001  # norms are rounded, and so are the means whose norm is taken
_USUAL_TAU = 2**16  # steps: differences are summed as they would be after so many


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


def _tau_units(steps: int, momentum: float) -> int:
    """FedNova's tau in units of 2^-20 steps."""
    return round(_TAU_UNITS * local_steps(steps, momentum))


class RunningVariances:
    """The running variances that a round began with: no training makes one negative."""

    def __init__(self, variances: Arrays) -> None:
        """Keep them as one vector.

        Args:
            variances: name -> array of the model that was sent.
        """
        self._before = {name: np.asarray(value) for name, value in variances.items()}
        together = [value.reshape(-1) for value in self._before.values()]
        before = np.concatenate(together) if together else np.zeros(0, np.float32)
        # the difference of two float32 numbers, each rounded
        self._least = before * np.asarray(-(1 + _ROUNDED), before.dtype)

    def refuse_negative(self, difference: Arrays) -> None:
        """Refuse a difference that would put one below 0.

        Raises:
            ContributionError: names the first such entry.
        """
        changes = [np.asarray(difference.get(name)) for name in self._before]
        if not changes:
            return
        formed = all(
            change.shape == before.shape and change.dtype.kind == "f"
            for change, before in zip(changes, self._before.values(), strict=True)
        )
        if not formed:
            return  # refused later, by its form
        below = np.concatenate([change.reshape(-1) for change in changes]) < self._least
        if below.any():
            stops = np.cumsum([change.size for change in changes])
            name = list(self._before)[int(np.searchsorted(stops, int(below.argmax()), side="right"))]
            raise ContributionError(f"entry {name} would be a variance below 0")


class RoundMean:
    """The mean of one round's differences, by steps where the rule asks for it; a refused one leaves no trace.

    With `tau`, parameters are averaged as FedNova does: the weighted mean of d_i / tau_i times the weighted mean of
    tau_i. All other entries are averaged as they are: a running statistic is no sum of gradients. A difference beyond
    the limits of `norms` is scaled down first, which depends on this difference and the round before alone.

    FedNova's parameters are summed as d_i 2^16 / tau_i, and their mean is multiplied by that of tau / 2^16: so the
    error of the common grid, 2^-30 scales (`harmofl.core.grid_sum`), is multiplied by less than 1 up to a mean tau of
    65,536 steps. Weight times 2^16 / tau takes the place of the weight in what is said there of products and range.
    """

    def __init__(
        self,
        mean: ContributionMean,
        parameters: frozenset[str],
        tau: Tau | None,
        norms: NormRule,
        variances: Arrays,
    ) -> None:
        """Prepare for differences like the reference of `mean`, which is empty still, to models with `variances`.

        Args:
            mean: measures the parameters.
            parameters: entries that gradients move.
            tau: by steps FedNova's tau, in units of 2^-20 steps.
            norms: limits of the round.
            variances: running variances that it began with.
        """
        self._parameters, self._tau, self._norms, self._mean = parameters, tau, norms, mean
        self._variances = RunningVariances(variances)
        self._weighted_steps = 0

    @property
    def count(self) -> int:
        """How many differences are in it."""
        return self._mean.count

    def add(self, difference: Arrays, weight: int, steps: int) -> SentDifference:
        """Check a whole difference, then add it.

        Args:
            difference: name -> change of the entry.
            weight: in the mean, a whole number.
            steps: training steps that moved the weights.

        Returns:
            Its norm per step, and whether it is an outlier.

        Raises:
            ContributionError: see `StreamingMean.check`; also no number of steps where the rule needs one, and a
                running variance that would be below 0 at the site, which no training makes.
        """
        self._variances.refuse_negative(difference)
        tau = self._tau(steps) if self._tau is not None else None
        counted = self._norms.counted(steps)
        share = 1.0 if tau is None else _USUAL_TAU * _TAU_UNITS / tau
        measured = self._mean.add(difference, weight, self._norms.limits(counted), share)
        self._weighted_steps += int(weight) * (tau or 0)
        return self._norms.judged(measured, counted)

    def partial(self) -> PartialSum:
        """What was added so far, for a mean of the same round elsewhere.

        Raises:
            ContributionError: nothing was added, or the mean is none of sums.
        """
        return self._streaming().partial(self._weighted_steps)

    def merge(self, partial: PartialSum, steps: Collection[int]) -> Measured:
        """Check a partial sum, then add it.

        Args:
            partial: of a mean of this round elsewhere, opened with the same model and norms of the round before.
            steps: of each difference in it, the training steps that moved the weights.

        Returns:
            Norm and direction of its mean.

        Raises:
            ContributionError: see `StreamingMean.merge`; also steps that do not belong to it, a mean longer than any of
                its differences may be, or one that puts a running variance below 0.
        """
        partial.check_numbers()
        if len(steps) != partial.count:
            raise ContributionError(f"steps of {len(steps)} sites came with a sum of {partial.count}")
        taus = None if self._tau is None else [self._tau(taken) for taken in steps]
        least, most = (0, 0) if taus is None else (min(taus) * partial.weight, max(taus) * partial.weight)
        if not least <= partial.weighted_steps <= most:
            raise ContributionError("the weighted steps of the partial sum are none that its sites' steps make")

        def judge(mean: Arrays, measured: Measured) -> None:
            self._variances.refuse_negative(mean)
            self._refuse_long(measured, partial, steps, taus)

        measured = self._streaming().merge(partial, judge)
        self._weighted_steps += partial.weighted_steps
        return measured

    def mean(self) -> dict[str, np.ndarray]:
        """The mean difference.

        Raises:
            ContributionError: nothing was added.
        """
        if self._tau is None or not self._mean.count:
            return self._mean.mean()
        return self._mean.mean(self._weighted_steps / (_USUAL_TAU * _TAU_UNITS * self._mean.total_weight))

    def _streaming(self) -> StreamingMean:
        if not isinstance(self._mean, StreamingMean):
            raise ContributionError("federation.aggregation: only 'mean' has partial sums")
        return self._mean

    def _refuse_long(
        self, measured: Measured, partial: PartialSum, steps: Collection[int], taus: list[int] | None
    ) -> None:
        """Each of its differences was within its limits or scaled to them, and so is their mean."""
        limits = [self._norms.limits(self._norms.counted(taken)) for taken in steps]
        shares = [1.0] * len(limits) if taus is None else [_USUAL_TAU * _TAU_UNITS / tau for tau in taus]
        norm = max(limit.norm * share for limit, share in zip(limits, shares, strict=True))
        rest = max(limit.rest_norm for limit in limits)
        for what, told, most in (("parameters", measured.norm, norm), ("statistics", measured.rest_norm, rest)):
            if told > _LONGER * most:
                raise ContributionError(
                    f"the mean change of the {what} of {partial.count} sites is {told:.3g} long, above {most:.3g}, "
                    "which federation.norm_bound lets none of them be; look at that relay"
                )


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
        self,
        federation: FederationSettings,
        training: TrainingSettings,
        parameters: frozenset[str] = frozenset(),
        variances: frozenset[str] = frozenset(),
    ) -> None:
        """Choose the rule.

        Args:
            federation: names rule, rate and Adam's numbers.
            training: the sites' optimizer, which decides FedNova's tau.
            parameters: entries that gradients move (`Partition.parameters`); rate and rule are for these alone.
            variances: entries that are never below 0 (`Partition.variances`).
        """
        self._settings, self._training, self._parameters = federation, training, parameters
        self._variances = variances
        momentum = training.momentum if training.optimizer == "sgd" else 0.0
        self._tau = partial(_tau_units, momentum=momentum) if federation.server_optimizer == "nova" else None
        self.moments: Moments = {}

    def open_round(
        self, weights: Arrays, usual: float | None = None, *, usual_steps: int | None = None, first: bool = True
    ) -> RoundMean:
        """The mean of a round that began with these weights.

        Args:
            weights: name -> array of the model that was sent.
            usual: norm per step of the round before (`usual_norm`), None where there is none.
            usual_steps: of the round before (`harmofl.core.norm_rule.usual_steps`).
            first: whether it is the first round.
        """
        share = self._settings.trimmed_share if self._settings.aggregation == "trimmed_mean" else None
        mean = (
            StreamingMean(weights, self._parameters, self._settings.scale_floor)
            if self._settings.aggregation == "mean"
            else CoordinatewiseMean(weights, self._parameters, share)
        )
        variances = {name: np.asarray(weights[name]) for name in self._variances if name in weights}
        norms = replace(self._norm_rule(weights, usual, first), usual_steps=usual_steps)
        return RoundMean(mean, self._parameters, self._tau, norms, variances)

    def _norm_rule(self, weights: Arrays, usual: float | None, first: bool) -> NormRule:
        floats = {name: value for name, value in weights.items() if np.issubdtype(np.asarray(value).dtype, np.floating)}
        parameters = [value for name, value in floats.items() if name in self._parameters]
        return NormRule(
            usual=usual,
            # on pooled data one place trains, and nobody is there to be protected from it
            bound=None if self._settings.pooled_data else self._settings.norm_bound,
            training=self._training,
            fresh=first or not self._training.keep_moments,
            model_norm=whole_norm(parameters),
            statistics_norm=whole_norm([value for name, value in floats.items() if name not in self._parameters]),
            values=sum(np.asarray(value).size for value in parameters),
        )

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
