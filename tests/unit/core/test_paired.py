"""Paired differences, against scipy's own tests and the definitions."""

from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, ttest_rel

from harmofl.core.paired import case_interval, holm, paired_difference


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_difference_is_scipys_paired_t(seed: int, pairs: int) -> None:
    rng = np.random.default_rng(seed)
    one, other = rng.uniform(size=pairs), rng.uniform(size=pairs)
    expected = ttest_rel(one, other)
    interval = expected.confidence_interval(0.95)
    held = paired_difference(one.tolist(), other.tolist())
    assert held.p_value == pytest.approx(expected.pvalue)
    assert (held.low, held.high) == pytest.approx((interval.low, interval.high))
    assert held.pairs == pairs


def test_three_seeds_by_hand() -> None:
    held = paired_difference([0.84, 0.86, 0.85], [0.83, 0.83, 0.83])
    # differences 0.01, 0.03, 0.02: mean 0.02, deviation 0.01, error 0.01 / sqrt(3); Student's 97.5 % at 2 is 4.3027
    assert held.mean == pytest.approx(0.02)
    assert held.low == pytest.approx(0.02 - 4.3027 * 0.01 / 3**0.5, abs=1e-6)


def test_repetitions_that_share_patients_are_less_sure() -> None:
    plain = paired_difference([0.84, 0.86, 0.85], [0.83, 0.83, 0.83])
    shared = paired_difference([0.84, 0.86, 0.85], [0.83, 0.83, 0.83], overlap=0.2 / 0.64)
    assert plain.high is not None and shared.high is not None and shared.p_value is not None
    # variance times 1 + 3 * 0.3125
    assert (shared.high - 0.02) / (plain.high - 0.02) == pytest.approx((1 + 3 * 0.3125) ** 0.5)
    assert shared.p_value > (plain.p_value or 1)


def test_too_few_pairs_give_no_interval() -> None:
    assert paired_difference([], []).mean is None
    assert paired_difference([nan, 0.5], [0.1, nan]).pairs == 0
    single = paired_difference([0.5, nan], [0.25, 0.1])
    assert (single.mean, single.low, single.p_value, single.pairs) == (0.25, None, None, 1)


def test_equal_methods_differ_by_nothing() -> None:
    held = paired_difference([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    assert (held.mean, held.low, held.high, held.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("one", [[0.75, 0.5], [0.82, 0.72, 0.77]])
def test_equal_differences_have_no_spread_to_judge_by(one: list[float]) -> None:
    """Student's t would say p = 0; 0.82 - 0.80 and 0.72 - 0.70 differ in the last bits, which is no spread either."""
    other = [value - (0.25 if len(one) == 2 else 0.02) for value in one]
    held = paired_difference(one, other)
    assert held.mean == pytest.approx(0.25 if len(one) == 2 else 0.02) and held.pairs == len(one)
    assert (held.low, held.high, held.p_value) == (None, None, None)
    nearly = paired_difference([*one, 0.5], [*other, 0.4])
    assert nearly.p_value is not None and nearly.low is not None


def test_case_interval_covers_the_mean_over_sites_and_shrinks_with_cases() -> None:
    rng = np.random.default_rng(4)
    few = {site: rng.normal(0.1, 0.05, size=4).tolist() for site in "ABC"}
    many = {site: rng.normal(0.1, 0.05, size=100).tolist() for site in "ABC"}
    narrow, wide = case_interval(many), case_interval(few)
    assert narrow is not None and wide is not None
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3
    # the standard error of the mean of three site means of 100 cases each is 0.05 / sqrt(300)
    assert narrow[1] - narrow[0] == pytest.approx(2 * 1.96 * 0.05 / 300**0.5, rel=0.2)
    mean = np.mean([np.mean(values) for values in many.values()])
    assert narrow[0] < mean < narrow[1]


def test_case_interval_counts_sites_alike_and_needs_cases() -> None:
    assert case_interval({"A": [0.1], "B": [nan]}) is None
    assert case_interval({}) is None
    # one site of one case and one of equal cases: nothing varies, each weighs a half
    assert case_interval({"A": [0.0], "B": [0.2, 0.2, 0.2]}) == pytest.approx((0.1, 0.1))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_its_definition(p_values: list[float]) -> None:
    """Rejected at a level where every smaller p value passes its own step, as the paper words it."""
    adjusted = holm(p_values)
    count = len(p_values)
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, index in enumerate(sorted(range(count), key=lambda place: p_values[place])):
            if p_values[index] * (count - rank) >= level:
                break
            rejected.add(index)
        assert {index for index, value in enumerate(adjusted) if value < level} == rejected
    # never more lenient than a procedure that only bounds the false discovery rate
    assert all(value >= found - 1e-12 for value, found in zip(adjusted, false_discovery_control(p_values), strict=True))
