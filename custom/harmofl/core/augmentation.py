"""Flips and quarter turns of whole batches, on the batch's device."""

import torch
from torch import Tensor


def flip_and_rotate(
    images_BCHW: Tensor,
    masks_BHW: Tensor,
    generator: torch.Generator,
    count: int | None = None,
    rows: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Turn every image by 0, 90, 180 or 270 degrees and mirror half of them, the mask with it.

    All eight symmetries of the square are equally likely (the released code favors 0 degrees). Images that are not
    square are turned by 0 or 180 degrees only, which keeps their size. Pixels are moved and never mixed, so that masks
    keep their labels exactly. Targets that are not masks, such as class labels (B,), are left alone.

    Args:
        images_BCHW: any float type.
        masks_BHW: integer masks, or labels (B,).
        generator: CPU generator; decides everything.
        count: images of the whole batch where these are a part of one, which is turned as it would be in the whole.
        rows: which of the whole batch these are.
    """
    count = len(images_BCHW) if count is None else count
    square = images_BCHW.shape[-1] == images_BCHW.shape[-2]
    turns = (
        torch.randint(4, (count,), generator=generator)
        if square
        else 2 * torch.randint(2, (count,), generator=generator)
    )
    mirrored = torch.randint(2, (count,), generator=generator)
    kinds = (2 * turns + mirrored)[rows]
    # Images of one symmetry move together: a handful of kernels a batch, where one by one each image costs as many.
    places = kinds.argsort(stable=True).to(images_BCHW.device, non_blocking=True)
    has_masks = masks_BHW.ndim > 1
    images, masks = torch.empty_like(images_BCHW), torch.empty_like(masks_BHW) if has_masks else masks_BHW
    for kind, where in enumerate(places.split(torch.bincount(kinds, minlength=8).tolist())):
        if len(where):
            images.index_copy_(0, where, _move(images_BCHW.index_select(0, where), *divmod(kind, 2)))
            if has_masks:
                masks.index_copy_(0, where, _move(masks_BHW.index_select(0, where), *divmod(kind, 2)))
    return images, masks


def _move(planes: Tensor, turn: int, mirror: int) -> Tensor:
    moved = torch.rot90(planes, turn, dims=(-2, -1))
    return moved.flip(-1) if mirror else moved
