"""The Dice loss that leaves pixels out: against its definition, and what left-out pixels cannot do."""

import numpy as np
import pytest
import torch
from monai.losses.dice import DiceLoss, MaskedDiceLoss

from harmofl.core.losses import DiceLossIgnoring

IGNORED = 255
CLASSES = 3


def logits_and_targets(seed=0, share_ignored=0.3, size=8):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, CLASSES, size, size, generator=generator)
    targets = torch.randint(CLASSES, (2, size, size), generator=generator)
    left_out = torch.rand(2, size, size, generator=generator) < share_ignored
    return logits, torch.where(left_out, IGNORED, targets)


def loss_and_gradient(logits, targets):
    logits = logits.clone().requires_grad_()
    loss = DiceLossIgnoring(IGNORED)(logits, targets)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("share_ignored", [0.0, 0.3, 0.9])
def test_the_loss_is_one_minus_the_mean_dice_of_the_pixels_that_count(share_ignored):
    logits, targets = logits_and_targets(share_ignored=share_ignored)
    loss, _ = loss_and_gradient(logits, targets)
    # By pixels: those that count, as one long list over the batch, in float64
    rows = logits.permute(0, 2, 3, 1).reshape(-1, CLASSES).double().numpy()
    labels = targets.flatten().numpy()
    rows, labels = rows[labels != IGNORED], labels[labels != IGNORED]
    shares = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    dice = [2 * shares[labels == c, c].sum() / (shares[:, c].sum() + (labels == c).sum()) for c in range(CLASSES)]
    assert float(loss) == pytest.approx(1 - np.mean(dice), abs=1e-5)  # MONAI adds 1e-5 above and below


def test_pixels_left_out_have_no_gradient_and_the_others_have():
    logits, targets = logits_and_targets()
    _, gradient = loss_and_gradient(logits, targets)
    left_out = (targets == IGNORED).unsqueeze(1).expand_as(logits)
    assert bool(left_out.any())
    assert not bool(gradient[left_out].any())
    assert bool((gradient[~left_out] != 0).all())


def test_what_the_network_says_at_pixels_left_out_changes_nothing():
    logits, targets = logits_and_targets()
    elsewhere = torch.where((targets == IGNORED).unsqueeze(1), 50 * torch.randn_like(logits), logits)
    assert not torch.equal(elsewhere, logits)
    for first, second in zip(loss_and_gradient(logits, targets), loss_and_gradient(elsewhere, targets), strict=True):
        assert torch.equal(first, second)


def test_images_cut_to_the_pixels_that_count_have_the_same_loss():
    logits, targets = logits_and_targets(share_ignored=0)
    framed, frame = torch.randn(2, CLASSES, 12, 12), torch.full((2, 12, 12), IGNORED)
    framed[:, :, 2:10, 2:10], frame[:, 2:10, 2:10] = logits, targets
    loss, gradient = loss_and_gradient(framed, frame)
    cut_loss, cut_gradient = loss_and_gradient(logits, targets)
    torch.testing.assert_close(loss, cut_loss)
    torch.testing.assert_close(gradient[:, :, 2:10, 2:10], cut_gradient)


def test_without_pixels_left_out_it_is_the_plain_loss():
    logits, targets = logits_and_targets(share_ignored=0)
    plain = DiceLoss(to_onehot_y=True, softmax=True, batch=True)(logits, targets.unsqueeze(1))
    torch.testing.assert_close(loss_and_gradient(logits, targets)[0], plain)


def test_the_masked_loss_alone_would_take_pixels_left_out_for_background():
    logits, targets = logits_and_targets()
    counted = (targets != IGNORED).unsqueeze(1)
    alone = MaskedDiceLoss(to_onehot_y=True, softmax=True, batch=True)(logits, targets.unsqueeze(1), counted.float())
    assert float(alone - loss_and_gradient(logits, targets)[0]) > 0.01


def test_a_batch_without_a_pixel_that_counts_has_no_loss_and_no_gradient():
    logits, targets = logits_and_targets(share_ignored=1.1)
    loss, gradient = loss_and_gradient(logits, targets)
    assert float(loss) == 0.0
    assert not bool(gradient.any())


def test_a_class_that_the_batch_does_not_hold_adds_one_and_hardly_any_gradient():
    logits, targets = logits_and_targets()
    targets[targets == 2] = 1
    loss, gradient = loss_and_gradient(logits, targets)
    # the mean over three classes of which only two are held
    alone = logits.clone().requires_grad_()
    planes = torch.stack([targets == 0, targets == 1], dim=1).float()
    counted = (targets != IGNORED).unsqueeze(1).float()
    two = MaskedDiceLoss(batch=True)(alone.softmax(1)[:, :2], planes, counted)
    (2 / 3 * two).backward()
    assert float(loss) == pytest.approx((2 * float(two.detach()) + 1) / 3, abs=1e-5)
    torch.testing.assert_close(gradient, alone.grad, atol=1e-7, rtol=1e-3)


def test_a_right_answer_costs_nothing():
    _, targets = logits_and_targets()
    sure = 100.0 * torch.nn.functional.one_hot(targets.clamp(max=CLASSES - 1), CLASSES).permute(0, 3, 1, 2)
    assert float(DiceLossIgnoring(IGNORED)(sure, targets)) == pytest.approx(0, abs=1e-6)


def test_a_label_that_is_no_class_is_an_error():
    logits, targets = logits_and_targets()
    targets[0, 0, 0] = CLASSES
    with pytest.raises(RuntimeError, match="out of bounds"):
        DiceLossIgnoring(IGNORED)(logits, targets)
