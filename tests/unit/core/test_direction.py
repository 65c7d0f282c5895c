"""VectorReader: finite, norm and direction of a vector, against NumPy in float64."""

import numpy as np
import pytest

from harmofl.core.direction import WIDTH, VectorReader, cosine_to_rest
from harmofl.core.grid_sum import PIECE

FLOAT32 = np.dtype(np.float32)


def read(reader, values, kind=FLOAT32):
    """As a mean has it read: in float32, pieces of a vector, each time anew."""
    with np.errstate(over="ignore"):
        held = values.astype(np.float32) if kind.itemsize < 8 else values
    return reader.read(lambda: ((start, held[start : start + PIECE]) for start in range(0, held.size, PIECE)), kind)


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# around a row, a block of 16 rows, a piece of 4 blocks
@pytest.mark.parametrize("size", [1, 7, 1023, 1024, 5000, 32767, 32768, 50_001, 65_536, 65_537, 300_001])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_norm_and_cosine_are_those_of_numpy(size, kind):
    generator = np.random.default_rng(size)
    first = generator.standard_normal(size).astype(kind)
    second = (first + generator.standard_normal(size)).astype(kind)
    reader = VectorReader(size, np.random.default_rng(0))
    told_of = [read(reader, values) for values in (first, second)]
    wide = [values.astype(np.float64) for values in (first, second)]
    for told, values in zip(told_of, wide, strict=True):
        # six digits: at most 5 in the seventh, and the rounding of a float32 sum of 1024
        assert told.norm == pytest.approx(np.linalg.norm(values), rel=1e-5)
    # vectors of random numbers: four standard deviations of at most 0.044 each
    assert cosine(*(told.direction for told in told_of)) == pytest.approx(cosine(*wide), abs=0.18)


def test_the_deviation_of_a_cosine_is_the_one_that_is_documented():
    generator, size = np.random.default_rng(0), 65_536
    a, b = generator.standard_normal((2, size)).astype(np.float32)
    found = []
    for seed in range(200):
        reader = VectorReader(size, np.random.default_rng(seed))
        told = [read(reader, values).direction for values in (a, b)]
        found.append(told[0] @ told[1] / np.linalg.norm(a) / np.linalg.norm(b))
    # for vectors at right angles the count sketch has variance 1 / WIDTH; the bound sqrt(2 / WIDTH) is not reached
    assert np.std(found) == pytest.approx((1 / WIDTH) ** 0.5, rel=0.25)
    assert np.mean(found) == pytest.approx(cosine(a, b), abs=4 * (1 / WIDTH) ** 0.5 / 200**0.5)


def test_parallel_rows_stay_within_the_wider_bound():
    # a constant vector: all its rows are parallel, and so are all its blocks
    size = 20 * 16_384
    a = np.ones(size, np.float32)
    found = []
    for seed in range(200):
        reader = VectorReader(size, np.random.default_rng(seed))
        direction = read(reader, a).direction
        found.append(direction @ direction / size)
    assert np.mean(found) == pytest.approx(1, abs=0.1)
    assert np.std(found) <= 1.25 * (2 / WIDTH + 2 / 20) ** 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("place", [0, 65_535, 65_536, 140_000])
def test_one_value_that_is_not_finite_is_found(bad, kind, place):
    values = np.ones(140_001, kind)
    reader = VectorReader(values.size)
    assert read(reader, values) is not None
    values[place] = bad
    assert read(reader, values) is None


def test_a_float64_beyond_float32_is_not_finite():
    assert read(VectorReader(3), np.array([0.0, 1e39, 1.0])) is None
    assert read(VectorReader(3), np.array([0.0, 1e39, 1.0]), np.dtype(np.float64)).norm == pytest.approx(1e39)


@pytest.mark.parametrize("size", [10, 140_001])
@pytest.mark.parametrize("value", [1e-40, 1e-30, 1e-20, 1e20, 1e30, 3e38])
def test_squares_beyond_float32_cost_no_digit(size, value):
    values = np.full(size, value, np.float32)
    told = read(VectorReader(size, np.random.default_rng(0)), values)
    assert told.norm == pytest.approx(float(values[0]) * size**0.5, rel=1e-5)
    assert np.isfinite(told.direction).all() and np.linalg.norm(told.direction) > 0


def test_zeros_have_no_direction():
    told = read(VectorReader(5000, np.random.default_rng(0)), np.zeros(5000, np.float32))
    assert told.norm == 0 and not told.direction.any()
    assert read(VectorReader(0), np.zeros(0, np.float32)).norm == 0


def test_cosine_to_the_others_by_hand():
    # A and B stand at 90 degrees, A and C at 180, B and C at 90
    told = cosine_to_rest({"A": np.array([3.0, 0.0]), "B": np.array([0.0, 2.0]), "C": np.array([-7.0, 0.0])})
    assert told == {"A": -0.5, "B": 0.0, "C": -0.5}


def test_a_long_difference_does_not_turn_the_rest_over():
    honest = {site: np.array([1.0, 0.2 * number]) for number, site in enumerate("ABC")}
    told = cosine_to_rest(honest | {"HK": np.array([-1e30, 0.0])})
    # HK: -1, -0.98 and -0.93; each of the others has near 1 twice and these once
    assert told["HK"] < -0.9 and min(told[site] for site in "ABC") > 0.25


def test_without_another_site_there_is_nothing_to_compare():
    assert cosine_to_rest({}) == cosine_to_rest({"A": np.ones(3), "B": np.zeros(3)}) == {}
