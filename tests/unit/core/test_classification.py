"""Scores of a classification: counted by hand, AUROC pair by pair, intervals from their definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics.rocauc import compute_roc_auc

from harmofl.core.classification import (
    accuracy,
    accuracy_by_group,
    auroc,
    binary_scores,
    predicted_labels,
    recall,
)
from harmofl.core.scores import summarize

# Three tumors and four without; the difference of the logits is the evidence for class 1.
EVIDENCE = [2.0, 0.5, -1.0, -2.0, 0.5, -3.0, -0.5]
LABELS = torch.tensor([1, 1, 1, 0, 0, 0, 0])
LOGITS = torch.tensor([[0.0, evidence] for evidence in EVIDENCE])


def bounds(estimate):
    return estimate.low, estimate.high


def wilson(count, total):
    """Its definition: the p at which (count / total - p)^2 = z^2 p (1 - p) / total, a quadratic in p."""
    z, share = 1.959964, count / total
    return np.sort(np.roots([1 + z**2 / total, -(2 * share + z**2 / total), share**2]).real)


def pairs(evidence, labels):
    """A row for each image of class 1, a column for each of class 0: 1 beaten, 1/2 equal, 0 else."""
    ones = [e for e, label in zip(evidence, labels, strict=True) if label == 1]
    zeros = [e for e, label in zip(evidence, labels, strict=True) if label == 0]
    return np.array([[1.0 if one > zero else 0.5 if one == zero else 0.0 for zero in zeros] for one in ones])


def test_binary_scores_by_hand():
    scores = binary_scores(LOGITS, LABELS)
    # Predicted 1, 1, 0 | 0, 1, 0, 0: right are 2 of 3 and 3 of 4, together 5 of 7.
    assert (scores["accuracy"].value, scores["accuracy"].n) == (pytest.approx(5 / 7), 7)
    assert (scores["sensitivity"].value, scores["sensitivity"].n) == (pytest.approx(2 / 3), 3)
    assert (scores["specificity"].value, scores["specificity"].n) == (pytest.approx(3 / 4), 4)
    # 2.0 beats all 4; 0.5 beats 3 and ties with one; -1.0 beats -2.0 and -3.0: 4 + 3.5 + 2 of 12 pairs
    assert (scores["auroc"].value, scores["auroc"].n) == (pytest.approx(9.5 / 12), 7)


def test_wilson_by_hand():
    # 5 of 10, z^2 = 3.841459: center (5 + z^2/2) / (10 + z^2) = 1/2,
    # half z sqrt(10 / 4 + z^2 / 4) / (10 + z^2) = 1.959964 * 1.860206 / 13.841459 = 0.263407
    predicted, labels = torch.ones(10).long(), torch.tensor([1, 0]).repeat(5)
    assert bounds(accuracy(predicted, labels)) == pytest.approx((0.236593, 0.763407), abs=2e-6)
    # 10 of 10: from 10 / (10 + z^2) to 1; 0 of 10 mirrors it
    assert bounds(accuracy(labels, labels)) == pytest.approx((10 / 13.841459, 1.0), abs=1e-6)
    assert bounds(accuracy(1 - labels, labels)) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)


@pytest.mark.parametrize(("count", "total"), [(1, 1), (2, 3), (7, 8), (90, 100), (27_001, 29_344)])
def test_intervals_of_proportions_solve_wilson_s_quadratic(count, total):
    labels = (torch.arange(total) < count).long()
    assert bounds(accuracy(torch.ones_like(labels), labels)) == pytest.approx(tuple(wilson(count, total)), abs=1e-6)


@settings(deadline=None)  # the first call imports scipy.stats
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3)), min_size=2, max_size=24))
def test_auroc_counts_pairs_and_has_delong_s_variance(images):
    labels, evidence = zip(*images, strict=True)
    estimate = auroc(torch.tensor(evidence), torch.tensor(labels))
    if len(set(labels)) == 1:
        assert math.isnan(estimate.value)
        return
    table = pairs(evidence, labels)
    area, (ones, zeros) = table.mean(), table.shape
    assert estimate.value == pytest.approx(area, abs=1e-12)
    # DeLong et al. (1988): variance of the row means over their number, plus that of the column means
    rows, columns = table.mean(1), table.mean(0)
    variance = 0.0
    if min(ones, zeros) > 1:
        variance = ((rows - area) ** 2).sum() / (ones - 1) / ones + ((columns - area) ** 2).sum() / (zeros - 1) / zeros
    if variance < 1e-12:
        assert all(math.isnan(bound) for bound in bounds(estimate))
        return
    logit, half = math.log(area / (1 - area)), 1.959964 * math.sqrt(variance) / (area * (1 - area))
    expected = [1 / (1 + math.exp(-(logit + sign * half))) for sign in (-1, 1)]
    assert bounds(estimate) == pytest.approx(tuple(expected), abs=1e-9)
    assert 0 < estimate.low < area < estimate.high < 1


def test_auroc_equals_monai():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(300, generator=generator) < 0.3).long()
    evidence = (torch.randn(300, generator=generator) + labels).mul(4).round()  # a score to a quarter: many ties
    assert auroc(evidence, labels).value == pytest.approx(compute_roc_auc(evidence, labels), abs=1e-9)


def test_the_interval_of_auroc_holds_the_truth_in_19_of_20_samples():
    # Normal evidence of class 1 shifted by 1.189998 = 0.841456 sqrt(2): the area is Phi(0.841456) = 0.8.
    generator = np.random.default_rng(0)
    labels = torch.tensor([1] * 40 + [0] * 60)
    held = 0
    for _ in range(400):
        evidence = np.concatenate([generator.normal(1.189998, 1, 40), generator.normal(0, 1, 60)])
        estimate = auroc(torch.from_numpy(evidence), labels)
        held += estimate.low <= 0.8 <= estimate.high
    # 400 draws of 0.95: mean 380, standard deviation sqrt(19) = 4.4; four of them, and nominal level is asymptotic
    assert 362 <= held <= 398


def test_order_and_scale_of_the_evidence_do_not_matter_and_the_other_sign_mirrors():
    evidence = torch.tensor(EVIDENCE)
    first, turned = auroc(evidence, LABELS), auroc(evidence.flip(0).exp(), LABELS.flip(0))
    assert (first.value, *bounds(first)) == pytest.approx((turned.value, *bounds(turned)), abs=1e-12)
    mirrored = auroc(-evidence, LABELS)
    assert (mirrored.value, *bounds(mirrored)) == pytest.approx((1 - first.value, 1 - first.high, 1 - first.low))


def test_very_likely_images_keep_their_order():
    # in float32 the softmax of all four is exactly 1, which would tie them at 1/2
    logits, labels = torch.tensor([[0.0, 40.0], [0.0, 30.0], [0.0, 35.0], [0.0, 25.0]]), torch.tensor([1, 0, 1, 0])
    assert logits.softmax(1)[:, 1].unique().tolist() == [1.0]
    assert binary_scores(logits, labels)["auroc"].value == 1.0


def test_probabilities_score_as_their_logits_do():
    from_logits, from_probabilities = binary_scores(LOGITS, LABELS), binary_scores(LOGITS.softmax(1), LABELS)
    assert from_logits == from_probabilities


@pytest.mark.parametrize(("label", "defined"), [(1, "sensitivity"), (0, "specificity")])
def test_one_class_leaves_the_other_undefined(label, defined):
    scores = binary_scores(LOGITS, torch.full_like(LABELS, label))
    undefined = {name for name, estimate in scores.items() if math.isnan(estimate.value)}
    assert undefined == {"auroc", "sensitivity", "specificity"} - {defined}
    for name in undefined:
        assert all(math.isnan(bound) for bound in bounds(scores[name]))
    assert sorted(scores[name].n for name in ("sensitivity", "specificity")) == [0, 7]


def test_no_image_leaves_everything_undefined():
    for estimate in binary_scores(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)).values():
        assert math.isnan(estimate.value)
        assert estimate.n == 0


@pytest.mark.parametrize(
    ("evidence", "labels", "area"),
    [
        ([3.0, 4.0, 1.0, 2.0], [1, 1, 0, 0], 1.0),  # complete separation
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 0, 0], 0.5),  # one answer for every image
        ([1.0] * 10, [1] * 7 + [0] * 3, 0.5),  # the same, where shares of 3 and 7 would round
        ([2.0, 1.0, 3.0], [1, 0, 0], 0.5),  # one image of class 1
    ],
)
def test_an_area_without_variance_has_no_interval(evidence, labels, area):
    estimate = auroc(torch.tensor(evidence), torch.tensor(labels))
    assert estimate.value == area
    assert all(math.isnan(bound) for bound in bounds(estimate))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_image_without_finite_logits_is_wrong_and_leaves_no_ranking(broken):
    logits = LOGITS.clone()
    logits[0, 1] = broken  # a tumor that was found; infinite evidence would win every pair
    scores = binary_scores(logits, LABELS)
    assert predicted_labels(logits).tolist() == [-1, 1, 0, 0, 1, 0, 0]
    assert scores["sensitivity"].value == pytest.approx(1 / 3)
    assert scores["accuracy"].value == pytest.approx(4 / 7)
    assert math.isnan(scores["auroc"].value)


def test_accuracy_and_recall_of_more_classes():
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    predicted = predicted_labels(torch.eye(4)[[0, 1, 1, 2, 0, 2]])
    assert predicted.tolist() == [0, 1, 1, 2, 0, 2]
    assert accuracy(predicted, labels).value == pytest.approx(4 / 6)
    assert [recall(predicted, labels, label).value for label in range(3)] == pytest.approx([1 / 2, 1, 2 / 3])
    assert math.isnan(recall(predicted, labels, 3).value)


def test_accuracy_by_group_is_one_number_a_slide():
    predicted, labels = torch.tensor([0, 1, 1, 0, 1, 1]), torch.tensor([0, 1, 0, 0, 1, 0])
    # Slide 3: right, right, wrong. Slide 41: right. Slide 7: right, wrong. In the order 3, 7, 41.
    by_slide = accuracy_by_group(predicted, labels, torch.tensor([3, 3, 3, 41, 7, 7]))
    assert by_slide == pytest.approx([2 / 3, 1 / 2, 1])
    assert summarize(by_slide).n == 3
