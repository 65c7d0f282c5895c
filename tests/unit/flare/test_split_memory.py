"""A run keeps who trains and how many cases there are, and says where either is another one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from harmofl.flare.split_memory import changed_split
from harmofl.flare.state import SiteState
from harmofl.tasks import SiteData

CASES = {"training": 3, "validation": 1, "test": 1}


def data_of(patients: Sequence[str], cases: dict[str, int]) -> SiteData:
    return SiteData(None, None, None, [], cases, dict, patients)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("patients", "cases", "is_changed"),
    [
        (["b", "a", "c", "a"], CASES, False),  # in another order, and two images of one
        (["a", "b", "d"], CASES, True),  # as many, of whom one is another patient
        (["a", "b", "c"], CASES | {"test": 2}, True),
        (["a", "b", "c"], CASES | {"validation": 2, "test": 0}, True),
    ],
)
def test_other_training_patients_or_numbers_are_a_warning(
    tmp_path: Path, patients: list[str], cases: dict[str, int], is_changed: bool
) -> None:
    state = SiteState(tmp_path, "run")
    assert changed_split(state, data_of(["a", "b", "c"], CASES)) is None
    for _ in range(2):  # the first ones stay those that the run began with
        found = changed_split(state, data_of(patients, cases))
        assert (found is not None) == is_changed
        assert found is None or (found.severity, found.code) == ("warning", "split_changed")
    assert changed_split(state, data_of(["a", "b", "c"], CASES)) is None
