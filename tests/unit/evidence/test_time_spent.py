"""What a comparison says it spent its time on, by hand."""

import pytest

from harmofl.evidence.time_spent import added_up, share_beside, spent_line

RUNS = [
    {"start": 1.0, "reading": 2.0, "training": 60.0, "scoring": 10.0},
    {"start": 0.5, "reading": 0.0, "training": 20.0, "scoring": 5.0, "landscape": 1.0},
]


def test_the_parts_of_all_runs_and_of_the_command_are_added_up() -> None:
    spent = added_up([*RUNS, {"page": 0.5}])  # type: ignore[list-item]
    assert spent == {"start": 1.5, "reading": 2, "training": 80, "scoring": 15, "landscape": 1, "page": 0.5}
    # 1.5 + 2 + 1 + 0.5 of 100
    assert share_beside(spent) == pytest.approx(0.05)


def test_the_line_has_what_is_beside_the_largest_first() -> None:
    line = spent_line(added_up([*RUNS, {"page": 0.5}]))  # type: ignore[list-item]
    assert line == (
        "5.0% of 100 s of all processes went to other things than training and scoring (training 80.0%, "
        "scoring 15.0%, reading 2.0%, start 1.5%, landscape 1.0%, page 0.5%)"
    )


def test_nothing_is_claimed_of_runs_that_an_earlier_version_made() -> None:
    assert share_beside(added_up([{}])) is None
    assert spent_line({}) == "no run says what it spent its time on"
