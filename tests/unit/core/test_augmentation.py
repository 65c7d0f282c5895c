"""Augmentation: masks move with their images, the symmetries of the square are equally likely."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from harmofl.core.augmentation import flip_and_rotate


def generator(seed):
    return torch.Generator().manual_seed(seed)


def planes(count, height, width, channels=1):
    """Images without any symmetry: every pixel has a value of its own; the mask is the first channel's number."""
    numbers = torch.arange(height * width).reshape(1, 1, height, width)
    images = numbers.float() + 1000.0 * torch.arange(channels).reshape(1, -1, 1, 1)
    return images.repeat(count, 1, 1, 1), numbers[:, 0].repeat(count, 1, 1)


def symmetries(plane):
    """The eight of a square, four of a rectangle, by NumPy: turns, then a mirror image of each."""
    turns = [np.rot90(plane, turn) for turn in range(4)]
    return [moved for turned in turns for moved in (turned, np.fliplr(turned)) if moved.shape == plane.shape]


@pytest.mark.parametrize(("height", "width"), [(5, 5), (4, 4), (4, 6), (5, 3)])
def test_every_image_moves_by_a_symmetry_and_its_mask_with_it(height, width):
    images, masks = planes(40, height, width, channels=3)
    moved, moved_masks = flip_and_rotate(images, masks, generator(0))
    assert (moved.shape, moved_masks.shape) == (images.shape, masks.shape)
    allowed = [plane.tolist() for plane in symmetries(masks[0].numpy())]
    assert len(allowed) == (8 if height == width else 4)
    for image, mask in zip(moved, moved_masks, strict=True):
        assert mask.tolist() in allowed
        for channel, plane in enumerate(image):
            assert torch.equal(plane.long() - 1000 * channel, mask)


@pytest.mark.parametrize(("size", "count"), [((3, 3), 8), ((3, 4), 4)])
def test_the_symmetries_are_equally_likely(size, count):
    images, masks = planes(50, *size)
    seen = Counter()
    for seed in range(80):
        _, moved = flip_and_rotate(images, masks, generator(seed))
        seen.update(str(mask.tolist()) for mask in moved)
    # 4000 draws of probability p: mean 4000 p, standard deviation sqrt(4000 p (1 - p)); 5 of them leave a chance
    # below 1e-6 that one of the classes lies outside.
    expected = 4000 / count
    bound = 5 * math.sqrt(expected * (1 - 1 / count))
    assert len(seen) == count
    assert all(abs(number - expected) < bound for number in seen.values())


@pytest.mark.parametrize("size", [(5, 5), (3, 4)])
def test_the_draws_are_quarter_turns_then_a_mirror_image_of_the_columns(size):
    """A seed gives the same images in every version: NumPy moves them by what the same generator draws."""
    images, masks = planes(40, *size)
    same = generator(7)
    turns = torch.randint(4, (40,), generator=same) if size == (5, 5) else 2 * torch.randint(2, (40,), generator=same)
    mirrored = torch.randint(2, (40,), generator=same)
    assert len(set(zip(turns.tolist(), mirrored.tolist(), strict=True))) == (8 if size == (5, 5) else 4)
    moved, moved_masks = flip_and_rotate(images, masks, generator(7))
    for index, (turn, mirror) in enumerate(zip(turns.tolist(), mirrored.tolist(), strict=True)):
        expected = np.rot90(masks[index].numpy(), turn)
        expected = np.fliplr(expected) if mirror else expected
        assert moved_masks[index].tolist() == moved[index, 0].long().tolist() == expected.tolist()


def test_images_of_a_batch_move_independently():
    images, masks = planes(2, 3, 3)
    pairs = Counter()
    for seed in range(640):
        _, moved = flip_and_rotate(images, masks, generator(seed))
        pairs[str(moved[0].tolist()) == str(moved[1].tolist())] += 1
    # equal by chance in 1 of 8: mean 80, standard deviation sqrt(640 * 7) / 8 = 8.4, times 5
    assert abs(pairs[True] - 80) < 42


def test_one_seed_gives_one_result_and_another_seed_another():
    images, masks = planes(16, 6, 6, channels=2)
    first, again, other = (flip_and_rotate(images, masks, generator(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_inputs_and_the_global_random_state_are_left_alone():
    images, masks = planes(8, 4, 4)
    before = (images.clone(), masks.clone(), torch.get_rng_state())
    flip_and_rotate(images, masks, generator(3))
    assert torch.equal(images, before[0])
    assert torch.equal(masks, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_labels_of_whole_images_stay():
    images, _ = planes(8, 4, 4)
    labels = torch.arange(8)
    moved, kept = flip_and_rotate(images, labels, generator(0))
    assert kept is labels
    assert not torch.equal(moved, images)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8])
@pytest.mark.parametrize(("height", "width"), [(9, 9), (6, 10)])
def test_pixels_left_out_stay_with_their_image_exactly(kind, height, width):
    # 255 is no class: an average with a neighbor would be found as another number, a shift by what the image holds
    draw = torch.Generator().manual_seed(5)
    masks = torch.tensor([0, 1, 4, 255])[torch.randint(4, (32, height, width), generator=draw)].to(kind)
    moved, moved_masks = flip_and_rotate(masks.float().unsqueeze(1), masks, generator(2))
    assert moved_masks.dtype == kind
    assert moved_masks.unique().tolist() == [0, 1, 4, 255]
    assert torch.equal(moved[:, 0], moved_masks.float())
    assert torch.equal((moved_masks == 255).sum((1, 2)), (masks == 255).sum((1, 2)))


def test_labels_and_masks_move_their_images_alike():
    images, masks = planes(16, 6, 6, channels=3)
    with_masks, with_labels = (flip_and_rotate(images, t, generator(4))[0] for t in (masks, torch.arange(16)))
    assert torch.equal(with_masks, with_labels)


def test_type_and_memory_format_are_kept():
    images, masks = planes(4, 4, 4, channels=3)
    half = images.half().contiguous(memory_format=torch.channels_last)
    moved, moved_masks = flip_and_rotate(half, masks.to(torch.uint8), generator(0))
    assert (moved.dtype, moved_masks.dtype) == (torch.float16, torch.uint8)
    assert moved.is_contiguous(memory_format=torch.channels_last)
