"""What the numbers of a mask mean, decided once, from its content, for every reader of masks."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harmofl.data.findings import Finding, refusal

Numbers = NDArray[Any]
LABEL_TOLERANCE = 1e-3  # distance of a label from an integer
LARGEST_FLOAT = 2.0**53  # float64 has every whole number up to here
# A few values between others may be labels of their own, such as one for the borders of nuclei.
FEWEST_BETWEEN = 3
# Of the pixels at borders. Labels of crowded, overlapping nuclei of 2 pixels reach 0.2, smooth resizing leaves 0.29.
MOST_BETWEEN = 0.25
# The same where nearly all marked pixels hold the smallest or the largest value (0 and 255). JPEG of quality 98 leaves
# 0.03 and more; one to three nuclei that overlap, whose labels alone can look so, have no three values in between.
MOST_BETWEEN_TWO = 0.03
# The same for classes, none of which is the border of another: crowded cells of 4 classes reach 0.1.
FEWEST_BETWEEN_CLASSES, MOST_BETWEEN_CLASSES = 1, 0.12
# JPEG of quality 99 and 100 turns 0 and 255 into 0, 1, 254 and 255, and every 1 would be marked.
JITTER, LEAST_JITTERED = 2, 100
# Of a volume, labels nearly all voxels of which lie between those of the slices above and below.
FEWEST_BETWEEN_SLICES = 2
NEAR = 0.1  # of the range: as good as the smallest or the largest value
RARE = 0.05  # share of the marked pixels
ALL_OF_A_LABEL = 0.95  # share of its voxels
BAND = 512  # rows looked at together: a picture may have 64 million pixels
SMALL = 2**16  # values below are counted, not sorted
NEARLY_NONE = 1e-4  # share of the counted pixels: a prostate of 10 mL in a field of 100 liters
NEARLY_ALL = 0.75  # share of the counted pixels, as of an inverted mask of nuclei that fill a quarter
MORE_THAN_HALF, ONE_PIECE, IN_PIECES = 0.5, 0.9, 0.5  # marked; largest part of what is marked, of what is not
FEWEST_TO_COMPARE = 5  # images of a site
FAR = 10.0  # times the typical amount of the site
FAR_SPREADS = 4.0  # standard deviations of the site, estimated by the median deviation
OF_DEVIATION = 1.4826  # from the median deviation to the standard deviation of a normal distribution
FIX_RAMPS = "make the mask anew: whole numbers, nearest neighbor where it is resized, compressed without loss"


def mask_labels(values: Numbers, subject: str, fix: str, *, classes: bool = False) -> Numbers:
    """Take the numbers of a mask for labels, or refuse them.

    Labels are whole numbers from 0 up; 0 is background. Any number is a label, so that 0/1, 0/255, classes and the
    numbers of thousands of nuclei are valid, but at a border one label follows another at once. Values that lie between
    those of their neighbors, of three kinds or more and along a large part of the borders, are a smoothed mask or an
    image. A smoothed mask of so few labels that rounding leaves no three values in between (0/1, 0/1/2) cannot be told
    from labels.

    Args:
        values: (H, W) or (S, H, W) numbers of any type.
        subject: file name for findings.
        fix: what to do about numbers that are no labels.
        classes: whether labels are classes, of which none runs along the border of another.

    Returns:
        The labels in the shape and type of `values`; what is off a whole number by less than 0.001 is rounded.

    Raises:
        CaseError: for NaN and infinity, fractions, negative numbers, floats above 2^53, and values that form ramps.
    """
    labels = whole_numbers(values, subject, fix)
    check_no_ramps(labels, subject, classes=classes)
    return labels


def whole_numbers(values: Numbers, subject: str, fix: str) -> Numbers:
    """Refuse what is no whole number from 0 up, the first half of `mask_labels`.

    Raises:
        CaseError: for NaN and infinity, fractions, negative numbers and floats above 2^53.
    """
    labels = values
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise refusal("mask_not_finite", subject, "the mask holds NaN or infinite values", fix)
        labels = np.rint(values)
        if float(np.abs(values - labels).max()) > LABEL_TOLERANCE:
            raise refusal("soft_mask", subject, "the mask holds fractions, not labels", fix)
        if float(labels.max()) > LARGEST_FLOAT:
            raise refusal("mask_labels", subject, f"the mask holds {labels.max():g}, which is not a label", fix)
    if labels.dtype.kind in "if" and float(labels.min()) < 0:
        raise refusal("negative_label", subject, f"the mask holds negative labels ({int(labels.min())})", fix)
    return labels


def check_no_ramps(labels: Numbers, subject: str, *, classes: bool = False) -> None:
    """Refuse whole numbers from 0 up, (H, W) or (S, H, W), that form ramps at borders.

    Raises:
        CaseError: code ``mask_ramps``, with some of the values.
    """
    planes = _around_marked(labels if labels.ndim == 3 else labels[np.newaxis])
    present = _distinct(planes)
    has_ramps = _is_jittered(present) or _ramps_within(planes, present, classes) or _ramps_between(planes)
    if len(present) < 3 or not has_ramps:
        return
    shown = ", ".join(str(value) for value in present[np.unique(np.linspace(0, len(present) - 1, 5).astype(int))])
    message = f"the mask's values form ramps at borders ({shown}, ...), as JPEG and smooth resizing leave them"
    raise refusal("mask_ramps", subject, message, FIX_RAMPS)


def _around_marked(planes: Numbers) -> NDArray[np.integer]:
    """The part of (S, H, W) that holds what is above 0 and a pixel around it, as integers."""
    for axis in range(3):
        others = tuple(other for other in range(3) if other != axis)
        marked = np.flatnonzero((planes > 0).any(axis=others))
        if not len(marked):
            return np.zeros((1, 1, 1), np.uint8)
        kept = slice(max(marked[0] - 1, 0), marked[-1] + 2)
        planes = planes[tuple(kept if other == axis else slice(None) for other in range(3))]
    if planes.dtype.kind == "b":
        return planes.astype(np.uint8)
    return planes.astype(np.int64) if planes.dtype.kind == "f" else planes


def _distinct(values: NDArray[np.integer]) -> NDArray[np.integer]:
    if values.size and int(values.max()) < SMALL:
        return np.flatnonzero(np.bincount(values.ravel()))
    return np.unique(values)


def _is_jittered(present: NDArray[np.integer]) -> bool:
    """Whether two numbers stand for what all values are, each with neighbors, as JPEG of the best qualities leaves."""
    low, high = int(present[0]), int(present[-1])
    near_low, near_high = present <= low + JITTER, present >= high - JITTER
    two_sided = min(int(near_low.sum()), int(near_high.sum())) > 1
    return high - low >= LEAST_JITTERED and two_sided and bool((near_low | near_high).all())


def _ramps_within(planes: NDArray[np.integer], present: NDArray[np.integer], classes: bool) -> bool:
    """Whether ramps run along the borders within slices of (S, H, W)."""
    fewest = FEWEST_BETWEEN_CLASSES if classes else FEWEST_BETWEEN
    if len(present) < fewest + 2:  # a ramp has something at either end
        return False
    near = NEAR * float(present[-1] - present[0])
    low, high = present[0] + near, present[-1] - near
    border = middle = marked = 0
    found: list[NDArray[np.integer]] = []
    for band, rows in _bands(planes):
        at_border, between, plateau = (part[rows] for part in _borders(band))
        values = band[rows]
        border += int(np.count_nonzero(at_border))
        found.append(values[between])
        flat = values[plateau & (values > 0)]
        middle += int(np.count_nonzero((flat > low) & (flat < high)))
        marked += len(flat)
    ramp = np.concatenate(found)
    most = MOST_BETWEEN_TWO if middle <= RARE * marked else MOST_BETWEEN
    most = MOST_BETWEEN_CLASSES if classes else most
    return len(ramp) >= most * border and len(_distinct(ramp)) >= fewest


def _bands(planes: NDArray[np.integer]) -> Iterator[tuple[NDArray[np.integer], slice]]:
    """Parts of all slices, one after another, with a row more on either side, and their own rows."""
    for plane in planes:
        for start in range(0, len(plane), BAND):
            first = max(start - 1, 0)
            yield plane[first : start + BAND + 1], slice(start - first, start - first + BAND)


def _borders(plane: NDArray[np.integer]) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which pixels of (H, W) lie at a border, which of them between their neighbors, and which in a flat part.

    Flat is what lies in a square of 2 x 2 equal pixels. Between is what does not, and either has one opposite neighbor
    below and one above it, or equals none of its eight neighbors, which are not all equal.
    """
    rows, columns = plane.shape
    around = np.pad(plane, 1, mode="edge")
    near = [around[top : top + rows, left : left + columns] for top in range(3) for left in range(3)]
    del near[4]  # itself
    up, left, right, down = near[1], near[3], near[4], near[6]
    at_border = (up != plane) | (left != plane) | (right != plane) | (down != plane)
    squares = (plane[1:, 1:] == plane[:-1, :-1]) & (plane[1:, 1:] == plane[1:, :-1]) & (plane[1:, 1:] == plane[:-1, 1:])
    flat = np.zeros(plane.shape, bool)
    for shift in ((0, 0), (0, 1), (1, 0), (1, 1)):
        flat[shift[0] : rows - 1 + shift[0], shift[1] : columns - 1 + shift[1]] |= squares
    ordered = _is_between(up, plane, down) | _is_between(left, plane, right)
    alone = np.logical_and.reduce([other != plane for other in near])
    alone &= np.minimum.reduce(near) != np.maximum.reduce(near)
    return at_border, (ordered | alone) & ~flat, flat


def _is_between(
    first: NDArray[np.integer], middle: NDArray[np.integer], last: NDArray[np.integer]
) -> NDArray[np.bool_]:
    return ((first < middle) & (middle < last)) | ((first > middle) & (middle > last))


def _ramps_between(planes: NDArray[np.integer]) -> bool:
    """Whether nearly all voxels of several labels lie between the values of the slices above and below."""
    if len(planes) < 3 or int(planes.max()) >= SMALL:
        return False
    between = np.zeros(planes.shape, bool)
    between[1:-1] = _is_between(planes[:-2], planes[1:-1], planes[2:])
    count = np.bincount(planes.ravel())
    inside = np.bincount(planes[between], minlength=len(count))
    return int(np.count_nonzero((count > 0) & (inside >= ALL_OF_A_LABEL * count))) >= FEWEST_BETWEEN_SLICES


def share_findings(marked: NDArray[np.bool_], counted: NDArray[np.bool_] | None, subject: str) -> list[Finding]:
    """Warn about a mask that marks nearly nothing or nearly all, or that looks inverted; nothing is left out for it.

    Inverted looks what marks more than half in one piece, in which the rest lies in pieces, as nuclei do.

    Args:
        marked: (H, W) or (S, H, W).
        counted: of the same shape, pixels that are not ignored; None for all.
        subject: file name.
    """
    size = marked.size if counted is None else int(np.count_nonzero(counted))
    share = np.count_nonzero(marked) / max(size, 1)
    if 0 < share < NEARLY_NONE:
        message, fix = f"only {100 * share:.2g} % of the pixels are marked", "check that the mask is whole"
    elif share > NEARLY_ALL or (share > MORE_THAN_HALF and _is_ground(marked, counted)):
        message = f"{100 * share:.0f} % of the pixels are marked, the mask may be inverted"
        fix = "check that 0 is background"
    else:
        return []
    return [Finding("warning", "implausible_share", subject, message, fix)]


def _is_ground(marked: NDArray[np.bool_], counted: NDArray[np.bool_] | None) -> bool:
    rest = ~marked if counted is None else counted & ~marked
    return _largest_part(marked) >= ONE_PIECE and _largest_part(rest) < IN_PIECES


def _largest_part(pixels: NDArray[np.bool_]) -> float:
    """Share of the largest connected part."""
    from scipy.ndimage import label

    sizes = np.bincount(label(pixels)[0].ravel())[1:]
    return float(sizes.max() / sizes.sum()) if len(sizes) else 0.0


def unlike_the_others(amounts: Mapping[str, float], unit: str, *, most: float = np.inf) -> list[Finding]:
    """Warn about masks that mark far more or less than the typical one of the site; nothing is left out for it.

    Far is ten times and four standard deviations, of the odds where an amount is a share. Sites of fewer than five
    masks, and masks that mark nothing, are not compared.

    Args:
        amounts: what each mask marks, by its name.
        unit: of the amounts.
        most: the largest possible amount: 100 for percent.
    """
    odds = {name: amount / (1 - amount / most) for name, amount in amounts.items() if 0 < amount < most}
    if len(odds) < FEWEST_TO_COMPARE:
        return []
    logs = {name: float(np.log(value)) for name, value in odds.items()}
    middle = float(np.median(list(logs.values())))
    spread = OF_DEVIATION * float(np.median([abs(value - middle) for value in logs.values()]))
    typical = float(np.median(list(amounts.values())))
    far = max(float(np.log(FAR)), FAR_SPREADS * spread)
    return [
        Finding(
            "warning",
            "unlike_other_masks",
            name,
            f"{amounts[name]:.3g} {unit} are marked, typical of the site are {typical:.3g} {unit}",
            "check that the mask belongs to this image and is whole",
        )
        for name, value in logs.items()
        if abs(value - middle) > far
    ]
