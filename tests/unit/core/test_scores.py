"""Scores: numbers derived by hand, rules for undefined values, agreement with MONAI."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.metrics.meandice import DiceMetric

from harmofl.core.scores import case_dice, image_dice, predicted_classes, published_dice, summarize


def case(*slices):
    return torch.tensor(slices)


# Two slices of 2 x 2 pixels. |P| = 3, |M| = 3, |P and M| = 2.
PREDICTED = case([[1, 1], [0, 0]], [[0, 0], [0, 1]])
TRUE = case([[1, 0], [1, 0]], [[0, 0], [0, 1]])
EMPTY = torch.zeros_like(TRUE)


def test_case_dice_by_hand():
    assert case_dice(PREDICTED, TRUE) == pytest.approx(2 * 2 / (3 + 3))


def test_published_dice_by_hand():
    # Slice 0: foreground 2*1 / (2+2) = 1/2; background: 1 common of 2 and 2, again 1/2.
    # Slice 1 is right: 1 and 1. Mean over slices of the mean over classes: (1/2 + 1) / 2 = 3/4.
    assert published_dice(PREDICTED, TRUE) == pytest.approx(0.75, abs=1e-8)


def test_published_dice_leaves_out_slices_without_prostate():
    # the false positive in an empty third slice costs the case Dice, 4 / (4 + 3), and not the published one
    predicted = torch.cat([PREDICTED, case([[1, 0], [0, 0]])])
    true = torch.cat([TRUE, case([[0, 0], [0, 0]])])
    assert published_dice(predicted, true) == pytest.approx(0.75, abs=1e-8)
    assert case_dice(predicted, true) == pytest.approx(4 / 7)


def test_a_two_class_mean_flatters():
    # 10 x 10 pixels, mask of 10, prediction of 10, 5 common: foreground 10 / 20 = 0.5; background: 90 and 90 with 85
    # common: 170 / 180. Mean: (1/2 + 17/18) / 2 = 13/18.
    true, predicted = torch.zeros(1, 10, 10), torch.zeros(1, 10, 10)
    true[0, 0], predicted[0, 0, :5], predicted[0, 1, :5] = 1, 1, 1
    assert case_dice(predicted, true) == 0.5
    assert published_dice(predicted, true) == pytest.approx(13 / 18, abs=1e-8)


@pytest.mark.parametrize("score", [case_dice, published_dice])
def test_edges(score):
    assert score(TRUE, TRUE) == pytest.approx(1, abs=1e-8)
    assert score(EMPTY, TRUE) < 0.5  # nothing found: 0 for the foreground
    # an empty mask leaves nothing to score, whether something was predicted or not
    assert math.isnan(score(EMPTY, EMPTY))
    assert math.isnan(score(PREDICTED, EMPTY))


def test_nothing_found_is_zero():
    assert case_dice(EMPTY, TRUE) == 0.0


def test_every_label_above_0_is_foreground():
    assert case_dice(PREDICTED * 2, TRUE.to(torch.uint8) * 3) == pytest.approx(2 / 3)


@pytest.mark.parametrize("seed", range(10))
def test_case_dice_equals_monai(seed):
    generator = torch.Generator().manual_seed(seed)
    predicted = (torch.rand(5, 17, 13, generator=generator) < 0.3).to(torch.uint8)
    true = (torch.rand(5, 17, 13, generator=generator) < 0.2).to(torch.uint8)
    # MONAI's batch first, class next: one item, one class, the whole case as a volume
    expected = DiceMetric(include_background=True, reduction="none")(predicted[None, None], true[None, None])
    assert case_dice(predicted, true) == pytest.approx(float(expected), abs=1e-6)


@given(st.integers(0, 2**16 - 1), st.integers(1, 2**16 - 1))
def test_case_dice_is_symmetric_and_bounded(first, second):
    masks = [torch.tensor([bits >> i & 1 for i in range(16)]).reshape(1, 4, 4) for bits in (first, second)]
    score = case_dice(*masks)
    assert 0 <= score <= 1
    assert (score == 1) == (first == second)
    if first:
        assert score == case_dice(*reversed(masks))


# Classes 0 to 2 of 3 x 3 pixels, the last column left out but for one pixel.
FOUND = torch.tensor([[1, 1, 2], [2, 0, 1], [0, 0, 2]])
TARGET = torch.tensor([[1, 2, 255], [2, 0, 255], [1, 0, 2]])


def test_image_dice_by_hand():
    # Of the seven that count: class 1 is found at two, true at two, one in common: 2 / 4. Class 2: found at two, true
    # at three, two in common: 4 / 5. Foreground: found at four, true at five, four in common: 8 / 9.
    assert image_dice(FOUND, TARGET, label=1, ignored=255) == pytest.approx(2 / 4)
    assert image_dice(FOUND, TARGET, label=2, ignored=255) == pytest.approx(4 / 5)
    assert image_dice(FOUND, TARGET, ignored=255) == pytest.approx(8 / 9)


@pytest.mark.parametrize("label", [None, 0, 1, 2])
def test_what_is_predicted_at_pixels_left_out_does_not_score(label):
    for number in range(3):
        other = torch.where(TARGET == 255, number, FOUND)
        assert image_dice(other, TARGET, label=label, ignored=255) == image_dice(
            FOUND, TARGET, label=label, ignored=255
        )


def test_image_dice_is_undefined_where_neither_holds_the_class_and_zero_where_one_does():
    blank = torch.zeros_like(TARGET)
    assert image_dice(FOUND, blank, label=1, ignored=255) == 0.0
    assert image_dice(blank, TARGET, label=1, ignored=255) == 0.0
    assert image_dice(blank, TARGET, ignored=255) == 0.0
    assert math.isnan(image_dice(FOUND, TARGET, label=3, ignored=255))
    assert math.isnan(image_dice(blank, blank, ignored=255))
    # predicted at pixels left out only
    assert math.isnan(image_dice(FOUND, torch.full_like(TARGET, 255), ignored=255))


@pytest.mark.parametrize("seed", range(3))
def test_image_dice_equals_monai_on_the_pixels_that_count(seed):
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randint(4, (17, 13), generator=generator).to(torch.uint8)
    true = torch.tensor([0, 1, 2, 3, 255])[torch.randint(5, (17, 13), generator=generator)]
    counted = true != 255
    for label in range(1, 4):
        planes = [(plane[counted] == label)[None, None, None] for plane in (predicted, true)]
        expected = float(DiceMetric(reduction="none")(*planes))
        assert image_dice(predicted, true, label=label, ignored=255) == pytest.approx(expected, abs=1e-6)


def test_the_interval_is_student_s_on_the_logit_scale():
    # Scores 0.7, 0.8, 0.9: mean 0.8, deviations -0.1, 0, 0.1, s^2 = 0.02 / 2, s = 0.1, error 0.1 / sqrt(3).
    # The slope of the logit at 0.8 is 1 / (0.8 * 0.2) = 6.25, the 97.5 % quantile of t with 2 degrees of freedom is
    # 4.302653 (tables), half = 4.302653 * 0.1 / sqrt(3) * 6.25 = 1.552586 around log(4) = 1.386294.
    summary = summarize([0.7, 0.8, 0.9])
    assert summary.mean == pytest.approx(0.8)
    assert summary.low == pytest.approx(1 / (1 + math.exp(1.552586 - 1.386294)), abs=1e-6)
    assert summary.high == pytest.approx(1 / (1 + math.exp(-1.552586 - 1.386294)), abs=1e-6)
    assert (summary.n, summary.undefined, summary.patients, summary.no_interval) == (3, 0, 3, None)


def test_cases_of_one_patient_are_one_unit():
    # Patients of two cases each with the means 0.7, 0.8 and 0.9: the interval is that of these three.
    cases = summarize([0.65, 0.75, 0.7, 0.9, 0.9, 0.9], [0, 0, 1, 1, 2, 2])
    patients = summarize([0.7, 0.8, 0.9])
    assert (cases.mean, cases.n, cases.patients) == (pytest.approx(0.8), 6, 3)
    assert (cases.low, cases.high) == (pytest.approx(patients.low), pytest.approx(patients.high))


@pytest.mark.parametrize("scores", [[0.5, 0.52], [0.0, 0.2], [0.6]])
def test_fewer_than_three_patients_get_no_interval(scores):
    summary = summarize(scores)
    assert summary.mean == pytest.approx(sum(scores) / len(scores))
    assert (summary.low, summary.high, summary.no_interval) == (None, None, "too_few")
    assert summarize(scores * 2, [*range(len(scores))] * 2).no_interval == "too_few"


def test_undefined_scores_do_not_count_as_zero():
    summary = summarize([0.7, math.nan, 0.8, 0.9, math.nan])
    assert summary.mean == pytest.approx(0.8)
    assert (summary.n, summary.undefined, summary.patients) == (3, 2, 3)


def test_one_defined_score_has_no_interval():
    summary = summarize([math.nan, 0.6])
    assert (summary.mean, summary.low, summary.high, summary.n, summary.undefined) == (0.6, None, None, 1, 1)


@pytest.mark.parametrize("scores", [[], [math.nan, math.nan]])
def test_no_defined_score_is_undefined_and_not_zero(scores):
    summary = summarize(scores)
    assert (summary.mean, summary.low, summary.high, summary.no_interval) == (None, None, None, "undefined")
    assert (summary.n, summary.undefined) == (0, len(scores))


def test_predicted_classes_are_the_largest_logits():
    logits = torch.tensor(np.random.default_rng(0).standard_normal((2, 3, 4, 5)))
    classes = predicted_classes(logits)
    assert classes.dtype == torch.uint8
    assert torch.equal(classes.long(), torch.tensor(logits.numpy().argmax(1)))


def test_the_mean_is_over_cases_whosever_they_are():
    summary = summarize([0.6, 0.8, 0.1], ["a", "a", "b"])
    # over patients it would be (0.7 + 0.1) / 2
    assert (summary.mean, summary.n, summary.patients) == (pytest.approx(0.5), 3, 2)
