"""Flips and quarter turns of whole batches, on the batch's device."""

import torch
from torch import Tensor


def flip_and_rotate(images_BCHW: Tensor, masks_BHW: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Turn every image by 0, 90, 180 or 270 degrees and mirror half of them, the mask with it.

    All eight symmetries of the square are equally likely (the released code favors 0 degrees). Images that are not
    square are turned by 0 or 180 degrees only, which keeps their size. Pixels are moved and never mixed, so that masks
    keep their labels exactly. Targets that are not masks, such as class labels (B,), are left alone.

    Args:
        images_BCHW: any float type.
        masks_BHW: integer masks, or labels (B,).
        generator: CPU generator; decides everything.
    """
    count = len(images_BCHW)
    square = images_BCHW.shape[-1] == images_BCHW.shape[-2]
    turns = (
        torch.randint(4, (count,), generator=generator)
        if square
        else 2 * torch.randint(2, (count,), generator=generator)
    )
    mirrored = torch.randint(2, (count,), generator=generator)
    has_masks = masks_BHW.ndim > 1
    images, masks = torch.empty_like(images_BCHW), torch.empty_like(masks_BHW) if has_masks else masks_BHW
    for index, (turn, mirror) in enumerate(zip(turns.tolist(), mirrored.tolist(), strict=True)):
        images[index] = _move(images_BCHW[index], turn, mirror)
        if has_masks:
            masks[index] = _move(masks_BHW[index], turn, mirror)
    return images, masks


def _move(plane: Tensor, turn: int, mirror: int) -> Tensor:
    moved = torch.rot90(plane, turn, dims=(-2, -1))
    return moved.flip(-1) if mirror else moved
