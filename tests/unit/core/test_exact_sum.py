"""ExactSum against rational numbers: no loss, whatever the magnitudes, the order, the type and the processor."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.core import exact_sum
from harmofl.core.aggregation import StreamingMean
from harmofl.core.exact_sum import PIECE, ExactSum

ORDERS = 100


def any_float32(generator, shape, lowest=-149, highest=127):
    """Magnitudes spread over all that float32 holds, the subnormal ones included, and some zeros."""
    values = np.ldexp(generator.uniform(0.5, 1, shape), generator.integers(lowest, highest, shape))
    signs = generator.choice([-1, 0, 1], shape, p=[0.45, 0.1, 0.45])
    return (values * signs).astype(np.float32)


def exact(vectors, weights, index):
    """The rational sum of the products as float64 rounds them."""
    products = (Fraction(float(vector[index]) * weight) for vector, weight in zip(vectors, weights, strict=True))
    return sum(products, Fraction())


def summed(vectors, weights, order=None):
    total = ExactSum(vectors[0].size)
    for index in order if order is not None else range(len(vectors)):
        total.add(vectors[index], weights[index])
    return total.nearest()


@pytest.fixture(params=[True, False], ids=["flag", "no flag"])
def flag(request, monkeypatch):
    """With the processor's flag, and as where nothing tells of it."""
    if not request.param:
        monkeypatch.setattr(exact_sum.InexactFlag, "_tried", lambda self: False)
    assert exact_sum.InexactFlag().works is request.param


@given(
    st.lists(st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 2**40)), min_size=1)
)
def test_the_nearest_number_to_the_rational_sum(drawn):
    vectors, weights = [np.array([value], np.float32) for value, _ in drawn], [weight for _, weight in drawn]
    assert summed(vectors, weights).tolist() == [float(exact(vectors, weights, 0))]


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("weighted", ["equal", "by samples", "fractions"])
def test_a_hundred_orders_of_any_magnitudes_give_the_same_bits(kind, weighted):
    generator = np.random.default_rng(0)
    size = 200
    sites = [any_float32(generator, size) for _ in range(9)]
    if kind == np.float16:
        sites = [any_float32(generator, size, -24, 15).astype(np.float16) for _ in range(9)]
    if kind == np.float64:
        sites = [site * generator.uniform(0.9, 1, size) for site in sites]
    sites += [-site for site in sites[:5]]  # what cancels lays bare what was rounded away
    weights = {
        "equal": [1.0] * 14,
        "by samples": [float(generator.integers(1, 5000)) for _ in range(9)],
        "fractions": generator.uniform(0.1, 3, 9).tolist(),
    }[weighted]
    weights += weights[: 14 - len(weights)]
    expected = [float(exact(sites, weights, index)) for index in range(size)]
    for _ in range(ORDERS):
        assert summed(sites, weights, generator.permutation(14)).tolist() == expected


def test_a_mean_has_the_same_bits_in_a_hundred_orders():
    """The same through StreamingMean, with large and small entries, across the pieces that are added at a time."""
    generator = np.random.default_rng(1)
    shapes = {"large": (2, PIECE // 2 + 100), "bias": (), "norm": (5,)}
    sites = [{name: any_float32(generator, shape, -60, 30) for name, shape in shapes.items()} for _ in range(6)]
    usual = generator.choice(PIECE, PIECE - 50, replace=False)  # at 250 of all places the magnitudes differ widely
    for site in sites:
        site["large"].reshape(-1)[usual] = generator.integers(-(2**20), 2**20, usual.size)
    sites += [{name: -value for name, value in site.items()} for site in sites[:3]]
    weights = [3, 5, 7, 0.1, 0.2, 0.3, 3, 5, 7]  # 0.1 + 0.2 + 0.3 depends on the order in float64
    found = set()
    for _ in range(ORDERS):
        mean = StreamingMean(sites[0])
        for index in generator.permutation(9):
            mean.add(sites[index], weights[index])
        found.add(b"".join(np.asarray(mean.mean()[name]).tobytes() for name in shapes))
    assert len(found) == 1


@pytest.mark.usefixtures("flag")
def test_rounded_elements_are_summed_apart_and_the_others_stay_as_they_are():
    size = PIECE + 300  # a whole piece and a begun one
    vectors = [np.ones(size, np.float32) for _ in range(4)]
    fine = [5, PIECE - 1, PIECE, size - 1]
    vectors[1][fine] = 2.0**-60
    total = ExactSum(size)
    for vector in vectors:
        total.add(vector, 1.0)
    assert sorted(total._apart.tolist()) == fine and not total._blocks
    expected = np.full(size, 4.0)
    expected[fine] = 3.0 + 2.0**-60
    assert total.nearest().tolist() == expected.tolist()
    for _ in range(3):
        total.add(-np.ones(size, np.float32), 1.0)
    expected = np.ones(size)
    expected[fine] = 2.0**-60  # it was never lost
    assert total.nearest().tolist() == expected.tolist()


def test_a_block_that_is_rounded_as_a_whole_takes_elements_that_were_apart_before():
    generator = np.random.default_rng(2)
    first, alone = np.ones(PIECE), np.zeros(PIECE)
    alone[7] = 2.0**-80
    dense = generator.uniform(1, 2, PIECE)
    dense[7] = 2.0**-140
    vectors = [first, alone, dense, dense / 3, -first]
    total = ExactSum(PIECE)
    for vector in vectors:
        total.add(vector, 1.0)
    assert total._apart.tolist() == [7] and len(total._blocks) == 8  # blocks of an eighth of a piece
    for index in (0, 6, 7, 8, PIECE - 1):
        assert total.nearest()[index] == float(exact(vectors, [1.0] * 5, index))


def test_memory_does_not_grow_with_the_number_of_vectors():
    """Uniform and by samples, of differences as training makes them: one accumulator, a handful of elements apart."""
    generator = np.random.default_rng(3)
    base = (0.05 * generator.standard_normal(PIECE)).astype(np.float32)
    for weight in (lambda: 1.0, lambda: float(generator.integers(50, 500))):
        total = ExactSum(PIECE)
        for _ in range(200):
            trained = base + (1e-3 * generator.standard_normal(PIECE)).astype(np.float32)
            total.add(trained - base, weight())
        assert not total._blocks
        assert total._apart.size < PIECE // 1000


def test_the_longest_expansion():
    # the largest and the least float32 with all powers of two of a float64's length between them: 277 bits, 6 vectors
    powers = [127, 74, 21, -32, -85, -138, -149]
    vectors = [np.array([2.0**power], np.float32) for power in powers]
    total = ExactSum(1)
    for vector in [*vectors, *vectors[::-1], *vectors[::2], *vectors[1::2]]:
        total.add(vector, 1.0)
    assert len(total._expansion) <= 9
    for vector in vectors[:-1]:
        total.add(vector, -3.0)
    assert total.nearest().tolist() == [3 * math.ldexp(1, -149)]
