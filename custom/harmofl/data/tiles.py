"""Square tiles of images of nuclei for training, and whole images scored tile by tile."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from harmofl.data.imagescope import IGNORED
from harmofl.data.nuclei import NucleiImage

OVERLAP = 0.25  # of neighboring tiles in a whole image, weighted less toward their borders
TILES_AT_ONCE = 4


class NucleiTiles(Dataset[tuple[Tensor, Tensor]]):
    """Tiles that cover every image, each as (3, S, S) float32 in 0..1 with its (S, S) int64 target.

    They lie on a regular grid, its last row and column shifted inward to the edge of the image. An image smaller than
    a tile is continued by reflection to the right and below, its target by pixels that do not count.

    Args:
        images: the images of one part of a split.
        size: S in pixels.

    Attributes:
        keys: name of the image, top row and left column of each tile.
        patients: whose each tile is.
    """

    def __init__(self, images: Sequence[NucleiImage], size: int) -> None:
        self.images = list(images)
        self.size = size
        self._index = [
            (position, top, left)
            for position, image in enumerate(self.images)
            for top in tile_starts(image.target.shape[0], size)
            for left in tile_starts(image.target.shape[1], size)
        ]
        self.keys = [(self.images[position].name, top, left) for position, top, left in self._index]
        self.patients = [self.images[position].patient for position, _, _ in self._index]

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self._index)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        """Return image (3, S, S) float32 in 0..1 and target (S, S) int64 of one tile."""
        image, target = self.stored(item)
        return image.float() / 255, target.long()

    def stored(self, item: int) -> tuple[Tensor, Tensor]:
        """Return the same tile in uint8, the image in 0..255."""
        position, top, left = self._index[item]
        image, size = self.images[position], self.size
        tile = image.image[top : top + size, left : left + size]
        target = image.target[top : top + size, left : left + size]
        rows, columns = size - target.shape[0], size - target.shape[1]
        if rows or columns:
            target = np.pad(target, ((0, rows), (0, columns)), constant_values=IGNORED)
        return torch.from_numpy(_reflected(tile, rows, columns)).permute(2, 0, 1), torch.from_numpy(target)


def tile_starts(length: int, size: int) -> list[int]:
    """Return where tiles start so that they cover a length, the last one shifted inward to end with it."""
    return [*range(0, length - size, size), max(length - size, 0)]


def most_tiles(pixels: int, size: int) -> int:
    """Return how many tiles an image of at most so many pixels gives at most, whatever its shape: a row of pixels does.

    With a and b pixels along the edges there are ceil(a / s) ceil(b / s) tiles. Where a <= s that is ceil(b / s), most
    for a = 1. Where both are larger, each factor is below twice its fraction: 4 a b / s^2, less than a b / s for s > 4.
    """
    return -(-pixels // size)


def image_tensor(picture: NDArray[np.uint8]) -> Tensor:
    """Return a picture (H, W, 3) uint8 as (3, H, W) float32 in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).float() / 255


def whole_image_logits(predict: Callable[[Tensor], Tensor], image: NucleiImage, size: int) -> Tensor:
    """Return the logits of a whole image, (1, K, H, W).

    Tiles of the training size overlap by a quarter and are blended by MONAI's sliding window; whatever `predict` does
    to a batch before the network, as the amplitude step, it does to tiles as in training.

    Args:
        predict: logits (B, K, S, S) of tiles (B, 3, S, S).
        image: the image, of any size.
        size: S in pixels.
    """
    from monai.inferers.utils import sliding_window_inference

    height, width = image.target.shape
    picture = _reflected(image.image, max(size - height, 0), max(size - width, 0))
    batch = image_tensor(picture).unsqueeze(0)
    logits = sliding_window_inference(batch, (size, size), TILES_AT_ONCE, predict, overlap=OVERLAP, mode="gaussian")
    assert isinstance(logits, Tensor), "one batch in, one out"
    return logits[..., :height, :width]


def _reflected(picture: NDArray[np.uint8], rows: int, columns: int) -> NDArray[np.uint8]:
    return np.pad(picture, ((0, rows), (0, columns), (0, 0)), mode="reflect") if rows or columns else picture
