"""Tiles cover an image, and a whole image is put together again from its tiles."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harmofl.data.imagescope import IGNORED
from harmofl.data.nuclei import NucleiImage
from harmofl.data.tiles import NucleiTiles, tile_starts, whole_image_logits


def numbered(rows: int, columns: int, name: str = "a") -> NucleiImage:
    """Red holds the row, green the column, and the target repeats the row, so that a tile shows where it was cut."""
    row, column = np.mgrid[:rows, :columns].astype(np.uint8)
    image = np.stack([row, column, np.full_like(row, 7)], axis=-1)
    return NucleiImage(name, name, image, row % 200, ())


@given(st.integers(1, 500), st.integers(1, 200))
def test_tiles_cover_every_pixel_and_stay_inside(length: int, size: int) -> None:
    starts = tile_starts(length, size)
    covered = {pixel for start in starts for pixel in range(start, start + size)}
    assert covered >= set(range(length))
    assert len(starts) == max(1, -(-length // size))  # as few as can be
    if length >= size:
        assert covered == set(range(length))
    assert starts == sorted(set(starts))


def test_a_tile_holds_the_pixels_of_its_place() -> None:
    tiles = NucleiTiles([numbered(8, 8), numbered(10, 20, "b")], 8)
    # 10 rows: 0 and 2; 20 columns: 0, 8 and 12
    places = [(top, left) for top in (0, 2) for left in (0, 8, 12)]
    assert tiles.keys == [("a", 0, 0), *(("b", *place) for place in places)]
    assert len(tiles) == 7
    for item, (top, left) in enumerate([(0, 0), *places]):
        image, target = tiles[item]
        assert (image.shape, image.dtype) == ((3, 8, 8), torch.float32)
        assert (target.shape, target.dtype) == ((8, 8), torch.int64)
        torch.testing.assert_close(image[0, :, 0] * 255, torch.arange(top, top + 8.0))
        torch.testing.assert_close(image[1, 0] * 255, torch.arange(left, left + 8.0))
        assert target[:, 3].tolist() == list(range(top, top + 8))
        assert float(image[2].max()) == pytest.approx(7 / 255)


def test_a_small_image_is_reflected_and_its_target_ignored() -> None:
    image, target = NucleiTiles([numbered(3, 10)], 8)[0]
    assert (image[0, :, 0] * 255).round().tolist() == [0, 1, 2, 1, 0, 1, 2, 1]
    assert target[:, 0].tolist() == [0, 1, 2] + 5 * [IGNORED]
    image, target = NucleiTiles([numbered(1, 1)], 4)[0]
    assert image[0].unique().tolist() == [0]
    assert int((target == IGNORED).sum()) == 15


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (1, 30), (21, 34), (9, 8)])
def test_a_whole_image_comes_back_from_its_tiles(shape: tuple[int, int]) -> None:
    """Tiles given back as they are blend to the image, whatever the weights."""
    sizes = []

    def same(batch: Tensor) -> Tensor:
        sizes.append(tuple(batch.shape[1:]))
        return batch

    image = numbered(*shape)
    logits = whole_image_logits(same, image, 8)
    expected = torch.from_numpy(image.image).permute(2, 0, 1).float().unsqueeze(0) / 255
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert set(sizes) == {(3, 8, 8)}


def test_each_tile_is_normalized_by_itself() -> None:
    """The mean taken off each tile is that of the tile, not of the image: halves of 40 and 200 both become 0."""
    halves = np.full((8, 16, 3), 40, np.uint8)
    halves[:, 8:] = 200
    image = NucleiImage("a", "a", halves, np.zeros((8, 16), np.uint8), ())
    logits = whole_image_logits(lambda batch: batch - batch.mean(dim=(2, 3), keepdim=True), image, 8)
    # starts 0, 6 and 8: columns 0..5 lie in the first alone, 14 and 15 in the last alone
    assert float(logits[..., :6].abs().max()) < 1e-6
    assert float(logits[..., 14:].abs().max()) < 1e-6
