"""Rules for the numbers in an image and in a mask."""

from collections.abc import Sequence

import numpy as np

from harmofl.data.findings import Finding, refusal
from harmofl.data.mask_meaning import check_no_ramps, share_findings, whole_numbers

MOST_NOT_FINITE = 1e-3  # share of voxels that may be replaced
LEAST_CONTRAST = 1e-5  # range of intensities relative to the largest
MOST_LABELS = 20


def finite_image(image: np.ndarray, subject: str) -> tuple[np.ndarray, list[Finding]]:
    """Replace a few NaN or infinite voxels by the smallest finite intensity.

    Args:
        image: (S, H, W) float32.
        subject: file name for findings.

    Raises:
        CaseError: if more than 0.1 % of the voxels are not finite.
    """
    finite = np.isfinite(image)
    count = image.size - int(np.count_nonzero(finite))
    if count == 0:
        return image, []
    share = count / image.size
    if share > MOST_NOT_FINITE:
        message = f"{count} of {image.size} voxels ({share:.1%}) are NaN or infinite"
        raise refusal("not_finite", subject, message, "export the image again")
    message = f"{count} NaN or infinite voxels were replaced by the smallest intensity"
    replaced = np.where(finite, image, image[finite].min())
    return replaced, [Finding("warning", "not_finite", subject, message, "export the image again if they matter")]


def check_contrast(image: np.ndarray, subject: str) -> None:
    """Refuse an image that is the same everywhere.

    Raises:
        CaseError: if the range of intensities is below 1e-5 of the largest.
    """
    low, high = float(image.min()), float(image.max())
    if high - low <= LEAST_CONTRAST * max(abs(low), abs(high)):
        message = f"the image is constant (intensities {low:.6g} to {high:.6g})"
        raise refusal("constant_image", subject, message, "export the image again")


def binary_mask(mask: np.ndarray, subject: str) -> tuple[np.ndarray, tuple[int, ...], list[Finding]]:
    """Turn labels into prostate (1) and the rest (0): every label above 0 is prostate.

    `mask_meaning` decides what is a label. A mask that marks nearly nothing or nearly all gives a
    warning.

    Args:
        mask: (S, H, W) float32.
        subject: file name for findings.

    Returns:
        (S, H, W) uint8, the labels above 0 that were found, and findings.

    Raises:
        CaseError: for NaN, negative or fractional numbers, more than 20 distinct labels, and values that form ramps.
    """
    values = whole_numbers(mask, subject, "store whole numbers, 0 outside the prostate")
    foreground = values > 0
    labels = tuple(int(label) for label in np.unique(values[foreground]))
    if len(labels) >= MOST_LABELS:  # the background is one value more
        message = f"the mask holds {len(labels) + 1} distinct values, it may be an image"
        raise refusal("too_many_labels", subject, message, "check that image and mask were not exchanged")
    check_no_ramps(values, subject)
    findings = [*_label_findings(labels, subject), *share_findings(foreground, None, subject)]
    return foreground.astype(np.uint8), labels, findings


def _label_findings(labels: Sequence[int], subject: str) -> list[Finding]:
    if not labels:
        return [Finding("warning", "empty_mask", subject, "nothing is labeled", "check that the mask was saved")]
    if max(labels) > 1:
        found = ", ".join(str(label) for label in labels)
        return [Finding("notice", "labels_merged", subject, f"labels {found} all count as prostate")]
    return []
