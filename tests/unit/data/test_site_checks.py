from pathlib import Path

import numpy as np
import pytest

from harmofl.data.checks import check_site
from harmofl.data.layout import find_cases
from harmofl.data.volumes import VolumeSettings, read_site

SETTINGS = VolumeSettings(height=32, width=40, upper_percentile=99.0)


def test_a_sound_folder(write_case, gland) -> None:
    rng = np.random.default_rng(1)
    image, mask = gland
    numbers = [0, *range(2, 13)]
    for number in numbers:
        case = write_case(f"Case{number:02d}", image=image + rng.integers(0, 9, image.shape).astype(np.int16))
    report = check_site(case.image.parent, SETTINGS, seed=0)
    assert report.findings == ()
    assert not report.has_errors
    assert [found.name for found in report.cases] == [f"Case{number:02d}" for number in numbers]
    first = report.cases[0]
    assert first.shape == (6, 16, 20)
    assert first.spacing == pytest.approx((3.0, 0.5, 0.5))
    assert (first.orientation, first.labels, first.foreground_slices) == ("LPS", (1,), 3)
    assert first.gland_ml == pytest.approx(5 * 7 * 3 * 0.5 * 0.5 * 3 / 1000)  # voxels of 0.75 mm3
    assert (report.slices, report.foreground_slices) == (12 * 6, 12 * 3)
    assert report.cache_bytes == 12 * 6 * 32 * 40 * (2 + 1)  # float16 image, uint8 mask
    assert len(report.split.train) + len(report.split.val) + len(report.split.test) == 12


def test_raw_intensities_take_four_bytes(write_case) -> None:
    case = write_case()
    report = check_site(case.image.parent, VolumeSettings(16, 20, None), seed=0)
    assert report.cache_bytes == 6 * 16 * 20 * (4 + 1)


def test_everything_wrong_is_said_at_once(write_case, gland) -> None:
    image, mask = gland
    rng = np.random.default_rng(2)

    def fresh() -> np.ndarray:
        return image + rng.integers(0, 9, image.shape).astype(np.int16)

    site = write_case("Case00", image=fresh()).image.parent
    write_case("Case01", image=fresh(), mask=mask * 2)
    write_case("Case02", image=np.zeros_like(image))
    write_case("Case03", image=fresh(), mask=mask[:, :, :-1])
    write_case("Case04").image.write_bytes(b"")
    write_case("Case05").mask.unlink()
    write_case("Case06")
    write_case("Case07")
    report = check_site(site, SETTINGS, seed=0)
    found = {(finding.code, finding.subject) for finding in report.findings if finding.code != "split_filled"}
    assert found == {
        ("labels_merged", "Case01_segmentation.nii.gz"),
        ("constant_image", "Case02.nii.gz"),
        ("geometry_mismatch", "Case03.nii.gz, Case03_segmentation.nii.gz"),
        ("empty_file", "Case04.nii.gz"),
        ("image_without_mask", "Case05.nii.gz"),
        ("duplicate_image", "Case06, Case07"),
    }
    assert report.has_errors
    assert [case.name for case in report.cases] == ["Case00", "Case01", "Case06", "Case07"]


def test_masks_that_a_person_should_look_at_are_named_and_used(write_case, gland) -> None:
    image, mask = gland
    rng = np.random.default_rng(3)
    for number in range(6):
        write_case(f"Case{number:02d}", image=image + rng.integers(0, 9, image.shape).astype(np.int16))
    small = np.zeros_like(mask)
    small[5:7, 7:9, 2] = 1  # 4 voxels of 105
    case = write_case("Case06", image=image + 1, mask=small)
    write_case("Case07", image=image + 2, mask=1 - mask)
    cases, _ = find_cases(case.image.parent)
    volumes, told = read_site(cases, VolumeSettings(16, 20, 99.0))
    report = check_site(case.image.parent, SETTINGS, seed=0)
    assert len(report.cases) == len(volumes) == 8 and not report.has_errors
    for findings in (told, report.findings):
        assert {(finding.severity, finding.code, finding.subject) for finding in findings} == {
            ("warning", "unlike_other_masks", "Case06"),
            ("warning", "unlike_other_masks", "Case07"),
            ("warning", "implausible_share", "Case07_segmentation.nii.gz"),
        }


def test_the_same_image_in_another_file_is_a_duplicate(write_case, write_nifti, gland) -> None:
    image, mask = gland
    folder = write_case("Case00").image.parent
    flipped = np.diag([0.5, -0.5, 3.0, 1.0])
    flipped[0, 3] = -0.5 * (image.shape[0] - 1)
    write_nifti("site/Case01.nii", np.ascontiguousarray(image[::-1]).astype(np.float32), flipped)
    write_nifti("site/Case01_segmentation.nii", np.ascontiguousarray(mask[::-1]), flipped)
    report = check_site(folder, SETTINGS, seed=0)
    assert ("duplicate_image", "Case00, Case01") in {(found.code, found.subject) for found in report.findings}


@pytest.mark.parametrize("count", [0, 2, 3])
def test_too_few_cases(write_case, gland, tmp_path: Path, count: int) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    for number in range(count):
        write_case(f"Case{number:02d}", image=gland[0] + np.int16(number * gland[0] % 5))
    report = check_site(folder, SETTINGS, seed=0)
    assert report.has_errors == (count < 3)
    assert ("too_few_cases" in {finding.code for finding in report.findings}) == (count < 3)
