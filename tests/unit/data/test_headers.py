"""What a header leaves open or says twice is named with its file, and nothing is shifted quietly."""

import gzip
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from harmofl.data.file_kinds import LOOK
from harmofl.data.findings import CaseError, Finding
from harmofl.data.nifti import MOST_BEHIND, MOST_SLICES, MOST_VOXELS, read_scan
from harmofl.data.nifti_masks import write_labels, wrote_labels
from tests.unit.data.raw_nifti import raw_nifti

LPS = np.diag([-0.5, -0.5, 3.0, 1.0])
VOXELS = np.arange(20 * 16 * 6, dtype=np.int16).reshape(20, 16, 6)


def read(path: Path) -> tuple[Finding, ...]:
    """Findings of a file whose voxels are those that were written."""
    scan = read_scan(path)
    np.testing.assert_array_equal(np.sort(scan.data, axis=None), np.arange(VOXELS.size))
    return scan.findings


def refused(path: Path) -> Finding:
    with pytest.raises(CaseError) as caught:
        read_scan(path)
    finding = caught.value.finding
    assert finding.subject == path.name and finding.fix and "\n" not in str(finding)
    assert str(path.parent) not in str(finding)
    return finding


def sheared(degrees: float) -> np.ndarray:
    """Each slice lies aside of the one below it: the axis of the slices leans to the back."""
    affine = LPS.copy()
    affine[:3, 2] = (0, -3 * np.sin(np.radians(degrees)), 3 * np.cos(np.radians(degrees)))
    return affine


def turned(degrees: float) -> np.ndarray:
    affine = LPS.copy()
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    affine[:2, :2] = np.array([[cosine, -sine], [sine, cosine]]) @ affine[:2, :2]
    return affine


@pytest.mark.parametrize(
    ("header", "code", "told"),
    [
        ({"sform": LPS}, None, ""),
        ({"sform": np.round(turned(7.3), 3)}, None, ""),
        ({"sform": LPS, "qform": LPS, "codes": (2, 1)}, None, ""),
        ({"qform": LPS, "codes": (0, 1)}, None, ""),
        ({"qform": LPS, "codes": (0, 0)}, "orientation_unknown", "neither sform nor qform"),
        ({"sform": LPS, "qform": LPS, "codes": (1, 1), "qoffset_x": 0.1}, None, ""),  # 0.2 voxels
        ({"sform": LPS, "qform": LPS, "codes": (1, 1), "qoffset_x": 1}, "forms_disagree", "disagree by 2 voxels, the"),
        (
            {"sform": LPS, "qform": LPS @ np.diag([-1.0, 1, 1, 1]), "codes": (1, 1)},
            "forms_disagree",
            # the last of 20 voxels, 19 steps to the left, lies 19 to the right
            "sform and qform disagree by 38 voxels (axes run to LPS against RPS), the sform is used",
        ),
        (
            {"sform": LPS, "qform": LPS @ np.diag([1.05, 1.05, 1.05, 1]), "codes": (1, 1)},
            "forms_disagree",
            "(voxels of 0.5 x 0.5 x 3 against 0.525 x 0.525 x 3.15 mm), the sform is used",
        ),
        (
            {"sform": LPS, "pixdim": (1, 1, 1)},
            "spacing_disagrees",
            "(1 x 1 x 1 mm) contradict its sform (0.5 x 0.5 x 3 mm)",
        ),
        (
            {"sform": LPS, "qform": LPS, "codes": (1, 1), "quatern_b": 0.9, "quatern_c": 0.9},
            "forms_disagree",
            "no affine",
        ),
        ({"sform": sheared(4)}, "axes_not_orthogonal", "4 degrees from right angles"),
        ({"sform": sheared(0.5)}, None, ""),
        ({"sform": LPS, "scl_slope": np.nan}, "scaling_ignored", "scl_slope is nan"),
        (
            {"sform": LPS, "scl_slope": 0, "scl_inter": -1024},
            "scaling_ignored",
            "-1024, the voxels are taken",
        ),
        ({"sform": LPS, "scl_slope": 0}, None, ""),  # by the standard: no scaling
        ({"sform": LPS, "behind": bytes(32)}, "trailing_bytes", "32 bytes follow the last voxel"),
        ({"sform": LPS, "behind": bytes(1)}, "trailing_bytes", "1 byte follows the last voxel"),
        # the voxels of this file begin at byte 352 + 10 and are read there
        ({"sform": LPS, "extension": bytes(14)}, "header_repaired", "vox offset (=362) not divisible by 16"),
        ({"sform": LPS, "pixdim": (0, 0.5, 3)}, "header_repaired", "pixdim[1,2,3] should be non-zero"),
        ({"sform": LPS, "codes": (1, 9)}, "header_repaired", "qform_code 9 not valid"),
    ],
)
def test_what_a_header_leaves_open_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], header: dict[str, Any], code: str | None, told: str
) -> None:
    found = read(raw_nifti(tmp_path / "odd.nii", VOXELS, **header))
    assert [finding.code for finding in found] == ([code] if code else [])
    for finding in found:
        assert (finding.subject, finding.severity) == ("odd.nii", "warning") and finding.fix
        assert told in finding.message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("header", "code", "told"),
    [
        ({"sform": sheared(11)}, "axes_not_orthogonal", "11 degrees from right angles"),
        (
            {"sform": np.diag([0.0, 0.0, 0.0, 1.0]), "qform": LPS, "codes": (1, 1)},
            "bad_affine",
            "the sform of the header places no voxel",
        ),
        ({"sform": LPS * 1e30}, "bad_affine", "the sform of the header places no voxel"),
        ({"qform": LPS, "codes": (0, 1), "qoffset_x": 1e38}, "bad_affine", "the qform of the header places no voxel"),
        ({"qform": LPS, "codes": (0, 1), "pixdim": (0, 0.5, 3)}, "bad_affine", "voxel sizes of 0 x 0.5 x 3 mm"),
        ({"codes": (0, 0), "pixdim": (0.5, np.nan, 3)}, "bad_affine", "voxel sizes of 0.5 x nan x 3 mm"),
        ({"sform": LPS, "vox_offset": 0}, "bad_header", "voxels begin at byte 0"),  # nibabel would read the header
        ({"sform": LPS, "vox_offset": 0, "kind": nibabel.Nifti2Header}, "bad_header", "voxels begin at byte 0"),
        ({"sform": LPS, "vox_offset": 351}, "bad_header", "voxels begin at byte 351"),
        ({"sform": LPS, "vox_offset": 1e9}, "bad_header", "voxels begin at byte 1e+09"),
        ({"sform": LPS, "vox_offset": np.nan}, "bad_header", "voxels begin at byte nan"),
        ({"sform": LPS, "scl_inter": np.nan}, "not_an_image", "Valid slope but invalid intercept nan"),
        ({"sform": LPS, "behind": bytes(MOST_BEHIND + 1)}, "bad_header", "goes on behind the last voxel"),
        ({"sform": LPS, "dim": [3, 20, 16, 7, 1, 1, 1, 1]}, "damaged_file", "cut short"),
        ({"sform": LPS, "dim": [3, 20, 16, 0, 1, 1, 1, 1]}, "no_voxels", "20x16x0"),
        ({"sform": LPS, "dim": [4, 20, 16, 6, 0, 0, 0, 0]}, "no_voxels", "20x16x6x0"),
        ({"sform": LPS, "dim": [3, 20, -16, 6, 1, 1, 1, 1]}, "no_voxels", "20x-16x6"),
        (
            {"sform": LPS, "dim": [9, 20, 16, 6, 1, 1, 1, 1]},
            "bad_header",
            "voxels begin at byte",
        ),  # in another byte order
        (
            {"sform": LPS, "dim": [3, 1920, 1, 1, 1, 1, 1, 1]},
            "not_three_dimensional",
            "1 x 1920 pixels",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], header: dict[str, Any], code: str, told: str
) -> None:
    for ending in (".nii", ".nii.gz"):
        finding = refused(raw_nifti(tmp_path / f"odd{ending}", VOXELS, **header))
        assert finding.code == code and told in finding.message
    assert capfd.readouterr() == ("", "")


def extension(size: int, content: int) -> bytes:
    """The flag that extensions follow, and one that says to be of `size` bytes and has `content` bytes."""
    return struct.pack("<4Bii", 1, 0, 0, 0, size, 6) + bytes(content - 8)


def test_extensions_are_read_over(tmp_path: Path) -> None:
    assert read(raw_nifti(tmp_path / "odd.nii", VOXELS, sform=LPS, extension=extension(32, 32))) == ()


@pytest.mark.parametrize("size", [-8, 0, 48, 2**31 - 16])
def test_extensions_that_reach_into_the_voxels_are_refused(tmp_path: Path, size: int) -> None:
    """nibabel reads as many bytes as an extension says, and all that are left where it says none."""
    path = raw_nifti(tmp_path / "odd.nii.gz", VOXELS, sform=LPS, extension=extension(size, 32))
    assert refused(path).code == "bad_header"


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each read of a gzip stream gives from now on."""
    read_bytes: list[int] = []

    class Counting(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            read_bytes.append(len(content))
            return content

    monkeypatch.setattr(gzip, "open", Counting)
    return read_bytes


def test_a_file_of_many_voxels_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MB of zeros in gzip are 8 GB in memory; the header is read, nothing else."""
    read_bytes = count_reads(monkeypatch)
    sizes = [3, 1024, 1024, MOST_VOXELS // 1024**2 + 1, 1, 1, 1, 1]
    finding = refused(raw_nifti(tmp_path / "large.nii.gz", VOXELS, sform=LPS, dim=sizes))
    assert finding.code == "too_large" and "1024x1024x123 voxels, more than 128 million" in finding.message
    assert read_bytes == [LOOK]  # to see what kind of file it is
    thin = [3, 2, 2, MOST_SLICES + 1, 1, 1, 1, 1]
    assert refused(raw_nifti(tmp_path / "thin.nii.gz", VOXELS, sform=LPS, dim=thin)).code == "too_large"
    vast = [3, 2**40, 2**40, 2**40, 1, 1, 1, 1]
    path = raw_nifti(tmp_path / "vast.nii.gz", VOXELS, sform=LPS, kind=nibabel.Nifti2Header, dim=vast)
    assert refused(path).code == "too_large"


def test_a_stream_that_goes_on_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB of zeros behind a volume of 4 kB: a gzip bomb in a file that says to be small."""
    path = raw_nifti(tmp_path / "bomb.nii.gz", VOXELS, sform=LPS, behind=bytes(1 << 26))
    read_bytes = count_reads(monkeypatch)
    assert refused(path).code == "bad_header"
    # what kind of file it is; then header, voxels and what may follow them
    assert sum(read_bytes) == LOOK + 352 + 2 * VOXELS.size + MOST_BEHIND + 1


def test_writing_and_recognizing_masks_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """nibabel fixes the same header each time it opens it, and says so on the console without a name."""
    source = raw_nifti(tmp_path / "odd.nii", VOXELS, sform=LPS, pixdim=(0, 0.5, 3))
    write_labels(np.ones((6, 16, 20), np.uint8), source, tmp_path / "mask.nii.gz")
    assert wrote_labels(tmp_path / "mask.nii.gz") and not wrote_labels(source)
    assert not wrote_labels(tmp_path / "absent.nii")
    assert capfd.readouterr() == ("", "")
