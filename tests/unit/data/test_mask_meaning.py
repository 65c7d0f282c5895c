"""What is a label, what is a smoothed mask or an image, and which masks a person should look at."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from harmofl.data.findings import CaseError
from harmofl.data.mask_meaning import BAND, mask_labels, share_findings, unlike_the_others
from harmofl.data.voxels import binary_mask

Resampling = Image.Resampling
Size = tuple[int, int]


def accepted(values: np.ndarray, *, classes: bool = False) -> bool:
    """Whether the values are taken for labels, and then unchanged."""
    try:
        labels = mask_labels(values, "a_mask.png", "save numbers", classes=classes)
    except CaseError as error:
        assert (error.finding.code, error.finding.subject) == ("mask_ramps", "a_mask.png")
        return False
    assert labels.dtype == values.dtype
    np.testing.assert_array_equal(labels, values)
    return True


def through_jpeg(mask: np.ndarray, quality: int) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8)).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream))


def resized(mask: np.ndarray, factor: float, how: Resampling) -> np.ndarray:
    rows, columns = (round(factor * size) for size in mask.shape)
    return (
        np.rint(np.asarray(Image.fromarray(mask.astype(np.float32)).resize((columns, rows), how))).clip(0).astype(int)
    )


def ellipses(seed: int, size: Size, count: int) -> np.ndarray:
    """Where each of `count` ellipses of 2.5 to 9 pixels lies, the later over the earlier: 0 or its number from 1."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[: size[0], : size[1]]
    drawn = np.zeros(size, np.int64)
    for number in range(1, count + 1):
        y, x = rng.uniform(0, 1, 2) * size
        angle, (long, short) = rng.uniform(0, np.pi), rng.uniform(2.5, 9, 2)
        along = (rows - y) * np.cos(angle) + (columns - x) * np.sin(angle)
        across = (columns - x) * np.cos(angle) - (rows - y) * np.sin(angle)
        drawn[(along / long) ** 2 + (across / short) ** 2 <= 1] = number
    return drawn


nuclei = st.builds(
    ellipses, st.integers(0, 2**32), st.tuples(st.integers(40, 90), st.integers(40, 90)), st.integers(1, 60)
)
smooth = st.sampled_from([Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS])
factors = st.sampled_from([0.5, 0.7, 1.5, 2.0, 3.0])


@settings(deadline=None, max_examples=60)
@given(nuclei, st.integers(0, 2**32), st.sampled_from([np.uint8, np.uint16, np.int32, np.float32]))
def test_numbers_of_nuclei_are_labels_bit_for_bit(drawn: np.ndarray, seed: int, kind: type) -> None:
    largest = min(np.iinfo(np.uint16).max, np.iinfo(kind).max if np.dtype(kind).kind != "f" else 2**16)
    numbers = np.random.default_rng(seed).permutation(largest)[: drawn.max()] + 1
    labels = np.concatenate([[0], numbers]).astype(kind)[drawn]
    assert accepted(labels)
    assert accepted(((drawn > 0) * 255).astype(kind)) and accepted(drawn > 0)
    assert accepted(np.where(drawn > 0, drawn % 4 + 1, 0), classes=True)


@settings(deadline=None, max_examples=40)
@given(nuclei, factors)
def test_nearest_neighbor_keeps_labels(drawn: np.ndarray, factor: float) -> None:
    small = resized(drawn, factor, Resampling.NEAREST)
    assert set(np.unique(small)) <= set(np.unique(drawn))
    assert accepted(small) and accepted(np.where(small > 0, small % 4 + 1, 0), classes=True)


@settings(deadline=None, max_examples=60)
@given(nuclei, st.integers(50, 95))
def test_jpeg_is_refused(drawn: np.ndarray, quality: int) -> None:
    binary = (drawn > 0) * 255
    assume(0 < binary.mean() < 255 and np.count_nonzero(binary) > 20)
    assert not accepted(through_jpeg(binary, quality))
    if 30 <= drawn.max() < 256:
        assert not accepted(through_jpeg(drawn, quality))


# the same examples in every run: about one in 1000 masks of 4 classes passes for labels after a smooth resize
@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(nuclei, factors, smooth)
def test_smooth_resizing_is_refused(drawn: np.ndarray, factor: float, how: Resampling) -> None:
    binary = (drawn > 0) * 255
    assume(0 < binary.mean() < 255 and np.count_nonzero(binary) > 50)
    assert not accepted(resized(binary, factor, how).clip(0, 255))
    if len(np.unique(drawn)) > 10:
        assert not accepted(resized(drawn, factor, how))
        assert not accepted(resized(np.where(drawn > 0, drawn % 4 + 1, 0), factor, how), classes=True)


def disk(size: int = 60, radius: float = 20) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size] - (size - 1) / 2
    return np.hypot(rows, columns) <= radius


def test_a_border_of_one_pixel_may_be_a_label_of_its_own() -> None:
    rim = disk() & ~disk(radius=19)
    for inside, border in ((2, 1), (255, 128), (1, 2)):
        assert accepted(np.where(rim, border, disk() * inside))
    assert not accepted(np.where(rim, 1, disk() * 2), classes=True)  # no ring of one class runs around all of another


def test_values_beside_0_and_255_alone_are_jpeg_of_the_best_quality() -> None:
    """Quality 99 and 100 leave 0, 1, 254 and 255, too few values for ramps; classes with 255 ignored have one end."""
    for seed, quality in ((3, 99), (4, 100)):
        stored = through_jpeg((ellipses(seed, (80, 80), 12) > 0) * 255, quality)
        assert set(np.unique(stored)) == {0, 1, 254, 255}
        assert not accepted(stored) and not accepted(stored, classes=True)
    classes = np.zeros((40, 40), np.uint8)
    classes[4:12, 4:12], classes[4:12, 20:30], classes[20:30, 4:30] = 1, 2, 255
    assert accepted(classes, classes=True) and accepted(classes)


def test_points_are_labels() -> None:
    """One pixel a nucleus, as from a list of centers: none lies between others."""
    points = np.zeros((64, 64), np.uint16)
    points[4::8, 4::8] = np.arange(1, 65).reshape(8, 8) * 100
    assert accepted(points)


def test_ramps_are_found_wherever_they_lie_in_a_large_picture() -> None:
    """Pictures are looked at in parts of 512 rows; a border may lie on the border of two."""
    for top in (BAND - 20, BAND - 31, 2 * BAND - 1):
        whole = np.zeros((2 * BAND + 80, 80), np.uint8)
        whole[top : top + 60, 10:70] = through_jpeg(disk() * 255, 90)
        assert not accepted(whole)
        whole[top : top + 60, 10:70] = disk() * 255
        assert accepted(whole)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([0.0, np.nan], "mask_not_finite"),
        ([0.0, np.inf], "mask_not_finite"),
        ([0.0, 0.3, 1.0], "soft_mask"),
        ([0.0, 1.002], "soft_mask"),
        ([0, -1], "negative_label"),
        ([0.0, -2.0], "negative_label"),
        # beyond 2^53 not every whole number has a float, beyond 2^63 it has no place in int64
        ([0.0, 1.0, 2.0**54], "mask_labels"),
        ([0.0, 2.0**70], "mask_labels"),
        ([0.0, np.float32(1e30)], "mask_labels"),
    ],
)
def test_what_is_no_whole_number_is_refused(values: list[float], code: str) -> None:
    with pytest.raises(CaseError) as caught:
        mask_labels(np.array([values]), "a_mask.tif", "save numbers")
    assert (caught.value.finding.code, caught.value.finding.fix) == (code, "save numbers")


def test_the_largest_labels() -> None:
    for labels in (np.array([[0, 1, 2**53]], np.float64), np.array([[0, 1, 2**64 - 1]], np.uint64)):
        np.testing.assert_array_equal(mask_labels(labels, "a", "b"), labels)


def test_rounding_errors_are_rounded_off() -> None:
    np.testing.assert_array_equal(mask_labels(np.array([[0.9995, 2.0000001]]), "a", "b"), [[1, 2]])


def gland(shape: tuple[int, int, int] = (12, 40, 40)) -> np.ndarray:
    """A ball of radius 5 slices and 15 pixels, 0 or 1."""
    slices, rows, columns = np.mgrid[: shape[0], : shape[1], : shape[2]]
    center = [(size - 1) / 2 for size in shape]
    inside = ((slices - center[0]) / 5) ** 2 + ((rows - center[1]) / 15) ** 2 + ((columns - center[2]) / 15) ** 2
    return (inside <= 1).astype(np.float32)


def test_a_volume_resampled_smoothly_in_the_slices_is_refused() -> None:
    """Linear interpolation by two of 0/255: the values 64, 128 and 191, few enough to pass for labels."""
    fine = np.stack([resized(plane * 255, 2, Resampling.BILINEAR) for plane in gland()]).astype(np.float32)
    assert len(np.unique(fine)) < 20
    with pytest.raises(CaseError) as caught:
        binary_mask(fine, "Case00_segmentation.nii.gz")
    assert caught.value.finding.code == "mask_ramps"
    nearest = np.stack([resized(plane * 255, 2, Resampling.NEAREST) for plane in gland()]).astype(np.float32)
    assert binary_mask(nearest, "x")[1] == (255,)


def test_a_volume_resampled_smoothly_along_the_slices_is_refused() -> None:
    """Two slices more between any two: 85 and 170 lie wholly between the slices above and below."""
    coarse = 255 * gland((5, 40, 40))
    steps = np.linspace(0, 4, 13)
    below = np.minimum(steps.astype(int), 3)
    fine = np.rint(coarse[below] + (steps - below)[:, None, None] * (coarse[below + 1] - coarse[below]))
    assert set(np.unique(fine)) == {0, 85, 170, 255}
    with pytest.raises(CaseError) as caught:
        binary_mask(fine.astype(np.float32), "Case00_segmentation.nii.gz")
    assert caught.value.finding.code == "mask_ramps"


def test_zones_of_the_prostate_are_labels() -> None:
    zones = gland() + gland() * (np.mgrid[:12, :40, :40][1] < 20)  # 1 behind, 2 in front
    zones[:, 18:22] *= 2  # and 2 to 4 in the middle
    binary, labels, findings = binary_mask(zones, "x")
    np.testing.assert_array_equal(binary, gland())
    assert labels == (1, 2, 4)
    assert [finding.code for finding in findings] == ["labels_merged"]


Marks = Callable[[], np.ndarray]


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        (lambda: ellipses(0, (90, 90), 20) > 0, ""),
        (lambda: np.zeros((90, 90), bool), ""),  # nothing marked has a finding of its own
        (lambda: np.pad(np.ones((1, 1), bool), 60), "only 0.0068 %"),  # 1 of 121 x 121
        (lambda: ellipses(0, (90, 90), 20) == 0, "may be inverted"),
        (lambda: ellipses(1, (90, 90), 46) == 0, "may be inverted"),
        (lambda: np.ones((9, 9), bool), "100 % of the pixels"),
        # crowded nuclei: more than half is marked, the rest hangs together
        (lambda: np.add.outer(np.arange(90) % 10 > 1, np.arange(90) % 10 > 1) == 2, ""),
    ],
)
def test_an_implausible_share_gives_a_warning(marks: Marks, said: str) -> None:
    marked = marks()
    findings = share_findings(marked, None, "a_mask.png")
    assert [(finding.severity, finding.code) for finding in findings] == [("warning", "implausible_share")] * bool(said)
    assert not said or said in findings[0].message


def test_ignored_pixels_are_not_counted() -> None:
    marked, counted = np.zeros((10, 10), bool), np.zeros((10, 10), bool)
    marked[:2], counted[:4] = True, True
    assert share_findings(marked, counted, "a") == []  # half of what counts
    counted[2:] = False
    assert "100 %" in share_findings(marked, counted, "a")[0].message


def test_masks_unlike_the_others_of_the_site() -> None:
    shares = {"a": 20.0, "b": 25.0, "c": 30.0, "d": 22.0, "empty": 0.0}
    assert unlike_the_others({**shares, "e": 24.0}, "%", most=100) == []
    # with a small one the median of the odds is that of 22 %, 0.282: a tenth is 0.0282, 2.74 %; with a large one it is
    # that of 25 %, 1/3: ten times as much is 3.33, 76.9 %
    for odd in (2.7, 77.0):
        [finding] = unlike_the_others({**shares, "odd": odd}, "%", most=100)
        assert (finding.severity, finding.code, finding.subject) == ("warning", "unlike_other_masks", "odd")
        assert f"{odd:.3g} %" in finding.message
    for like in (2.8, 76.8):
        assert unlike_the_others({**shares, "like": like}, "%", most=100) == []
    assert unlike_the_others({"a": 20, "b": 21, "c": 22, "odd": 4000}, "mL") == []  # too few to tell
    assert [f.subject for f in unlike_the_others({"a": 20, "b": 21, "c": 22, "d": 30, "odd": 0.5}, "mL")] == ["odd"]


def test_a_site_of_very_different_masks_has_no_typical_one() -> None:
    assert unlike_the_others({str(n): 2.0**n for n in range(-8, 9)}, "mL") == []


@pytest.mark.parametrize("start", [100, BAND - 2, BAND - 1, BAND])
def test_a_ramp_is_seen_wherever_rows_are_parted_to_be_looked_at(start: int) -> None:
    # three rows between 0 above and 255 below: one not seen, at the edge of a band, would leave too few values
    mask = np.zeros((600, 40), np.uint8)
    mask[start : start + 3] = [[64], [128], [192]]
    mask[start + 3 :] = 255
    mask[0, 0] = 255  # rows are counted from the first one that holds anything
    assert not accepted(mask)


def test_labels_that_lie_between_slices_in_part_are_labels() -> None:
    volume = np.full((3, 10, 10), 10, np.uint8)
    volume[1, :5], volume[1, 5:], volume[2] = 20, 30, 40
    assert not accepted(volume), "all of 20 and 30 lies between 10 and 40"
    # row 0 and row 9 of the first slice: 40 of 60 voxels of either label lie between now, 0.67 where 0.95 are a ramp
    volume[0, 0], volume[0, 9] = 20, 30
    assert accepted(volume)


@pytest.mark.parametrize(("pixels", "codes"), [(9, ["implausible_share"]), (11, [])])
def test_nearly_none_is_less_than_one_pixel_in_ten_thousand(pixels: int, codes: list[str]) -> None:
    marked = np.zeros((400, 250), bool)
    marked[0, :pixels] = True
    assert [finding.code for finding in share_findings(marked, None, "a_mask.png")] == codes
