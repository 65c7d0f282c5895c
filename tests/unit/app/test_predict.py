"""`harmofl predict` over the files of every task."""

import csv
import hashlib
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from harmofl.app.cli import main
from harmofl.app.model_file import load_model
from harmofl.core.scores import case_dice, predicted_classes
from harmofl.data.nifti import read_scan
from harmofl.data.unlabeled import read_fitted_scan
from harmofl.data.windows import image_windows
from harmofl.tasks.prostate import volume_settings
from tests.unit.app.model_files import ModelOfTask, small_experiment, write_model, write_site


def predict(model: ModelOfTask | Path, images: list[Path], output: Path, *more: str) -> int:
    path = model if isinstance(model, Path) else model.path
    return main(["predict", "--model", str(path), *map(str, images), "-o", str(output), *more])


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def mask_of(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def test_a_model_finds_what_it_was_trained_on(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    before = digests(prostate_model.folder)
    assert predict(prostate_model, prostate_model.images, tmp_path) == 0
    assert digests(prostate_model.folder) == before
    scores = []
    for image in prostate_model.images:
        name = image.name.replace(".nii.gz", "_segmentation.nii.gz")
        truth, written = nibabel.load(prostate_model.folder / name), nibabel.load(tmp_path / name)
        np.testing.assert_array_equal(written.affine, nibabel.load(image).affine)
        pair = [torch.from_numpy(np.asarray(one.dataobj).astype(np.uint8)) for one in (written, truth)]
        scores.append(case_dice(*pair))
    assert np.mean(scores) > 0.6  # an untrained network of this width is near 0.1


@pytest.mark.parametrize("task", ["prostate", "nuclei", "camelyon17"])
def test_an_image_alone_gets_the_answer_that_it_gets_among_others(
    task: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: ModelOfTask = request.getfixturevalue(f"{task}_model")
    images = model.images[:3]
    assert predict(model, images, tmp_path / "together") == 0
    together = digests(tmp_path / "together")
    alone: dict[str, str] = {}
    rows = []
    for number, image in enumerate(images):
        assert predict(model, [image], tmp_path / str(number)) == 0
        alone |= digests(tmp_path / str(number))
        if task == "camelyon17":
            rows += (tmp_path / str(number) / "predictions.csv").read_text().splitlines()[1:]
    if task == "camelyon17":
        assert rows == (tmp_path / "together" / "predictions.csv").read_text().splitlines()[1:]
    elif task == "nuclei":
        assert alone == together and len(together) == 3
    else:  # gzip stamps the time
        for name in together:
            found = [mask_of(next(tmp_path.glob(f"{place}/{name}"))) for place in ("together", "[0-9]")]
            np.testing.assert_array_equal(*found)


def test_a_volume_has_the_profile_of_its_own_slices(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    """The normalization that training defined, with the mean profile of the volume as own profile, gives the mask."""
    image, model = prostate_model.images[0], load_model(prostate_model.path, device="cpu")
    windows = image_windows(read_fitted_scan(image, volume_settings(model.experiment)).image)
    model.normalization.set_own(model.normalization.statistics(windows).mean(0))
    expected = predicted_classes(model.network(model.normalization(windows))).numpy()
    assert predict(prostate_model, [image], tmp_path) == 0
    written = read_scan(tmp_path / image.name.replace(".nii", "_segmentation.nii")).data
    assert np.mean(written != expected) < 1e-3  # rounding may move a voxel at a border


def test_the_hospitals_profile_can_be_given(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of one image alone is the mask that this image gets without a folder."""
    lone = tmp_path / "lone"
    lone.mkdir()
    shutil.copy(prostate_model.images[0], lone)
    places = (("each", None), ("one", lone), ("all", prostate_model.folder))
    masks = {}
    for name, folder in places:
        more = () if folder is None else ("--profile-of", str(folder))
        assert predict(prostate_model, prostate_model.images[:1], tmp_path / name, *more) == 0
        masks[name] = mask_of(tmp_path / name / "Case00_segmentation.nii.gz")
    assert f"profile of 5 images in {prostate_model.folder}" in capsys.readouterr().out
    np.testing.assert_array_equal(masks["one"], masks["each"])
    assert (masks["all"] != masks["each"]).any()


def test_tissue_gets_a_mask_of_its_size(nuclei_model: ModelOfTask, tmp_path: Path) -> None:
    """An image that is no multiple of the tile, and one that is smaller than a tile."""
    picture = Image.open(nuclei_model.images[0])
    (tmp_path / "in").mkdir()
    sizes = {"odd.tif": (81, 70), "small.png": (40, 50)}
    for name, size in sizes.items():
        picture.crop((0, 0, *size)).save(tmp_path / "in" / name)
    assert predict(nuclei_model, sorted((tmp_path / "in").iterdir()), tmp_path / "out") == 0
    for name, size in sizes.items():
        mask = Image.open(tmp_path / "out" / f"{Path(name).stem}_mask.png")
        assert mask.size == size and mask.mode == "L"
        assert set(np.unique(mask)) <= {0, 255}


def test_cell_types_are_labels_with_colors(tmp_path: Path) -> None:
    experiment = small_experiment("nuclei", {"reader.classes": "cell_types"})
    data = write_site(experiment, "breast", tmp_path / "breast")
    model = write_model(tmp_path / "model.pt", experiment, data)
    image = next((tmp_path / "breast").rglob("*.tif"))
    assert predict(model, [image], tmp_path / "out") == 0
    mask = Image.open(tmp_path / "out" / f"{image.stem}_mask.png")
    assert mask.mode == "P" and set(np.unique(mask)) <= set(range(5))


def test_patches_get_a_row_each(camelyon17_model: ModelOfTask, tmp_path: Path) -> None:
    images = camelyon17_model.images[:2]
    assert predict(camelyon17_model, images, tmp_path) == 0
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [row["file"] for row in rows] == [image.name for image in images]
    for row in rows:
        assert float(row["normal"]) + float(row["tumor"]) == pytest.approx(1, abs=2e-6)


def test_what_cannot_be_read_is_named_and_the_others_are_done(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    shutil.copy(prostate_model.images[0], source / "good.nii.gz")
    (source / "cut.nii.gz").write_bytes(prostate_model.images[1].read_bytes()[:700])
    (source / "picture.png").write_bytes(b"x")
    (source / "folder.nii.gz").mkdir()
    shutil.copy(prostate_model.images[0], source / "good_segmentation.nii.gz")
    images = [*sorted(source.iterdir()), source / "gone.nii.gz"]
    assert predict(prostate_model, images, tmp_path / "out") == 1
    out = capsys.readouterr().out.splitlines()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good_segmentation.nii.gz"]
    told = {name: [line for line in out if f"error: {name}: " in line] for name in ("cut.nii.gz", "gone.nii.gz")}
    assert all(len(lines) == 1 for lines in told.values())
    assert "error: picture.png: the model is of task prostate and takes a NIfTI volume (.nii, .nii.gz)" in "\n".join(
        out
    )
    assert "error: folder.nii.gz: is a folder; name the files in it" in out
    assert "passed over: good_segmentation.nii.gz is a mask by its name" in out
    assert out[-1] == "1 of 5 images predicted"


def test_a_patch_of_another_size_is_refused(
    camelyon17_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (50, 40)).save(tmp_path / "wide.png")
    assert predict(camelyon17_model, [tmp_path / "wide.png"], tmp_path / "out") == 1
    assert "wide.png: the patch has 50 x 40 instead of 64 x 64 pixels" in capsys.readouterr().out
    assert not (tmp_path / "out" / "predictions.csv").exists()


def test_predictions_are_not_overwritten_unless_asked(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image, target = prostate_model.images[0], tmp_path / "Case00_segmentation.nii.gz"
    assert predict(prostate_model, [image], tmp_path) == 0
    written = target.stat().st_mtime_ns
    assert predict(prostate_model, [image], tmp_path) == 2
    assert "exists already" in capsys.readouterr().err and target.stat().st_mtime_ns == written
    assert predict(prostate_model, [image], tmp_path, "--force") == 0
    assert target.stat().st_mtime_ns > written and nibabel.load(target).shape == nibabel.load(image).shape


@pytest.mark.parametrize("task", ["prostate", "nuclei", "camelyon17"])
def test_only_predictions_are_overwritten(
    task: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mask drawn by hand has the name that a prediction would have."""
    model: ModelOfTask = request.getfixturevalue(f"{task}_model")
    image = model.images[0]
    assert predict(model, [image], tmp_path / "first") == 0
    (target,) = (tmp_path / "first").iterdir()
    assert predict(model, [image], tmp_path / "first", "--force") == 0
    capsys.readouterr()
    if task == "prostate":
        mask = nibabel.load(target)
        nibabel.save(nibabel.Nifti1Image(np.asarray(mask.dataobj), mask.affine), target)
    elif task == "nuclei":
        Image.fromarray(np.asarray(Image.open(target))).save(target)
    else:
        target.write_text("patient,consent\n1,yes\n")
    before = target.read_bytes()
    assert predict(model, [image], tmp_path / "first", "--force") == 2
    told = capsys.readouterr().err
    assert f"{target}: --force replaces earlier predictions only" in told and told.count("\n") == 1
    assert target.read_bytes() == before


def test_a_link_over_an_image_is_not_followed(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "in" / "Case00.nii.gz"
    image.parent.mkdir()
    shutil.copy(prostate_model.images[0], image)
    before, output = digests(image.parent), tmp_path / "out"
    output.mkdir()
    (output / "Case00_segmentation.nii.gz").symlink_to(image)
    assert predict(prostate_model, [image], output, "--force") == 2
    assert "replaces earlier predictions only" in capsys.readouterr().err
    assert digests(image.parent) == before


def refused(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_mistakes_are_refused_before_anything_is_written(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, image = ["predict", "--model", prostate_model.path], prostate_model.images[0]
    other = tmp_path / "other" / "CASE00.nii"
    assert "would have one answer" in refused([*command, image, other, "-o", tmp_path / "out"], capsys)
    assert "never written to" in refused([*command, image, "-o", prostate_model.folder], capsys)
    assert "is a file" in refused([*command, image, "-o", prostate_model.path], capsys)
    mask = image.with_name("Case00_segmentation.nii.gz")
    assert "no image to predict" in refused([*command, mask, "-o", tmp_path / "out"], capsys)
    empty = tmp_path / "empty"
    empty.mkdir()
    rest = [image, "-o", tmp_path / "out", "--profile-of"]
    assert "holds no image that can be read" in refused([*command, *rest, empty], capsys)
    assert "is not a folder" in refused([*command, *rest, tmp_path / "gone"], capsys)
    assert not (tmp_path / "out").exists()


def test_a_profile_is_refused_where_none_is_needed(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = small_experiment("prostate", {"amplitude.region": "off"})
    model = write_model(tmp_path / "model.pt", experiment, prostate_model.data)
    command = ["predict", "--model", model, prostate_model.images[0], "-o", tmp_path / "out"]
    assert "region off, which needs no profile" in refused([*command, "--profile-of", prostate_model.folder], capsys)


@pytest.mark.parametrize("name", ["prostatex/px_trio_320_t2_tra.nii.gz", "prostatex/px_skyra2_t2_crop160.nii.gz"])
def test_real_volumes_are_predicted_on_their_own_grid(
    realdata: Path, prostate_model: ModelOfTask, tmp_path: Path, name: str
) -> None:
    image = realdata / "mri_prostate" / name
    assert predict(prostate_model, [image], tmp_path) == 0
    read, written = nibabel.load(image), nibabel.load(next(tmp_path.iterdir()))
    assert written.shape == read.shape
    np.testing.assert_allclose(written.affine, read.affine)
    assert set(np.unique(np.asarray(written.dataobj))) <= {0, 1}
