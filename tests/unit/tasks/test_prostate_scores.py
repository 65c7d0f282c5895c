"""The prostate task's Dice of a volume by hand, and the window of the reader that the job sets."""

from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor

from harmofl.data.synthetic import write_prostate_site
from harmofl.data.volumes import Volume
from harmofl.experiment import Experiment
from harmofl.tasks.prostate import TASK, ScoredVolume, volume_settings

Resolve = Callable[..., Experiment]
JOB = "harmofl_prostate"
SIZE = 8


def scored(masked: dict[int, int], depth: int) -> ScoredVolume:
    """A volume whose slices hold prostate on the first pixels of their first rows, so many a slice.

    A slice has its number as intensity, but for one pixel: what is the same everywhere holds no prostate.
    """
    mask = np.zeros((depth, SIZE, SIZE), np.uint8)
    for index, count in masked.items():
        mask[index].flat[:count] = 1
    image = np.arange(depth, dtype=np.float32)[:, None, None] * np.ones((SIZE, SIZE), np.float32)
    image[:, -1, -1] = 100
    return ScoredVolume(Volume("Case00", image, mask, (1.0, 1.0, 1.0), ()))


def predictor(found: dict[int, int]) -> Callable[[Tensor], Tensor]:
    """Logits that find so many pixels on each slice, whose number is the intensity of the window's middle channel."""

    def predict(windows_SCHW: Tensor) -> Tensor:
        logits = torch.zeros(len(windows_SCHW), 2, SIZE, SIZE)
        logits[:, 0] = 1
        for row, window in enumerate(windows_SCHW):
            logits[row, 1].flatten()[: found.get(int(window[1, 0, 0]), 0)] = 2
        return logits

    return predict


@pytest.mark.parametrize(
    ("masked", "found", "dice"),
    [
        # 8 of 8 pixels found and 8 on a slice without prostate: 2 * 8 / (16 + 8)
        ({1: 4, 2: 4}, {1: 4, 2: 4, 4: 8}, 2 / 3),
        # nothing on the slices with prostate, 5 pixels elsewhere
        ({1: 4, 2: 4}, {0: 5}, 0.0),
        # the slices count together: 2 * (2 + 20) / (2 + 30 + 4 + 20), not the mean of 2/3 and 0.8
        ({1: 4, 3: 20}, {1: 2, 3: 30}, 44 / 56),
    ],
)
def test_the_dice_is_of_the_whole_volume(masked: dict[int, int], found: dict[int, int], dice: float) -> None:
    scores = TASK.evaluate(predictor(found), [scored(masked, 5)], workers=0)
    assert scores.scores["dice"] == [pytest.approx(dice)] and scores.key_score == pytest.approx(dice)


def test_the_key_score_is_the_mean_over_cases_that_hold_prostate() -> None:
    # Dice 1, 2 * 4 / (8 + 4), and none without prostate
    cases = [scored({1: 4}, 3), scored({1: 8}, 3), scored({}, 3)]
    told = TASK.evaluate(predictor({1: 4}), cases, workers=0)
    assert told.scores["dice"][:2] == [1.0, pytest.approx(2 / 3)] and np.isnan(told.scores["dice"][2])
    assert told.key_score == pytest.approx((1 + 2 / 3) / 2)


def test_the_published_dice_leaves_out_the_outermost_slices() -> None:
    case, part = scored({0: 4, 1: 4, 2: 4, 3: 4}, 4), scored({0: 4, 1: 4, 2: 4, 3: 4}, 4).volume
    assert case.slices == [0, 1, 2, 3] and case.published_slices == [1, 2]
    assert ScoredVolume(part, [0, 2, 3]).published_slices == [2]
    # nothing found on the outermost slices, all on slice 1, 4 pixels too many on slice 2
    told = TASK.evaluate(predictor({1: 4, 2: 8}), [case], workers=0).scores
    # prostate 2 * 4 / 8 and 2 * 4 / 12, the rest 2 * 60 / 120 and 2 * 56 / 116
    expected = np.mean([(1 + 1) / 2, (2 * 4 / 12 + 2 * 56 / 116) / 2])
    assert told["published_dice"] == [pytest.approx(expected, abs=1e-4)]
    assert told["dice"] == [pytest.approx(2 * 8 / (16 + 12))]


@pytest.mark.parametrize(("intensity", "percentile"), [("window", 99.5), ("zscore", 99.5), ("none", None)])
def test_raw_intensities_have_no_window(resolve_job: Resolve, intensity: str, percentile: float | None) -> None:
    changes = {"reader.upper_percentile": 99.5, "amplitude.intensity": intensity}
    assert volume_settings(resolve_job(JOB, changes)).upper_percentile == percentile


@pytest.mark.parametrize("percentile", [60.0, 100.0])
def test_the_window_ends_at_the_percentile_of_the_job(resolve_job: Resolve, tmp_path: Path, percentile: float) -> None:
    small = {"data.height": 64, "data.width": 64, "reader.slices": "all", "reader.upper_percentile": percentile}
    experiment = resolve_job(JOB, small)
    assert volume_settings(experiment).upper_percentile == percentile
    write_prostate_site(tmp_path / "HK", "siemens_1.5t_endorectal", 4, 0, matrix=64, slices=4)
    data = TASK.open_site(tmp_path / "HK", "HK", experiment, tmp_path / "cache")
    for case in data.validation:
        raw = np.asarray(nibabel.load(tmp_path / "HK" / f"{case.volume.name}.nii.gz").dataobj).astype(float)
        # of all voxels as stored, whatever their order
        low, high = raw.min(), np.percentile(raw, percentile)
        expected = np.sort(np.clip((raw - low) / (high - low), 0, 1), axis=None)
        np.testing.assert_allclose(np.sort(case.volume.image, axis=None), expected, atol=2.0**-11)


def test_the_loss_is_the_mean_of_cross_entropy_and_of_the_dice_of_a_whole_batch() -> None:
    logits = 2 * torch.randn(3, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(3, SIZE, SIZE, dtype=torch.int64)
    masks[0, :2], masks[1, 3:] = 1, 1  # none on the third
    raised = np.exp(logits.double().numpy())
    shares = raised / raised.sum(1, keepdims=True)
    true = np.stack([masks.numpy() == 0, masks.numpy() == 1], axis=1)
    entropy = -np.log(shares[true]).mean()
    # of both classes, over all images together: 1 - 2 |P M| / (|P| + |M|)
    overlap, both = (shares * true).sum((0, 2, 3)), (shares + true).sum((0, 2, 3))
    expected = (entropy + np.mean(1 - 2 * overlap / both)) / 2
    assert float(TASK.loss()(logits, masks)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("slices", "kept"), [("all", 6), ("foreground", 5), ("published", 4)])
def test_check_counts_the_slices_that_training_uses(
    resolve_job: Resolve, tmp_path: Path, slices: str, kept: int
) -> None:
    experiment = resolve_job(JOB, {"data.height": 64, "data.width": 64, "reader.slices": slices})
    write_prostate_site(tmp_path / "HK", "siemens_1.5t_endorectal", 4, 0, matrix=64, slices=6)
    for path in (tmp_path / "HK").glob("*_segmentation.nii.gz"):
        image = nibabel.load(path)
        mask = np.asarray(image.dataobj).copy()
        mask[..., 0] = 0
        nibabel.save(nibabel.Nifti1Image(mask, image.affine, image.header), path)
    told = TASK.inspect(tmp_path / "HK", "HK", experiment)
    used = TASK.open_site(tmp_path / "HK", "HK", experiment, tmp_path / "cache")
    assert (told.training_images, told.validation_images) == (len(used.training), 6)  # one case is for validation
    # 2 of 4 cases are for training; the gland fills 5 of 6 slices, of which the released loader leaves out the last
    assert told.training_images == 2 * kept


def test_the_published_split_takes_64_and_16_percent_of_the_slices(resolve_job: Resolve, tmp_path: Path) -> None:
    experiment = resolve_job(JOB, {"data.height": 64, "data.width": 64, "data.split": "as_published"})
    write_prostate_site(tmp_path / "HK", "siemens_1.5t_endorectal", 5, 0, matrix=64, slices=7)
    for path in (tmp_path / "HK").glob("*_segmentation.nii.gz"):  # on all 7 slices, of which the outermost are left out
        image = nibabel.load(path)
        mask = np.zeros(image.shape, np.uint8)
        mask[20:40, 20:40, :] = 1
        nibabel.save(nibabel.Nifti1Image(mask, image.affine, image.header), path)
    told = TASK.inspect(tmp_path / "HK", "HK", experiment)
    used = TASK.open_site(tmp_path / "HK", "HK", experiment, tmp_path / "cache")
    parts = [len(used.training), *(sum(len(case.slices) for case in part) for part in (used.validation, used.test))]
    assert parts == [16, 4, 5]  # of 25
    assert (told.training_images, told.validation_images) == (16, 4)
    assert told.training_patients == used.patient_count


def test_a_case_that_cannot_be_read_is_counted_as_skipped(resolve_job: Resolve, tmp_path: Path) -> None:
    write_prostate_site(tmp_path / "HK", "siemens_1.5t_endorectal", 5, 0, matrix=64, slices=3)
    (tmp_path / "HK" / "Case01.nii.gz").write_bytes(b"broken")
    (tmp_path / "HK" / "Case02_segmentation.nii.gz").unlink()
    experiment = resolve_job(JOB, {"data.height": 64, "data.width": 64})
    data = TASK.open_site(tmp_path / "HK", "HK", experiment, tmp_path / "cache")
    assert data.skipped() == {"not_gzip": 1, "image_without_mask": 1}
    assert sum(data.cases.values()) == 3
