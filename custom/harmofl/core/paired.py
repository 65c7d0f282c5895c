"""Paired differences between two methods, and how sure they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

from harmofl.core.clustered import EFFECTIVE, FEWEST, ROUNDING, Units, student_quantile


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference of pairs with a 95 % interval and a two-sided p value; None where they are undefined.

    Fewer than three pairs, and pairs that all differ by the same amount, other than 0, have neither: see
    `paired_difference`.
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
    the interval would have no width and p would be 0, sure of what three pairs cannot know. They get neither, and so do
    one or two pairs, whose spread says next to nothing (the quantile of two is 12.7).

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
    if count > 1 and not differences.any():  # methods that are one and the same
        return PairedDifference(0.0, 0.0, 0.0, 1.0, count)
    if count < FEWEST:
        return PairedDifference(mean, None, None, None, count)
    from scipy.stats import t

    error = float(differences.std(ddof=1)) * sqrt(1 / count + overlap)
    if float(np.ptp(differences)) <= ROUNDING * max(abs(value) for pair in pairs for value in pair):
        return PairedDifference(mean, None, None, None, count)
    half = student_quantile(count - 1) * error
    return PairedDifference(mean, mean - half, mean + half, float(2 * t.sf(abs(mean) / error, count - 1)), count)


def interval_over_patients(
    repetitions: Sequence[Sequence[tuple[float, Units]]], *, recurring: bool
) -> tuple[float, float] | None:
    """95 % interval of the mean over repetitions of the mean over sites of a difference, over patients within sites.

    It says how far other patients of the same sites could move the difference between these trained models, and
    nothing about training them again. A bootstrap over the patients of each site is far too narrow where they are few
    (coverage 0.5 to 0.7 with two a site), so the sites' variances are added up, with the degrees of freedom of
    Satterthwaite (1946).

    Args:
        repetitions: by repetition and site the paired difference and what each patient contributes to it.
        recurring: a patient may be among those of several repetitions, whose errors are then not independent: they
            are added as if they were the same.

    Returns:
        None with fewer degrees of freedom than three patients of one site have, where a site has a single patient, and
        where nothing differs.
    """
    held = [sites for sites in repetitions if sites]
    if not held or any(units.effective <= 1 for sites in held for _, units in sites):
        return None
    spare = [sum(len(units.values) - 1 for _, units in sites) for sites in held]
    if (min(spare) if recurring else sum(spare)) < FEWEST - 1:
        return None
    errors, freedoms = [], []
    for sites in held:
        variances = np.array([units.error**2 for _, units in sites]) / len(sites) ** 2
        inverse = float((variances**2 / np.array([units.effective - 1 for _, units in sites])).sum())
        errors.append(sqrt(float(variances.sum())))
        freedoms.append(float(variances.sum()) ** 2 / inverse if inverse > 0 else 0.0)
    squares = np.square(errors)
    if recurring:
        error, freedom = sum(errors) / len(held), min(freedoms)
    else:
        error = sqrt(float(squares.sum())) / len(held)
        inverse = sum(square**2 / known for square, known in zip(squares.tolist(), freedoms, strict=True) if known)
        freedom = float(squares.sum()) ** 2 / inverse if inverse else 0.0
    mean = float(np.mean([np.mean([difference for difference, _ in sites]) for sites in held]))
    if error <= ROUNDING or freedom < EFFECTIVE - 1:
        return None
    half = student_quantile(freedom) * error
    return max(mean - half, -1.0), min(mean + half, 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """P values that hold for all comparisons together (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
