import numpy as np
import pytest

from harmofl.data.findings import CaseError, Finding
from harmofl.data.layout import Case
from harmofl.data.pairs import read_pair
from tests.unit.data.raw_nifti import raw_nifti

LPS = np.diag([-0.5, -0.5, 3.0, 1.0])


def refusal_of(case: Case) -> Finding:
    with pytest.raises(CaseError) as caught:
        read_pair(case)
    assert "\n" not in str(caught.value)
    assert caught.value.finding.fix
    return caught.value.finding


def codes(case: Case) -> list[str]:
    return [finding.code for finding in read_pair(case).findings]


def moved(x: float = 0.0, y: float = 0.0, z: float = 0.0) -> np.ndarray:
    affine = LPS.copy()
    affine[:3, 3] += (x, y, z)
    return affine


def test_image_and_mask_come_in_one_frame(write_case, gland) -> None:
    image, mask = gland
    pair = read_pair(write_case())
    np.testing.assert_array_equal(pair.image, image.transpose(2, 1, 0))
    np.testing.assert_array_equal(pair.mask, mask.transpose(2, 1, 0))
    assert pair.mask.dtype == np.uint8
    assert pair.labels == (1,)
    assert pair.findings == ()


def test_b1_mask_stored_with_reversed_rows_is_aligned(write_case, gland) -> None:
    image, mask = gland
    flipped = LPS.copy()
    flipped[1] = [0, 0.5, 0, -0.5 * (mask.shape[1] - 1)]  # LAS: row 0 is where the last row was
    pair = read_pair(write_case(mask=mask[:, ::-1], mask_affine=flipped))
    assert pair.image[pair.mask > 0].min() >= 800  # the gland of the fixture is 810 and more, the rest below 200
    assert np.count_nonzero(pair.mask) == np.count_nonzero(mask)


@pytest.mark.parametrize(
    ("mask_affine", "shown"),
    [
        (moved(x=3.0), "origin 3, 0, 0"),
        (moved(y=0.25), "0.5 voxels apart"),  # half a voxel of 0.5 mm
        (moved(x=-0.15), "0.3 voxels apart"),
        (moved(z=1.5), "0.5 voxels apart"),  # half a slice
        (np.diag([-1.0, -1.0, 6.0, 1.0]), "spacing 6 x 1 x 1 mm"),
    ],
)
def test_b1_another_grid_is_refused_with_both_values(write_case, mask_affine: np.ndarray, shown: str) -> None:
    finding = refusal_of(write_case(mask_affine=mask_affine))
    assert finding.code == "geometry_mismatch"
    assert finding.subject == "Case00.nii.gz, Case00_segmentation.nii.gz"
    assert shown in finding.message
    assert "against" in finding.message


def test_b1_one_slice_fewer_is_refused(write_case, gland) -> None:
    finding = refusal_of(write_case(mask=gland[1][:, :, :-1]))
    assert finding.code == "geometry_mismatch"
    assert "6x16x20 against 5x16x20" in finding.message


MIRRORED = LPS @ np.diag([-1.0, 1, 1, 1])
RESAMPLE, CONVERT, SAVE = (
    "resample the mask",
    "convert the image again",
    "save the mask again with the header of the image",
)


@pytest.mark.parametrize(
    ("headers", "told", "fix"),
    [
        (({"sform": moved(x=30)}, {"sform": LPS}), "voxels apart", RESAMPLE),
        (
            ({"qform": LPS, "codes": (0, 0)}, {"sform": LPS}),
            "the image's header holds neither sform nor qform",
            CONVERT,
        ),
        (({"sform": LPS}, {"qform": LPS, "codes": (0, 0)}), "the mask's header holds neither sform nor qform", SAVE),
        (
            ({"sform": LPS @ np.diag([1.2, 1.2, 1, 1]), "pixdim": (0.5, 0.5, 3)}, {"sform": LPS}),
            "by the voxel sizes of the image's header they agree, its sform says otherwise",
            CONVERT,
        ),
        (
            ({"sform": LPS}, {"sform": LPS @ np.diag([1.2, 1.2, 1, 1]), "pixdim": (0.5, 0.5, 3)}),
            "by the voxel sizes of the mask's header they agree, its sform says otherwise",
            SAVE,
        ),
        (
            ({"sform": LPS, "qform": MIRRORED, "codes": (1, 1)}, {"sform": MIRRORED}),
            "by the qform of the image's header they agree, its sform says otherwise",
            CONVERT,
        ),
        (
            ({"sform": LPS}, {"sform": moved(y=9), "qform": LPS, "codes": (1, 1)}),
            "by the qform of the mask's header they agree, its sform says otherwise",
            SAVE,
        ),
        (
            ({"sform": LPS, "qform": MIRRORED, "codes": (1, 1)}, {"sform": MIRRORED, "qform": LPS, "codes": (1, 1)}),
            "both headers contradict themselves",
            f"compare both with the series, then {CONVERT} from DICOM, or {SAVE}",
        ),
        (({"sform": LPS}, {"sform": np.eye(4)}), "the mask's sform is the identity", SAVE),
        (({"sform": np.eye(4)}, {"sform": moved(x=3)}), "the image's sform is the identity", CONVERT),
        (
            ({"sform": LPS}, {"sform": LPS @ np.diag([2, 2, 2, 1.0])}),
            "as many voxels of another size: one of the headers is wrong",
            f"compare both with the series, then {CONVERT} from DICOM, or {SAVE}",
        ),
    ],
)
def test_a_mismatch_names_the_header_that_is_wrong(tmp_path, gland, headers, told: str, fix: str) -> None:
    names = ("A.nii", "A_s.nii")
    files = [raw_nifti(tmp_path / names[part], gland[part], **headers[part]) for part in (0, 1)]
    finding = refusal_of(Case("A", *files))
    assert (finding.code, finding.subject) == ("geometry_mismatch", "A.nii, A_s.nii")
    assert told in finding.message and finding.fix.startswith(fix)


@pytest.mark.parametrize("headers", [({"qform": LPS, "codes": (0, 0)}, {"sform": LPS}), ({}, {"sform": np.eye(4)})])
def test_no_header_is_blamed_for_another_number_of_voxels(tmp_path, gland, headers) -> None:
    image = raw_nifti(tmp_path / "A.nii", gland[0], **({"sform": LPS} | headers[0]))
    mask = raw_nifti(tmp_path / "A_s.nii", gland[1][:, :, :-1], **headers[1])
    finding = refusal_of(Case("A", image, mask))
    assert finding.message == "image and mask differ in size (6x16x20 against 5x16x20, slices x rows x columns)"
    assert finding.fix.startswith(RESAMPLE)


def test_padding_is_replaced_beside_a_mask_as_alone(write_case, gland) -> None:
    image = gland[0].copy()
    image[:, :2] = -32768
    pair = read_pair(write_case(image=image))
    assert pair.image.min() == 0 and pair.image[:, 2:].min() == 10
    assert [finding.code for finding in pair.findings] == ["padding_replaced"]


@pytest.mark.parametrize("mask_affine", [moved(x=1e-6, z=1e-6), moved(x=0.011, y=0.011, z=0.011)])
def test_b2_rounding_of_headers_passes(write_case, mask_affine: np.ndarray) -> None:
    assert codes(write_case(mask_affine=mask_affine)) == []  # 0.011 mm is 0.022 voxels, as in the PROSTATEx pair


@pytest.mark.parametrize(
    ("spacing", "view"), [((0.5, 3.0, 0.5), "coronal"), ((3.0, 0.5, 0.5), "sagittal"), ((0.5, 0.5, 3.0), "axial")]
)
def test_slices_must_be_axial(write_case, spacing: tuple[float, float, float], view: str) -> None:
    case = write_case(affine=np.diag([-spacing[0], -spacing[1], spacing[2], 1.0]))
    if view == "axial":
        assert codes(case) == []
    else:
        finding = refusal_of(case)
        assert finding.code == "not_axial"
        assert view in finding.message


def test_isotropic_volumes_are_kept(write_case) -> None:
    assert codes(write_case(affine=np.diag([-1.0, -1.0, 1.0, 1.0]))) == []


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ([0, 1], (1,), []),
        ([0, 1, 2], (1, 2), ["labels_merged"]),
        ([0, 255], (255,), ["labels_merged"]),
        ([0, 1.0000001], (1,), []),
        ([0, 0.9995], (1,), []),
        ([0], (), ["empty_mask"]),
    ],
)
def test_b3_labels_above_zero_are_prostate(write_case, gland, values, labels, expected) -> None:
    cycle = np.resize(np.array(values, np.float32), gland[1].shape)
    pair = read_pair(write_case(mask=cycle))
    np.testing.assert_array_equal(pair.mask, cycle.transpose(2, 1, 0) > 0.5)
    assert pair.labels == labels
    assert [finding.code for finding in pair.findings] == expected


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([0, -1], "negative_label"),
        ([0, np.nan], "mask_not_finite"),
        ([0, 0.3, 0.7, 1], "soft_mask"),
        ([0, 1.002], "soft_mask"),
        (list(range(21)), "too_many_labels"),
    ],
)
def test_b3_other_masks_are_refused(write_case, gland, values: list[float], code: str) -> None:
    finding = refusal_of(write_case(mask=np.resize(np.array(values, np.float32), gland[1].shape)))
    assert finding.code == code
    assert finding.subject == "Case00_segmentation.nii.gz"


def test_b3_twenty_labels_are_the_most(write_case, gland) -> None:
    mask = np.zeros(gland[1].shape, np.int16)
    mask[4:14, 4:12] = np.kron(np.arange(20).reshape(5, 4), np.ones((2, 2), int))[..., np.newaxis]  # 2 x 2 voxels each
    assert codes(write_case(mask=mask)) == ["labels_merged"]


def test_b3_exchanged_image_and_mask(write_case, gland) -> None:
    image, mask = gland
    assert refusal_of(write_case(image=mask, mask=image)).code == "too_many_labels"


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_b5_thin_volumes_are_kept(write_case, gland, slices: int) -> None:
    image, mask = gland[0][:, :, :slices], gland[1][:, :, 1 : 1 + slices]
    expected = ["thin_volume"] if slices < 3 else []
    assert codes(write_case(image=image, mask=np.ascontiguousarray(mask))) == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b8_one_bad_voxel_is_replaced_by_the_finite_minimum(write_case, gland, bad: float) -> None:
    image = gland[0].astype(np.float32)
    image[3, 4, 5] = bad  # 1 of 20 * 16 * 6 = 1920 voxels, 0.05 %
    pair = read_pair(write_case(image=image))
    assert np.isfinite(pair.image).all()
    assert pair.image[5, 4, 3] == image[np.isfinite(image)].min()
    assert [(finding.code, finding.severity) for finding in pair.findings] == [("not_finite", "warning")]
    assert pair.findings[0].message == "1 NaN or infinite voxel was replaced by the smallest intensity"


@pytest.mark.parametrize("count", [2, 320, 1920])  # 2 of 1920 is 0.104 %, 320 is one slice
def test_b8_more_bad_voxels_refuse_the_case(write_case, gland, count: int) -> None:
    image = gland[0].astype(np.float32)
    image.reshape(-1)[:count] = np.nan
    assert refusal_of(write_case(image=image)).code == "not_finite"


@pytest.mark.parametrize(("value", "spread"), [(0.0, 0.0), (7.0, 0.0), (-1000.0, 0.0), (1000.0, 1e-3)])
def test_b9_constant_images_are_refused(write_case, gland, value: float, spread: float) -> None:
    image = np.full(gland[0].shape, value, np.float32)
    image[0, 0, 0] += spread  # 1e-3 of 1000 is a relative range of 1e-6
    assert refusal_of(write_case(image=image)).code == "constant_image"


def test_b9_small_numbers_are_not_constant(write_case, gland) -> None:
    image = gland[0].astype(np.float32) * 1e-20
    assert codes(write_case(image=image)) == []
