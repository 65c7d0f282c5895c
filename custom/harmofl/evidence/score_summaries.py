"""Scores of a split as the evidence holds them; apart from the schema, which is read where torch is not loaded."""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from harmofl.core.classification import Estimate
from harmofl.core.scores import summarize
from harmofl.evidence.results import ScoreSummary


def summary_of_cases(
    scores: Sequence[float], patients: Sequence[int] | None = None, largest: float = 1.0
) -> ScoreSummary:
    """Mean over cases; undefined cases (NaN) are null and counted.

    Args:
        scores: of the cases.
        patients: number of each case's patient; without them each case is of a patient of its own.
        largest: 1 for scores in [0, 1], infinity for distances.
    """
    held = [score if isfinite(score) else nan for score in scores]
    return ScoreSummary(
        **vars(summarize(held, patients, largest)),
        per_case=[_finite(score) for score in held],
        patient_of_case=list(patients or ()),
    )


def summary_of_images(estimate: Estimate) -> ScoreSummary:
    """A score over all images of a split, which has no list of cases."""
    mean = _finite(estimate.value)
    return ScoreSummary(
        mean=mean,
        low=_finite(estimate.low),
        high=_finite(estimate.high),
        no_interval=estimate.no_interval,
        n=estimate.n,
        undefined=int(mean is None),
        patients=estimate.patients,
        per_case=[],
        by_patient=[(counted, of) for counted, of in estimate.by_patient],
    )


def summary_as_sent(told: Mapping[str, Any]) -> ScoreSummary:
    """What a site sends in place of the scores of its cases: `harmofl.flare.wire.ReleasedSummary`."""
    return ScoreSummary(**{"n" if name == "cases" else name: value for name, value in told.items()}, per_case=[])


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
