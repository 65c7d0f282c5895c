"""Pictures of scored cases: their scores are those of the evaluation, what is shown is what the rule says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from harmofl.data.nuclei import NucleiImage
from harmofl.data.volumes import Volume
from harmofl.experiment import Experiment
from harmofl.tasks import Illustrating, load_task
from harmofl.tasks.nuclei import SHOWN, ScoredImages
from harmofl.tasks.prostate import ScoredVolume

Resolve = Callable[..., Experiment]
SMALL = {"data.height": 64, "data.width": 64}


def bright(images: Tensor) -> Tensor:
    """Two logits a pixel: foreground where the middle channel is above a half."""
    return torch.stack([torch.full_like(images[:, 1], 0.5), images[:, 1]], 1)


@pytest.mark.parametrize("job", ["harmofl_prostate", "harmofl_camelyon17", "harmofl_nuclei"])
def test_every_task_of_the_package_draws_pictures(resolve_job: Resolve, job: str) -> None:
    task = load_task(resolve_job(job))
    assert isinstance(task, Illustrating) and task.illustrates


def test_a_volume_is_shown_by_its_slice_with_the_most_prostate(resolve_job: Resolve) -> None:
    mask = np.zeros((4, 64, 64), np.uint8)
    mask[1, 10:20, 10:20], mask[2, 10:30, 10:30] = 1, 1
    image = mask.astype(np.float16)
    image[2, 25:30, 10:30] = 0  # 100 of the 400 pixels of slice 2 are missed
    task, case = load_task(resolve_job("harmofl_prostate", SMALL)), Volume("x", image, mask, (1, 1, 1), ())
    (whole,) = task.illustrate(bright, [ScoredVolume(case)], workers=0)  # type: ignore[attr-defined]
    assert whole.score == pytest.approx(2 * 400 / (400 + 500)) and whole.note == "slice 3 of 4"
    assert whole.score == task.evaluate(bright, [ScoredVolume(case)], workers=0).scores["dice"][0]
    assert whole.image.dtype == np.float32 and np.array_equal(whole.image, image[2])
    assert np.array_equal(whole.reference, mask[2] > 0) and np.array_equal(whole.predicted, image[2] > 0)
    (part,) = task.illustrate(bright, [ScoredVolume(case, [0, 1])], workers=0)  # type: ignore[attr-defined]
    assert part.note == "slice 2 of 4" and part.score == 1


def test_a_tissue_image_is_shown_by_its_part_with_the_most_nuclei(resolve_job: Resolve) -> None:
    target = np.zeros((SHOWN + 40, SHOWN + 70), np.uint8)
    target[-30:, -60:] = 1  # in the last corner alone
    target[-5:, -60:] = 255  # pixels that count not
    image = np.repeat((target == 1)[..., None], 3, 2).astype(np.uint8) * 255
    image[-5:, -60:] = 255  # predicted there all the same
    experiment = resolve_job("harmofl_nuclei", SMALL)
    split = ScoredImages([NucleiImage("case", "patient", image, target, ())], experiment)
    task = load_task(experiment)
    (shown,) = task.illustrate(bright, split, workers=0)  # type: ignore[attr-defined]
    assert shown.score == task.evaluate(bright, split, workers=0).scores["dice"][0] == 1
    assert shown.image.shape == (SHOWN, SHOWN, 3) and shown.image.max() == 1
    assert np.array_equal(shown.reference, target[-SHOWN:, -SHOWN:] == 1)
    assert np.array_equal(shown.predicted, shown.reference), "ignored pixels are nobody's"
    assert shown.note == f"part of {SHOWN + 70} x {SHOWN + 40} pixels"


def test_a_patch_is_scored_by_the_chance_of_its_class(
    resolve_job: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**SMALL, "demo.data.slides": 10, "demo.data.patches": 60}
    experiment = resolve_job("harmofl_camelyon17", changes, demo=True)
    task = load_task(experiment)
    task.write_demo(tmp_path, "hospital1", experiment)
    data = task.open_site(tmp_path, "hospital1", experiment, tmp_path)
    monkeypatch.setattr("harmofl.tasks.camelyon17.SHOWN", 5)

    def always_tumor(images: Tensor) -> Tensor:
        return torch.tensor([[0.0, 1.0]]).expand(len(images), 2)

    shown = list(task.illustrate(always_tumor, data.test, workers=0))  # type: ignore[attr-defined]
    assert len(data.test) > 5
    positions = [int(step) for step in np.linspace(0, len(data.test) - 1, 5)]
    labels = [int(data.test[position][1]) for position in positions]
    tumor = 1 / (1 + np.exp(-1))  # softmax of 0 and 1
    assert [held.score for held in shown] == pytest.approx([tumor if label else 1 - tumor for label in labels])
    assert {held.note for held in shown} <= {"tumor, called tumor", "normal, called tumor"}
    assert all(held.reference is None and held.image.shape == (64, 64, 3) for held in shown)
    assert np.array_equal(shown[0].image, data.test[0][0].permute(1, 2, 0).numpy())
