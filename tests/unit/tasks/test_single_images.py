"""One image alone: which files are images, how it is cut, and the mask that is written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from harmofl.data.unlabeled import FittedScan
from harmofl.experiment import Experiment
from harmofl.tasks.single_images import Answer, image_use, scan_image, tissue_image

Resolve = Callable[..., Experiment]
SMALL = {"data.height": 64, "data.width": 64}


@pytest.mark.parametrize(
    ("name", "beside", "is_mask"),
    [
        ("Case00.nii.gz", "Case00_segmentation.nii.gz", False),
        ("Case00_segmentation.nii.gz", "Case00.nii.gz", True),
        ("Case00_SEGMENTATION.nii", None, True),
        # a name of another program says it only beside its image
        ("Case00_label.nii.gz", "Case00.nii.gz", True),
        ("Case00_label.nii.gz", None, False),
        ("mask_01.nii", None, False),
    ],
)
def test_a_volume_is_a_mask_by_its_name(tmp_path: Path, name: str, beside: str | None, is_mask: bool) -> None:
    for file in filter(None, (name, beside)):
        (tmp_path / file).touch()
    assert image_use("prostate").is_annotation(tmp_path / name) is is_mask


@pytest.mark.parametrize(
    ("name", "beside", "is_mask"),
    [
        ("a.png", "a_mask.png", False),
        ("a_mask.png", None, True),
        ("a_label.png", "a.png", True),
        ("a_label.png", None, False),
        ("GT_01/a.png", None, True),
        ("images/a.png", None, False),
    ],
)
def test_a_picture_is_a_mask_by_its_name_or_its_folder(
    tmp_path: Path, name: str, beside: str | None, is_mask: bool
) -> None:
    for file in filter(None, (name, beside)):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert image_use("nuclei").is_annotation(tmp_path / name) is is_mask


def test_tissue_is_cut_into_tiles_that_cover_it(resolve_job: Resolve) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (5 * 64 - 10, 4 * 64, 3), np.uint8)
    parts = list(tissue_image(picture, resolve_job("harmofl_nuclei", SMALL)).inputs())
    # 5 rows of 4 tiles, 16 at a time; the last row is shifted inward
    assert [tuple(part.shape) for part in parts] == [(16, 3, 64, 64), (4, 3, 64, 64)]
    tiles = torch.cat(parts)
    for number, tile in enumerate(tiles):
        top, left = min(number // 4 * 64, 5 * 64 - 10 - 64), number % 4 * 64
        expected = picture[top : top + 64, left : left + 64].transpose(2, 0, 1) / 255
        np.testing.assert_allclose(tile.numpy(), expected, atol=1e-6)


def prostate_where_bright(windows_SCHW: Tensor) -> Tensor:
    """Two logits a pixel: prostate where the slice itself, the middle channel, is above a half."""
    return torch.stack([torch.full_like(windows_SCHW[:, 1], 0.5), windows_SCHW[:, 1]], 1)


def test_a_scan_is_answered_by_a_mask_of_one_class_and_its_volume() -> None:
    image = np.zeros((3, 64, 64), np.float32)
    image[0, 10:20, 10:20], image[2, 10:20, 10:30] = 1, 1
    image[:, 0, 0] = 0.25  # the slice between has contrast too
    answer = scan_image(FittedScan(image, (3, 64, 64), 0.01, ())).answer(prostate_where_bright)
    assert answer.labels is not None and np.array_equal(answer.labels, image > 0.5)
    # 100 and 200 voxels of 0.01 mL
    assert answer.summary == "3.0 mL on 2 of 3 slices" and answer.classes == 1


@pytest.mark.parametrize(("classes", "shown"), [(1, [0, 255]), (4, [0, 1, 2, 3, 4])])
def test_a_mask_of_tissue_is_written_as_it_is(tmp_path: Path, classes: int, shown: list[int]) -> None:
    """Nuclei are white for people; cell types are their labels, which the palette shows in colors."""
    labels = np.random.default_rng(0).integers(0, classes + 1, (20, 30), np.uint8)
    use, target = image_use("nuclei"), tmp_path / "a_mask.png"
    use.write(Answer(labels, (), "", classes), tmp_path / "a.png", target)
    with Image.open(target) as picture:
        assert np.array_equal(np.asarray(picture), np.array(shown, np.uint8)[labels])
        assert picture.mode == ("L" if classes == 1 else "P")
    assert use.is_answer(target) and [path.name for path in tmp_path.iterdir()] == ["a_mask.png"]
