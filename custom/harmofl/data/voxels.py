"""Rules for the numbers in an image and in a mask."""

from collections.abc import Sequence

import numpy as np

from harmofl.data.findings import Finding, refusal
from harmofl.data.mask_meaning import check_no_ramps, share_findings, whole_numbers

MOST_NOT_FINITE = 1e-3  # share of voxels that may be replaced
LEAST_CONTRAST = 1e-5  # range of intensities relative to the largest; harmofl.core.contrast has the same for tensors
SHOWN = 5  # numbers of slices in a message
MOST_LABELS = 20
PADDED = 1e-3  # share of voxels of one value from which on it may be padding
EMPTY_WINDOW = 0.25  # share of the range of intensities that nothing but padding opens


def usable_intensities(image: np.ndarray, subject: str) -> tuple[np.ndarray, list[Finding]]:
    """The intensities of an image by the rules that hold in training, prediction and export.

    Args:
        image: (S, H, W) float32.
        subject: file name for findings.

    Returns:
        (S, H, W) float32, finite and without padding, and findings.

    Raises:
        CaseError: if more than 0.1 % of the voxels are not finite, or all are the same.
    """
    finite, findings = finite_image(image, subject)
    unpadded, more = without_padding(finite, subject)
    check_contrast(unpadded, subject)
    return unpadded, [*findings, *more]


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
    were = "voxel was" if count == 1 else "voxels were"
    message = f"{count} NaN or infinite {were} replaced by the smallest intensity"
    replaced = np.where(finite, image, image[finite].min())
    return replaced, [Finding("warning", "not_finite", subject, message, "export the image again if they matter")]


def without_padding(image: np.ndarray, subject: str) -> tuple[np.ndarray, list[Finding]]:
    """Replace a padding value far outside the image's own range.

    A value below 0 becomes 0, as where an MR image has no signal, or the smallest of the others if some are below 0
    too; a large one becomes the largest of the others. A value is taken for padding if at least 0.1 % of the voxels
    have it, no voxel has more, or less, a quarter of the range or more lies between it and what it becomes, and the
    others have as many values as an image. A window from the smallest to a high intensity would else be empty to that
    part.

    Args:
        image: (S, H, W) float32, finite.
        subject: file name for findings.
    """
    findings = []
    for value, is_low in ((float(image.min()), True), (float(image.max()), False)):
        padded = image == value
        count = int(np.count_nonzero(padded))
        if (is_low and value >= 0) or not PADDED * image.size <= count < image.size:
            continue
        others = image[~padded]
        low, high = float(others.min()), float(others.max())
        becomes, farthest = (min(low, 0.0), high) if is_low else (high, low)
        if abs(becomes - value) < EMPTY_WINDOW * abs(farthest - value) or len(np.unique(others)) < MOST_LABELS:
            continue
        image = np.where(padded, np.float32(becomes), image)
        message = (
            f"{count / image.size:.1%} of the voxels are {value:g}, far from the others ({low:g} to {high:g}), "
            f"and count as {becomes:g}"
        )
        fix = "check that this is padding, or export the image without it"
        findings.append(Finding("warning", "padding_replaced", subject, message, fix))
    return image, findings


def sparse_findings(image: np.ndarray, upper_percentile: float, subject: str) -> list[Finding]:
    """Warn where the upper percentile of an image is its minimum, so that no range of zero divides.

    Args:
        image: (S, H, W) float32, finite.
        upper_percentile: of the window.
        subject: file name for findings.
    """
    rank = int(np.ceil(upper_percentile / 100 * (image.size - 1)))
    if int(np.count_nonzero(image == image.min())) <= rank:
        return []
    message = (
        f"more than {upper_percentile:g} % of the voxels hold the smallest intensity, the window runs to the largest"
    )
    return [Finding("warning", "sparse_image", subject, message, "check the image")]


def check_contrast(image: np.ndarray, subject: str) -> None:
    """Refuse an image that is the same everywhere.

    Raises:
        CaseError: if the range of intensities is below 1e-5 of the largest.
    """
    if blank_slices(image[np.newaxis]):
        message = f"the image is constant (intensities {float(image.min()):.6g} to {float(image.max()):.6g})"
        raise refusal("constant_image", subject, message, "export the image again")


def blank_slices(image: np.ndarray) -> tuple[int, ...]:
    """Return which slices of an image (S, ...) have no contrast: a range below 1e-5 of their largest intensity."""
    flat = np.asarray(image.reshape(len(image), -1), np.float32)
    low, high = flat.min(1).astype(np.float64), flat.max(1).astype(np.float64)
    return tuple(np.flatnonzero(high - low <= LEAST_CONTRAST * np.maximum(np.abs(low), np.abs(high))).tolist())


def contrast_findings(image: np.ndarray, subject: str) -> list[Finding]:
    """Warn of slices without contrast, which no amplitude statistic takes in.

    Args:
        image: (S, H, W) as the network gets its slices.
        subject: file name for findings.
    """
    blank = blank_slices(image)
    if not blank:
        return []
    shown = ", ".join(str(at + 1) for at in blank[:SHOWN]) + (", ..." if len(blank) > SHOWN else "")
    has, is_left = ("has", "is") if len(blank) == 1 else ("have", "are")
    message = (
        f"{len(blank)} of {len(image)} slices {has} no contrast (from the feet: {shown}) and {is_left} left out of the "
        "amplitude"
    )
    return [Finding("warning", "blank_slices", subject, message, "leave out slices that show nothing")]


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
