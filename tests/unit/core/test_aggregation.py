"""StreamingMean: on a common grid, independent of the order of arrival, all or nothing, of constant size."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.core.aggregation import StreamingMean
from harmofl.core.contributions import ContributionError

HALF_AND_A_BIT = Fraction(1, 2**28)
GRID = Fraction(1, 2**29)  # of entries of scale 1


def bits(array):
    return np.asarray(array).tobytes()


def quantum(value: Fraction) -> Fraction:
    """Distance between neighboring float32 numbers around value."""
    exponent = math.floor(math.log2(abs(value)))
    exponent += (abs(value) >= Fraction(2) ** (exponent + 1)) - (abs(value) < Fraction(2) ** exponent)
    return Fraction(2) ** max(exponent - 23, -149)  # 24 bits of mantissa; 2^-149 is the smallest subnormal


def rounded_once(value: Fraction) -> float:
    """The nearest float32, ties to even, without a float64 on the way."""
    return 0.0 if value == 0 else float(round(value / quantum(value)) * quantum(value))


def near_a_tie(value: Fraction) -> bool:
    """Whether a float64 on the way may decide between two neighbors.

    The sum and the division each round by at most 2^-53 of the value, together 2^-52, and value < 2^24 quanta.
    """
    return value != 0 and abs(value / quantum(value) % 1 - Fraction(1, 2)) <= HALF_AND_A_BIT


@st.composite
def contributions(draw):
    """Some sites' values of one entry, of any magnitude that fits, and weights up to a million images."""
    count, size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    mantissas = st.integers(-(2**24) + 1, 2**24 - 1)
    number = st.builds(math.ldexp, mantissas, st.integers(-149, 10))  # 2^34 times a million is below 2^54
    rows = st.lists(number, min_size=size, max_size=size)
    values = [np.array(draw(rows), np.float32) for _ in range(count)]
    weights = [draw(st.integers(1, 10**6)) for _ in range(count)]
    # what cancels lays bare what a float64 sum has rounded away
    canceled = [index for index in range(count - 1) if draw(st.booleans())]
    return values + [-values[index] for index in canceled], weights + [weights[index] for index in canceled]


def mean_of(values, weights):
    mean = StreamingMean({"w": np.zeros_like(values[0])})
    for value, weight in zip(values, weights, strict=True):
        mean.add({"w": value}, weight)
    return mean.mean()["w"]


@given(contributions())
def test_the_mean_is_the_rational_one_of_whole_grids_rounded(drawn):
    values, weights = drawn
    result = mean_of(values, weights)
    assert result.dtype == np.float32
    for index, got in enumerate(result.tolist()):
        pairs = list(zip(values, weights, strict=True))
        # products of 24 and 20 bits are exact in float64; Python rounds halves of a Fraction to even
        grids = sum(round(Fraction(float(v[index])) * w / GRID) for v, w in pairs)
        expected = grids * GRID / sum(weights)
        if near_a_tie(expected):
            assert abs(Fraction(got) - expected) < quantum(expected)
        else:
            assert got == rounded_once(expected)
        exact = sum((Fraction(float(v[index])) * w for v, w in pairs), Fraction()) / sum(weights)
        assert abs(expected - exact) <= Fraction(1, 2**30)  # of scale 1, as documented


@given(contributions(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_change_a_bit(drawn, random):
    pairs = list(zip(*drawn, strict=True))
    expected = bits(mean_of(*drawn))
    random.shuffle(pairs)
    assert bits(mean_of(*zip(*pairs, strict=True))) == expected


def test_a_hundred_orders_of_seven_sites_give_the_same_bits():
    generator = np.random.default_rng(0)
    # three sites that cancel three others leave the smallest one, 10^17 below the largest, at 2^-20 of its digits
    scales = 10.0 ** np.array([[13.0], [7.0], [0.0], [-4.0]])
    sites = (generator.uniform(0.5, 1, (4, 50)) * scales).astype(np.float32)
    values = [*sites, *-sites[:3]]
    weights = [3, 5, 7, 11, 3, 5, 7]
    results, naive = set(), set()
    for _ in range(100):
        order = generator.permutation(7)
        results.add(bits(mean_of([values[i] for i in order], [weights[i] for i in order])))
        total = sum(values[i].astype(np.float64) * weights[i] for i in order)
        naive.add(bits((total / 41).astype(np.float32)))
    assert len(results) == 1
    assert len(naive) > 1  # a plain float64 sum depends on the order
    # 41 is the sum of the weights; the least site is rounded to the grid, 2^-29, and the others left nothing
    grids = np.rint(sites[3].astype(np.float64) * 11 * 2**29)
    assert results == {bits((grids / 2**29 / 41).astype(np.float32))}


def test_what_cancels_leaves_what_is_small():
    # 2^53 + 1 - 2^53 = 1 in every order, though 2^53 + 1 is no float64; 1/3 is rounded once
    values = [np.array([value], np.float32) for value in (2.0**53, 1.0, -(2.0**53))]
    for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
        assert mean_of([values[i] for i in order], [1, 1, 1]).tolist() == [float(np.float32(1 / 3))]


# what the difference of two float32 models of magnitudes from 1/64 on is made of, up to 2^24
on_grid = st.builds(math.ldexp, st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-29, 0))


@given(st.lists(on_grid, min_size=1, max_size=5), st.integers(1, 2**29))
def test_one_contribution_of_any_weight_comes_back(values, weight):
    array = np.array(values, np.float32) + np.float32(0)  # a sum has no negative zero
    assert bits(mean_of([array], [weight])) == bits(array)


@given(st.lists(on_grid, min_size=1, max_size=5), st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_equal_contributions_are_the_identity(values, weights):
    array = np.array(values, np.float32) + np.float32(0)
    assert bits(mean_of([array] * len(weights), weights)) == bits(array)


def test_weights_count():
    # (1 * 3 + 5 * 1) / 4 = 2
    assert mean_of([np.float32([1]), np.float32([5])], [3, 1]).tolist() == [2.0]


def test_memory_does_not_grow_up_to_a_thousand_sites():
    size = 70_000  # a piece of the sum and a begun one
    mean = StreamingMean({"w": np.zeros(size, np.float32), "n": np.zeros(size, np.int64)})
    generator = np.random.default_rng(0)
    sent = [{"w": generator.standard_normal(size).astype(np.float32), "n": np.arange(size)} for _ in range(3)]

    def held_after(count):
        while mean.count < count:
            mean.add(sent[mean.count % 3], mean.count + 1)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        few, many = held_after(6), held_after(1000)
    finally:
        tracemalloc.stop()
    assert many - few < size  # one kept float32 contribution alone would be 4 bytes a value


def test_memory_is_that_of_the_documentation():
    size = 100_000
    tracemalloc.start()
    try:
        mean = StreamingMean({"w": np.zeros(size, np.float32), "b": np.full(10, 3.0, np.float32)})
        sent = {"w": np.ones(size, np.float32), "b": np.ones(10, np.float32)}
        before = tracemalloc.get_traced_memory()[0]
        mean.add(sent, 1)
        near = tracemalloc.get_traced_memory()[0] - before
        mean.add(sent | {"b": np.full(10, 1e9, np.float32)}, 1)  # another scale: only its entries need more
        other = tracemalloc.get_traced_memory()[0] - before
        mean.add(sent | {"w": np.full(size, 1e9, np.float32)}, 1)
        far = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert near == pytest.approx(8 * size, rel=0.01) == other and far == pytest.approx(16 * size, rel=0.01)


def test_a_thousand_sites_of_a_million_images_have_the_room_that_is_documented():
    """Before round 0: zero biases; running variances of 1 that become ten thousand; counters."""
    model = {
        "bias": np.zeros(4, np.float32),
        "weight": np.full(4, 0.05, np.float32),
        "running_mean": np.zeros(4, np.float32),
        "running_var": np.ones(4, np.float32),
        "count": np.zeros((), np.int64),
    }
    change = {
        "bias": np.full(4, -4.0, np.float32),  # 4 scales: the most by one integer
        "weight": np.full(4, 4.0, np.float32),
        "running_mean": np.full(4, -1234.5, np.float32),
        "running_var": np.array([9_999, 2.0**34, 0.5, -1], np.float32),  # 2^34 scales: the most for a million images
        "count": np.array(62_500, np.int64),
    }
    mean = StreamingMean(model, frozenset({"bias", "weight"}))
    for _ in range(1000):
        mean.add(change, 2**20)
    result = mean.mean()
    assert all(np.array_equal(result[name], change[name]) for name in model)
    partial = mean.partial()
    assert partial.high.keys() == {"running_mean", "running_var"} and partial.weight == 1000 * 2**20
    with pytest.raises(ContributionError, match="entry running_var is 1.8e.16 with its weight, above 1.8e.16"):
        mean.add(change, 2**20 + 1)


def test_a_lower_floor_makes_the_mean_finer_and_the_room_smaller():
    value = np.array([3 * 2.0**-37], np.float32)
    found = []
    for floor in (1.0, 2.0**-8):
        mean = StreamingMean({"w": np.full(1, 2.0**-9, np.float32)}, floor=floor)
        mean.add({"w": value}, 1)
        found.append(mean.mean()["w"][0])
        with pytest.raises(ContributionError, match="above"):
            mean.add({"w": np.full(1, 2.0**55 * floor, np.float32)}, 1)
    assert found == [0.0, value[0]]  # grids of 2^-29 and 2^-37


def reference():
    return {
        "conv.weight": np.zeros((2, 3), np.float32),
        "conv.bias": np.zeros((), np.float32),
        "norm.count": np.zeros((), np.int64),
        "norm.flags": np.zeros(3, bool),
    }


def contribution(value=1.0, count=5, flags=(True, False, False)):
    return {
        "conv.weight": np.full((2, 3), value, np.float32),
        "conv.bias": np.array(value, np.float32),
        "norm.count": np.array(count, np.int64),
        "norm.flags": np.array(flags),
    }


@pytest.mark.parametrize("weights", [(1, 3), (1_000_000, 7)])
def test_counters_and_flags_take_the_maximum_and_keep_their_type(weights):
    mean = StreamingMean(reference())
    mean.add(contribution(count=20, flags=(True, False, False)), weights[0])
    mean.add(contribution(count=10, flags=(False, False, True)), weights[1])
    result = mean.mean()
    assert {name: (value.dtype, value.shape) for name, value in result.items()} == {
        name: (value.dtype, value.shape) for name, value in reference().items()
    }
    assert result["norm.count"] == 20
    assert result["norm.flags"].tolist() == [True, False, True]


def test_a_counter_beyond_the_integers_of_a_float64_stays_exact():
    mean = StreamingMean({"n": np.zeros((), np.int64)})
    mean.add({"n": np.array(2**53 + 1)}, 1)
    mean.add({"n": np.array(2**53)}, 1)
    assert mean.mean()["n"] == 2**53 + 1


def test_counters_below_zero_are_not_raised_to_zero():
    mean = StreamingMean({"n": np.zeros(1, np.int64)})
    mean.add({"n": np.array([-4])}, 1)
    mean.add({"n": np.array([-2])}, 1)
    assert mean.mean()["n"].tolist() == [-2]


def test_numpy_scalars_pass_for_arrays_without_dimensions():
    mean = StreamingMean(reference())
    mean.add(contribution(2.0) | {"conv.bias": np.float32(2), "norm.count": np.int64(7)}, 1)
    result = mean.mean()
    assert isinstance(result["conv.bias"], np.ndarray)
    assert isinstance(result["norm.count"], np.ndarray)
    assert (result["conv.bias"], result["norm.count"]) == (2.0, 7)


def test_a_half_precision_contribution_is_averaged_in_the_model_s_type():
    result = StreamingMean({"w": np.zeros(1, np.float32)})
    result.add({"w": np.array([0.1], np.float16)}, 1)
    assert result.mean()["w"].tolist() == [float(np.float16(0.1))]
