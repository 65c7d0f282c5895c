"""95 % intervals whose independent units are patients: patches, slides or cases of one patient are alike."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FEWEST = 3  # units below which no interval is given
EFFECTIVE = 2.0  # the same for the effective number of units, which is lower where a few of them hold most of the data
WIDEST = 0.95  # of the range of a score; an interval wider than this says nothing
ROUNDING = 1e-12  # of the values: units that vary by less are equal but for rounding

Why = Literal["too_few", "no_spread", "undefined", "no_parts"]
NO_INTERVAL: dict[Why, str] = {  # why a score has no interval, in words
    "too_few": "too few for an interval",
    "no_spread": "no spread for an interval",
    "undefined": "undefined",
    "no_parts": "not known by patient",
}


@dataclass(frozen=True)
class Interval:
    """Bounds over `count` independent units; both are None where there is none, for the reason `no_interval`."""

    low: float | None
    high: float | None
    count: int
    no_interval: Why | None = None


@dataclass(frozen=True)
class Units:
    """What each unit contributes to a score: its mean is the score, and its spread tells how sure the score is.

    Attributes:
        values: pseudo-values of the delete-one jackknife (Tukey 1958), (G,) float; for units of equal weight they are
            the units' own scores.
        effective: effective number of units, (sum w)^2 / sum w^2 of their weights (Kish 1965); G for equal weights.
    """

    values: NDArray[np.float64]
    effective: float

    @property
    def error(self) -> float:
        """Standard error of the score."""
        return float(self.values.std(ddof=1)) / sqrt(len(self.values))

    @property
    def spreads(self) -> bool:
        """Whether the units differ by more than rounding."""
        return float(np.ptp(self.values)) > ROUNDING * max(1.0, float(np.abs(self.values).max()))


def numbered(names: Iterable[Hashable]) -> list[int]:
    """Each name as a number, counted from 0 in the order of first appearance, so that no name goes on."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def by_patient(values: Sequence[float], patients: Sequence[Hashable]) -> list[tuple[float, float]]:
    """Sum and number of the defined values of each patient that has one, in the order of first appearance."""
    parts: dict[Hashable, tuple[float, float]] = {}
    for value, patient in zip(values, patients, strict=True):
        if isfinite(value):
            total, count = parts.get(patient, (0.0, 0.0))
            parts[patient] = (total + value, count + 1)
    return list(parts.values())


def ratio_units(parts: Sequence[tuple[float, float]]) -> Units | None:
    """The units of a ratio of sums: a mean over cases, or a share of images.

    Args:
        parts: by unit its part of the numerator and of the denominator, such as the patches that are called right and
            all patches of a patient.

    Returns:
        None where the ratio without one of the units is undefined, as for a single one.
    """
    above, below = (np.array([part[place] for part in parts if part[1]], dtype=np.float64) for place in (0, 1))
    count = len(below)
    if count < 2:
        return None
    without = (above.sum() - above) / (below.sum() - below)
    return Units(count * above.sum() / below.sum() - (count - 1) * without, effective_number(below))


def effective_number(weights: NDArray[Any]) -> float:
    """How many units of equal weight are as good as these (Kish 1965)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def interval_of(value: float, units: Units | None, count: int, largest: float | None) -> Interval:
    """Student's 95 % interval of a score over independent units, on a scale that keeps it within its range.

    The variance is the jackknife's, the degrees of freedom are the effective number of units less one, since few
    large units know less than as many equal ones. Coverage by simulation stands in tests/unit/core/test_clustered.py.

    Args:
        value: the score.
        units: of it.
        count: their number, for what is said where there are too few.
        largest: 1 for a score in [0, 1], whose interval is taken on the logit scale; infinity for a distance, on the
            log scale; None for a difference of two scores in [0, 1], whose interval is cut to [-1, 1].

    Returns:
        Without bounds for fewer than 3 units (effective ones: 2), for a width of nearly the whole range, and where
        all units are equal, since few equal ones do not show that others would be.
    """
    if not isfinite(value):
        return Interval(None, None, count, "undefined")
    if units is None or count < FEWEST or units.effective < EFFECTIVE:
        return Interval(None, None, count, "too_few")
    if not units.spreads or (largest is not None and not 0 < value < largest):
        return Interval(None, None, count, "no_spread")
    scale, back, slope = _scale(value, largest)
    half = student_quantile(units.effective - 1) * units.error * slope
    low, high = back(scale - half), back(scale + half)
    if largest is None:
        low, high = max(low, -1.0), min(high, 1.0)
    if largest != inf and high - low > WIDEST * (1 if largest else 2):
        return Interval(None, None, count, "too_few")
    return Interval(low, high, count)


def student_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def _scale(value: float, largest: float | None) -> tuple[float, Callable[[float], float], float]:
    """The value on the scale of its interval, the way back, and the scale's slope at the value."""
    if largest is None:
        return value, float, 1.0
    if largest == inf:
        return log(value), _exp, 1 / value
    assert largest == 1, "a score has the range [0, 1] or [0, infinity)"
    return log(value / (1 - value)), lambda logit: 1 / (1 + _exp(-logit)), 1 / (value * (1 - value))


def _exp(exponent: float) -> float:
    return exp(min(max(exponent, -700.0), 700.0))
