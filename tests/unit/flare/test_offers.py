"""What a site tells its ledger about a mean: which images of whom carry what weight."""

from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError

from harmofl.core.amplitude import RunningAmplitude
from harmofl.flare.local_amplitude import marks_of
from harmofl.flare.releases import members_of
from harmofl.flare.wire import SiteNumbers
from harmofl.tasks import SiteData

PATIENTS = ["a", "a", "b", "c", "d", "e"]


def data_of(unreadable: Sequence[int] = ()) -> SiteData:
    return SiteData(None, None, None, [], {}, dict, PATIENTS, unreadable=lambda: unreadable)  # type: ignore[arg-type]


def observed(estimation: str, *batches: list[int], blank: int | None = None, momentum: float = 0.1) -> RunningAmplitude:
    """A mean of one channel over batches of items."""
    local = RunningAmplitude(estimation, momentum)  # type: ignore[arg-type]
    for items in batches:
        contrast = torch.tensor([[item != blank] for item in items])
        local.update(torch.ones(len(items), 1, 1), contrast, torch.tensor(items))
    return local


def test_an_exact_mean_weighs_all_images_alike_but_those_without_contrast() -> None:
    marks, weighted = marks_of(observed("before_training", [0, 1, 2, 3], [4, 5], blank=2), data_of())
    assert (marks, weighted) == (["1", "1", "", "1", "1", "1"], False)
    assert [member[:2] for member in members_of(PATIENTS, PATIENTS, marks)] == [(name, name) for name in "acde"]


def test_an_image_that_another_stands_in_for_is_marked_so() -> None:
    marks, _ = marks_of(observed("before_training", [0, 1, 2, 3, 4, 5]), data_of(unreadable=[1]))
    assert marks == ["1", "u1", "1", "1", "1", "1"]


def test_a_first_batch_holds_its_own_images_alone() -> None:
    marks, weighted = marks_of(observed("first_batch", [0, 3], [1, 2, 4, 5]), data_of())
    assert (marks, weighted) == (["1", "", "", "1", "", ""], False)


def test_a_running_mean_says_that_its_weights_differ_and_how() -> None:
    marks, weighted = marks_of(observed("running_mean", [0, 1, 2], [3, 4, 5]), data_of())
    assert (marks, weighted) == (["0.9"] * 3 + ["1"] * 3, True)
    other, _ = marks_of(observed("running_mean", [0, 1, 2], [3, 4, 5], momentum=0.2), data_of())
    assert other != marks, "other weights of the same patients are another set"
    assert marks_of(observed("running_mean", [0, 1, 2, 3, 4, 5]), data_of()) == (["1"] * 6, False)


def test_images_are_told_apart_within_a_case_and_cases_within_a_patient() -> None:
    first, second = (members_of(["x", "x", "y"], ["a", "a", "a"], marks) for marks in (["1", "", "1"], ["", "1", "1"]))
    assert [member[:2] for member in first] == [("x", "a"), ("y", "a")]
    assert first[0] != second[0] and first[1] == second[1]


def test_counts_of_releases_are_counts_under_three_names() -> None:
    SiteNumbers.model_validate({"releases": {"new": 1, "repeated": 0, "withheld": 2}})
    for wrong in ({"Jane_Doe": 1}, {"new": -1}, {"new": 1.5}, {"new": "1"}):
        with pytest.raises(ValidationError):
            SiteNumbers.model_validate({"releases": wrong})
