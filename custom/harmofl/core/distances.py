"""Distances between the surfaces of two masks, in mm."""

import warnings
from math import nan

import torch
from torch import Tensor

PERCENTILE = 95


def surface_distances(
    prediction_SHW: Tensor, mask_SHW: Tensor, spacing: tuple[float, float, float]
) -> tuple[float, float]:
    """HD95 and ASD of one whole case.

    HD95 is the larger of the two 95th percentiles of the distances from the voxels of one surface to the other surface;
    ASD is the mean over the voxels of both surfaces. A voxel of a mask is on its surface if one of its six neighbors is
    not in the mask.

    Args:
        prediction_SHW: predicted classes, (S, H, W) integer; above 0 is foreground.
        mask_SHW: true classes, (S, H, W) integer.
        spacing: mm, order slice, row, column.

    Returns:
        Both in mm; NaN where one of the masks is empty, since there is no surface to measure from.
    """
    predicted, true = prediction_SHW > 0, mask_SHW > 0
    if not (bool(predicted.any()) and bool(true.any())):
        return nan, nan
    from monai.metrics import compute_average_surface_distance, compute_hausdorff_distance

    pair = [mask[None, None].to(torch.uint8).cpu() for mask in (predicted, true)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # MONAI warns about an argument that it sets itself
        hausdorff = compute_hausdorff_distance(*pair, include_background=True, percentile=PERCENTILE, spacing=spacing)
        average = compute_average_surface_distance(*pair, include_background=True, symmetric=True, spacing=spacing)
    return float(hausdorff), float(average)
