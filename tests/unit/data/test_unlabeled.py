"""An image without its mask is read as with it, and an answer comes back on the file's own grid."""

import hashlib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from nibabel.affines import from_matvec

from harmofl.data.findings import CaseError
from harmofl.data.nifti import read_scan
from harmofl.data.unlabeled import labels_on_grid, read_fitted_scan, write_labels
from harmofl.data.volumes import VolumeSettings, read_volume

SETTINGS = VolumeSettings(height=64, width=64, upper_percentile=99.0)
TURN = np.deg2rad(12)
OBLIQUE = np.array([[np.cos(TURN), -np.sin(TURN), 0], [np.sin(TURN), np.cos(TURN), 0], [0, 0, 1]])
AFFINES = {
    "as scanned": np.diag([-0.5, -0.5, 3.0, 1]),
    "RAS": from_matvec(np.diag([0.5, 0.5, 3.0]), [-40, 12, 7]),
    "flipped slices": from_matvec(np.diag([-0.5, 0.5, -3.0]), [3, 2, 1]),
    "axes permuted": from_matvec(np.array([[0, 0.5, 0], [0, 0, 0.5], [3.0, 0, 0]]), [1, 2, 3]),
    "oblique": from_matvec(OBLIQUE @ np.diag([-0.5, -0.5, 3.0]), [5, 6, 7]),
}


@pytest.mark.parametrize("percentile", [99.0, None])
def test_an_image_alone_is_read_as_beside_its_mask(write_case: Any, percentile: float | None) -> None:
    case, settings = write_case(), VolumeSettings(64, 64, percentile)
    alone, pair = read_fitted_scan(case.image, settings), read_volume(case, settings)
    assert alone.image.dtype == pair.image.dtype
    np.testing.assert_array_equal(alone.image, pair.image)
    assert alone.shape == (6, 16, 20) and alone.voxel_ml == pytest.approx(3.0 * 0.5 * 0.5 / 1000)


@pytest.mark.parametrize("affine", AFFINES.values(), ids=AFFINES)
def test_labels_lie_on_the_grid_of_the_image(write_nifti: Any, affine: np.ndarray, tmp_path: Path) -> None:
    """Each label in the common frame comes back at the voxel that it was computed from."""
    shape = (6, 20, 16) if affine[2, 0] > 1 else (20, 16, 6)
    image = write_nifti("image.nii.gz", np.random.default_rng(0).integers(0, 99, shape).astype(np.int16), affine)
    before = hashlib.sha256(image.read_bytes()).hexdigest()
    scan = read_scan(image)
    write_labels((scan.data > 50).astype(np.uint8), image, tmp_path / "mask.nii.gz")
    read, written = nibabel.load(image), nibabel.load(tmp_path / "mask.nii.gz")
    np.testing.assert_array_equal(np.asarray(written.dataobj), np.asarray(read.dataobj) > 50)
    np.testing.assert_array_equal(written.affine, read.affine)
    assert written.get_data_dtype() == np.uint8
    assert hashlib.sha256(image.read_bytes()).hexdigest() == before
    assert [path.name for path in tmp_path.glob("*mask*")] == ["mask.nii.gz"]


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_both_forms_of_the_header_are_kept(kind: Any, tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).integers(0, 99, (20, 16, 6)).astype(np.int16)
    image = kind(voxels, AFFINES["oblique"])
    image.set_sform(AFFINES["oblique"], code="aligned")
    image.set_qform(AFFINES["oblique"], code="scanner")
    image.header.set_slope_inter(2.0, 10.0)
    image.header["cal_max"] = 900
    nibabel.save(image, tmp_path / "image.nii")
    write_labels(np.ones((6, 16, 20), np.uint8), tmp_path / "image.nii", tmp_path / "mask.nii.gz")
    read, written = nibabel.load(tmp_path / "image.nii"), nibabel.load(tmp_path / "mask.nii.gz")
    assert type(written) is kind
    for form in ("get_sform", "get_qform"):
        (expected, code), (found, held) = (getattr(one, form)(coded=True) for one in (read, written))
        assert code == held
        np.testing.assert_array_equal(found, expected)
    assert written.header["cal_max"] == 1
    assert np.asarray(written.dataobj).max() == 1  # no slope of the image's


def test_a_fourth_axis_of_one_is_left_out(write_nifti: Any, tmp_path: Path) -> None:
    image = write_nifti("image.nii.gz", np.random.default_rng(0).integers(0, 99, (20, 16, 6, 1)).astype(np.int16))
    write_labels(np.ones((6, 16, 20), np.uint8), image, tmp_path / "mask.nii.gz")
    assert nibabel.load(tmp_path / "mask.nii.gz").shape == (20, 16, 6)


def test_on_the_same_grid_nothing_is_interpolated() -> None:
    probabilities = torch.rand((3, 4, 10, 12), generator=torch.Generator().manual_seed(0)).softmax(1)
    assert torch.equal(labels_on_grid(probabilities, 10, 12), probabilities.argmax(1).to(torch.uint8))


def test_a_border_lies_where_the_probabilities_cross() -> None:
    """Columns 0 to 3 have 0.1, columns 4 to 7 have 0.9: they cross at the edge between them, whatever the size."""
    foreground = torch.full((1, 1, 8, 8), 0.1)
    foreground[..., 4:] = 0.9
    for size in (8, 16, 24, 6):
        labels = labels_on_grid(torch.cat([1 - foreground, foreground], 1), size, size)
        assert labels.sum(dim=-1).unique().tolist() == [size // 2]


def test_pixels_are_areas_on_the_way_back_to_the_grid() -> None:
    # Twice the pixels over the same field: centers at -0.25, 0.25, 0.75 and 1.25 of the small grid, so that 0 and 0.7
    # become 0, 0.175, 0.525 and 0.7. With corner pixels laid on each other they would be 0, 0.23, 0.47 and 0.7.
    share = torch.tensor([[0.0, 0.7]])
    labels = labels_on_grid(torch.stack([1 - share, share])[None], 1, 4)
    assert labels.tolist() == [[[0, 0, 1, 1]]]
    upright = labels_on_grid(torch.stack([1 - share.T, share.T])[None], 4, 1)
    assert upright.flatten().tolist() == [0, 0, 1, 1]
    # from 4 pixels to 2: centers at 0.5 and 2.5, the means of neighbors, 0.45 and 0.55; corners would be 0 and 0.2
    share = torch.tensor([[0.0, 0.9, 0.9, 0.2]])
    assert labels_on_grid(torch.stack([1 - share, share])[None], 1, 2).tolist() == [[[0, 1]]]


@pytest.mark.parametrize(
    ("array", "code"),
    [(np.zeros((20, 16, 6), np.int16), "constant_image"), (np.full((20, 16, 6), np.nan, np.float32), "not_finite")],
)
def test_what_training_refuses_is_refused(write_nifti: Any, array: np.ndarray, code: str) -> None:
    with pytest.raises(CaseError) as caught:
        read_fitted_scan(write_nifti("image.nii.gz", array), SETTINGS)
    assert caught.value.finding.code == code and caught.value.finding.subject == "image.nii.gz"


@pytest.mark.parametrize(
    "name",
    [
        "mri_prostate/prostatex/px_trio_320_t2_tra.nii.gz",
        "mri_prostate/prostatex/px_skyra_adc_84x128_nonsquare.nii.gz",
        "mri_label012/sct_spine/sct_t2.nii.gz",
        "nifti_odd/dipy_aniso_vox.nii.gz",
    ],
)
def test_real_volumes_come_back_voxel_by_voxel(realdata: Path, tmp_path: Path, name: str) -> None:
    image, scan = realdata / name, read_scan(realdata / name)
    threshold = float(np.median(scan.data))
    write_labels((scan.data > threshold).astype(np.uint8), image, tmp_path / "mask.nii.gz")
    read, written = nibabel.load(image), nibabel.load(tmp_path / "mask.nii.gz")
    np.testing.assert_array_equal(np.asarray(written.dataobj), read.get_fdata(dtype=np.float32) > threshold)
    np.testing.assert_allclose(written.affine, read.affine)
