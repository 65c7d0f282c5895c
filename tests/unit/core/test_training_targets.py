"""A round of training on every kind of target: labels of whole images, and masks with pixels left out."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from toy_segmentation import SIZE, dataset, equal, fitted, normalization, settings

from harmofl.core.losses import DiceLossIgnoring
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import TrainingError, build_optimizer, fit_round, predict

IGNORED = 255


def trained_classifier(data, seed=1, rounds=1):
    """A classifier of a few layers, trained with flips and turns; returns it and the last round's result."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        )
    optimizer = WeightPerturbation(build_optimizer(model, "adam", 0.05, 0.9, 0.0), 0.05, model)
    layer = normalization(intensity="none")
    for _ in range(rounds):
        result = fit_round(model, layer, optimizer, nn.functional.cross_entropy, data, settings=settings(), seed=seed)
    return model, result


def labelled_images():
    """Whole images, bright where the label is 1: no turn can hide that."""
    labels = torch.arange(12) % 2
    images = torch.rand(12, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    return TensorDataset(images + labels.reshape(-1, 1, 1, 1), labels)


def test_labels_of_whole_images_can_be_learned_with_flips_and_turns():
    data = labelled_images()
    model, result = trained_classifier(data, rounds=15)
    images, labels = data.tensors
    assert result.images == 12
    assert torch.equal(model(images).argmax(1), labels)


def test_a_round_on_labels_depends_on_its_seed_alone():
    data = labelled_images()
    first, again, other = (trained_classifier(data, seed)[0] for seed in (1, 1, 2))
    assert equal(first, again)
    assert not equal(first, other)


def test_masks_with_pixels_left_out_can_be_learned_with_flips_and_turns():
    images, masks = dataset().tensors
    left_out = torch.zeros_like(masks, dtype=torch.bool)
    left_out[:, :10, 3:] = True  # half of the pixels, without a symmetry: moved the wrong way, others would count
    found = {}
    for name, value in {"left out": torch.full_like(masks, IGNORED), "wrong": 1 - masks}.items():
        data = TensorDataset(images, torch.where(left_out, value, masks))
        model, layer, _, result = fitted(data, loss=DiceLossIgnoring(IGNORED), rounds=20, name="adam")
        assert result.skipped_steps == 0
        found[name] = float((predict(model, layer, images, 4).argmax(1) == masks).float().mean())
    assert found["left out"] > 0.9  # measured: 0.94
    assert found["wrong"] < 0.6  # measured 0.44, which is what the same pixels teach where they count


def test_an_image_without_a_pixel_that_counts_is_skipped_and_fails_only_where_no_image_counts():
    images, masks = dataset(count=4).tensors
    blank, loss = torch.full_like(masks, IGNORED), DiceLossIgnoring(IGNORED)
    blank[0] = masks[0]
    result = fitted(TensorDataset(images, blank), loss=loss, batch_size=1)[3]
    assert (result.steps, result.skipped_steps) == (4, 3)  # no gradient has no direction to perturb along
    blank[0] = IGNORED
    with pytest.raises(TrainingError, match="none of 4 steps.*do the targets hold anything that counts"):
        fitted(TensorDataset(images, blank), loss=loss, batch_size=1)
