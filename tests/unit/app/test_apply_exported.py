"""apply.py beside an exported model answers odd images as harmofl predict does, or refuses them with the same line."""

import csv
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from harmofl.app.cli import main
from tests.unit.app.exported import assert_alike, contents, export, run_alone
from tests.unit.app.model_files import ModelOfTask
from tests.unit.data.raw_nifti import raw_nifti

TURNED = 6  # EXIF: to be turned by 90 degrees


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def exported(model: ModelOfTask, exports: Path) -> Path:
    folder = exports / model.experiment.task
    if not folder.exists():
        assert export(model, "torchscript", folder) == 0
    return folder


def odd_pictures(picture: Image.Image, folder: Path) -> list[str]:
    """The same picture in the forms that scanners and viewers leave, and what no program should guess at."""
    folder.mkdir()
    pixels = np.asarray(picture)
    alpha = np.linspace(0, 255, pixels.shape[1]).astype(np.uint8)
    Image.fromarray(np.dstack([pixels, np.broadcast_to(alpha, pixels.shape[:2])])).save(folder / "alpha.png")
    gray = pixels.mean(-1)
    Image.fromarray((gray * 257).astype(np.uint16)).save(folder / "deep.png")
    Image.fromarray(gray.astype(np.uint8)).save(folder / "gray.png")
    exif = Image.Exif()
    exif[274] = TURNED
    picture.save(folder / "turned.jpg", exif=exif, quality=95)
    picture.convert("CMYK").save(folder / "inks.tif")
    picture.quantize(16).save(folder / "palette.png")
    Image.fromarray(gray.astype(np.uint16)).save(folder / "shallow.png")  # 8 bits in 16
    Image.fromarray(gray.astype(np.float32)).save(folder / "float.tif")
    picture.save(folder / "pages.tif", save_all=True, append_images=[picture])
    (folder / "broken.png").write_bytes(b"broken")
    (folder / "folder.png").mkdir()
    return ["broken.png", "float.tif", "folder.png", "pages.tif", "shallow.png"]


def both(
    model: ModelOfTask, exports: Path, images: list[Path], place: Path, capsys: pytest.CaptureFixture[str], *, code: int
) -> tuple[list[str], list[str]]:
    """The lines about the files of apply.py, and those of predict."""
    told = run_alone(exported(model, exports), images, place / "alone", code=code).splitlines()
    capsys.readouterr()
    assert main(["predict", "--model", str(model.path), *map(str, images), "-o", str(place / "predicted")]) == code
    return told, capsys.readouterr().out.splitlines()


def findings(lines: list[str]) -> list[str]:
    return [line for line in lines if line.split(": ")[0] in ("error", "warning", "notice")]


def test_odd_tissue_is_read_as_predict_reads_it(
    nuclei_model: ModelOfTask, exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = Image.open(nuclei_model.images[0]).convert("RGB").crop((0, 0, 90, 70))
    refused = odd_pictures(picture, tmp_path / "in")
    images = sorted((tmp_path / "in").iterdir())
    told, expected = both(nuclei_model, exports, images, tmp_path, capsys, code=1)
    assert findings(told) == findings(expected)
    assert [line.split(": ")[1] for line in told if line.startswith("error: ")] == refused
    found = contents(tmp_path / "alone")
    assert len(found) == len(images) - len(refused)
    assert found["turned_mask.png"].shape == (90, 70)
    assert_alike(found, contents(tmp_path / "predicted"))


def test_odd_patches_are_read_as_predict_reads_them(
    camelyon17_model: ModelOfTask, exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = Image.open(camelyon17_model.images[0]).convert("RGB")
    refused = odd_pictures(picture, tmp_path / "in")
    picture.crop((0, 0, 50, 64)).save(tmp_path / "in" / "narrow.png")
    images = sorted((tmp_path / "in").iterdir())
    told, expected = both(camelyon17_model, exports, images, tmp_path, capsys, code=1)
    assert findings(told) == findings(expected)
    assert [line.split(": ")[1] for line in told if line.startswith("error: ")] == sorted([*refused, "narrow.png"])
    shares = {line.split(": ")[0]: line.split()[-1] for line in told if " tumor " in line}
    rows = {row["file"]: row["tumor"] for row in csv.DictReader((tmp_path / "predicted" / "predictions.csv").open())}
    assert shares.keys() == rows.keys() and len(rows) == len(images) - len(refused) - 1
    assert [float(share) for share in shares.values()] == pytest.approx(list(map(float, rows.values())), abs=1e-4)


def odd_volumes(source: Path, folder: Path) -> None:
    """Volumes as hospitals have them: few and many voxels that are no numbers, other axes, one that is all the same,
    one with slices that show nothing.
    """
    folder.mkdir()
    image = nibabel.load(source)
    data, affine = image.get_fdata(dtype=np.float32), image.affine

    def write(name: str, changed: np.ndarray, placed: np.ndarray = affine) -> None:
        nibabel.save(nibabel.Nifti1Image(changed, placed), folder / name)

    some, many = data.copy(), data.copy()
    some[2, 3, 1], some[5, 5, 2] = np.nan, np.inf
    many[:9] = np.nan
    write("some_nan.nii.gz", some)
    write("many_nan.nii.gz", many)
    write("constant.nii.gz", np.full_like(data, 7))
    write("flipped.nii.gz", data[::-1, :, ::-1], affine @ np.diag([-1.0, 1, -1, 1]))
    write("sagittal.nii.gz", data, affine @ np.diag([10.0, 1, 0.1, 1]))
    write("otherwise.nii.gz", data.transpose(1, 0, 2), affine[:, [1, 0, 2, 3]])
    write("two.nii.gz", np.stack([data, data], -1))
    write("thin.nii.gz", data[..., :2])
    blank = data.copy()
    blank[..., 0], blank[..., 3] = data.min(), data.max() / 2  # the file begins at the head
    write("blank.nii.gz", blank)
    sparse = np.zeros_like(data)
    sparse[12:14, 12:14] = data[12:14, 12:14] + 1
    write("sparse.nii.gz", sparse)
    (folder / "folder.nii.gz").mkdir()
    stored = nibabel.Nifti1Image((data / data.max() * 4000).astype(np.int16), affine)
    stored.header.set_slope_inter(0.25, -3)
    nibabel.save(stored, folder / "scaled.nii.gz")
    write("crc.nii.gz", data)
    whole = bytearray((folder / "crc.nii.gz").read_bytes())
    whole[-6] ^= 255  # in the checksum at the end of the stream
    (folder / "crc.nii.gz").write_bytes(whole)


def test_odd_volumes_are_read_as_predict_reads_them(
    prostate_model: ModelOfTask, exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd_volumes(prostate_model.images[0], tmp_path / "in")
    images = sorted((tmp_path / "in").iterdir())
    told, expected = both(prostate_model, exports, images, tmp_path, capsys, code=1)
    assert findings(told) == findings(expected)
    assert "warning: some_nan.nii.gz: 2 NaN or infinite voxels were replaced by the smallest intensity" in "\n".join(
        told
    )
    refused = ["constant.nii.gz", "crc.nii.gz", "folder.nii.gz", "many_nan.nii.gz", "sagittal.nii.gz", "two.nii.gz"]
    assert [line.split(": ")[1] for line in told if line.startswith("error: ")] == refused
    found = contents(tmp_path / "alone")
    assert "warning: blank.nii.gz: 2 of 6 slices have no contrast (from the feet: 3, 6) and are left out" in "\n".join(
        told
    )
    drawn = found["blank_segmentation.nii.gz"].any((0, 1))
    assert drawn.any() and not drawn[[0, 3]].any(), "a slice that shows nothing holds nothing"
    assert "warning: sparse.nii.gz: more than 99 % of the voxels hold the smallest intensity" in "\n".join(told)
    assert found["some_nan_segmentation.nii.gz"].any()
    assert_alike(found, contents(tmp_path / "predicted"))


def contradictory_volumes(source: Path, folder: Path) -> None:
    """One volume under headers that say twice, and not alike, where it lies; the sform of each is that of the first."""
    folder.mkdir()
    image = nibabel.load(source)
    data, affine = np.asarray(image.dataobj), image.affine
    mirrored = affine @ np.diag([-1.0, 1, 1, 1])
    both_forms = {"sform": affine, "codes": (1, 1)}
    headers: dict[str, dict[str, Any]] = {
        "a_right": {"sform": affine},
        "b_pixdim_1": {"sform": affine, "pixdim": (1, 1, 1)},
        "c_mirrored": {**both_forms, "qform": mirrored},
        "d_larger": {**both_forms, "qform": mirrored, "pixdim": tuple(1.05 * np.linalg.norm(affine[:3, :3], axis=0))},
        "e_no_qform": {**both_forms, "qform": affine, "quatern_b": 2},
        "f_offset": {"sform": affine, "extension": bytes(10)},
    }
    for name, header in headers.items():
        raw_nifti(folder / f"{name}.nii", data, **header)
    raw_nifti(folder / "G_UPPER.NII", data, qform=affine, codes=(0, 2))
    raw_nifti(folder / "h_neither.nii.gz", data, qform=affine, codes=(0, 0))
    padded = data.astype(np.int16)
    padded[:, :4] = -32768
    raw_nifti(folder / "i_padded.nii.gz", padded, sform=affine)
    raw_nifti(folder / "j_nifti2.nii", data, sform=affine, kind=nibabel.Nifti2Header)


def test_contradictory_headers_are_read_as_predict_reads_them(
    prostate_model: ModelOfTask, exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contradictory_volumes(prostate_model.images[0], tmp_path / "in")
    images = sorted((tmp_path / "in").iterdir())
    told, expected = both(prostate_model, exports, images, tmp_path, capsys, code=0)
    assert findings(told) == findings(expected)
    codes = {line.split(": ")[1]: line for line in told if line.startswith("warning: ")}
    assert codes.keys() == {image.name for image in images if image.name[0] not in "aGj"}
    found = contents(tmp_path / "alone")
    assert_alike(found, contents(tmp_path / "predicted"))
    # equal voxels under one sform: equal masks
    right = found["a_right_segmentation.nii.gz"]
    assert right.any()
    for name in ("b_pixdim_1", "c_mirrored", "d_larger", "e_no_qform", "f_offset", "j_nifti2"):
        np.testing.assert_array_equal(found[f"{name}_segmentation.nii.gz"], right)
    for image in images:
        written = tmp_path / "alone" / f"{image.name.split('.')[0]}_segmentation.nii.gz"
        np.testing.assert_allclose(nibabel.load(written).affine, nibabel.load(image).affine)
    milliliters = {line.split(": ")[0]: re.search(r"([\d.]+) mL", line)[1] for line in told if " mL" in line}  # type: ignore[index]
    assert milliliters == {
        line.split(": ")[0]: re.search(r"([\d.]+) mL", line)[1]
        for line in expected
        if " mL" in line  # type: ignore[index]
    }


def test_a_mask_drawn_by_hand_is_not_overwritten(prostate_model: ModelOfTask, exports: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "Case00_segmentation.nii.gz"
    drawn.write_bytes(b"drawn by hand")
    told = run_alone(exported(prostate_model, exports), prostate_model.images[:1], tmp_path, code=1)
    assert told == f"error: Case00.nii.gz: {drawn} exists already; name another folder with -o\n"
    assert drawn.read_bytes() == b"drawn by hand"
