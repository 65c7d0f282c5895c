"""Whether a channel of an image shows anything: what has no contrast is in no amplitude statistic.

A constant plane has no amplitude but that of its mean. Its log profile would be the floor of every bin and its phase
rounding noise, so that one blank slice would move the mean of a whole volume. A channel of an image counts for itself:
in a window of three slices a blank slice is left out of the channel where it lies, and its neighbors are kept.
"""

import torch
from torch import Tensor

from harmofl.core.device_kinds import kind_of

LEAST_CONTRAST = 1e-5  # range of intensities relative to the largest; harmofl.data.voxels has the same number for files
_LOOKS = 8  # rows and columns of pixels that are looked at first


def has_contrast(images_BCHW: Tensor) -> Tensor:
    """Which channels of which images have contrast, (B, C) bool; see `contrast_of_planes`.

    On a CPU some pixels of each plane are compared first, which settles it for nearly every image at little cost.
    """
    if not kind_of(images_BCHW.device).runs_ahead and not torch.compiler.is_compiling():
        height, width = images_BCHW.shape[-2:]
        some = images_BCHW[..., :: max(1, height // _LOOKS), :: max(1, width // _LOOKS)].flatten(-2)
        low, high = some.aminmax(dim=-1)
        # twice the limit: a plane without contrast cannot pass, whatever its other pixels do to the largest intensity
        found = _differ(low, high, 2 * LEAST_CONTRAST)
        if bool(found.all()):
            return found
    return contrast_of_planes(images_BCHW)


def contrast_of_planes(images_BCHW: Tensor) -> Tensor:
    """Which planes (H, W) vary by more than 1e-5 of their largest absolute intensity, (B, C) bool.

    A plane that holds NaN counts as one with contrast: whatever looks for such values still finds them.
    """
    return _differ(images_BCHW.amin((-2, -1)), images_BCHW.amax((-2, -1)), LEAST_CONTRAST)


def _differ(low: Tensor, high: Tensor, least: float) -> Tensor:
    low, high = low.float(), high.float()
    return ~(high - low <= least * torch.maximum(low.abs(), high.abs()))
