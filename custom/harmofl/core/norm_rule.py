"""How long a site's difference may be: by the sites of the round before, and by what its optimizer can do."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from harmofl.core.aggregation import Measured, NormLimits
from harmofl.core.grid_sum import Doubles
from harmofl.experiment import TrainingSettings

# A site whose steps point anywhere moves by the root of their number, so that with 25 times fewer steps than another
# its norm per step is 5 times as large; with 100 times fewer, 10 times, which is the default of federation.norm_bound.
OUTLIER = 5.0
MOST_STEPS = 10  # times the median of the sites: of a site with more so many count, or a claim would lift its limit
_BETA_1, _BETA_2 = 0.9, 0.999  # of torch.optim.Adam
_ROUNDING = 1.1  # float16 on the way, and weights of float32, move a difference a little


@dataclass(frozen=True)
class SentDifference:
    """What a site sent in a round.

    Attributes:
        norm: L2 norm of the change of the parameters by training step.
        factor: what the difference was multiplied by before it was added; 1 where it was not scaled.
        note: why it is an outlier, in one line; empty where it is none.
        direction: random projection of the change of the parameters.
    """

    norm: float
    factor: float
    note: str
    direction: Doubles


def usual_steps(steps: Collection[int]) -> int | None:
    """The median of the sites' steps, of an even number the lower one in the middle; None without any."""
    return sorted(steps)[(len(steps) - 1) // 2] if steps else None


def usual_norm(norms: Collection[float]) -> float | None:
    """The median of norms per step, None without any above 0; of an even number the lower of the two in the middle.

    So one of two sites cannot raise it.
    """
    held = sorted(norms)
    return (held[(len(held) - 1) // 2] or None) if held else None


def adam_reach(step: int) -> float:
    """The most, in learning rates, that step number `step` (from 1) of Adam can move a weight, whatever the gradients.

    With gradients g_1, ..., g_t the step is the corrected first moment by the root of the corrected second one; by
    Cauchy and Schwarz at most (1 - b1) / sqrt(1 - b2) * sqrt(sum over k < t of (b1^2 / b2)^k)
    * sqrt(1 - b2^t) / (1 - b1^t): 1 for the first step, 7.27 in the end. Weight decay and proximal terms are part of
    the gradients of torch.optim.Adam.
    """
    ratio = _BETA_1**2 / _BETA_2
    moments = math.sqrt((1 - ratio**step) / (1 - ratio)) * (1 - _BETA_1) / math.sqrt(1 - _BETA_2)
    return moments * math.sqrt(1 - _BETA_2**step) / (1 - _BETA_1**step)


_ADAM_IN_THE_END = (1 - _BETA_1) / math.sqrt((1 - _BETA_2) * (1 - _BETA_1**2 / _BETA_2))


@dataclass(frozen=True)
class NormRule:
    """The limits of a round.

    A difference may be as long as `factor` times the usual norm per step of the round before, by its own steps. In the
    first round, or where the round before tells nothing, and beside that in every round, it may be as long as the
    optimizer can make it: with Adam no weight moves further in a step than `adam_reach` learning rates; with SGD,
    whose steps have no such bound, no round may move the model by more than the model's own norm. Running statistics
    have no steps: they may change by `factor` times their own norm.

    Attributes:
        usual: norm per step of the round before, see `usual_norm`; None where there is none.
        bound: `federation.norm_bound`; None to scale nothing and only say what is an outlier.
        training: the sites' optimizer.
        fresh: whether the sites' moments begin with this round.
        model_norm: of the parameters that the round began with.
        statistics_norm: of the running statistics that it began with.
        values: number of values of the parameters.
        usual_steps: median of the sites' steps in the round before; None where there is none.
    """

    usual: float | None
    bound: float | None
    training: TrainingSettings
    fresh: bool
    model_norm: float
    statistics_norm: float
    values: int
    usual_steps: int | None = None

    def counted(self, steps: int) -> int:
        """How many of a site's steps its norm is divided by, and its limits are made for: at least 1."""
        return max(1, steps if self.usual_steps is None else min(steps, MOST_STEPS * self.usual_steps))

    def limits(self, steps: int) -> NormLimits:
        """From which norms on a difference of so many steps is scaled down, and to which; none without a bound.

        What is beyond the bound is no difference of such a training: it gets the length of a usual one, not that of the
        longest that is let through.
        """
        if self.bound is None:
            return NormLimits()
        reach = self._reach(steps)
        usual = math.inf if self.usual is None else self.usual * steps
        return NormLimits(min(self.bound * usual, reach), min(usual, reach), self._statistics(self.bound))

    def judged(self, measured: Measured, steps: int) -> SentDifference:
        """What a difference was, and whether it is an outlier."""
        norm = measured.norm / steps
        reasons = [self._parameters_reason(norm, steps), self._statistics_reason(measured.rest_norm)]
        if measured.factor < 1:
            reasons.append(f"scaled by {measured.factor:.3g} (federation.norm_bound {self.bound:g})")
        elif any(reasons) and self.bound is None:
            reasons.append("added as it is (federation.norm_bound is null)")
        note = "; ".join(reason for reason in reasons if reason)
        return SentDifference(norm, measured.factor, note, measured.direction)

    def _parameters_reason(self, norm: float, steps: int) -> str:
        times = OUTLIER if self.bound is None else min(OUTLIER, self.bound)
        if self.usual is not None and norm > times * self.usual:
            return (
                f"norm {norm:.3g} a step is {norm / self.usual:.3g} times the median of the round before "
                f"({self.usual:.3g})"
            )
        reach = self._reach(steps) / steps
        if norm <= reach:
            return ""
        if self.training.optimizer == "adam":
            return f"norm {norm:.3g} a step is above {reach:.3g}, the most that Adam can do at this learning rate"
        return f"norm {norm:.3g} a step is above {reach:.3g}: the round moved the model by more than the model's norm"

    def _statistics_reason(self, norm: float) -> str:
        limit = self._statistics(self.bound or OUTLIER)
        return f"running statistics changed by {norm:.3g}, above {limit:.3g}" if norm > limit else ""

    def _statistics(self, times: float) -> float:
        return times * self.statistics_norm if self.statistics_norm > 0 else math.inf

    def _reach(self, steps: int) -> float:
        if self.training.optimizer != "adam":
            return self.model_norm or math.inf
        reach = sum(map(adam_reach, range(1, steps + 1))) if self.fresh and steps < 1_000 else steps * _ADAM_IN_THE_END
        return _ROUNDING * self.training.learning_rate * math.sqrt(self.values) * reach


def whole_norm(arrays: "Collection[np.ndarray]") -> float:
    """The L2 norm of arrays together, in float64."""
    return math.sqrt(math.fsum(float(np.square(np.asarray(value, np.float64)).sum()) for value in arrays))
