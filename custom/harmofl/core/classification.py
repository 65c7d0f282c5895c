"""Scores of a classification over all images of a split, with intervals and rules for undefined values."""

from dataclasses import dataclass
from math import nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NORMAL_QUANTILE = 1.959964  # 97.5 %


@dataclass(frozen=True)
class Estimate:
    """A score over `n` images and its 95 % interval, each NaN where it is undefined.

    The interval takes the images for independent. Patches of one slide are not: for other slides it is too narrow,
    and `accuracy_by_group` is the score that knows.
    """

    value: float
    low: float
    high: float
    n: int


def binary_scores(logits_B2: Tensor, labels_B: Tensor) -> dict[str, Estimate]:
    """Accuracy, AUROC, sensitivity and specificity; class 1 is the one to be found.

    Args:
        logits_B2: logits or probabilities, (B, 2) float.
        labels_B: true classes, (B,) integer, 0 or 1.
    """
    predicted = predicted_labels(logits_B2)
    return {
        "accuracy": accuracy(predicted, labels_B),
        # not the softmax, which rounds whatever is very likely to 1 and so makes ties
        "auroc": auroc(logits_B2[:, 1].double() - logits_B2[:, 0].double(), labels_B),
        "sensitivity": recall(predicted, labels_B, 1),
        "specificity": recall(predicted, labels_B, 0),
    }


def predicted_labels(logits_BK: Tensor) -> Tensor:
    """Class with the largest logit, (B,) int64, the lower one of equals; -1, always wrong, where one is not finite."""
    return torch.where(logits_BK.isfinite().all(1), logits_BK.argmax(1), -1)


def accuracy(predicted_B: Tensor, labels_B: Tensor) -> Estimate:
    """Share of the images whose class is found, any number of classes; interval by Wilson."""
    return _proportion(int((predicted_B == labels_B).sum()), len(labels_B))


def recall(predicted_B: Tensor, labels_B: Tensor, label: int) -> Estimate:
    """Share found of the images of one class; of class 1 the sensitivity, of class 0 the specificity.

    Undefined where no image is of that class; interval by Wilson.
    """
    of_class = labels_B == label
    return _proportion(int((predicted_B[of_class] == label).sum()), int(of_class.sum()))


def auroc(evidence_B: Tensor, labels_B: Tensor) -> Estimate:
    """Area under the ROC curve: chance that an image of class 1 has more evidence than one of class 0; ties are half.

    The interval has the variance of DeLong, DeLong and Clarke-Pearson (1988), by midranks as in Sun and Xu (2014), on
    the logit scale, which keeps it in (0, 1) (Pepe 2003). It is undefined where that variance is 0, as for two classes
    that separate completely, or where a class has fewer than two images.

    Args:
        evidence_B: for class 1, on any scale, (B,) float.
        labels_B: true classes, (B,) integer, 0 or 1.

    Returns:
        Undefined where a class has no image or evidence is not finite.
    """
    evidence, positive = evidence_B.double().cpu().numpy(), labels_B.cpu().numpy() == 1
    if not np.isfinite(evidence).all() or positive.all() or not positive.any():
        return Estimate(nan, nan, nan, len(evidence))
    won, lost = _pairs(evidence, positive)
    ones, zeros = won.size, lost.size
    area = float(won.mean() / zeros)
    # of numbers of pairs, not of shares: these are exact, so that no spread is exactly 0
    spread = won.var(ddof=1) / zeros**2 / ones + lost.var(ddof=1) / ones**2 / zeros if min(ones, zeros) > 1 else 0.0
    if not (0 < area < 1 and spread > 0):
        return Estimate(area, nan, nan, len(evidence))
    odds = area / (1 - area)
    # the derivative of the logit is 1 / (A (1 - A))
    factor = np.exp(_NORMAL_QUANTILE * np.sqrt(spread) / (area * (1 - area)))
    low, high = (float(1 / (1 + 1 / bound)) for bound in (odds / factor, odds * factor))
    return Estimate(area, low, high, len(evidence))


def accuracy_by_group(predicted_B: Tensor, labels_B: Tensor, groups_B: Tensor) -> list[float]:
    """Accuracy within each group of images, such as a slide, in the order of the groups' numbers.

    Groups are the independent units of a split: `scores.summarize` of these has the interval for other slides.
    """
    right = predicted_B == labels_B
    return [float(right[groups_B == group].double().mean()) for group in groups_B.unique(sorted=True)]


def _pairs(evidence: NDArray[np.float64], positive: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
    """For each image of class 1 how many of class 0 it beats, for each of class 0 how many of class 1 beat it.

    A midrank counts the images beaten, plus half of the equal ones, plus one half; the rank within the own class
    takes away those of the own class.
    """
    from scipy.stats import rankdata

    ranks = rankdata(evidence)
    won = ranks[positive] - rankdata(evidence[positive])
    lost = positive.sum() - (ranks[~positive] - rankdata(evidence[~positive]))
    return won, lost


def _proportion(count: int, total: int) -> Estimate:
    """A share with the interval of Wilson (1927), which is never empty, also at 0 and 1."""
    if total == 0:
        return Estimate(nan, nan, nan, 0)
    from scipy.stats import binomtest

    interval = binomtest(count, total).proportion_ci(0.95, method="wilson")
    return Estimate(count / total, float(interval.low), float(interval.high), total)
