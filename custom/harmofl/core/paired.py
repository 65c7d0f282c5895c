"""Paired differences between two methods, and how sure they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

DRAWS = 2000  # bootstrap samples: a 2.5 % quantile then has a standard error below a tenth of the interval's width

ROUNDING = 1e-12  # of the scores: differences that vary by less are equal but for the rounding of their means


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference of pairs with a 95 % interval and a two-sided p value; None where they are undefined.

    Pairs that all differ by the same amount, other than 0, have neither: see `paired_difference`.
    """

    mean: float | None
    low: float | None
    high: float | None
    p_value: float | None
    pairs: int


def paired_difference(one: Sequence[float], other: Sequence[float], overlap: float = 0.0) -> PairedDifference:
    """Student's t over pairs, `one` minus `other`.

    With few pairs a bootstrap over them is far too narrow (three pairs have ten different resamples), while Student's
    quantile for their number is right for normal differences: 4.3 with three pairs. It takes the differences for draws
    of a normal distribution whose deviation they show. Equal ones, such as of scores that count few pixels, show none:
    the interval would have no width and p would be 0, sure of what two or three pairs cannot know. They get neither.

    Args:
        one: a score a repetition.
        other: scores of the same repetitions.
        overlap: test over training cases where repetitions split the same patients anew. Their differences are then
            correlated, and the variance of the mean is multiplied by 1 + pairs * overlap (Nadeau and Bengio 2003); 0
            where every repetition has patients of its own.
    """
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isfinite(a) and isfinite(b)]
    if not pairs:
        return PairedDifference(None, None, None, None, 0)
    differences = np.array([a - b for a, b in pairs], dtype=np.float64)
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return PairedDifference(mean, None, None, None, count)
    from scipy.stats import t

    error = float(differences.std(ddof=1)) * sqrt(1 / count + overlap)
    if not differences.any():  # methods that are one and the same
        return PairedDifference(0.0, 0.0, 0.0, 1.0, count)
    if float(np.ptp(differences)) <= ROUNDING * max(abs(value) for pair in pairs for value in pair):
        return PairedDifference(mean, None, None, None, count)
    half = float(t.ppf(0.975, count - 1)) * error
    return PairedDifference(mean, mean - half, mean + half, float(2 * t.sf(abs(mean) / error, count - 1)), count)


def case_interval(by_group: Mapping[str, Sequence[float]], seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of the mean over groups of their mean paired difference, by resampling cases within each group.

    It says how far other patients of the same sites could move the difference between these trained models, and
    nothing about training them again.

    Args:
        by_group: paired differences of the cases of each group (a site in one repetition); NaN where undefined.
        seed: of the resampling.

    Returns:
        The 2.5 and 97.5 % percentiles, None where no group has two cases.
    """
    groups = [np.array([value for value in values if isfinite(value)]) for values in by_group.values()]
    groups = [group for group in groups if len(group)]
    if not any(len(group) > 1 for group in groups):
        return None
    generator = np.random.default_rng(seed)
    means = np.zeros(DRAWS)
    for group in groups:
        means += group[generator.integers(len(group), size=(DRAWS, len(group)))].mean(1)
    low, high = np.percentile(means / len(groups), (2.5, 97.5))
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values that hold for all comparisons together (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
