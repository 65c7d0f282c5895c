"""Axes of rounds: whole numbers, and the curve ends with the model that the headline is about."""

import pytest
from matplotlib.figure import Figure

from harmofl.evidence.curves import validation_points
from harmofl.evidence.page import whole_rounds
from harmofl.evidence.results import Results, RoundRecord


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (3, 3), (0, 7), (0, 499)])
def test_an_axis_of_rounds_has_whole_numbers_alone(first: int, last: int) -> None:
    axes = Figure().add_subplot()
    axes.plot(range(first, last + 1), [0.5] * (last - first + 1), "o")
    whole_rounds(axes, first, last)
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert shown and all(tick == round(tick) for tick in shown)
    assert low < first and high > last, "a mark on the border would be cut"
    if last - first < 2:
        assert shown == list(range(first, last + 1))


def test_the_validation_curve_ends_with_the_final_model(results: Results, rounds: list[RoundRecord]) -> None:
    # HEALTHY scored 0.3 before round 0, nothing in round 1, and 0.4 after it
    assert validation_points(results, rounds)["HEALTHY"] == {0: 0.3, 1: None, 2: 0.4}
    held = results.model_dump()
    held["sites"]["HEALTHY"]["validation"] = None
    assert validation_points(Results.model_validate(held), rounds)["HEALTHY"] == {0: 0.3, 1: None}
    assert validation_points(results, []) == {}
