"""GridSum against rational numbers: rounded as documented, exact after that, free of order and grouping."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.core.grid_sum import FAR, MOST, NEAR, PIECE, GridSum, scale_exponent

GRID = Fraction(1, 2**29)  # of scale 1


def add(total, vector, weight=1.0, far=False, take_back=False):
    buffer = np.empty(min(PIECE, vector.size))
    for start in range(0, vector.size, PIECE):
        piece = vector[start : start + PIECE]
        (total.take_back if take_back else total.add)(start, piece, weight, buffer, far=far)


def summed(vectors, weights, far=(), exponent=0):
    total = GridSum(vectors[0].size, exponent)
    for index, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
        add(total, vector, weight, far=index in far)
    return total


def whole(total):
    """The sums in grids, by both integers, as Python has them."""
    high = total.high()
    return [int(low) + (2**32 * int(high[index]) if high is not None else 0) for index, low in enumerate(total.low())]


def in_grids(value, weight, exponent=0):
    """The product as float64 has it in grids; Python rounds halves of a Fraction to even."""
    return round(Fraction(float(np.float64(value) * weight)) / (GRID * Fraction(2) ** exponent))


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(0.0, 0), (0.3, 0), (1.0, 0), (1.0 + 2**-10, 1), (1.5, 1), (2.0, 1), (-5.0, 3), (3e38, 128), (1e-40, 0)],
)
def test_the_scale_is_the_power_of_two_at_or_above(largest, exponent):
    assert scale_exponent(np.array([0.25, largest], np.float32), 1.0) == exponent


def test_the_floor_is_the_least_scale():
    values = np.full(3, 0.01, np.float32)
    assert [scale_exponent(values, floor) for floor in (4.0, 1.0, 2.0**-5, 2.0**-10)] == [2, 0, -5, -6]  # 0.01 < 2^-6
    assert scale_exponent(np.zeros(0, np.float32), 0.5) == -1


@given(st.floats(0, 60_000, width=32))
def test_a_model_that_was_rounded_to_float16_on_its_way_has_the_same_scale(value):
    sent = np.array([value], np.float32)
    assert scale_exponent(sent.astype(np.float16).astype(np.float32), 1.0) == scale_exponent(sent, 1.0)


near = st.floats(-(2.0**22), 2.0**22, width=32)
weights = st.integers(1, 10**6)


@given(st.lists(st.tuples(near, weights), min_size=1, max_size=9), st.integers(-20, 20))
def test_the_sum_of_near_values_is_that_of_the_rounded_products(drawn, exponent):
    scale = 2.0**exponent
    drawn = [(value / weight * scale, weight) for value, weight in drawn]  # the product is near
    vectors, counts = [np.array([value]) for value, _ in drawn], [float(weight) for _, weight in drawn]
    expected = sum(in_grids(value, weight, exponent) for value, weight in drawn)
    total = summed(vectors, counts, exponent=exponent)
    assert whole(total) == [expected]
    assert total.nearest().tolist() == [float(expected) * scale * 2.0**-29]


@given(st.lists(st.tuples(st.floats(-(2.0**54), 2.0**54, width=32), weights), min_size=1, max_size=9))
def test_the_sum_of_far_values_is_that_of_the_rounded_products(drawn):
    drawn = [(value / weight, weight) for value, weight in drawn]
    vectors, counts = [np.array([value]) for value, _ in drawn], [float(weight) for _, weight in drawn]
    expected = sum(in_grids(value, weight) for value, weight in drawn)
    total = summed(vectors, counts, far=range(len(drawn)))
    assert whole(total) == [expected]
    # both integers are rounded to float64, and their sum
    assert total.nearest()[0] == pytest.approx(float(expected * GRID), rel=2**-51, abs=2**-29 * 2**-20)


def test_near_and_far_vectors_stand_in_one_sum():
    generator = np.random.default_rng(0)
    vectors = [generator.uniform(-1, 1, 5) * 10.0**power for power in (0, 6, 12, -3, 15)]
    expected = [sum(in_grids(vector[index], 3.0) for vector in vectors) for index in range(5)]
    for order in (range(5), reversed(range(5))):
        total = GridSum(5, 0)
        for index in order:
            add(total, vectors[index], 3.0, far=index in (2, 4))
        assert whole(total) == expected


def test_halves_go_to_the_even_neighbor_at_both_signs():
    # 0.5, 1.5, 2.5, 3.5 grids and their negatives; the same where the second integer is used
    halves = np.array([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5]) * 2.0**-29
    for far in (False, True):
        total = GridSum(8, 0)
        add(total, halves, far=far)
        assert whole(total) == [0, 2, 2, 4, 0, -2, -2, -4]


def test_the_ends_of_the_ranges_and_as_many_as_fit():
    # 4095 times 2^51 grids stay below 2^63; one more, and a sum could wrap around
    assert MOST * 2**51 < 2**63 <= (MOST + 1) * 2**51
    for end, far in ((NEAR, False), (-NEAR, False), (FAR, True), (-FAR, True)):
        total = GridSum(1, 0)
        for _ in range(MOST):
            add(total, np.array([end]), far=far)
        assert whole(total) == [MOST * in_grids(end, 1)]
        assert total.nearest().tolist() == [MOST * end]


def test_what_is_taken_back_leaves_no_bit_whatever_it_was():
    generator = np.random.default_rng(1)
    size = PIECE + 300  # a whole piece and a begun one
    total = summed([generator.standard_normal(size)], [3.0])
    before = total.low()
    wild = np.array([np.nan, np.inf, -np.inf, 1e300, 0.1] * 60 + [0.25] * (size - 300))
    with np.errstate(all="ignore"):
        add(total, wild, 7.0)
        add(total, wild, 7.0, take_back=True)
    add(total, np.full(size, 1e12), 7.0, far=True)
    add(total, np.full(size, 1e12), 7.0, far=True, take_back=True)
    assert np.array_equal(total.low(), before) and not total.high().any()


def test_masks_of_a_secure_sum_cancel_to_the_same_bits():
    """Bonawitz et al. 2017: each pair of sites adds and subtracts the same random integers, uniform modulo 2^64."""
    generator = np.random.default_rng(2)
    differences = [1e-3 * generator.standard_normal(1000).astype(np.float32) for _ in range(5)]
    counts = [3.0, 311.0, 57.0, 1.0, 250.0]
    expected = summed(differences, counts).low()
    pairs = zip(differences, counts, strict=True)
    sent = [summed([difference], [count]).low().view(np.uint64) for difference, count in pairs]
    for first in range(5):
        for second in range(first):
            mask = generator.integers(0, 2**64, 1000, np.uint64)
            sent[first], sent[second] = sent[first] + mask, sent[second] - mask
    # a masked vector is uniform: half of its numbers are above 2^63
    assert all(0.4 < np.mean(one >= 2**63) < 0.6 for one in sent)
    assert np.array_equal(sum(sent).view(np.int64), expected)


def test_the_product_is_rounded_before_the_grid_is_added():
    # 3 * (2^53 + 1) / 3 rounds to even neighbors of float64 first; a fused operation would see the last bit
    weight, value = 1 + 2.0**-30, (1 + 2.0**-30) * (2**29 + 0.5) * 2.0**-29
    assert whole(summed([np.array([value])], [weight])) == [in_grids(value, weight)]


def test_memory_is_8_bytes_an_element_and_16_after_a_far_vector():
    total = GridSum(1000, 0)
    add(total, np.ones(1000))
    assert total.high() is None
    add(total, np.full(1000, math.ldexp(1.0, 30)), far=True)
    assert total.high().nbytes + total.low().nbytes == 16_000
