"""Padding far outside an image's own range opens no empty window; what is no padding stays as it is."""

import numpy as np
import pytest

from harmofl.data.findings import CaseError
from harmofl.data.voxels import usable_intensities, without_padding


def scanned(low: int, high: int) -> np.ndarray:
    """(6, 16, 20) float32 with every whole intensity of a range about equally often."""
    return np.linspace(low, high, 6 * 16 * 20).round().astype(np.float32).reshape(6, 16, 20)


@pytest.mark.parametrize(
    ("padding", "low", "high", "becomes"),
    [
        (-32768, 0, 900, 0),
        (-2000, 0, 3000, 0),
        (-1000, 350, 900, 0),  # no signal, darker than all tissue
        (-9000, -900, 900, -900),
        (65535, 0, 2000, 2000),
    ],
)
def test_padding_becomes_the_nearest_intensity(padding: int, low: int, high: int, becomes: int) -> None:
    image = scanned(low, high)
    image[1, :3] = padding
    values, findings = without_padding(image, "a.nii")
    np.testing.assert_array_equal(values, np.where(image == padding, becomes, image))
    assert image[1, 0, 0] == padding  # the argument is not changed
    (finding,) = findings
    assert (finding.code, finding.severity, finding.subject) == ("padding_replaced", "warning", "a.nii")
    assert (
        f"3.1% of the voxels are {padding:g}, far from the others" in finding.message
    )  # 3 of 16 rows of 1 of 6 slices


@pytest.mark.parametrize(
    ("image", "what"),
    [
        (np.maximum(scanned(-300, 900), 0), "zero where there is no signal"),
        (np.where(scanned(0, 9) > 3, scanned(800, 1000), 0).astype(np.float32), "zero far below a narrow range"),
        (np.minimum(scanned(0, 5000), 4095), "cut off at the top"),
        (np.where(scanned(0, 9) > 3, scanned(0, 900), -1).astype(np.float32), "one below the rest"),
        (scanned(-1024, 900), "computed tomography"),
        (np.clip(scanned(-1, 2), 0, 2), "labels"),
        (np.where(scanned(0, 9) > 4, 1000, -500).astype(np.float32), "two values"),
    ],
)
def test_what_is_no_padding_stays(image: np.ndarray, what: str) -> None:
    values, findings = without_padding(image, "a.nii")
    assert values is image and findings == [], what


def test_one_odd_voxel_is_no_padding() -> None:
    image = scanned(0, 900)
    image[0, 0, 0] = -32768
    assert without_padding(image, "a.nii")[1] == []


def test_an_image_of_nothing_but_padding_is_constant() -> None:
    with pytest.raises(CaseError, match="constant"):
        usable_intensities(np.full((6, 16, 20), -32768, np.float32), "a.nii")


def test_padding_of_no_number_and_of_a_number() -> None:
    image = scanned(0, 900)
    image[:, :3] = -32768
    image[5, 15, 19] = np.nan
    values, findings = usable_intensities(image, "a.nii")
    assert [finding.code for finding in findings] == ["not_finite", "padding_replaced"]
    assert values.min() >= 0 and np.isfinite(values).all()
