"""`harmofl evaluate` over a hospital's folder, for every task."""

import csv
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from harmofl.app.cli import main
from harmofl.app.model_file import load_model
from harmofl.core.distances import surface_distances
from harmofl.core.scores import case_dice
from harmofl.data.nifti import read_scan
from harmofl.evidence.evaluation import Evaluation, read_evaluation
from tests.unit.app.model_files import ModelOfTask
from tests.unit.app.provisioned import set_privacy


def evaluate(model: ModelOfTask, data: Path, output: Path, *more: str) -> tuple[int, Evaluation]:
    code = main(["evaluate", "--model", str(model.path), str(data), "-o", str(output), *more])
    return code, read_evaluation(output / "evaluation.json")


@pytest.fixture
def copied(prostate_model: ModelOfTask, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prostate_model.folder, tmp_path / "hospital"))


def test_scores_are_those_of_the_masks_that_predict_writes(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = evaluate(prostate_model, prostate_model.folder, tmp_path)
    assert code == 0 and found.unit == "case" and found.skipped == {}
    assert found.names == [f"Case0{number}" for number in range(5)]  # all of them, not a test split
    masks = tmp_path / "masks"
    images = map(str, prostate_model.images)
    assert main(["predict", "--model", str(prostate_model.path), *images, "-o", str(masks)]) == 0
    for row, case in enumerate(found.names):
        written, truth = (
            read_scan(folder / f"{case}_segmentation.nii.gz") for folder in (masks, prostate_model.folder)
        )
        pair = [torch.from_numpy(scan.data.astype(np.uint8)) for scan in (written, truth)]
        expected = (case_dice(*pair), *surface_distances(*pair, truth.spacing))
        scores = [found.scores[name].per_case[row] for name in ("dice", "hd95_mm", "asd_mm")]
        assert scores == pytest.approx(expected, rel=1e-6)
    mean = found.scores["dice"].mean
    assert mean == pytest.approx(np.mean([score for score in found.scores["dice"].per_case if score is not None]))
    table = capsys.readouterr().out
    assert f"{mean:.3f}" in table and "Case04" in table and "own profile: of each case itself" in table


def test_intervals_are_over_patients_and_two_give_none(
    prostate_model: ModelOfTask, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = evaluate(prostate_model, copied, tmp_path / "five")
    dice = found.scores["dice"]
    assert (dice.patients, dice.n, dice.no_interval) == (5, 5, None) and dice.low is not None
    assert "95 % interval over patients" in capsys.readouterr().out
    for case in ("Case02", "Case03", "Case04"):
        for path in copied.glob(f"{case}*"):
            path.unlink()
    _, found = evaluate(prostate_model, copied, tmp_path / "two")
    for summary in found.scores.values():
        assert (summary.low, summary.high, summary.no_interval, summary.patients) == (None, None, "too_few", 2)
    assert capsys.readouterr().out.count("too few for an interval") == len(found.scores)


def test_distances_have_no_upper_bound(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    """An interval of a Dice score ends at 1, that of a distance in mm does not."""
    _, found = evaluate(prostate_model, prostate_model.folder, tmp_path)
    distances, dice = found.scores["hd95_mm"], found.scores["dice"]
    assert distances.mean is not None and distances.high is not None and dice.high is not None
    assert distances.high > max(1.0, distances.mean) and dice.high <= 1


def test_cases_of_no_use_are_told_and_the_others_scored(
    prostate_model: ModelOfTask, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "Case01.nii.gz").write_bytes(b"broken")
    (copied / "Case02_segmentation.nii.gz").unlink()
    code, found = evaluate(prostate_model, copied, tmp_path / "out")
    assert code == 1 and found.names == ["Case00", "Case03", "Case04"]
    assert found.skipped == {"image_without_mask": 1, "not_gzip": 1}
    out = capsys.readouterr().out
    assert "error: Case01.nii.gz: " in out and "error: Case02.nii.gz: the image has no mask" in out
    assert {finding.code for finding in found.findings} == set(found.skipped)


def test_a_slice_without_signal_leaves_the_scores_as_they_are(
    prostate_model: ModelOfTask, copied: Path, tmp_path: Path
) -> None:
    """Some scanners append one to every volume. In the profile of a volume it would be 1e-6 in every bin."""
    _, without = evaluate(prostate_model, prostate_model.folder, tmp_path / "without")
    for path in copied.glob("*.nii.gz"):
        volume = nibabel.load(path)
        ends = [(0, int(code in "SI")) for code in nibabel.aff2axcodes(volume.affine)]
        voxels = np.pad(np.asarray(volume.dataobj), ends)
        nibabel.save(nibabel.Nifti1Image(voxels, volume.affine, volume.header), path)
    _, held = evaluate(prostate_model, copied, tmp_path / "with")
    # up to 0.03 apart where the slice is in the profile, 0.005 where it is not: windows at the end hold it all the same
    assert held.scores["dice"].per_case == pytest.approx(without.scores["dice"].per_case, abs=0.01)
    assert sum(finding.code == "blank_slices" for finding in held.findings) == len(held.names)


def test_a_case_without_prostate_is_undefined_and_counted(
    prostate_model: ModelOfTask, copied: Path, tmp_path: Path
) -> None:
    path = copied / "Case00_segmentation.nii.gz"
    mask = nibabel.load(path)
    nibabel.save(nibabel.Nifti1Image(np.zeros(mask.shape, np.uint8), mask.affine, mask.header), path)
    code, found = evaluate(prostate_model, copied, tmp_path / "out")
    assert code == 0
    for summary in found.scores.values():
        assert summary.per_case[0] is None and summary.n == 4 and summary.undefined == 1


def test_an_empty_prediction_has_dice_0_and_no_distance(
    prostate_model: ModelOfTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmofl.tasks.whole_site.scan_labels", lambda scan, predict: torch.zeros(scan.shape))
    _, found = evaluate(prostate_model, prostate_model.folder, tmp_path)
    assert found.scores["dice"].per_case == [0.0] * 5
    assert (found.scores["hd95_mm"].mean, found.scores["hd95_mm"].undefined) == (None, 5)
    assert "a case whose prediction is empty has Dice 0 and no distance" in " ".join(found.rules)


def test_a_site_is_found_below_a_data_root(prostate_model: ModelOfTask, copied: Path, tmp_path: Path) -> None:
    shutil.move(copied, tmp_path / "root" / "ISBI")  # an alias of RUNMC in the job
    _, found = evaluate(prostate_model, tmp_path / "root", tmp_path / "out", "--site", "RUNMC")
    assert found.site == "RUNMC" and len(found.names) == 5


def test_patients_are_those_of_the_hospitals_own_pattern(
    prostate_model: ModelOfTask, copied: Path, tmp_path: Path, site: Path
) -> None:
    _, each = evaluate(prostate_model, copied, tmp_path / "each")
    set_privacy(site, patient_pattern="^Case0[0-2]", folder=copied.name)
    _, own = evaluate(prostate_model, copied.parent, tmp_path / "own", "--kit", str(site))
    # by hand: Case00 to Case04; the pattern makes one patient of each of the first three and finds none in the rest
    assert each.scores["dice"].patients == own.scores["dice"].patients == 5
    set_privacy(site, patient_pattern="^Case0")
    _, own = evaluate(prostate_model, copied, tmp_path / "one", "--kit", str(site))
    assert own.site == "HK" and own.scores["dice"].patients == 1 and own.scores["dice"].low is None
    assert own.scores["dice"].per_case == each.scores["dice"].per_case


def test_the_hospitals_profile_can_be_given(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    _, each = evaluate(prostate_model, prostate_model.folder, tmp_path / "each")
    folder = str(prostate_model.folder)
    _, whole = evaluate(prostate_model, prostate_model.folder, tmp_path / "all", "--profile-of", folder)
    assert (each.own_profile, whole.own_profile) == ("of each case itself", folder)
    assert each.scores["dice"].per_case != whole.scores["dice"].per_case


def test_nuclei_are_scored_image_by_image(nuclei_model: ModelOfTask, tmp_path: Path) -> None:
    code, found = evaluate(nuclei_model, nuclei_model.folder, tmp_path)
    assert code == 0 and found.unit == "image" and len(found.names) == 4
    assert found.own_profile == "none: a gain of 1"
    assert found.scores["dice"].mean is not None and found.scores["dice"].mean > 0.3  # noise of 20 % nuclei: 0.2


def test_patches_are_scored_as_predict_answers_them(camelyon17_model: ModelOfTask, tmp_path: Path) -> None:
    code, found = evaluate(camelyon17_model, camelyon17_model.folder, tmp_path)
    assert code == 0 and found.unit == "slide" and len(found.names) == 5
    assert found.names[0] == "patient 000 slide 0"
    images = map(str, camelyon17_model.images)
    assert main(["predict", "--model", str(camelyon17_model.path), *images, "-o", str(tmp_path)]) == 0
    shares = {row["file"]: float(row["tumor"]) for row in csv.DictReader((tmp_path / "predictions.csv").open())}
    rows = list(csv.DictReader((camelyon17_model.folder / "metadata.csv").open()))
    right = 0
    for row in rows:
        name = "patch_patient_{patient}_node_{node}_x_{x_coord}_y_{y_coord}.png".format(**row)
        right += (shares[name] > 0.5) == (row["tumor"] == "1")
    assert found.scores["accuracy"].mean == pytest.approx(right / len(rows))
    assert found.scores["accuracy"].n == len(rows) == 20
    assert {"auroc", "sensitivity", "specificity", "accuracy_by_slide"} < found.scores.keys()


def test_the_hospital_of_patches_is_a_site_or_a_center(
    camelyon17_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two centers in one index, of which the model's job knows one as hospital1 (0) and none as number 7."""
    folder = Path(shutil.copytree(camelyon17_model.folder, tmp_path / "both"))
    lines = (folder / "metadata.csv").read_text().splitlines()
    header = lines[0].split(",")
    center = header.index("center")
    moved = [line.split(",") for line in lines[11:]]
    for row in moved:
        row[center] = "7"
    (folder / "metadata.csv").write_text("\n".join([*lines[:11], *map(",".join, moved)]) + "\n")
    command = ["evaluate", "--model", str(camelyon17_model.path), str(folder), "-o", str(tmp_path / "x")]
    assert main(command) == 2
    assert "has rows of the centers 0, 7; name the hospital with --site: hospital1" in capsys.readouterr().err
    assert main([*command, "--site", "9"]) == 2
    counts = {}
    for site in ("hospital1", "7"):
        _, found = evaluate(camelyon17_model, folder, tmp_path / site, "--site", site)
        counts[site] = found.scores["accuracy"].n
    assert counts == {"hospital1": 10, "7": 10}


def test_too_many_unreadable_patches_are_told(
    camelyon17_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(camelyon17_model.folder, tmp_path / "bad"))
    for path in sorted(folder.rglob("*.png"))[:6]:
        path.write_bytes(b"broken")
    command = ["evaluate", "--model", str(camelyon17_model.path), str(folder), "-o", str(tmp_path / "out")]
    assert main(command) == 1
    assert "patches cannot be read" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("left", ["no case", "no score"])
def test_nothing_scored_leaves_no_result(
    prostate_model: ModelOfTask, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    for path in copied.glob("*_segmentation.nii.gz"):
        if left == "no case":
            path.unlink()
        else:  # masks without prostate: Dice is undefined for every case
            held = nibabel.load(path)
            nibabel.save(nibabel.Nifti1Image(np.zeros(held.shape, np.uint8), held.affine, held.header), path)
    arguments = ["evaluate", "--model", str(prostate_model.path), str(copied), "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    *before, told = capsys.readouterr().out.splitlines()
    # a table is shown where it has a row
    assert any(line.startswith("score ") for line in before) == (left == "no score")
    assert told == f"error: nothing in {copied} could be scored, so evaluation.json is not written"
    assert not (tmp_path / "out").exists()


def test_mistakes_are_refused(prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--model", str(prostate_model.path)]
    assert main([*command, str(tmp_path / "gone")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "evaluation.json").write_text("{}")
    assert main([*command, str(prostate_model.folder), "-o", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([*command, str(empty), "-o", str(tmp_path / "out")]) == 1
    assert "could be scored" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert main([*command, str(empty), "--site", "UCL", "-o", str(tmp_path / "two")]) == 2
    assert "no data for site UCL" in capsys.readouterr().err


def test_the_data_folder_is_never_written_to(
    prostate_model: ModelOfTask,
    copied: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["evaluate", "--model", str(prostate_model.path)]
    before = sorted(copied.iterdir())
    monkeypatch.chdir(copied)
    for more in (["."], [str(copied)], [".", "-o", "scores"], [str(tmp_path), "--site", "hospital", "-o", "."]):
        assert main([*command, *more]) == 2
        told = capsys.readouterr().err
        assert "which is never written to; name another with -o" in told and told.count("\n") == 1
    assert sorted(copied.iterdir()) == before


def test_only_an_earlier_evaluation_is_overwritten(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluation.json").write_text('{"course": "anatomy", "grade": 1}')
    command = ["evaluate", "--model", str(prostate_model.path), str(prostate_model.folder), "-o", str(tmp_path)]
    assert main([*command, "--force"]) == 2
    told = capsys.readouterr().err
    assert "--force replaces an earlier evaluation only" in told and told.count("\n") == 1
    assert "anatomy" in (tmp_path / "evaluation.json").read_text()
    (tmp_path / "evaluation.json").unlink()
    for more in ([], ["--force"]):
        assert main([*command, *more]) == 0
    assert len(read_evaluation(tmp_path / "evaluation.json").names) == 5


def test_the_record_says_what_was_evaluated(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    _, found = evaluate(prostate_model, prostate_model.folder, tmp_path)
    model = load_model(prostate_model.path)
    assert found.model.experiment_hash == model.experiment.hash
    assert (found.model.file, found.model.task, found.model.network) == ("prostate.pt", "prostate", "unet")
    assert found.versions.keys() >= {"harmofl", "torch"}
