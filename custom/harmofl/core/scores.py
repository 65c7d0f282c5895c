"""Scores of a segmentation, a case at a time, with intervals and rules for undefined values."""

from dataclasses import dataclass
from math import isnan, nan, sqrt

import numpy as np
import torch
from torch import Tensor


def case_dice(prediction_SHW: Tensor, mask_SHW: Tensor) -> float:
    """Foreground Dice of one whole case, 2 |P and M| / (|P| + |M|).

    Args:
        prediction_SHW: predicted classes, (S, H, W) integer; above 0 is foreground.
        mask_SHW: true classes, (S, H, W) integer.

    Returns:
        Dice in [0, 1]; NaN where the case holds no foreground, since nothing can be scored there.
    """
    predicted, true = prediction_SHW > 0, mask_SHW > 0
    if not bool(true.any()):
        return nan
    return 2 * int((predicted & true).sum()) / (int(predicted.sum()) + int(true.sum()))


def image_dice(prediction_HW: Tensor, target_HW: Tensor, *, ignored: int, label: int | None = None) -> float:
    """Dice of one class of one image, or of all classes above 0 taken as one, over the pixels that count.

    Args:
        prediction_HW: predicted classes, (H, W) integer.
        target_HW: true classes, (H, W) integer, `ignored` where a pixel does not count.
        ignored: label of the pixels that are left out of prediction and truth.
        label: the class; without one, the foreground.

    Returns:
        Dice in [0, 1], 0 where only one of the two holds the class; NaN where neither does.
    """
    counted = target_HW != ignored
    predicted, true = (
        plane[counted] > 0 if label is None else plane[counted] == label for plane in (prediction_HW, target_HW)
    )
    total = int(predicted.sum()) + int(true.sum())
    return 2 * int((predicted & true).sum()) / total if total else nan


def published_dice(prediction_SHW: Tensor, mask_SHW: Tensor) -> float:
    """Mean over the slices that hold foreground of the Dice of background and foreground, averaged.

    This is what the released code's numbers mean, which leaves out the outermost slices of a volume beforehand; a
    two-class mean of 0.94 is a foreground Dice of about 0.89.

    Returns:
        Mean in [0, 1]; NaN where no slice holds foreground.
    """
    values = []
    for predicted, true in zip(prediction_SHW > 0, mask_SHW > 0, strict=True):
        if bool(true.any()):
            values.append((_plane_dice(predicted, true) + _plane_dice(~predicted, ~true)) / 2)
    return float(np.mean(values)) if values else nan


def _plane_dice(predicted: Tensor, true: Tensor) -> float:
    both = int((predicted & true).sum())
    return 2 * both / (int(predicted.sum()) + int(true.sum()) + 1e-9)


@dataclass(frozen=True)
class Summary:
    """Mean of the defined scores, 95 % interval of that mean, numbers of defined and undefined scores."""

    mean: float | None
    low: float | None
    high: float | None
    n: int
    undefined: int


def summarize(scores: list[float], largest: float = 1.0) -> Summary:
    """Mean with a 95 % Student interval over cases; None, not 0, where it is undefined.

    An interval needs two defined scores; it is cut to [0, largest]: 1 for a Dice score, infinity for a distance.
    """
    defined = np.array([score for score in scores if not isnan(score)], dtype=np.float64)
    undefined = len(scores) - defined.size
    if defined.size == 0:
        return Summary(None, None, None, 0, undefined)
    mean = float(defined.mean())
    if defined.size == 1:
        return Summary(mean, None, None, 1, undefined)
    half = _student_quantile(defined.size - 1) * float(defined.std(ddof=1)) / sqrt(defined.size)
    return Summary(mean, max(0.0, mean - half), min(largest, mean + half), int(defined.size), undefined)


def _student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def predicted_classes(logits_BCHW: Tensor) -> Tensor:
    """Class with the largest logit, (B, H, W) uint8."""
    return logits_BCHW.argmax(dim=1).to(torch.uint8)
