"""Every real volume is read, or answered with a finding that names the file (see SOURCES.md beside the images)."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.data.checks import check_site
from harmofl.data.findings import CaseError, DataRootError
from harmofl.data.layout import Case, find_cases, site_folder
from harmofl.data.nifti import read_scan
from harmofl.data.pairs import read_pair
from harmofl.data.volumes import VolumeCache, VolumeSettings, fit_image, read_site, read_volume
from harmofl.data.voxels import binary_mask
from harmofl.data.windows import SliceWindows, image_windows

SMALL = VolumeSettings(height=64, width=64, upper_percentile=99.0)
LESION_PAIR = ("px_skyra_384_t2_tra.nii.gz", "px_skyra_384_lesion_flippedY.nii.gz")

# file -> slices, rows, columns after reorientation, or the code of the refusal
IMAGES: dict[str, tuple[int, int, int] | str] = {
    "mri_prostate/prostatex/px_skyra2_hbv_84x128_nonsquare.nii.gz": (19, 128, 84),
    "mri_prostate/prostatex/px_skyra2_t2_coronal.nii.gz": "not_axial",
    "mri_prostate/prostatex/px_skyra2_t2_crop160.nii.gz": (20, 160, 160),
    "mri_prostate/prostatex/px_skyra_384_t2_tra.nii.gz": (19, 384, 384),
    "mri_prostate/prostatex/px_skyra_adc_84x128_nonsquare.nii.gz": (19, 128, 84),
    "mri_prostate/prostatex/px_trio_320_t2_tra.nii.gz": (20, 320, 320),
    "mri_prostate/prostate3t_runmc/p3t_skyra_384_t2_tra_21sl.nii.gz": (21, 384, 384),
    "mri_label012/msd_hippocampus/hippocampus_001.nii.gz": (35, 51, 35),
    "mri_label012/msd_hippocampus/hippocampus_003.nii.gz": (35, 52, 34),
    "mri_label012/msd_hippocampus/hippocampus_007.nii.gz": (40, 47, 34),
    "mri_label012/msd_hippocampus/hippocampus_033.nii.gz": (38, 48, 33),
    "mri_label012/sct_spine/sct_dmri_4d.nii.gz": "not_three_dimensional",
    "mri_label012/sct_spine/sct_mt1.nii.gz": (5, 40, 40),
    "mri_label012/sct_spine/sct_t2.nii.gz": (55, 60, 52),  # PSR: stored as row, slice, column
    "mri_label012/sct_spine/sct_t2s.nii.gz": (9, 54, 49),
    "nifti_odd/dipy_S0_10slices.nii.gz": "axes_not_orthogonal",  # its slices run along (30, 30, 32) mm
    "nifti_odd/dipy_aniso_vox.nii.gz": (24, 58, 58),
    "nifti_odd/empty_gzip.nii.gz": "not_an_image",
    "nifti_odd/nibabel_analyze.hdr": "not_nifti",
    "nifti_odd/nibabel_anatomical.nii": (25, 41, 33),
    "nifti_odd/nibabel_example4d.nii.gz": "not_three_dimensional",
    "nifti_odd/nibabel_example_nifti2.nii.gz": "not_three_dimensional",
    "nifti_odd/nibabel_functional.nii": "not_three_dimensional",
    "nifti_odd/nibabel_nifti1.hdr": "missing_file",
    "nifti_odd/nibabel_nifti2.hdr": "missing_file",
    "nifti_odd/nibabel_reoriented_anat_moved.nii": (22, 26, 21),
    "nifti_odd/nibabel_resampled_anat_moved.nii": "not_finite",
    "nifti_odd/nibabel_row_major.dconn.nii": "not_nifti",
    "nifti_odd/nibabel_standard.nii.gz": (7, 5, 4),
    "nifti_odd/nibabel_test.mgz": "not_nifti",
    "nifti_odd/nnunet_example_ct_sm.nii.gz": (30, 101, 122),
    "nifti_odd/not_gzip_but_named.nii.gz": "not_gzip",
    "nifti_odd/pair_example4d_vol0.hdr": (24, 96, 128),
    "nifti_odd/pair_example4d_vol0.img": (24, 96, 128),
    "nifti_odd/truncated_hippocampus_001.nii.gz": "damaged_file",
    "nifti_odd/zero_bytes.nii.gz": "empty_file",
}

# mask -> the image it is read with, labels above 0
MASKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "mri_prostate/prostatex/px_skyra_384_lesion_flippedY.nii.gz": (LESION_PAIR[0], (1,)),
    "mri_label012/msd_hippocampus/hippocampus_001_label.nii.gz": ("hippocampus_001.nii.gz", (1, 2)),
    "mri_label012/msd_hippocampus/hippocampus_003_label.nii.gz": ("hippocampus_003.nii.gz", (1, 2)),
    "mri_label012/msd_hippocampus/hippocampus_007_label.nii.gz": ("hippocampus_007.nii.gz", (1, 2)),
    "mri_label012/msd_hippocampus/hippocampus_033_label.nii.gz": ("hippocampus_033.nii.gz", (1, 2)),
    "mri_label012/sct_spine/sct_mt1_seg.nii.gz": ("sct_mt1.nii.gz", (1,)),
    "mri_label012/sct_spine/sct_t2_labels.nii.gz": ("sct_t2.nii.gz", (3, 5)),
    "mri_label012/sct_spine/sct_t2_seg_manual.nii.gz": ("sct_t2.nii.gz", (1,)),
    "mri_label012/sct_spine/sct_t2s_gmseg_manual.nii.gz": ("sct_t2s.nii.gz", (1,)),
    "nifti_odd/monai_anatomical_label.nii.gz": ("nibabel_anatomical.nii", (1,)),
    "nifti_odd/nnunet_example_ct_sm_label.nii.gz": ("nnunet_example_ct_sm.nii.gz", (1,)),
}

# The whole gland read as mask of the zones read as image (three intensities): same patient, same grid, or not
PICAI = "mri_prostate/picai_masks_by_nc"
GLAND_AGAINST_ZONES = {
    "PCNN_05": "25x640x640 against 31x640x640",
    "PCNN_06": "27x561x561 against 27x1024x1024",
    "PCNN_07": None,
    "RUMC_00": None,
    "RUMC_01": None,
    "RUMC_02": None,
    "ZGT_03": None,
    "ZGT_04": None,
}


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]


def test_the_tables_name_every_file(realdata: Path) -> None:
    present = {
        path.relative_to(realdata).as_posix()
        for folder in ("mri_prostate", "mri_label012", "nifti_odd")
        for path in (realdata / folder).rglob("*")
        if path.is_file()
    }
    picai = {f"{PICAI}/picai_{case}_{kind}.nii.gz" for case in GLAND_AGAINST_ZONES for kind in ("wg", "zones")}
    assert present == set(IMAGES) | set(MASKS) | picai


@pytest.mark.parametrize("file", IMAGES)
def test_image_is_read_or_refused_by_name(realdata: Path, tmp_path: Path, file: str) -> None:
    path, expected = realdata / file, IMAGES[file]
    mask = tmp_path / "mask.nii"
    if isinstance(expected, str) and expected not in ("not_axial", "not_finite"):
        with pytest.raises(CaseError) as caught:
            read_volume(Case("real", path, mask), SMALL)
    else:  # a mask on the grid of the image
        header = nibabel.load(path)
        box = np.zeros(header.shape[:3], np.uint8)
        box[2:-1, 2:-1, 2:-1] = 1
        nibabel.save(nibabel.Nifti1Image(box, header.affine), mask)
        if not isinstance(expected, str):
            pair = read_pair(Case("real", path, mask))
            assert pair.image.shape == expected
            assert np.isfinite(pair.image).all()
            assert np.count_nonzero(pair.mask) == np.count_nonzero(box)
            return
        with pytest.raises(CaseError) as caught:
            read_volume(Case("real", path, mask), SMALL)
    assert caught.value.finding.code == expected
    assert caught.value.finding.subject == path.name
    assert caught.value.finding.fix


@pytest.mark.parametrize("file", MASKS)
def test_real_pair_trains(realdata: Path, file: str) -> None:
    image, labels = MASKS[file]
    mask = realdata / file
    case = Case("real", mask.parent / image, mask)
    pair = read_pair(case)
    stored = np.asanyarray(nibabel.load(mask).dataobj)
    assert pair.labels == labels
    assert np.count_nonzero(pair.mask) == np.count_nonzero(stored)
    assert ("labels_merged" in {finding.code for finding in pair.findings}) == (max(labels) > 1)
    volume = read_volume(case, SMALL)
    assert volume.image.shape == (len(pair.image), 64, 64)
    assert np.isfinite(volume.image).all()
    assert float(volume.image.min()) >= 0
    assert float(volume.image.max()) <= 1
    window, target = SliceWindows([volume], "all")[0]
    assert window.shape == (3, 64, 64)
    assert target.shape == (64, 64)


@pytest.mark.parametrize("patient", GLAND_AGAINST_ZONES)
def test_picai_gland_and_zones(realdata: Path, patient: str) -> None:
    gland, zones = (realdata / PICAI / f"picai_{patient}_{kind}.nii.gz" for kind in ("wg", "zones"))
    case, sizes = Case(patient, zones, gland), GLAND_AGAINST_ZONES[patient]
    if sizes is None:
        pair = read_pair(case)
        assert pair.labels == (1,)
        assert set(np.unique(pair.image)) <= {0, 1, 2}
        assert binary_mask(pair.image, zones.name)[1] == (1, 2)
        assert pair.findings == ()
        inside = np.count_nonzero(pair.mask & (pair.image > 0)) / np.count_nonzero(pair.image)
        assert inside > 0.7  # zones of one gland lie in the gland, if both are in one frame
        return
    with pytest.raises(CaseError) as caught:
        read_pair(case)
    assert caught.value.finding.code == "geometry_mismatch"
    assert caught.value.finding.subject == f"{zones.name}, {gland.name}"
    assert sizes in caught.value.finding.message
    assert binary_mask(read_scan(zones).data, zones.name)[1] == (1, 2)


def test_a_real_gland_resampled_smoothly_is_refused(realdata: Path) -> None:
    """A third and a half of the resolution, stored as whole numbers; by nearest neighbor it stays valid."""
    gland = read_scan(realdata / PICAI / "picai_RUMC_02_wg.nii.gz").data
    for order, step in ((0, 2), (0, 3), (1, 2), (1, 3)):
        smaller = np.rint(zoom(255 * gland, (1, 1 / step, 1 / step), order=order, grid_mode=True, mode="nearest"))
        if order == 0:
            assert binary_mask(smaller, "a")[1] == (255,)
            continue
        with pytest.raises(CaseError) as caught:
            binary_mask(smaller, "a")
        assert caught.value.finding.code in ("mask_ramps", "too_many_labels")


def test_b1_lesion_stored_upside_down_is_found_at_its_place(realdata: Path) -> None:
    image, mask = (realdata / "mri_prostate/prostatex" / name for name in LESION_PAIR)
    pair = read_pair(Case("lesion", image, mask))
    assert pair.image[pair.mask > 0].mean() == pytest.approx(107, abs=0.1)
    raw_image, raw_mask = (np.asanyarray(nibabel.load(path).dataobj) for path in (image, mask))
    assert raw_image[raw_mask > 0].mean() == pytest.approx(208.5, abs=0.1)  # what pairing arrays would learn from
    assert pair.spacing == pytest.approx((3.0, 0.5, 0.5), abs=1e-4)


def test_spacing_follows_the_slices_of_an_oblique_series(realdata: Path) -> None:
    scan = read_scan(realdata / "mri_prostate/prostatex/px_trio_320_t2_tra.nii.gz")
    assert scan.spacing == pytest.approx((3.6, 0.625, 0.625), abs=1e-4)


@pytest.mark.parametrize("place", ["dicom/px_adc_series", "dicom/px_hbv_series_missing_slice_06", "dicom"])
def test_dicom_series_get_the_conversion(realdata: Path, place: str) -> None:
    with pytest.raises(DataRootError, match="dcm2niix"):
        site_folder(realdata / place, "HK")


def test_dicom_slice_in_the_place_of_a_volume(realdata: Path) -> None:
    slice_file = realdata / "dicom/px_adc_series/1-01.dcm"
    with pytest.raises(CaseError) as caught:
        read_volume(Case("series", slice_file, slice_file), SMALL)
    assert caught.value.finding.code == "dicom"


def test_nothing_is_written_beside_the_images(realdata: Path, tmp_path: Path) -> None:
    folder = tmp_path / "HK"
    folder.mkdir()
    source = realdata / "mri_label012/msd_hippocampus"
    for number in ("001", "003", "007", "033"):
        (folder / f"Case{number}.nii.gz").symlink_to(source / f"hippocampus_{number}.nii.gz")
        (folder / f"Case{number}_Segmentation.nii.gz").symlink_to(source / f"hippocampus_{number}_label.nii.gz")
    (folder / "Case900.nii.gz").symlink_to(realdata / "nifti_odd/truncated_hippocampus_001.nii.gz")
    (folder / "Case900_segmentation.nii.gz").symlink_to(source / "hippocampus_001_label.nii.gz")
    before = listing(folder), listing(source)
    cases, findings = find_cases(site_folder(tmp_path, "HK"))
    assert findings == []
    cache = VolumeCache(tmp_path / "cache")
    for _ in range(2):
        volumes, findings = read_site(cases, SMALL, cache)
        assert [volume.name for volume in volumes] == ["Case001", "Case003", "Case007", "Case033"]
        assert {finding.code for finding in findings} == {"labels_merged", "damaged_file"}
    report = check_site(folder, SMALL, seed=0)
    assert report.has_errors
    # 1 mm voxels, so the gland's mL are its voxels / 1000
    labels = np.asanyarray(nibabel.load(source / "hippocampus_001_label.nii.gz").dataobj)
    assert report.cases[0].gland_ml == pytest.approx(np.count_nonzero(labels) / 1000)
    assert (listing(folder), listing(source)) == before


def test_a_slice_that_a_tool_padded_is_named_and_in_no_profile(realdata: Path) -> None:
    scan = read_scan(realdata / "mri_prostate/prostatex/px_skyra2_t2_crop160.nii.gz")
    assert [int(np.ptp(image)) == 0 for image in scan.data] == 19 * [False] + [True]
    fitted, [finding] = fit_image(scan.data, SMALL, "crop160")
    assert str(finding).startswith("warning: crop160: 1 of 20 slices has no contrast (from the feet: 20)")
    windows = image_windows(fitted)
    layer = AmplitudeNormalization(
        intensity="zscore",
        region="site_gain",
        low_fraction=0.1,
        estimation="before_training",
        momentum=0.1,
        channels=3,
        height=64,
        width=64,
    )
    layer.observe(windows)
    each = layer.statistics(windows)
    # the padded slice lies in channel 2 of windows 18 and 19, channel 1 of window 19 and in no channel 0
    kept = torch.stack([each[:20, 0].mean(0), each[:19, 1].mean(0), each[:18, 2].mean(0)])
    torch.testing.assert_close(layer.local_statistic, kept, rtol=1e-5, atol=1e-5)
    # with it the log of 1e-6 would be in every bin: by a twentieth in channel 1
    assert float((each[:, 1].mean(0) - kept[1]).max()) < -0.4
