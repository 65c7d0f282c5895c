"""Scores of the nuclei task by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from harmofl.data.findings import CaseError
from harmofl.data.nuclei import NucleiCase, NucleiImage, read_nuclei
from harmofl.experiment import Experiment
from harmofl.tasks.nuclei import TASK, ScoredImages
from harmofl.tasks.single_images import image_use

JOB = "harmofl_nuclei"
SMALL = {"data.height": 64, "data.width": 64}
CLASSES = ("epithelial", "lymphocyte", "neutrophil", "macrophage")  # of MoNuSAC, in the order of their labels
Resolve = Callable[..., Experiment]


def predict_red(images: Tensor) -> Tensor:
    """Class by the red value in tenths, of 5 classes: logits of one where it is and of zero elsewhere."""
    numbers = (images[:, 0] * 10).round().long()
    return torch.nn.functional.one_hot(numbers, 5).permute(0, 3, 1, 2).float()


def picture(predicted: np.ndarray, target: np.ndarray) -> NucleiImage:
    """An image whose red channel makes `predict_red` answer `predicted`."""
    image = np.zeros((*target.shape, 3), np.uint8)
    image[..., 0] = np.rint(predicted * 25.5)
    return NucleiImage("case", "patient", image, target.astype(np.uint8), ())


def rectangle(value: int, rows: slice, columns: slice, shape: tuple[int, int] = (80, 100)) -> np.ndarray:
    plane: np.ndarray = np.zeros(shape, np.int64)
    plane[rows, columns] = value
    return plane


def test_dice_of_whole_images_by_hand(resolve_job: Resolve) -> None:
    target = rectangle(1, slice(10, 30), slice(10, 40))
    target[60:80, 0:50] = 255
    # 20 x 30 true pixels, 20 x 60 predicted ones that hold them; what is predicted on ignored pixels counts not
    half = picture(rectangle(1, slice(10, 30), slice(10, 70)) + rectangle(1, slice(60, 80), slice(0, 50)), target)
    nothing = np.zeros((80, 100), np.int64)
    missed = picture(nothing, rectangle(1, slice(70, 80), slice(90, 100)))
    empty = picture(nothing, nothing)
    small = picture(rectangle(1, slice(0, 9), slice(0, 9), (20, 30)), rectangle(1, slice(0, 9), slice(0, 9), (20, 30)))
    split = ScoredImages([half, missed, empty, small], resolve_job(JOB, SMALL))
    result = TASK.evaluate(predict_red, split, workers=0)
    assert set(result.scores) == {"dice"} and result.pooled == {}
    first, second, third, last = result.scores["dice"]
    assert first == pytest.approx(2 * 600 / (600 + 1200)) and second == 0 and math.isnan(third) and last == 1
    assert result.key_score == pytest.approx((2 / 3 + 0 + 1) / 3)  # the image without nuclei is undefined


def test_all_undefined_stays_undefined(resolve_job: Resolve) -> None:
    empty = picture(np.zeros((80, 100)), np.zeros((80, 100)))
    result = TASK.evaluate(predict_red, ScoredImages([empty], resolve_job(JOB, SMALL)), workers=0)
    assert result.key_score is None and math.isnan(result.scores["dice"][0])


def test_cell_types_are_scored_one_by_one_and_together(resolve_job: Resolve) -> None:
    target = rectangle(1, slice(0, 20), slice(0, 20)) + rectangle(2, slice(0, 20), slice(20, 40))
    predicted = rectangle(1, slice(0, 20), slice(0, 30)) + rectangle(2, slice(0, 20), slice(30, 40))
    experiment = resolve_job(JOB, {**SMALL, "reader.classes": "cell_types"})
    result = TASK.evaluate(predict_red, ScoredImages([picture(predicted, target)], experiment), workers=0)
    assert list(result.scores) == ["dice", *(f"dice_{name}" for name in CLASSES)]
    # epithelial: 400 of 600 and 400; lymphocyte: 200 of 200 and 400; the foreground is the same 800 pixels
    assert result.scores["dice"] == [1.0]
    assert result.scores["dice_epithelial"] == [pytest.approx(2 * 400 / 1000)]
    assert result.scores["dice_lymphocyte"] == [pytest.approx(2 * 200 / 600)]
    assert math.isnan(result.scores["dice_neutrophil"][0]) and math.isnan(result.scores["dice_macrophage"][0])
    assert result.key_score == 1.0


def test_a_binary_mask_is_no_picture_of_cell_types(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "a_mask.png"]
    for path, channels in zip(paths, (3, 1), strict=True):
        plane = rectangle(255, slice(10, 30), slice(10, 40)).astype(np.uint8)
        Image.fromarray(np.repeat(plane[..., None], channels, -1).squeeze()).save(path)
    with pytest.raises(CaseError) as caught:
        read_nuclei(NucleiCase("a", "a", *paths), CLASSES)  # 255 is ignored: the site would train on background alone
    assert caught.value.finding.code == "no_cell_types"


def test_images_of_one_patient_are_one_unit(resolve_job: Resolve) -> None:
    plane = rectangle(1, slice(0, 9), slice(0, 9), (20, 30))
    images = [replace(picture(plane, plane), patient=patient) for patient in ("P7", "P2", "P7", "P9")]
    result = TASK.evaluate(predict_red, ScoredImages(images, resolve_job(JOB, SMALL)), workers=0)
    assert result.patients == [0, 1, 0, 2]


def test_the_share_of_nuclei_that_is_told_of_an_image_is_that_of_its_mask(resolve_job: Resolve, tmp_path: Path) -> None:
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:16, :, 0] = 26  # a quarter of the pixels is of class 1, the rest background
    Image.fromarray(picture).save(tmp_path / "a.png")
    answer = image_use("nuclei").read(tmp_path / "a.png", resolve_job(JOB, SMALL)).answer(predict_red)
    assert answer.labels is not None and int(answer.labels.sum()) == 16 * 64
    assert answer.summary == "25.0 % of the pixels in nuclei"
