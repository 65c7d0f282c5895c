"""Radial frequency bins: the log profile of an amplitude spectrum and the one smooth gain of a site.

Both work on the half plane of ``rfft2``, (H, W // 2 + 1). Bins are half octaves of the radial frequency f in cycles a
pixel: bin j lies around 2^(-n + j / 2), j = 0..2n - 2, with n = 6 for images up to 64 pixels and ceil(log2) of the
longer side beyond. All sites need the same pixel spacing.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

PROFILE_FLOOR = 1e-6
GAIN_LIMIT = math.log(4.0)


class RadialBins(NamedTuple):
    """Order and weights that sum a half plane by half-octave bins of radial frequency."""

    order: Tensor  # flat half-plane indices sorted by bin, without DC
    weights: Tensor  # 2, or 1 where a coefficient is its own conjugate's column, in that order
    sizes: list[int]  # coefficients a bin
    totals: Tensor  # summed weight a bin
    source: Tensor  # for every bin the nearest one that is not empty


def bin_count(height: int, width: int) -> int:
    """Number of bins for images of this size in pixels."""
    return 2 * _octaves(height, width) - 1


def bin_sizes(height: int, width: int) -> Tensor:
    """Number of coefficients of the whole plane, DC left out, in every bin, (bins,) float64; 0 in an empty one."""
    bins = _radial_bins(height, width, torch.device("cpu"))
    sizes = torch.zeros(len(bins.sizes), dtype=torch.float64)
    number = torch.repeat_interleave(torch.arange(len(bins.sizes)), torch.tensor(bins.sizes))
    return sizes.index_add_(0, number, bins.weights.double())


def log_profile(amplitude: Tensor, height: int, width: int) -> Tensor:
    """Logarithm of the mean orthonormal amplitude in every bin; empty bins take the nearest one (lower on a tie).

    Args:
        amplitude: (B, C, H, W // 2 + 1) ``|rfft2|``, unnormalized.
        height: rows of the images in pixels.
        width: columns of the images in pixels.

    Returns:
        (B, C, bins), at least log 1e-6.
    """
    bins = _radial_bins(height, width, amplitude.device)
    weighted = amplitude.flatten(-2).index_select(-1, bins.order) * bins.weights
    sums = torch.stack([part.sum(-1) for part in weighted.split(bins.sizes, dim=-1)], dim=-1)
    profile = sums / (bins.totals * math.sqrt(height * width))
    return profile.index_select(-1, bins.source).clamp_min_(PROFILE_FLOOR).log_()


def profile_weights(height: int, width: int) -> Tensor:
    """Matrix from a flat amplitude half plane to the mean orthonormal amplitude in every bin, before the logarithm.

    Returns:
        (H * (W // 2 + 1), bins) float32: what `log_profile` sums, for graphs that know matrix products only.
    """
    bins = _radial_bins(height, width, torch.device("cpu"))
    number = torch.repeat_interleave(torch.arange(len(bins.sizes)), torch.tensor(bins.sizes))
    weights = torch.zeros(height * (width // 2 + 1), len(bins.sizes))
    weights[bins.order, number] = bins.weights
    return (weights / (bins.totals * math.sqrt(height * width)))[:, bins.source]


def site_gain(target_profile: Tensor, own_profile: Tensor, height: int, width: int) -> Tensor:
    """Real, positive gain over the half plane that moves a site's mean log profile to the target.

    ``g = clip(target - own, -log 4, log 4)`` smoothed over neighboring bins by [1, 2, 1] / 4 with repeated ends,
    interpolated linearly in the logarithm of the radial frequency; DC has gain 1.

    Args:
        target_profile: (C, bins) mean log profile of all sites.
        own_profile: (C, bins) mean log profile of this site; NaN where it is not known, which gives a gain of 1.
        height: rows of the images in pixels.
        width: columns of the images in pixels.

    Returns:
        (C, H, W // 2 + 1) float32 on the device of ``target_profile``.
    """
    position = _radial_position(height, width)
    with torch.no_grad():
        step = target_profile.detach().double().cpu() - own_profile.detach().double().cpu()
        step = step.clamp(-GAIN_LIMIT, GAIN_LIMIT).nan_to_num_(0.0)
        padded = torch.cat([step[:, :1], step, step[:, -1:]], dim=1)
        smooth = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
        lower = position.floor().long()
        upper = (lower + 1).clamp_max(smooth.shape[1] - 1)
        gain = torch.lerp(smooth[:, lower], smooth[:, upper], (position - lower).expand(len(smooth), -1, -1)).exp_()
        gain[:, 0, 0] = 1.0
        return gain.to(target_profile.device, torch.float32)


def _octaves(height: int, width: int) -> int:
    """Octaves below 1 cycle a pixel that the bins reach: 6 up to 64 pixels, the longer side's own beyond."""
    return max(6, math.ceil(math.log2(max(height, width))))


@functools.lru_cache(maxsize=8)
def _radial_position(height: int, width: int) -> Tensor:
    """(H, W // 2 + 1) float64: 2 (log2 f + octaves), clipped to the bins, with f in cycles a pixel."""
    octaves = _octaves(height, width)
    rows = torch.fft.fftfreq(height, dtype=torch.float64)
    columns = torch.fft.rfftfreq(width, dtype=torch.float64)
    squared = rows.square()[:, None] + columns.square()
    return (squared.log2() + 2 * octaves).clamp(0, 2 * octaves - 2)


@functools.lru_cache(maxsize=8)
def _radial_bins(height: int, width: int, device: torch.device) -> RadialBins:
    weights = torch.full((height, width // 2 + 1), 2.0, dtype=torch.float64)
    weights[:, 0] = 1.0
    if width % 2 == 0:
        weights[:, -1] = 1.0
    bins = _radial_position(height, width).round().long().flatten()[1:]  # DC, the first coefficient, has weight 0
    order = bins.argsort(stable=True)
    count = bin_count(height, width)
    weights = weights.flatten()[1:][order]
    totals = torch.zeros(count, dtype=torch.float64).index_add_(0, bins[order], weights)
    filled = totals.nonzero().flatten()
    nearest = (torch.arange(count)[:, None] - filled).abs().argmin(1)
    return RadialBins(
        (order + 1).to(device),
        weights.float().to(device),
        torch.bincount(bins, minlength=count).tolist(),
        totals.clamp_min(1.0).float().to(device),
        filled[nearest].to(device),
    )
