"""What FLARE makes of a model's entries on its wire: the same ones, in the same order, with few arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.flare.packed_arrays import SMALL, PackedArrays, PackedArraysDecomposer, UnreadableArrays

ENTRIES = st.dictionaries(
    st.text(max_size=8),
    st.sampled_from(["f2", "f4", "f8", "i8", "u1", "?"]).flatmap(
        lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ),
    max_size=9,
)


def sent(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    common_decomposers.register()
    return fobs.loads(fobs.dumps({"weights": PackedArrays(values)}))["weights"]


@given(ENTRIES)
def test_entries_arrive_as_they_were(values):
    received = sent(values)
    assert type(received) is dict and list(received) == list(values)
    for name, value in values.items():
        assert received[name].dtype == value.dtype and received[name].shape == value.shape
        assert received[name].tobytes() == np.ascontiguousarray(value).tobytes()  # NaN and -0.0 too


def test_large_small_strided_and_foreign_entries_arrive_in_order():
    values = {
        "counter": np.int64(7),
        "large": np.arange(SMALL, dtype=np.float32),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "big_endian": np.arange(3, dtype=">f4"),
        "larger": np.ones((SMALL, 2), np.float16),
    }
    received = sent(values)
    assert list(received) == list(values)
    for name, value in values.items():
        np.testing.assert_array_equal(received[name], value)


def test_a_thousand_small_entries_cost_a_few_bytes_each():
    values = {f"layer{index}.weight": np.zeros(8, np.float32) for index in range(1000)}
    over = len(fobs.dumps(PackedArrays(values))) - 1000 * 8 * 4
    assert over < 1000 * 30  # the name, its length, shape and type; one by one they cost 300 and more


@pytest.mark.parametrize(
    "change", ["longer", "shorter", "missing", "more", "shape", "negative", "huge", "twice", "text", "kind", "none"]
)
def test_arrays_that_are_not_those_listed_are_refused(change):
    data = PackedArraysDecomposer().decompose(
        PackedArrays({"a": np.zeros(SMALL, np.float32), "b": np.zeros((2, 3), np.float32)})
    )
    if change == "longer":
        data["small"]["f4"] = np.zeros(7, np.float32)
    elif change == "shorter":
        data["small"]["f4"] = np.zeros(5, np.float32)
    elif change == "missing":
        data["large"] = []
    elif change == "more":
        data["large"] *= 2
    elif change == "twice":
        data["entries"][1][0] = "a"
    elif change == "text":
        data["large"] = ["a"]
    elif change == "kind":
        data["entries"][1][2] = "f8"
    elif change == "none":
        data["entries"] = None
    else:
        data["entries"][1][1] = {"shape": [7], "negative": [-1, 3], "huge": [2**40, 2**40]}[change]
    received = PackedArraysDecomposer().recompose(data)
    assert isinstance(received, UnreadableArrays) and not received and received.problem
