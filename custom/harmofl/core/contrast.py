"""Whether a channel of an image shows anything: what has no contrast is in no amplitude statistic.

A constant plane has no amplitude but that of its mean. Its log profile would be the floor of every bin and its phase
rounding noise, so that one blank slice would move the mean of a whole volume. A channel of an image counts for itself:
in a window of three slices a blank slice is left out of the channel where it lies, and its neighbors are kept.
"""

import torch
from torch import Tensor

LEAST_CONTRAST = 1e-5  # range of intensities relative to the largest; harmofl.data.voxels has the same number for files
_STRIDE = 16  # pixels between those that are looked at first


def has_contrast(images_BCHW: Tensor) -> Tensor:
    """Which channels of which images have contrast, (B, C) bool; see `contrast_of_planes`.

    On a CPU some pixels of a grid are compared first, which settles it for nearly every image at little cost.
    """
    if images_BCHW.device.type == "cpu" and not torch.compiler.is_compiling():
        # twice the limit: a plane without contrast cannot pass, whatever its other pixels do to the largest intensity
        some = contrast_of_planes(images_BCHW[..., ::_STRIDE, ::_STRIDE], 2 * LEAST_CONTRAST)
        if bool(some.all()):
            return some
    return contrast_of_planes(images_BCHW)


def contrast_of_planes(images_BCHW: Tensor, least: float = LEAST_CONTRAST) -> Tensor:
    """Which planes (H, W) vary by more than `least` times their largest absolute intensity, (B, C) bool.

    A plane that holds NaN counts as one with contrast: whatever looks for such values still finds them.
    """
    low = images_BCHW.amin((-2, -1)).float()
    high = images_BCHW.amax((-2, -1)).float()
    return ~(high - low <= least * torch.maximum(low.abs(), high.abs()))
