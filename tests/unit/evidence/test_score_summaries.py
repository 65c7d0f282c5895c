"""Scores of cases as the evidence holds them: what is not finite is no score."""

from math import exp, inf, nan, sqrt

import pytest

from harmofl.core.classification import Estimate
from harmofl.evidence.score_summaries import summary_of_cases, summary_of_images


def test_an_infinite_distance_is_undefined_and_in_no_mean() -> None:
    summary = summary_of_cases([2.0, inf, 4.0, nan, 6.0], largest=inf)
    assert (summary.mean, summary.n, summary.undefined, summary.patients) == (4.0, 3, 2, 3)
    assert summary.per_case == [2.0, None, 4.0, None, 6.0]
    # 2, 4 and 6: error 2 / sqrt 3, on the log scale a quarter of it; Student's quantile of 2 degrees is 4.302653
    factor = exp(4.302653 * 2 / sqrt(3) / 4)
    assert summary.low == pytest.approx(4 / factor, rel=1e-5) and summary.high == pytest.approx(4 * factor, rel=1e-5)


def test_a_score_over_images_counts_images_and_patients_apart() -> None:
    summary = summary_of_images(Estimate(0.6, 0.4, 0.8, 10, 3, None, ((2, 4), (3, 4), (1, 2))))
    assert (summary.n, summary.patients, summary.undefined) == (10, 3, 0)
    none = summary_of_images(Estimate(nan, nan, nan, 10, 0, "undefined"))
    assert (none.mean, none.low, none.n, none.patients, none.undefined) == (None, None, 10, 0, 1)
