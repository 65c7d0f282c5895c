"""Whatever a header says about where its voxels lie, reading, measuring and writing take the affine of nibabel."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nibabel.eulerangles import euler2mat

from harmofl.data.checks import check_site
from harmofl.data.findings import CaseError
from harmofl.data.geometry import Grid, grid_in_frame, in_voxels, skew
from harmofl.data.layout import Case
from harmofl.data.nifti import read_scan
from harmofl.data.nifti_masks import write_labels
from harmofl.data.pairs import read_pair
from harmofl.data.volumes import VolumeSettings
from tests.unit.data.raw_nifti import raw_nifti

SHAPE = (5, 4, 3)
ANGLES = st.floats(-0.35, 0.35)  # 20 degrees


@st.composite
def affines(draw: st.DrawFn) -> np.ndarray:
    """Axes in any order and direction, turned, of voxels that differ."""
    turned = euler2mat(draw(ANGLES), draw(ANGLES), draw(ANGLES))
    directions = np.eye(3)[:, list(draw(st.permutations(range(3))))] * draw(st.tuples(*3 * [st.sampled_from((-1, 1))]))
    sizes = draw(st.tuples(*3 * [st.floats(0.3, 5.0)]))
    affine = np.eye(4)
    affine[:3, :3] = turned @ directions * sizes
    affine[:3, 3] = draw(st.tuples(*3 * [st.floats(-200, 200)]))
    return affine


@st.composite
def headers(draw: st.DrawFn) -> dict[str, object]:
    """Both forms with codes 0 to 4, agreeing or not, printed with few decimals or not; voxel sizes right or wrong."""
    sform = draw(affines())
    relation = draw(st.sampled_from(("agrees", "flipped", "shifted", "other")))
    qform = draw(affines()) if relation == "other" else sform.copy()
    if relation == "flipped":
        qform = sform @ np.diag([-1.0, 1, 1, 1])
    if relation == "shifted":
        qform[:3, 3] += 7
    decimals = draw(st.sampled_from((None, 4, 3, 2)))
    lengths = np.linalg.norm(sform[:3, :3], axis=0)
    return {
        "sform": sform if decimals is None else np.round(sform, decimals),
        "qform": qform,
        "codes": draw(st.tuples(st.integers(0, 4), st.integers(0, 4))),
        "pixdim": draw(st.sampled_from((None, tuple(lengths), (1.0, 1.0, 1.0), tuple(1.05 * lengths)))),
        "kind": draw(st.sampled_from((nibabel.Nifti1Header, nibabel.Nifti2Header))),
    }


AXIAL = np.array([[-0.5, 0, 0, 40], [0, -0.5, 0, 30], [0, 0, 3.0, -20], [0, 0, 0, 1]])
OBLIQUE = AXIAL.copy()
OBLIQUE[:3, :3] = euler2mat(0.11, 0.07, -0.13) @ AXIAL[:3, :3]


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=headers(), ending=st.sampled_from((".nii", ".nii.gz")), more=st.integers(0, 2))
@example(header={"sform": AXIAL, "pixdim": (1.0, 1.0, 1.0)}, ending=".nii", more=0)
@example(header={"sform": AXIAL, "qform": AXIAL @ np.diag([-1.05, 1, 1, 1]), "codes": (1, 1)}, ending=".nii", more=0)
@example(header={"sform": np.round(OBLIQUE, 3)}, ending=".nii", more=0)
@example(header={"sform": np.round(OBLIQUE, 4)}, ending=".nii", more=0)
def test_a_reader_has_at_a_place_the_voxel_that_nibabel_has_there(
    tmp_path: Path, header: dict[str, object], ending: str, more: int
) -> None:
    voxels = np.random.default_rng(0).permutation(np.arange(60, dtype=np.int16)).reshape(SHAPE)
    axes_of_one = voxels.reshape(SHAPE + (1,) * more)
    path = raw_nifti(tmp_path / f"image{ending}", axes_of_one, **header)  # type: ignore[arg-type]
    try:
        nibabels = nibabel.load(path)
    except ValueError:  # of a qform that rounding made longer than a rotation, see test_nifti.py
        with pytest.raises(CaseError) as caught:
            read_scan(path)
        assert caught.value.finding.code == "bad_affine"
        return
    scan = read_scan(path)
    indices = np.array(list(np.ndindex(*SHAPE)))
    world = nibabels.affine @ np.c_[indices, np.ones(len(indices))].T
    column, row, plane, _ = np.linalg.solve(scan.affine, world)
    found = np.rint([plane, row, column]).astype(int)
    np.testing.assert_allclose([plane, row, column], found, atol=1e-3)
    np.testing.assert_array_equal(scan.data[tuple(found)], voxels[tuple(indices.T)])
    # the axis of the slices is the one that runs most to the head, the rows run most to the back
    directions = scan.affine[:3, :3] / np.linalg.norm(scan.affine[:3, :3], axis=0)
    assert (np.diag(directions) * (-1, -1, 1) > 0).all()

    write_labels((scan.data > 29).astype(np.uint8), path, tmp_path / "mask.nii.gz")
    mask = nibabel.load(tmp_path / "mask.nii.gz")
    np.testing.assert_array_equal(mask.affine, nibabels.affine)
    np.testing.assert_array_equal(np.asarray(mask.dataobj), voxels > 29)

    # millimetres and milliliters from the same affine
    np.testing.assert_allclose(sorted(scan.spacing), sorted(np.linalg.norm(nibabels.affine[:3, :3], axis=0)))
    assert scan.grid.voxel_ml == pytest.approx(abs(np.linalg.det(nibabels.affine[:3, :3])) / 1000)


def test_spacing_is_of_the_affine_that_is_used(tmp_path: Path, gland: tuple[np.ndarray, np.ndarray]) -> None:
    """A header with the affine in its sform alone and voxel sizes of 1 mm: sizes and mL are those of the sform."""
    for name, pixdim in (("right", (0.5, 0.5, 3.0)), ("default", (1.0, 1.0, 1.0))):
        raw_nifti(tmp_path / f"{name}.nii", gland[0], sform=AXIAL, pixdim=pixdim)
        raw_nifti(tmp_path / f"{name}_segmentation.nii", gland[1], sform=AXIAL, pixdim=pixdim)
        pair = read_pair(Case(name, tmp_path / f"{name}.nii", tmp_path / f"{name}_segmentation.nii"))
        assert pair.spacing == pytest.approx((3.0, 0.5, 0.5))
        assert pair.voxel_ml == pytest.approx(0.5 * 0.5 * 3 / 1000)
    reports = check_site(tmp_path, VolumeSettings(64, 64, 99.0), seed=0).cases
    # 105 voxels of 0.75 mm3
    assert [report.gland_ml for report in reports] == pytest.approx([0.07875, 0.07875])


def test_distances_in_words() -> None:
    told = [in_voxels(distance) for distance in (0.26, 1.0, 1.04, 9.99, 1e-4, 23.4)]
    assert told == ["0.26 voxels", "1 voxel", "1 voxel", "10 voxels", "0.0001 voxels", "23 voxels"]


def test_volumes_come_from_the_determinant() -> None:
    """Slices shifted by 5 degrees: lengths stay, the volume is that of the right angle times the cosine."""
    sheared = AXIAL.copy()
    sheared[:3, 2] = (0, 3 * np.sin(np.radians(5)), 3 * np.cos(np.radians(5)))
    grid = Grid(sheared, (6, 16, 20))
    assert grid.spacing == pytest.approx((3.0, 0.5, 0.5))
    assert grid.voxel_ml == pytest.approx(0.00075 * np.cos(np.radians(5)))
    assert skew(sheared) == pytest.approx(5.0)
    assert skew(AXIAL) == pytest.approx(0.0)


def test_grids_of_other_shapes_are_infinitely_far() -> None:
    first = grid_in_frame(AXIAL, (20, 16, 6))
    assert first.shape == (6, 16, 20) and first.distance_to(first) == 0
    assert first.distance_to(grid_in_frame(AXIAL, (20, 16, 5))) == float("inf")
