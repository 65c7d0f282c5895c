"""What travels as float16: which entries, how far rounding moves them, and that it moves no model over the rounds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harmofl.core.exchange import BeyondFloat16Error, exchange_types, from_exchange_types, to_exchange_types
from harmofl.core.server_rules import ServerRule
from harmofl.core.training import arrays_sha256
from harmofl.experiment import FederationSettings, TrainingSettings

STATISTICS = frozenset({"mean", "var"})
# every float32 that rounds to a float16: up to the middle between 65504 and the next step, 65536
FITS = st.floats(-65519, 65519, width=32, allow_subnormal=True)


def model(**entries: Any) -> dict[str, np.ndarray]:
    whole = {
        "w": np.array([[1.0006, -3.0], [7e-8, 65519.0]], np.float32),
        "scale": np.array(0.1, np.float32),
        "mean": np.array([7e4], np.float32),
        "var": np.array([1e-12], np.float32),
        "count": np.array(70_001, np.int64),
        "flag": np.array([True]),
        "empty": np.zeros((0, 3), np.float32),
    }
    return whole | entries


def sent(entries: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return to_exchange_types(entries, "float16", STATISTICS)


def received(entries: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return from_exchange_types(sent(entries))


def test_parameters_are_rounded_and_nothing_else() -> None:
    """A mean beyond 65504, a variance that float16 would make 0 and a counter travel as they are."""
    held, types = model(), exchange_types(model(), "float16", STATISTICS)
    assert {name for name, kind in types.items() if kind == np.float16} == {"w", "scale", "empty"}
    travels = sent(held)
    assert {name: value.dtype for name, value in travels.items()} == types
    assert {name: value.shape for name, value in travels.items()} == {name: value.shape for name, value in held.items()}
    assert all(travels[name] is held[name] for name in ("mean", "var", "count", "flag"))
    # 1.0006 lies 0.61 steps of 2^-10 above 1; 7e-8 is 1.17 steps of 2^-24; 65519 is below the middle of 65504 and 65536
    assert travels["w"].tolist() == [[1 + 2**-10, -3.0], [2**-24, 65504.0]]
    assert float(travels["scale"]) == 0.0999755859375  # 1638 * 2^-14


def test_float32_leaves_every_entry_as_it_is() -> None:
    held = model(w=np.full(2, 1e30, np.float32))
    travels = to_exchange_types(held, "float32", STATISTICS)
    assert all(travels[name] is value for name, value in held.items())
    assert exchange_types(held, "float32", STATISTICS) == {name: value.dtype for name, value in held.items()}


@pytest.mark.parametrize("value", [65520.0, -7e4, 3e38, np.inf, np.nan])
def test_what_float16_has_not_is_named_and_the_model_is_left_alone(value: float) -> None:
    held = model(w=np.array([1.0, value], np.float32))
    with pytest.raises(BeyondFloat16Error, match=r"^w reaches .*, float16 ends at 65504$") as caught:
        sent(held)
    assert caught.value.name == "w" and str(caught.value.largest) == str(float(np.float32(abs(value))))
    assert np.array_equal(held["w"], np.array([1.0, value], np.float32), equal_nan=True)


def test_a_numpy_scalar_travels_too() -> None:
    """NumPy makes scalars of arrays without a dimension."""
    travels = sent({"scale": np.float32(0.5), "count": np.int64(3)})  # type: ignore[dict-item]
    assert (travels["scale"].dtype, travels["count"].dtype) == (np.float16, np.int64)
    assert float(from_exchange_types(travels)["scale"]) == 0.5


@given(arrays(np.float32, st.integers(0, 40), elements=FITS))
@settings(max_examples=100, deadline=None)
def test_rounding_is_idempotent_near_and_gives_every_site_the_same_bits(values: np.ndarray) -> None:
    once = received({"w": values})
    assert once["w"].dtype == np.float32
    assert arrays_sha256(received(once)) == arrays_sha256(once)
    assert arrays_sha256(sent(once)) == arrays_sha256(sent({"w": values}))
    # a site of another byte layout in memory, one that reads every second value of a longer array
    apart = np.repeat(values, 2)[::2]
    assert arrays_sha256(received({"w": apart})) == arrays_sha256(once)
    error = np.abs(once["w"].astype(np.float64) - values)
    assert (error <= np.maximum(2.0**-11 * np.abs(values.astype(np.float64)), 2.0**-25)).all()


def test_rounding_is_to_nearest_and_ties_to_even() -> None:
    # between 1 and 2 steps are 2^-10: half a step above an even mantissa falls, above an odd one rises
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-23, 2**-25, 3 * 2**-25], np.float32)
    assert received({"w": values})["w"].tolist() == [1.0, 1 + 2**-9, 1 + 2**-10, 0.0, 2 * 2**-24]


def rule(optimizer: str = "average", rate: float = 1.0) -> ServerRule:
    federation = FederationSettings(
        rounds=1, minimum_sites=1, server_optimizer=optimizer, server_learning_rate=rate, norm_bound=None
    )
    training = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=1)
    return ServerRule(federation, training, frozenset({"w"}), frozenset({"var"}))


def test_a_change_of_1e_5_of_a_weight_of_1_is_kept_over_1000_rounds() -> None:
    """Half a step of float16 at 1 is 4.9e-4: the model that is sent stays where it is for 49 rounds, and then moves.

    1e-5 travels up as 168 * 2^-24 (1e-5 * 2^24 = 167.77), which is 84 steps of float32 above 1, so that every sum is
    exact: after 1,000 rounds 1 + 84,000 * 2^-23 = 1.010013580322265625, or 1034.25 steps of 2^-10, of which 1034 are
    sent.
    """
    chosen, weights, sent_at, naive = rule(), {"w": np.ones(3, np.float32)}, [], np.ones(3, np.float32)
    for _ in range(1000):
        base = received(weights)
        sent_at.append(float(base["w"][0]))
        trained = base["w"] + np.float32(1e-5)
        difference = sent({"w": trained - base["w"]})
        opened = chosen.open_round(base)
        opened.add(difference, 1, 1)
        weights = chosen.next_model(weights, opened.mean())
        naive = received({"w": naive + difference["w"]})["w"]
    assert weights["w"].tolist() == [1 + 84_000 * 2**-23] * 3
    assert received(weights)["w"].tolist() == [1034 * 2**-10] * 3
    # 48 rounds add 48 * 168 * 2^-24 = 4.81e-4, less than half a step; 49 add 4.91e-4
    assert sent_at[48] == 1.0 and sent_at[49] == 1 + 2**-10
    assert naive.tolist() == [1.0] * 3, "moved from the rounded model itself, the weight would stay for ever"


VALUES = arrays(np.float32, 6, elements=st.floats(-8, 8, width=32))
CHANGES = st.lists(arrays(np.float32, 6, elements=st.floats(-0.25, 0.25, width=32)), min_size=1, max_size=12)


@given(VALUES, CHANGES, st.sampled_from([1.0, 0.5]))
@settings(max_examples=40, deadline=None)
def test_the_model_that_is_sent_is_one_rounding_off_the_sum_of_all_changes(
    values: np.ndarray, changes: list[np.ndarray], rate: float
) -> None:
    """R_T - R_0 = eta (d_0 + ... + d_{T-1}) + e_T - e_0: no term for each round."""
    chosen, weights = rule(rate=rate), {"w": values, "var": np.ones(1, np.float32)}
    first, total = received(weights)["w"].astype(np.float64), np.zeros(6)
    for change in changes:
        difference = sent({"w": change, "var": np.zeros(1, np.float32)})
        opened = chosen.open_round(received(weights))
        opened.add(difference, 1, 1)
        weights = chosen.next_model(weights, opened.mean())
        total += rate * difference["w"].astype(np.float64)
    largest = max(np.abs(values).max(), np.abs(weights["w"]).max()) + 0.25 * len(changes)
    two_roundings = 2 * (2.0**-11 * largest + 2.0**-25)
    of_float32 = len(changes) * 2.0**-23 * largest
    off = np.abs(received(weights)["w"] - first - total)
    assert (off <= two_roundings + of_float32).all()


@given(VALUES, CHANGES)
@settings(max_examples=25, deadline=None)
def test_rounds_are_those_of_a_plain_loop_over_numbers(values: np.ndarray, changes: list[np.ndarray]) -> None:
    """Two sites, number by number in Python, whose struct module rounds to float16 and float32 as IEEE 754 says."""
    import struct

    def to(kind: str, number: float) -> float:
        return float(struct.unpack(kind, struct.pack(kind, number))[0])

    chosen, weights, own = rule(), {"w": values}, [float(value) for value in values]
    for change in changes:
        base, other = received(weights), change[::-1]
        opened = chosen.open_round(base)
        for added in (change, other):
            opened.add(sent({"w": (base["w"] + added) - base["w"]}), 1, 1)
        weights = chosen.next_model(weights, opened.mean())
        for index, number in enumerate(own):
            start = to("e", number)
            moves = [to("f", to("f", start + float(added[index])) - start) for added in (change, other)]
            mean = to("f", (to("e", moves[0]) + to("e", moves[1])) / 2)
            own[index] = to("f", number + mean)
        assert weights["w"].tolist() == own
