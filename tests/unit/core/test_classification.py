"""Scores of a classification: counted by hand, AUROC pair by pair, intervals over patients from their definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.metrics.rocauc import compute_roc_auc
from scipy.stats import t

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
PATIENTS = torch.tensor([0, 1, 2, 0, 1, 2, 3])


def bounds(estimate):
    return estimate.low, estimate.high


def alone(labels):
    """Each image of a patient of its own."""
    return torch.arange(len(labels))


def pairs(evidence, labels):
    """A row for each image of class 1, a column for each of class 0: 1 beaten, 1/2 equal, 0 else."""
    ones = [e for e, label in zip(evidence, labels, strict=True) if label == 1]
    zeros = [e for e, label in zip(evidence, labels, strict=True) if label == 0]
    return np.array([[1.0 if one > zero else 0.5 if one == zero else 0.0 for zero in zeros] for one in ones])


def test_binary_scores_by_hand():
    scores = binary_scores(LOGITS, LABELS, torch.tensor([4, 4, 9, 4, 9, 9, 2]))
    # Predicted 1, 1, 0 | 0, 1, 0, 0: right are 2 of 3 and 3 of 4, together 5 of 7.
    assert (scores["accuracy"].value, scores["accuracy"].n) == (pytest.approx(5 / 7), 7)
    assert (scores["sensitivity"].value, scores["sensitivity"].n) == (pytest.approx(2 / 3), 3)
    assert (scores["specificity"].value, scores["specificity"].n) == (pytest.approx(3 / 4), 4)
    # 2.0 beats all 4; 0.5 beats 3 and ties with one; -1.0 beats -2.0 and -3.0: 4 + 3.5 + 2 of 12 pairs
    assert (scores["auroc"].value, scores["auroc"].n) == (pytest.approx(9.5 / 12), 7)
    # by patient in the order 2, 4, 9: images of it that are right, and all
    assert scores["accuracy"].by_patient == ((1, 1), (3, 3), (1, 3))
    assert scores["sensitivity"].by_patient == ((2, 2), (0, 1))
    assert scores["specificity"].by_patient == ((1, 1), (1, 1), (1, 2))
    assert [scores[name].patients for name in ("accuracy", "sensitivity", "specificity", "auroc")] == [3, 2, 3, 2]


def test_the_interval_of_a_share_is_over_patients():
    # patients of 8 patches with 7, 6, 5 and 4 right, as in test_clustered.py
    predicted = torch.cat([torch.arange(8) < right for right in (7, 6, 5, 4)]).long()
    patients = torch.arange(4).repeat_interleave(8)
    found = accuracy(predicted, torch.ones(32).long(), patients)
    # log(0.6875 / 0.3125) = 0.788457, half 3.182446 * 0.080687 / (0.6875 * 0.3125) = 1.195206
    expected = [1 / (1 + math.exp(-(0.788457 + sign * 1.195206))) for sign in (-1, 1)]
    assert bounds(found) == pytest.approx(expected, abs=1e-5)
    assert (found.value, found.n, found.patients, found.no_interval) == (0.6875, 32, 4, None)


def test_patches_of_two_patients_give_no_interval():
    found = accuracy(torch.ones(1000).long(), torch.arange(1000) % 4 // 3, torch.arange(1000) % 2)
    assert (found.value, found.patients, found.no_interval) == (0.25, 2, "too_few")
    assert all(math.isnan(bound) for bound in bounds(found))


@settings(deadline=None)  # the first call imports scipy.stats
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-3, 3), st.integers(0, 5)), min_size=2, max_size=24))
def test_auroc_counts_pairs_and_has_the_jackknife_s_variance(images):
    labels, evidence, patients = (np.array(held) for held in zip(*images, strict=True))
    estimate = auroc(*(torch.from_numpy(held) for held in (evidence, labels, patients)))
    if len(set(labels)) == 1:
        assert math.isnan(estimate.value)
        return
    area = pairs(evidence, labels).mean()
    assert estimate.value == pytest.approx(area, abs=1e-12)
    fewest = min(len(set(patients[labels == label])) for label in (0, 1))
    assert estimate.patients == fewest
    if fewest < 3 or estimate.no_interval:
        assert all(math.isnan(bound) for bound in bounds(estimate))
        return
    without = [pairs(evidence[patients != one], labels[patients != one]).mean() for one in sorted(set(patients))]
    count, sizes = len(without), [np.unique(patients[labels == label], return_counts=True)[1] for label in (0, 1)]
    # Efron (1982): variance (G - 1) / G times the sum of squares around the mean without each
    error = math.sqrt((count - 1) / count * ((np.array(without) - np.mean(without)) ** 2).sum())
    freedom = min(size.sum() ** 2 / (size**2).sum() for size in sizes) - 1
    logit, half = math.log(area / (1 - area)), float(t.ppf(0.975, freedom)) * error / (area * (1 - area))
    expected = [1 / (1 + math.exp(-(logit + sign * half))) for sign in (-1, 1)]
    assert bounds(estimate) == pytest.approx(tuple(expected), abs=1e-9)
    assert 0 < estimate.low < area < estimate.high < 1


def test_auroc_equals_monai():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(300, generator=generator) < 0.3).long()
    evidence = (torch.randn(300, generator=generator) + labels).mul(4).round()  # a score to a quarter: many ties
    assert auroc(evidence, labels, alone(labels)).value == pytest.approx(compute_roc_auc(evidence, labels), abs=1e-9)


def test_order_and_scale_of_the_evidence_do_not_matter_and_the_other_sign_mirrors():
    generator = torch.Generator().manual_seed(0)
    labels, patients = torch.arange(80) % 2, torch.arange(80) // 10
    evidence = torch.randn(80, generator=generator) + labels
    first = auroc(evidence, labels, patients)
    turned = auroc(evidence.flip(0).double().exp(), labels.flip(0), patients.flip(0))
    assert first.no_interval is None
    assert (first.value, *bounds(first)) == pytest.approx((turned.value, *bounds(turned)), abs=1e-12)
    mirrored = auroc(-evidence, labels, patients)
    assert (mirrored.value, *bounds(mirrored)) == pytest.approx((1 - first.value, 1 - first.high, 1 - first.low))


def test_very_likely_images_keep_their_order():
    # in float32 the softmax of all four is exactly 1, which would tie them at 1/2
    logits, labels = torch.tensor([[0.0, 40.0], [0.0, 30.0], [0.0, 35.0], [0.0, 25.0]]), torch.tensor([1, 0, 1, 0])
    assert logits.softmax(1)[:, 1].unique().tolist() == [1.0]
    assert binary_scores(logits, labels, alone(labels))["auroc"].value == 1.0


def test_probabilities_score_as_their_logits_do():
    from_logits, from_probabilities = (binary_scores(held, LABELS, PATIENTS) for held in (LOGITS, LOGITS.softmax(1)))
    assert repr(from_logits) == repr(from_probabilities)  # a bound that is NaN equals nothing


@pytest.mark.parametrize(("label", "defined"), [(1, "sensitivity"), (0, "specificity")])
def test_one_class_leaves_the_other_undefined(label, defined):
    scores = binary_scores(LOGITS, torch.full_like(LABELS, label), PATIENTS)
    undefined = {name for name, estimate in scores.items() if math.isnan(estimate.value)}
    assert undefined == {"auroc", "sensitivity", "specificity"} - {defined}
    for name in undefined:
        assert all(math.isnan(bound) for bound in bounds(scores[name]))
    assert sorted(scores[name].n for name in ("sensitivity", "specificity")) == [0, 7]


def test_no_image_leaves_everything_undefined():
    for estimate in binary_scores(torch.zeros(0, 2), *torch.zeros(2, 0, dtype=torch.long)).values():
        assert math.isnan(estimate.value)
        assert (estimate.n, estimate.patients, estimate.no_interval) == (0, 0, "undefined")


@pytest.mark.parametrize(
    ("evidence", "labels", "area", "reason"),
    [
        ([4.0, 5.0, 6.0, 1.0, 2.0, 3.0], [1, 1, 1, 0, 0, 0], 1.0, "no_spread"),  # complete separation
        ([1.0] * 6, [1, 1, 1, 0, 0, 0], 0.5, "no_spread"),  # one answer for every image
        ([1.0] * 10, [1] * 7 + [0] * 3, 0.5, "no_spread"),  # the same, where shares of 3 and 7 would round
        ([2.0, 1.0, 3.0, 4.0], [1, 1, 0, 0], 0.0, "too_few"),
        ([2.0, 1.0, 3.0], [1, 0, 0], 0.5, "too_few"),  # one image of class 1
    ],
)
def test_an_area_without_variance_or_patients_has_no_interval(evidence, labels, area, reason):
    estimate = auroc(torch.tensor(evidence), torch.tensor(labels), alone(labels))
    assert (estimate.value, estimate.no_interval) == (area, reason)
    assert all(math.isnan(bound) for bound in bounds(estimate))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_an_image_without_finite_logits_is_wrong_and_leaves_no_ranking(broken):
    logits = LOGITS.clone()
    logits[0, 1] = broken  # a tumor that was found; infinite evidence would win every pair
    scores = binary_scores(logits, LABELS, PATIENTS)
    assert predicted_labels(logits).tolist() == [-1, 1, 0, 0, 1, 0, 0]
    assert scores["sensitivity"].value == pytest.approx(1 / 3)
    assert scores["accuracy"].value == pytest.approx(4 / 7)
    assert math.isnan(scores["auroc"].value)


def test_accuracy_and_recall_of_more_classes():
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    predicted = predicted_labels(torch.eye(4)[[0, 1, 1, 2, 0, 2]])
    assert predicted.tolist() == [0, 1, 1, 2, 0, 2]
    assert accuracy(predicted, labels, alone(labels)).value == pytest.approx(4 / 6)
    assert [recall(predicted, labels, alone(labels), label).value for label in range(3)] == pytest.approx(
        [1 / 2, 1, 2 / 3]
    )
    assert math.isnan(recall(predicted, labels, alone(labels), 3).value)


def test_accuracy_by_group_is_one_number_a_slide():
    predicted, labels = torch.tensor([0, 1, 1, 0, 1, 1]), torch.tensor([0, 1, 0, 0, 1, 0])
    # Slide 3: right, right, wrong. Slide 41: right. Slide 7: right, wrong. In the order 3, 7, 41.
    by_slide = accuracy_by_group(predicted, labels, torch.tensor([3, 3, 3, 41, 7, 7]))
    assert by_slide == pytest.approx([2 / 3, 1 / 2, 1])
    assert summarize(by_slide).n == 3
