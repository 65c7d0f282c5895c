"""A contribution that must not enter the mean is refused as a whole, in one line, and changes nothing."""

import math

import numpy as np
import pytest

from harmofl.core.aggregation import StreamingMean
from harmofl.core.contributions import ContributionError
from harmofl.core.grid_sum import GridSum


def bits(array):
    return np.asarray(array).tobytes()


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


def renamed(old, new):
    return lambda entries: {new if name == old else name: value for name, value in entries.items()}


class Unreadable:
    def __array__(self, dtype=None, copy=None):
        raise OSError("the file behind this value is gone")


REFUSED = {
    "missing": (renamed("conv.bias", "gone"), "misses entries: conv.bias"),
    "unknown": (lambda entries: entries | {"head.weight": np.zeros(1)}, "has unknown entries: head.weight"),
    "prefix": (
        lambda entries: {f"module.{name}": value for name, value in entries.items()},
        "misses entries: conv.bias, conv.weight, norm.count and 1 more",
    ),
    "shape": (
        lambda entries: entries | {"conv.weight": np.zeros((3, 2), np.float32)},
        r"conv.weight has shape \(3, 2\), not \(2, 3\)",
    ),
    "one element more": (lambda entries: entries | {"conv.bias": np.zeros(1, np.float32)}, "conv.bias has shape"),
    "float counter": (lambda entries: entries | {"norm.count": np.array(5.0)}, "norm.count holds float64, not int64"),
    "int weight": (lambda entries: entries | {"conv.bias": np.array(5)}, "conv.bias holds int64, not float32"),
    "complex": (lambda entries: entries | {"norm.count": np.array(1j)}, "norm.count holds complex128"),
    "text": (lambda entries: entries | {"norm.count": np.array("5")}, "norm.count holds <U1, not int64"),
    "object": (lambda entries: entries | {"norm.count": np.array(None)}, "norm.count holds object"),
    "NaN": (lambda entries: entries | {"conv.bias": np.array(np.nan, np.float32)}, "conv.bias .*not finite"),
    "infinity": (lambda entries: entries | {"conv.bias": np.array(-np.inf, np.float32)}, "conv.bias .*not finite"),
    # finite as sent, infinite in the type of the model
    "too large": (lambda entries: entries | {"conv.bias": np.array(1e300)}, "conv.bias .*not finite"),
    "overflow": (
        lambda entries: entries | {"conv.bias": np.array(1e5).astype(np.float16)},
        "conv.bias .*not finite",
    ),
}


def healthy():
    mean = StreamingMean(reference())
    mean.add(contribution(3.0), 2)
    return mean


def state_of(mean):
    return {name: bits(value) for name, value in mean.mean().items()}, mean.count, mean.total_weight


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_contribution_changes_nothing(name):
    change, message = REFUSED[name]
    mean = healthy()
    before = state_of(mean)
    with pytest.raises(ContributionError, match=message) as caught:
        mean.add(change(contribution(9.0)), 1)
    assert "\n" not in str(caught.value)
    assert state_of(mean) == before


def test_a_value_that_cannot_be_read_changes_nothing():
    mean = healthy()
    before = state_of(mean)
    with pytest.raises(OSError, match="is gone"):
        # conv.weight, which comes first, is fine: nothing of it may stay
        mean.add(contribution(9.0) | {"norm.flags": Unreadable()}, 1)
    assert state_of(mean) == before


@pytest.mark.parametrize(
    "weight", [0, 0.0, -1, -0.5, 0.25, 3.0, math.nan, math.inf, -math.inf, 2**41, 10**400, True, None, "1", 1j]
)
def test_a_weight_that_is_no_whole_number_from_1_on_is_refused(weight):
    mean = healthy()
    before = state_of(mean)
    with pytest.raises(ContributionError, match="weight .* is not a whole number from 1"):
        mean.add(contribution(9.0), weight)
    assert state_of(mean) == before


def test_what_does_not_fit_is_refused_by_entry_and_leaves_no_bit():
    mean = healthy()
    before = state_of(mean)
    broken = contribution(9.0) | {"conv.bias": np.array(1e30, np.float32)}
    for act in (mean.add, mean.check):
        # 2^54 scales of 1 are 1.8e16
        with pytest.raises(ContributionError, match=r"conv.bias is 3e\+30 with its weight, above 1.8e\+16") as caught:
            act(broken, 3)
        assert "set federation.norm_bound" in str(caught.value) and "\n" not in str(caught.value)
        assert state_of(mean) == before


def test_what_fits_depends_on_the_contribution_alone():
    at_the_end = contribution() | {"conv.bias": np.array(2.0**54, np.float32)}
    beyond = contribution() | {"conv.bias": np.array(2.0**54 * (1 + 2.0**-23), np.float32)}
    for others in (0, 50):
        mean = StreamingMean(reference())
        for _ in range(others):
            mean.add(at_the_end, 1)
        with pytest.raises(ContributionError, match="conv.bias"):
            mean.add(beyond, 1)
        with pytest.raises(ContributionError, match="conv.bias"):
            mean.add(at_the_end, 2)
        mean.add(at_the_end, 1)
        assert mean.mean()["conv.bias"] == 2.0**54


def test_a_failure_in_the_middle_of_the_sum_leaves_no_bit(monkeypatch):
    # one scale is 1, the other 16: two vectors
    mean = StreamingMean(reference() | {"later": np.full(3, 9.0, np.float32)})
    sent = contribution(3.0) | {"later": np.ones(3, np.float32)}
    mean.add(sent, 2)
    before, calls, add = state_of(mean), [], GridSum.add

    def failing(self, *arguments, **named):
        calls.append(self.scale)
        if len(calls) == 2:
            raise MemoryError
        add(self, *arguments, **named)

    monkeypatch.setattr(GridSum, "add", failing)
    with pytest.raises(MemoryError):
        mean.add(contribution(4.0) | {"later": np.ones(3, np.float32)}, 1)
    monkeypatch.undo()
    assert calls == [1.0, 16.0] and state_of(mean) == before


def test_more_contributions_than_the_sum_has_room_for_are_refused():
    mean = StreamingMean({"w": np.zeros(1, np.float32)})
    for _ in range(4095):
        mean.add({"w": np.ones(1, np.float32)}, 1)
    with pytest.raises(ContributionError, match="at most 4095 contributions"):
        mean.add({"w": np.ones(1, np.float32)}, 1)
    assert mean.mean()["w"].tolist() == [1.0]


def test_checking_alone_adds_nothing():
    mean = healthy()
    before = state_of(mean)
    mean.check(contribution(9.0), 1)
    assert state_of(mean) == before


def test_the_mean_of_nothing_is_refused():
    with pytest.raises(ContributionError, match="no contribution was accepted"):
        StreamingMean(reference()).mean()
