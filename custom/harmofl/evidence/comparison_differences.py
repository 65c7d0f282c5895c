"""Spreads over seeds, paired differences between two methods' cells, and what they allow to say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan

import numpy as np

from harmofl.core.clustered import FEWEST
from harmofl.core.paired import PairedDifference, holm, interval_over_patients, paired_difference
from harmofl.evidence.comparison import CellRecord, Difference, Spread, Verdict
from harmofl.evidence.patient_differences import OtherCasesError, PatientDifference, patient_difference

LEVEL = 0.05
_NO_SPREAD = Spread(mean=None, deviation=None, n=0)


def spread(values: Iterable[float | None]) -> Spread:
    """Mean and standard deviation of the defined values."""
    defined = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(defined):
        return _NO_SPREAD
    deviation = float(defined.std(ddof=1)) if len(defined) > 1 else None
    return Spread(mean=float(defined.mean()), deviation=deviation, n=len(defined))


def mean_score(record: CellRecord, *, final: bool = False) -> float | None:
    """Mean over the sites that trained of a cell's key score."""
    scores = defined(site_score(record, site, final=final) for site in record.seen)
    return sum(scores) / len(scores) if scores else None


def unseen_score(record: CellRecord) -> float | None:
    """The key score at the site that took no part."""
    return site_score(record, record.key.left_out) if record.key.left_out else None


def site_score(record: CellRecord, site: str, *, final: bool = False) -> float | None:
    """A cell's key score at one site, of the best model or the last one."""
    held = record.scores.get(site)
    score = (held.final if final else held.best).get(record.key_score) if held else None
    return score.mean if score else None


def defined(values: Iterable[float | None]) -> list[float]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def by_round(rows: Sequence[Sequence[float | None]]) -> list[Spread]:
    """Spread over rows of each round; rows may differ in length."""
    longest = max((len(row) for row in rows), default=0)
    return [spread(row[index] for row in rows if index < len(row)) for index in range(longest)]


def difference_of(
    one: Mapping[int, CellRecord],
    other: Mapping[int, CellRecord],
    score: Callable[[CellRecord], float | None],
    *,
    by_patient: bool = False,
) -> Difference:
    """Paired over the seeds that both methods finished; `by_patient` adds the interval over patients."""
    seeds = [seed for seed in one if seed in other]
    pairs = [(score(one[seed]), score(other[seed])) for seed in seeds]
    first = [nan if a is None else a for a, _ in pairs]
    second = [nan if b is None else b for _, b in pairs]
    # seeds split the same patients anew, but for synthetic ones, whom each seed draws for itself
    real = [seed for seed in seeds if not one[seed].demo]
    overlap = max((one[seed].test_over_training for seed in real), default=0.0)
    interval = None
    if by_patient:
        interval = _interval_over_patients([(one[seed], other[seed]) for seed in seeds], recurring=bool(real))
    return recorded(paired_difference(first, second, overlap), interval)


def recorded(paired: PairedDifference, interval: tuple[float, float] | None) -> Difference:
    """As comparison.json holds it, not corrected yet."""
    return Difference(
        mean=paired.mean,
        low=paired.low,
        high=paired.high,
        p_value=paired.p_value,
        p_corrected=paired.p_value,
        pairs=paired.pairs,
        patients_low=interval[0] if interval else None,
        patients_high=interval[1] if interval else None,
    )


def _interval_over_patients(
    pairs: Sequence[tuple[CellRecord, CellRecord]], *, recurring: bool
) -> tuple[float, float] | None:
    """Of the mean over seeds and sites; None where a site has a single patient or its score is not known by patient."""
    repetitions = []
    for one, other in pairs:
        try:
            sites = _by_site(one, other)
        except OtherCasesError:  # another split: there is nothing to pair
            return None
        if any(difference.units is None for difference in sites):
            return None
        repetitions.append([(held.mean, held.units) for held in sites if held.units is not None])
    return interval_over_patients(repetitions, recurring=recurring)


def _by_site(one: CellRecord, other: CellRecord) -> list[PatientDifference]:
    """The sites that both score: a seed gives both methods the same cases in the same order."""
    differences = []
    for site in one.seen:
        first, second = (
            held.best.get(record.key_score) if (held := record.scores.get(site)) else None for record in (one, other)
        )
        difference = patient_difference(first, second) if first and second else None
        if difference is not None:
            differences.append(difference)
    return differences


def corrected(differences: Sequence[Difference | None]) -> list[Difference | None]:
    """P values that hold for all of these comparisons together."""
    tested = [held.p_value for held in differences if held is not None and held.p_value is not None]
    adjusted = iter(holm(tested))
    return [
        held.model_copy(update={"p_corrected": next(adjusted)})
        if held is not None and held.p_value is not None
        else held
        for held in differences
    ]


def equal(one: Mapping[int, CellRecord], other: Mapping[int, CellRecord]) -> bool:
    """Whether every score of both is equal to the last bit, as of two methods that do the same."""
    shared = [seed for seed in one if seed in other]
    return bool(shared) and all(one[seed].scores == other[seed].scores for seed in shared)


def verdict_of(difference: Difference | None) -> Verdict:
    """What a corrected difference allows to say."""
    if difference is None:
        return "reference"
    if difference.mean is None:
        return "no_scores"
    if difference.p_value is None or difference.p_corrected is None:
        return "few_seeds" if difference.pairs < FEWEST else "no_spread"
    if difference.p_corrected < LEVEL:
        return "better" if difference.mean > 0 else "worse"
    return "unclear" if difference.p_value < LEVEL else "no_evidence"
