"""Scores of a classification over all images of a split, with intervals and rules for undefined values."""

from dataclasses import dataclass
from math import nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harmofl.core.clustered import Interval, Units, Why, effective_number, interval_of, ratio_units


@dataclass(frozen=True)
class Estimate:
    """A score over `n` images with its 95 % interval over patients, since images of one patient are alike.

    Attributes:
        value: NaN where it is undefined.
        low: lower bound, NaN where there is no interval.
        high: upper bound, NaN where there is no interval.
        n: images.
        patients: patients of these images; of AUROC those of the class that fewer patients have.
        no_interval: why there is none.
        by_patient: of a share, for each patient the images that count for it and all its images.
    """

    value: float
    low: float
    high: float
    n: int
    patients: int
    no_interval: Why | None = None
    by_patient: tuple[tuple[int, int], ...] = ()


def binary_scores(logits_B2: Tensor, labels_B: Tensor, patients_B: Tensor) -> dict[str, Estimate]:
    """Accuracy, AUROC, sensitivity and specificity; class 1 is the one to be found.

    Args:
        logits_B2: logits or probabilities, (B, 2) float.
        labels_B: true classes, (B,) integer, 0 or 1.
        patients_B: number of each image's patient, (B,) integer.
    """
    predicted = predicted_labels(logits_B2)
    return {
        "accuracy": accuracy(predicted, labels_B, patients_B),
        # not the softmax, which rounds whatever is very likely to 1 and so makes ties
        "auroc": auroc(logits_B2[:, 1].double() - logits_B2[:, 0].double(), labels_B, patients_B),
        "sensitivity": recall(predicted, labels_B, patients_B, 1),
        "specificity": recall(predicted, labels_B, patients_B, 0),
    }


def predicted_labels(logits_BK: Tensor) -> Tensor:
    """Class with the largest logit, (B,) int64, the lower one of equals; -1, always wrong, where one is not finite."""
    return torch.where(logits_BK.isfinite().all(1), logits_BK.argmax(1), -1)


def accuracy(predicted_B: Tensor, labels_B: Tensor, patients_B: Tensor) -> Estimate:
    """Share of the images whose class is found, any number of classes."""
    return _share(predicted_B == labels_B, patients_B)


def recall(predicted_B: Tensor, labels_B: Tensor, patients_B: Tensor, label: int) -> Estimate:
    """Share found of the images of one class; of class 1 the sensitivity, of class 0 the specificity.

    Undefined where no image is of that class.
    """
    of_class = labels_B == label
    return _share(predicted_B[of_class] == label, patients_B[of_class])


def auroc(evidence_B: Tensor, labels_B: Tensor, patients_B: Tensor) -> Estimate:
    """Area under the ROC curve: chance that an image of class 1 has more evidence than one of class 0; ties are half.

    The variance is the jackknife's over patients, as Obuchowski (1997) takes clusters for the units of the variance of
    DeLong, DeLong and Clarke-Pearson (1988); the interval is on the logit scale (Pepe 2003). It needs three patients
    of either class, and none without whom a class is empty.

    Args:
        evidence_B: for class 1, on any scale, (B,) float.
        labels_B: true classes, (B,) integer, 0 or 1.
        patients_B: number of each image's patient, (B,) integer.

    Returns:
        Undefined where a class has no image or evidence is not finite.
    """
    evidence, positive = evidence_B.double().cpu().numpy(), labels_B.cpu().numpy() == 1
    patients = patients_B.cpu().numpy()
    counts = [np.unique(patients[of_class], return_counts=True)[1] for of_class in (positive, ~positive)]
    fewest = min(len(count) for count in counts)
    if not fewest or not np.isfinite(evidence).all():
        return _estimate(nan, len(evidence), interval_of(nan, None, fewest, 1))
    won, lost = _pairs(evidence, positive)
    pairs = won.sum()
    area = float(pairs / positive.sum() / (~positive).sum())
    units = None
    if fewest > 1:
        without = []
        for own in (patients == patient for patient in np.unique(patients)):
            # the pairs within the patient are among both of what is taken away
            left = pairs - won[own].sum() - lost[own].sum() + _pairs(evidence[own], positive[own])[0].sum()
            without.append(left / positive[~own].sum() / (~positive[~own]).sum())
        values = len(without) * area - (len(without) - 1) * np.array(without)
        units = Units(values, min(effective_number(count) for count in counts))
    return _estimate(area, len(evidence), interval_of(area, units, fewest, 1))


def accuracy_by_group(predicted_B: Tensor, labels_B: Tensor, groups_B: Tensor) -> list[float]:
    """Accuracy within each group of images, such as a slide, in the order of the groups' numbers.

    Slides of one patient are alike too: `scores.summarize` with the patients of the slides has the interval.
    """
    right = predicted_B == labels_B
    return [float(right[groups_B == group].double().mean()) for group in groups_B.unique(sorted=True)]


def _pairs(evidence: NDArray[np.float64], positive: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
    """For each image of class 1 how many of class 0 it beats, for each of class 0 how many beat it; else 0. Ties: 1/2.

    A midrank counts the images beaten, plus half of the equal ones, plus one half; the rank within the own class
    takes away those of the own class. Half numbers are exact, so that equal patients have no spread at all.
    """
    from scipy.stats import rankdata

    won, lost, ranks = np.zeros(len(evidence)), np.zeros(len(evidence)), rankdata(evidence)
    won[positive] = ranks[positive] - rankdata(evidence[positive])
    lost[~positive] = positive.sum() - (ranks[~positive] - rankdata(evidence[~positive]))
    return won, lost


def _share(counted_B: Tensor, patients_B: Tensor) -> Estimate:
    """The share of images that count, with what each patient has of it, in the order of the patients' numbers."""
    _, inverse = patients_B.cpu().unique(sorted=True, return_inverse=True)
    counted, of = (torch.bincount(held).tolist() for held in (inverse[counted_B.cpu()], inverse))
    parts = tuple(zip(counted + [0] * (len(of) - len(counted)), of, strict=True))
    value = sum(counted) / len(counted_B) if len(counted_B) else nan
    return _estimate(value, len(counted_B), interval_of(value, ratio_units(parts), len(parts), 1), parts)


def _estimate(value: float, count: int, found: Interval, parts: tuple[tuple[int, int], ...] = ()) -> Estimate:
    low, high = (nan if bound is None else bound for bound in (found.low, found.high))
    return Estimate(value, low, high, count, found.count, found.no_interval, parts)
