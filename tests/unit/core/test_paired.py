"""Paired differences, against scipy's own tests and the definitions."""

from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, t, ttest_rel

from harmofl.core.clustered import Units
from harmofl.core.paired import holm, interval_over_patients, paired_difference


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 12))
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
    two = paired_difference([0.5, 0.75], [0.25, 0.25])
    assert (two.mean, two.low, two.high, two.p_value, two.pairs) == (0.375, None, None, None, 2)


def test_equal_methods_differ_by_nothing() -> None:
    held = paired_difference([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    assert (held.mean, held.low, held.high, held.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(("one", "gain"), [([0.75, 0.5, 1.0], 0.25), ([0.82, 0.72, 0.77], 0.02)])
def test_equal_differences_have_no_spread_to_judge_by(one: list[float], gain: float) -> None:
    """Student's t would say p = 0; 0.82 - 0.80 and 0.72 - 0.70 differ in the last bits, which is no spread either."""
    other = [value - gain for value in one]
    held = paired_difference(one, other)
    assert held.mean == pytest.approx(gain) and held.pairs == len(one)
    assert (held.low, held.high, held.p_value) == (None, None, None)
    nearly = paired_difference([*one, 0.5], [*other, 0.4])
    assert nearly.p_value is not None and nearly.low is not None


def site(*values: float) -> tuple[float, Units]:
    """A site whose patients weigh the same."""
    return float(np.mean(values)), Units(np.array(values), float(len(values)))


def test_the_interval_over_patients_by_hand() -> None:
    # A: variance of the mean 0.0002 / 2 = 0.0001, 1 degree of freedom; B: 0.0016 / 4 = 0.0004 with 3. Mean over sites
    # 0.15; variance (0.0001 + 0.0004) / 4 = 0.000125. Satterthwaite: 0.0005^2 / (0.0001^2 / 1 + 0.0004^2 / 3) = 3.947
    first = site(0.09, 0.11)
    second = site(0.2 - 0.04 * 0.75**0.5, 0.2 + 0.04 * 0.75**0.5, 0.2 - 0.04 * 0.75**0.5, 0.2 + 0.04 * 0.75**0.5)
    held = interval_over_patients([[first, second]], recurring=False)
    assert held is not None
    half = float(t.ppf(0.975, 0.0005**2 / (0.0001**2 + 0.0004**2 / 3))) * 0.000125**0.5
    assert held == pytest.approx((0.15 - half, 0.15 + half), abs=1e-9)
    # three repetitions with patients of their own: a third of the variance, three times the degrees of freedom
    thrice = interval_over_patients([[first, second]] * 3, recurring=False)
    assert thrice is not None
    freedom = 3 * 0.0005**2 / (0.0001**2 + 0.0004**2 / 3)
    assert thrice[1] - 0.15 == pytest.approx(float(t.ppf(0.975, freedom)) * (0.000125 / 3) ** 0.5)
    # with the same patients they know no more than one
    assert interval_over_patients([[first, second]] * 3, recurring=True) == pytest.approx(held)


def test_the_interval_over_patients_needs_patients_that_differ() -> None:
    assert interval_over_patients([], recurring=False) is None
    assert interval_over_patients([[]], recurring=False) is None
    # two patients of one site are too few, of two sites they are not
    assert interval_over_patients([[site(0.1, 0.2)]], recurring=False) is None
    assert interval_over_patients([[site(0.1, 0.2), site(0.1, 0.2)]], recurring=False) is not None
    # the same two in each of three repetitions are still two
    assert interval_over_patients([[site(0.1, 0.2)]] * 3, recurring=True) is None
    assert interval_over_patients([[site(0.1, 0.1, 0.1), site(0.2, 0.2, 0.2)]], recurring=False) is None
    single = (0.1, Units(np.array([0.1]), 1.0))
    assert interval_over_patients([[single, site(0.1, 0.2, 0.3)]], recurring=False) is None


def test_repetitions_that_hold_no_site_have_no_interval_over_patients() -> None:
    for recurring in (False, True):
        assert interval_over_patients([], recurring=recurring) is None
        assert interval_over_patients([[], []], recurring=recurring) is None


def test_a_site_whose_patients_count_as_one_gives_no_interval() -> None:
    """One patient with nearly all the images: their variance has no degree of freedom, which others cannot lend."""
    one = (0.2, Units(np.array([0.1, 0.3]), 1.0))
    others = site(0.1, 0.2, 0.3)
    assert interval_over_patients([[others]] * 2, recurring=False) is not None
    assert interval_over_patients([[one], [others], [others]], recurring=False) is None
    assert interval_over_patients([[one, others]], recurring=False) is None


@pytest.mark.parametrize(("freedom", "given"), [(0.99, False), (1.01, True), (1.5, True)])
def test_the_least_that_an_interval_needs_are_two_effective_patients(freedom: float, given: bool) -> None:
    # one site of three patients with unequal weights: its degrees of freedom are the effective number less one
    values = np.array([0.1, 0.2, 0.3])
    held = interval_over_patients([[(0.2, Units(values, freedom + 1))]], recurring=False)
    assert (held is not None) is given
    if held is not None:
        # variance 0.01, error 0.1 / sqrt(3); cut to [-1, 1]
        half = float(t.ppf(0.975, freedom)) * 0.1 / 3**0.5
        assert held == pytest.approx((max(0.2 - half, -1), min(0.2 + half, 1)))


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
