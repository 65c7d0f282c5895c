"""The difference of one score of two models on the same cases, patient by patient."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

from harmofl.core.clustered import Interval, Units, by_patient, interval_of, ratio_units
from harmofl.data.findings import count_text
from harmofl.evidence.results import ScoreSummary


class OtherCasesError(ValueError):
    """The two models were not scored on the same cases; one part of a line."""


@dataclass(frozen=True)
class PatientDifference:
    """First minus second score.

    Attributes:
        mean: over the cases that both models score; of a share the difference of the two shares.
        count: these cases, or images.
        counted: what was counted.
        patients: of these cases.
        units: what each patient contributes; None where a single one has them all or the score is not known by patient.
        known: whether the score is known by patient.
    """

    mean: float
    count: int
    counted: str
    patients: int
    units: Units | None
    known: bool = True

    @property
    def interval(self) -> Interval:
        """The 95 % interval over patients."""
        if not self.known:
            return Interval(None, None, self.patients, "no_parts")
        return interval_of(self.mean, self.units, self.patients, None)


def patient_difference(first: ScoreSummary, second: ScoreSummary) -> PatientDifference | None:
    """The difference of two summaries of one score at one site; None where nothing is scored in both.

    Raises:
        OtherCasesError: another number of cases, other patients, or images that are not theirs.
    """
    if first.mean is None or second.mean is None:
        return None
    if not all(held.per_case or held.by_patient for held in (first, second)):  # a site's limits may keep them there
        return PatientDifference(
            first.mean - second.mean, first.n, "cases or images", first.patients, None, known=False
        )
    if len(first.per_case) != len(second.per_case):
        tested = count_text(len(first.per_case), "case")
        raise OtherCasesError(f"tested {tested} in one run and {len(second.per_case)} in the other")
    if first.patient_of_case != second.patient_of_case:
        raise OtherCasesError("tested cases of other patients in one run than in the other")
    if first.per_case:
        return _of_cases(first, second)
    images = [sum(of for _, of in held.by_patient) for held in (first, second)]
    if [of for _, of in first.by_patient] != [of for _, of in second.by_patient]:
        raise OtherCasesError(f"tested {images[0]} images in one run and {images[1]} others in the other")
    mean, patients = first.mean - second.mean, len(first.by_patient)
    return PatientDifference(mean, images[0], "images", patients, _difference(first.by_patient, second.by_patient))


def _of_cases(first: ScoreSummary, second: ScoreSummary) -> PatientDifference | None:
    pairs = zip(first.per_case, second.per_case, strict=True)
    gains = [nan if one is None or other is None else one - other for one, other in pairs]
    parts = by_patient(gains, first.patient_of_case or range(len(gains)))
    if not parts:
        return None
    count = int(sum(number for _, number in parts))
    return PatientDifference(sum(gain for gain, _ in parts) / count, count, "cases", len(parts), ratio_units(parts))


def _difference(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> Units | None:
    one, other = ratio_units(first), ratio_units(second)
    return Units(one.values - other.values, one.effective) if one and other else None
