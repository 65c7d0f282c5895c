"""Scores of a segmentation, a case at a time, with intervals and rules for undefined values."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
import torch
from torch import Tensor

from harmofl.core.clustered import Why, by_patient, interval_of, ratio_units


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
    """Mean of the defined scores, 95 % interval of that mean over patients, numbers of defined and undefined scores.

    `no_interval` says why there is none, `patients` counts those with a defined score.
    """

    mean: float | None
    low: float | None
    high: float | None
    no_interval: Why | None
    n: int
    undefined: int
    patients: int


def summarize(scores: Sequence[float], patients: Sequence[Hashable] | None = None, largest: float = 1.0) -> Summary:
    """Mean over cases with a 95 % interval over their patients; None, not 0, where it is undefined.

    Args:
        scores: of the cases, NaN where undefined.
        patients: of the cases, in the same order; without them each case is of a patient of its own.
        largest: 1 for scores in [0, 1], infinity for distances.
    """
    parts = by_patient(scores, range(len(scores)) if patients is None else patients)
    defined = [score for score in scores if not isnan(score)]
    count, mean = len(defined), float(np.mean(defined)) if defined else nan
    found = interval_of(mean, ratio_units(parts), len(parts), largest)
    return Summary(
        mean=mean if count else None,
        low=found.low,
        high=found.high,
        no_interval=found.no_interval,
        n=count,
        undefined=len(scores) - count,
        patients=found.count,
    )


def predicted_classes(logits_BCHW: Tensor) -> Tensor:
    """Class with the largest logit, (B, H, W) uint8."""
    return logits_BCHW.argmax(dim=1).to(torch.uint8)
