import gzip
import itertools
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

from harmofl.data.findings import CaseError
from harmofl.data.geometry import corner_distance
from harmofl.data.nifti import read_scan
from tests.unit.data.raw_nifti import raw_nifti

LPS = np.diag([-0.5, -0.5, 3.0, 1.0])
CODES = ["".join(codes) for codes in itertools.permutations(("L", "P", "S"))] + ["RAS", "LAS", "LPI", "AIR", "PSR"]


def refused(path: Path) -> str:
    with pytest.raises(CaseError) as caught:
        read_scan(path)
    finding = caught.value.finding
    assert finding.severity == "error"
    assert finding.subject == path.name
    assert finding.fix
    assert "\n" not in str(caught.value)
    assert str(path.parent) not in str(caught.value)
    return finding.code


@pytest.mark.parametrize("codes", CODES)
def test_every_storage_order_gives_the_same_volume(write_nifti, gland, codes: str) -> None:
    image, _ = gland
    affine = LPS.copy()
    affine[:3, 3] = (31.0, -12.0, 5.0)
    ornt = ornt_transform(io_orientation(affine), axcodes2ornt(codes))
    stored = nibabel.apply_orientation(image, ornt)
    path = write_nifti("a.nii.gz", stored, affine @ inv_ornt_aff(ornt, image.shape))
    scan = read_scan(path)
    # image is (x, y, z) in LPS already, so (slice, row, column) is its transpose
    np.testing.assert_array_equal(scan.data, image.transpose(2, 1, 0))
    np.testing.assert_allclose(scan.affine, affine, atol=1e-6)
    np.testing.assert_allclose(scan.spacing, (3.0, 0.5, 0.5), rtol=1e-6)
    assert scan.orientation == codes
    assert scan.data.dtype == np.float32


@pytest.mark.parametrize("shape", [(20, 16, 6, 1), (20, 16, 6, 1, 1), (20, 16, 1), (20, 16, 1, 1)])
def test_b7_trailing_single_axes_are_dropped(write_nifti, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    scan = read_scan(write_nifti("a.nii.gz", array))
    np.testing.assert_array_equal(scan.data, array.reshape(shape[:3]).transpose(2, 1, 0))


@pytest.mark.parametrize("shape", [(20, 16), (20, 16, 6, 10), (20, 16, 6, 1, 2), (20, 16, 1, 3)])
def test_b7_other_dimensions_are_refused(write_nifti, shape: tuple[int, ...]) -> None:
    assert refused(write_nifti("a.nii.gz", np.ones(shape, np.int16))) == "not_three_dimensional"


def test_a_qform_alone_that_is_no_rotation_is_named(tmp_path: Path, gland) -> None:
    path = raw_nifti(tmp_path / "a.nii", gland[0], qform=np.eye(4), codes=(0, 1), quatern_b=1, quatern_c=1)
    with pytest.raises(CaseError, match="a.nii: the qform of the header is not a rotation"):
        read_scan(path)


def test_a_qform_that_rounding_made_longer_than_a_rotation_is_named(tmp_path: Path, gland) -> None:
    """Half a turn about an oblique axis: b, c and d have length 1 but for rounding, too much for nibabel in NIfTI-2."""
    half_turn = {"quatern_b": 0.6, "quatern_c": 0.0, "quatern_d": 0.8 * (1 + 1e-14)}
    path = raw_nifti(
        tmp_path / "a.nii", gland[0], qform=np.eye(4), codes=(0, 1), kind=nibabel.Nifti2Header, **half_turn
    )
    with pytest.raises(ValueError, match="w2 should be positive"):
        nibabel.load(path)
    with pytest.raises(CaseError, match="a.nii: the qform of the header is not a rotation .* set its sform"):
        read_scan(path)
    # the same rounding is within the limit of NIfTI-1, which stores 32 bits
    assert read_scan(raw_nifti(tmp_path / "b.nii", gland[0], qform=np.eye(4), codes=(0, 1), **half_turn)).data.size


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent.nii.gz") == "missing_file"
    (tmp_path / "folder.nii.gz").mkdir()
    assert refused(tmp_path / "folder.nii.gz") == "not_a_file"
    contents = {
        "zero.nii.gz": (b"", "empty_file"),
        "nothing.nii.gz": (gzip.compress(b""), "not_an_image"),
        "plain.nii.gz": (b"plain text", "not_gzip"),
        "text.nii": (b"plain text", "not_nifti"),
        "noise.nii": (bytes(range(256)) * 4, "not_an_image"),
        "series.nii": (bytes(128) + b"DICM" + bytes(400), "dicom"),
    }
    for name, (content, code) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert refused(tmp_path / name) == code, name


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_b17_truncated_file_is_named(write_nifti, gland, suffix: str, kept: float) -> None:
    path = write_nifti(f"a{suffix}", gland[0])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    assert refused(path) in {"damaged_file", "not_an_image"}


def test_a_flipped_bit_in_the_stream_is_found(write_nifti, gland) -> None:
    path = write_nifti("a.nii.gz", gland[0])
    content = bytearray(path.read_bytes())
    content[-6] ^= 0xFF  # one byte of the checksum of the gzip stream
    path.write_bytes(bytes(content))
    assert refused(path) == "damaged_file"


def test_header_that_promises_more_voxels_than_memory(write_nifti, gland) -> None:
    path = write_nifti("a.nii", gland[0])
    content = bytearray(path.read_bytes())
    content[40:48] = np.array([3, 30000, 30000, 30000], "<i2").tobytes()  # dim of NIfTI-1
    path.write_bytes(bytes(content))
    assert refused(path) == "too_large"


def test_upper_case_extension(write_nifti, gland, tmp_path: Path) -> None:
    write_nifti("a.nii.gz", gland[0]).rename(tmp_path / "A.NII.GZ")
    assert read_scan(tmp_path / "A.NII.GZ").data.shape == (6, 16, 20)


def test_color_and_singular_headers_are_refused(tmp_path: Path, write_nifti, gland) -> None:
    color = np.zeros((4, 4, 3), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    nibabel.save(nibabel.Nifti1Image(color, LPS), tmp_path / "color.nii")
    assert refused(tmp_path / "color.nii") == "not_scalar"
    assert refused(write_nifti("complex.nii", gland[0].astype(np.complex64))) == "not_scalar"
    flat = LPS.copy()
    flat[:, 1] = flat[:, 0]
    assert refused(write_nifti("flat.nii", gland[0], flat)) == "bad_affine"


def forms(path: Path, sform: np.ndarray, qform: np.ndarray, codes: tuple[int, int]) -> Path:
    image = nibabel.load(path)
    voxels = np.asanyarray(image.dataobj)
    image = nibabel.Nifti1Image(voxels, None)
    image.set_sform(sform, codes[0])
    image.set_qform(qform, codes[1])
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize(
    ("shift", "codes", "expected"),
    [
        (0.0, (1, 1), []),
        (0.01, (1, 1), []),  # 0.02 voxels of 0.5 mm
        (1.0, (1, 1), ["forms_disagree"]),
        (1.0, (1, 0), []),
        (0.0, (0, 0), ["orientation_unknown"]),
    ],
)
def test_b2_sform_and_qform(write_nifti, gland, shift: float, codes: tuple[int, int], expected: list[str]) -> None:
    moved = LPS.copy()
    moved[0, 3] += shift
    scan = read_scan(forms(write_nifti("a.nii.gz", gland[0]), LPS, moved, codes))
    assert [finding.code for finding in scan.findings] == expected
    assert {finding.severity for finding in scan.findings} <= {"warning"}


def test_spacing_of_another_unit_is_a_warning(write_nifti, gland) -> None:
    scan = read_scan(write_nifti("a.nii.gz", gland[0], np.diag([-500.0, -500.0, 3000.0, 1.0])))  # micrometers
    assert [finding.code for finding in scan.findings] == ["implausible_spacing"]


def test_corner_distance_is_in_voxels_of_the_axis() -> None:
    moved = LPS.copy()
    moved[2, 3] = 1.5  # half of a 3 mm slice
    assert corner_distance(LPS, moved, (20, 16, 6)) == pytest.approx(0.5)
    scaled = LPS @ np.diag([1.01, 1.0, 1.0, 1.0])
    assert corner_distance(LPS, scaled, (101, 16, 6)) == pytest.approx(1.0)  # 1 % over 100 steps
