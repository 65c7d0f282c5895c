"""Intervals over patients: units and bounds by hand, and how often the bounds hold the truth."""

from math import exp, inf, log, nan, sqrt

import numpy as np
import pytest

from harmofl.core.clustered import Units, by_patient, effective_number, interval_of, numbered, ratio_units
from harmofl.core.scores import summarize
from tests.benchmarks import interval_coverage

T2, T3 = 4.302653, 3.182446  # 97.5 % quantiles of Student's t with 2 and 3 degrees of freedom, from tables


def logit(share: float) -> float:
    return log(share / (1 - share))


def back(value: float) -> float:
    return 1 / (1 + exp(-value))


def test_names_become_numbers_in_the_order_of_appearance() -> None:
    assert numbered(["Case07", "Case02", "Case07", "Case09"]) == [0, 1, 0, 2]


def test_cases_of_one_patient_are_one_part() -> None:
    assert by_patient([0.5, nan, 0.75, 1.0], ["a", "b", "a", "c"]) == [(1.25, 2), (1.0, 1)]


def test_units_of_equal_weight_are_their_own_scores() -> None:
    units = ratio_units([(3, 4), (2, 4), (4, 4)])
    assert units is not None
    assert units.values.tolist() == pytest.approx([0.75, 0.5, 1.0])
    assert units.effective == pytest.approx(3)


def test_uneven_units_by_hand() -> None:
    # 3 of 4, 1 of 2, 0 of 4: 4 of 10 = 0.4. Without each: 1 of 6, 3 of 8, 4 of 6.
    units = ratio_units([(3, 4), (1, 2), (0, 4), (0, 0)])
    assert units is not None
    expected = [3 * 0.4 - 2 / 6, 3 * 0.4 - 2 * 3 / 8, 3 * 0.4 - 2 * 4 / 6]
    assert units.values.tolist() == pytest.approx(expected)
    # 10^2 / (16 + 4 + 16)
    assert units.effective == pytest.approx(100 / 36)
    assert ratio_units([(3, 4), (0, 0)]) is None


def test_a_share_by_hand() -> None:
    # patients of 8 patches with 7, 6, 5 and 4 right: 22 of 32 = 0.6875; 0.875, 0.75, 0.625, 0.5 have the deviation
    # sqrt(0.078125 / 3) = 0.161374, the error is 0.080687
    found = interval_of(22 / 32, ratio_units([(7, 8), (6, 8), (5, 8), (4, 8)]), 4, 1)
    half = T3 * 0.080687 / (0.6875 * 0.3125)
    assert (found.low, found.high) == (
        pytest.approx(back(logit(0.6875) - half), abs=1e-5),
        pytest.approx(back(logit(0.6875) + half), abs=1e-5),
    )
    assert (found.count, found.no_interval) == (4, None)


def test_a_distance_stays_above_zero() -> None:
    # 2, 4 and 6 mm: mean 4, error 2 / sqrt(3); on the log scale times 1 / 4
    found = interval_of(4.0, ratio_units([(2, 1), (4, 1), (6, 1)]), 3, inf)
    factor = exp(T2 * 2 / sqrt(3) / 4)
    assert (found.low, found.high) == (pytest.approx(4 / factor, rel=1e-5), pytest.approx(4 * factor, rel=1e-5))


def test_a_difference_is_students_and_cut_to_its_range() -> None:
    found = interval_of(0.1, ratio_units([(0.0, 1), (0.1, 1), (0.2, 1)]), 3, None)
    assert (found.low, found.high) == (
        pytest.approx(0.1 - T2 * 0.1 / sqrt(3), abs=1e-6),
        pytest.approx(0.1 + T2 * 0.1 / sqrt(3), abs=1e-6),
    )
    wide = interval_of(0.8, ratio_units([(0.6, 1), (0.8, 1), (1.0, 1)]), 3, None)
    assert wide.high == 1.0 and wide.low == pytest.approx(0.8 - T2 * 0.2 / sqrt(3), abs=1e-6)


def test_one_large_patient_counts_for_fewer_degrees_of_freedom() -> None:
    even, uneven = ([(8 * size, 10 * size), (7 * size, 10 * size), (36, 40), (30, 40)] for size in (4, 8))
    widths = []
    for parts in (even, uneven):
        units = ratio_units(parts)
        assert units is not None
        same_spread = Units(np.array([0.7, 0.8, 0.8, 0.9]), units.effective)
        found = interval_of(0.8, same_spread, 4, 1)
        assert found.low is not None and found.high is not None
        widths.append(found.high - found.low)
    assert widths[1] > 1.05 * widths[0]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(3, 4), (1, 4)], "too_few"),
        ([(3, 4)], "too_few"),
        # effective number of patients 1020^2 / (1000^2 + 2 * 10^2) = 1.04
        ([(900, 1000), (5, 10), (7, 10)], "too_few"),
        # 0.5 with an error of 0.289: nearly the whole of [0, 1]
        ([(1, 100), (50, 100), (99, 100)], "too_few"),
        ([(3, 4), (3, 4), (3, 4)], "no_spread"),
        ([(4, 4), (8, 8), (4, 4)], "no_spread"),
        # 0.1 + 0.2 and 0.3 are equal but for rounding
        ([(0.1 + 0.2, 1), (0.3, 1), (0.3, 1)], "no_spread"),
    ],
)
def test_no_interval_and_why(parts: list[tuple[float, float]], reason: str) -> None:
    value = sum(above for above, _ in parts) / sum(below for _, below in parts)
    found = interval_of(value, ratio_units(parts), len(parts), 1)
    assert (found.low, found.high, found.count, found.no_interval) == (None, None, len(parts), reason)


def test_one_patient_with_nearly_all_images_leaves_no_interval_of_a_difference() -> None:
    units = Units(np.array([0.0, 0.1, 0.2]), 1.04)
    assert interval_of(0.1, units, 3, None).no_interval == "too_few"
    assert interval_of(0.1, Units(units.values, 2.0), 3, None).no_interval is None


@pytest.mark.parametrize(("parts", "is_given"), [([19, 1, 1, 1, 1, 1, 1], False), ([17, 2, 2, 2, 2, 2, 2], True)])
def test_the_effective_number_of_patients_must_be_2(parts: list[int], is_given: bool) -> None:
    # 25^2 / (361 + 6) = 1.70 and 29^2 / (289 + 24) = 2.69, each of seven patients
    units = ratio_units([(round(0.6 * of) + (of > 2), of) for of in parts])
    assert units is not None
    # so close to each other that even the quantile of 0.7 degrees of freedom, 36, makes no wide interval
    found = interval_of(0.6, Units(np.linspace(0.599, 0.601, 7), units.effective), 7, 1)
    assert (found.no_interval is None) == is_given


def test_differences_that_are_equal_but_for_rounding_have_no_spread() -> None:
    # 0.9 - 0.8, 0.8 - 0.7 and 0.7 - 0.6 differ in float64 by 1e-16, which would be an interval from 0.100 to 0.100
    one, other = (ratio_units([(right - less, 10) for right in (9, 8, 7)]) for less in (0, 1))
    assert one is not None and other is not None
    values = one.values - other.values
    assert np.ptp(values) > 0
    assert interval_of(0.1, Units(values, one.effective), 3, None).no_interval == "no_spread"


def test_an_undefined_score_has_no_interval() -> None:
    assert interval_of(nan, None, 0, 1).no_interval == "undefined"


def test_kishs_number_is_that_of_equal_weights() -> None:
    assert effective_number(np.array([2.0, 2.0, 2.0])) == pytest.approx(3)
    assert effective_number(np.array([1.0, 0.0, 0.0])) == pytest.approx(1)


@pytest.mark.parametrize("spread", [0.0, 0.24, 0.48])  # of the difference about 0, 0.04 and 0.07
@pytest.mark.parametrize("patients", [4, 10])
def test_the_interval_of_a_difference_holds_the_truth_in_19_of_20_samples(patients: int, spread: float) -> None:
    told = interval_coverage.coverage(interval_coverage.difference(patients, spread), 300)
    # 300 draws of 0.95: standard deviation 0.0126, three and a half of them
    assert told.given > 0.99 and 0.905 <= told.holds <= 0.995


def test_two_patients_get_no_interval() -> None:
    assert interval_coverage.coverage(interval_coverage.difference(2, 0.24), 20).given == 0


@pytest.mark.parametrize(
    "draw",
    [
        interval_coverage.difference(4, 0.48, uneven=True),
        interval_coverage.one_share(4, 0.7),
        interval_coverage.one_share(6, 0.7, uneven=True),
        interval_coverage.area(4, 0.6),
        interval_coverage.mean_dice(4, 3),
        interval_coverage.over_sites(3, 2),
        interval_coverage.over_sites(6, 4),
    ],
    ids=["uneven difference", "share", "uneven share", "auroc", "dice", "three sites of two", "six sites of four"],
)
def test_no_interval_is_narrower_than_it_says(draw: interval_coverage.Draw) -> None:
    told = interval_coverage.coverage(draw, 200)
    # 200 draws of 0.95: standard deviation 0.0154, three of them; wider than said is no fault
    assert told.given > 0.75 and told.holds >= 0.904


def test_images_taken_for_patients_would_hold_it_far_less_often() -> None:
    """What the numbers above would be if patients were not distinguished."""
    rng, held = np.random.default_rng(0), []
    for _ in range(200):
        logits = rng.normal(2.0, 0.6, 4)[:, None] + rng.normal(0, 0.25, (4, 10))
        found = summarize((1 / (1 + np.exp(-logits))).ravel().tolist())
        assert found.low is not None and found.high is not None
        held.append(found.low <= 0.8646 <= found.high)
    assert np.mean(held) < 0.7
