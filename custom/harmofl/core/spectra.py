"""Amplitude spectra of image batches, their replacement, and filters on them.

Tensor names carry their layout: B images, C channels, H rows, W columns. All work is float32 on the half plane of
``rfft2`` (H x (W // 2 + 1) coefficients), without gradients and whatever autocast says: the transforms of torch refuse
half precision on the CPU and, for sizes that are no powers of two, on CUDA.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from harmofl.core.device_kinds import kind_of
from harmofl.core.radial import bin_count, log_profile, site_gain

Region = Literal["off", "dc", "low", "full", "site_gain"]

STD_FLOOR = 1e-6
PHASE_FLOOR = 1e-6  # of the largest coefficient: float32 transforms leave noise of about 1e-7 of it in every other one
# Temporaries take four times a chunk. One image of 3 x 384 x 384, or twelve of 96 x 96, stay in a CPU's cache; on other
# devices launches cost more than cache misses. Both keep output and temporaries of a batch within 1.5 times the batch.
CACHED_VALUES = 331_776
CHUNKS_ON_DEVICE = 8


def zscore(images_BCHW: Tensor) -> Tensor:
    """Standardize every image and channel to mean 0 and standard deviation 1.

    Args:
        images_BCHW: (B, C, H, W), any floating dtype.

    Returns:
        (B, C, H, W) float32, ``(x - mean) / max(std, 1e-6)`` with the population's deviation; constant images give 0.
    """
    with torch.no_grad():
        images = images_BCHW.float()
        centered = images - images.mean((-2, -1), keepdim=True)
        # The mean of large intensities is rounded, and a deviation near 0 would magnify the rest: center once more.
        centered -= centered.mean((-2, -1), keepdim=True)
        pixels = centered.shape[-2] * centered.shape[-1]
        std = torch.linalg.vector_norm(centered, dim=(-2, -1), keepdim=True) / math.sqrt(pixels)
        return centered.div_(std.clamp_min_(STD_FLOOR))


def statistic_shape(region: Region, channels: int, height: int, width: int, low_fraction: float) -> tuple[int, ...]:
    """Shape of one image's statistic, without the batch dimension.

    Returns:
        ``full`` (C, H, W // 2 + 1); ``low`` (C, 2b + 1, b + 1) with b = floor(min(H, W) * low_fraction);
        ``dc`` (C, 1, 1); ``site_gain`` (C, bins); ``off`` (0,).

    Raises:
        ValueError: ``low`` with a fraction outside (0, 0.5].
    """
    if region == "full":
        return (channels, height, width // 2 + 1)
    if region == "low":
        reach = _low_reach(height, width, low_fraction)
        return (channels, 2 * reach + 1, reach + 1)
    if region == "site_gain":
        return (channels, bin_count(height, width))
    return (channels, 1, 1) if region == "dc" else (0,)


def amplitude_spectrum(images_BCHW: Tensor, region: Region, low_fraction: float) -> Tensor:
    """Amplitude statistic of every image (HarmoFL Eq 2), float32.

    ``full`` holds ``|rfft2|``. ``low`` is its window around DC: rows are the vertical frequencies -b..b in this order,
    columns the horizontal ones 0..b. ``dc`` is the one coefficient at zero frequency. ``site_gain`` is the logarithm of
    the mean orthonormal amplitude in half-octave bins of radial frequency.

    Args:
        images_BCHW: (B, C, H, W), any floating dtype.
        region: which statistic; not ``off``.
        low_fraction: half width of the window of ``low`` as a fraction of the shorter side, in (0, 0.5].

    Returns:
        (B, *statistic_shape), float32.

    Raises:
        ValueError: region ``off``, which has no statistic, or a fraction outside (0, 0.5].
    """
    if region == "off":
        raise ValueError("region off has no amplitude statistic: choose dc, low, full or site_gain")
    batch, channels, height, width = images_BCHW.shape
    with torch.no_grad(), torch.autocast(images_BCHW.device.type, enabled=False):
        if region == "dc":
            return images_BCHW.float().sum((-2, -1), keepdim=True).abs_()
        shape = statistic_shape(region, channels, height, width, low_fraction)
        statistics = torch.empty((batch, *shape), dtype=torch.float32, device=images_BCHW.device)
        for rows in _chunks(images_BCHW):
            spectrum = torch.fft.rfft2(images_BCHW[rows].float().contiguous())
            if region == "low":
                reach = shape[-1] - 1
                signed_rows = torch.arange(-reach, reach + 1, device=spectrum.device) % height
                spectrum = spectrum[..., : reach + 1].index_select(-2, signed_rows)
            amplitude = _power(spectrum).sqrt_()
            statistics[rows] = log_profile(amplitude, height, width) if region == "site_gain" else amplitude
        return statistics


def replace_amplitude(
    images_BCHW: Tensor, target: Tensor, region: Region, low_fraction: float, out: Tensor | None = None
) -> Tensor:
    """Give every image the target amplitude in the region and keep its phase (HarmoFL Eqs 3-4).

    ``dc`` is a mean shift, ``x - mean(x) + target / (H * W)``: the published replacement of the zero-frequency
    coefficient on non-negative images, without its jump of sign on images around zero.

    ``low`` and ``full`` multiply a coefficient F by the real ratio target / |F|. Bins that are real by symmetry (DC
    and Nyquist) have a sign for a phase; a positive ratio keeps that too. With M the largest |F| of the same image and
    channel:

    * |F| > 1e-6 M: amplitude replaced, phase kept;
    * 0 < |F| <= 1e-6 M: left alone, because its phase is rounding noise of the transform;
    * F = 0: phase 0 by definition (the angle of 0), so the coefficient becomes the target, real.

    Args:
        images_BCHW: (B, C, H, W), any floating dtype and memory format; not changed unless it is ``out``.
        target: (C, ...) as ``statistic_shape`` says, non-negative.
        region: ``dc``, ``low`` or ``full``.
        low_fraction: as in ``amplitude_spectrum``.
        out: float32 (B, C, H, W) to write into, may be ``images_BCHW`` itself.

    Returns:
        Normalized images in the dtype and memory format of the input.

    Raises:
        ValueError: another region, or a target of another shape.
    """
    if region not in ("dc", "low", "full"):
        raise ValueError(f"region {region} does not replace an amplitude: choose dc, low or full")
    _, channels, height, width = images_BCHW.shape
    expected = statistic_shape(region, channels, height, width, low_fraction)
    if tuple(target.shape) != expected:
        raise ValueError(f"amplitude for region {region} has shape {tuple(target.shape)}, these images need {expected}")
    with torch.no_grad(), torch.autocast(images_BCHW.device.type, enabled=False):
        result = torch.empty_like(images_BCHW, dtype=torch.float32) if out is None else out
        target = target.to(images_BCHW.device, torch.float32)
        if region == "dc":
            mean = images_BCHW.mean((-2, -1), keepdim=True, dtype=torch.float32)
            torch.add(images_BCHW, target / (height * width) - mean, out=result)
        for rows in _chunks(images_BCHW) if region != "dc" else ():
            spectrum = torch.fft.rfft2(images_BCHW[rows].float().contiguous())
            _set_amplitude(spectrum, target, whole=region == "full")
            result[rows] = torch.fft.irfft2(spectrum, s=(height, width))
        return result if out is not None else result.to(images_BCHW.dtype)


def apply_gain(images_BCHW: Tensor, gain: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply every image's half plane by a real gain, (C, H, W // 2 + 1); ``out`` as in ``replace_amplitude``."""
    height, width = images_BCHW.shape[-2:]
    with torch.no_grad(), torch.autocast(images_BCHW.device.type, enabled=False):
        result = torch.empty_like(images_BCHW, dtype=torch.float32) if out is None else out
        for rows in _chunks(images_BCHW):
            spectrum = torch.fft.rfft2(images_BCHW[rows].float().contiguous())
            spectrum.mul_(gain)
            result[rows] = torch.fft.irfft2(spectrum, s=(height, width))
        return result if out is not None else result.to(images_BCHW.dtype)


def site_gain_filter(images_BCHW: Tensor, target_profile: Tensor, own_profile: Tensor) -> Tensor:
    """Filter images by the radial gain from a site's own mean log profile to the target; phase and mean stay.

    Args:
        images_BCHW: (B, C, H, W), any floating dtype and memory format.
        target_profile: (C, bins) mean log profile of all sites.
        own_profile: (C, bins) mean log profile of this site.

    Returns:
        Filtered images in the dtype and memory format of the input.
    """
    height, width = images_BCHW.shape[-2:]
    return apply_gain(images_BCHW, site_gain(target_profile.to(images_BCHW.device), own_profile, height, width))


def _chunks(images_BCHW: Tensor) -> Iterator[slice]:
    """Slices of the batch whose temporaries stay in the cache, or on other devices within half the batch."""
    batch = images_BCHW.shape[0]
    if not kind_of(images_BCHW.device).runs_ahead:
        size = max(1, CACHED_VALUES // max(1, images_BCHW[:1].numel()))
    else:
        size = max(1, math.ceil(batch / CHUNKS_ON_DEVICE))
    return (slice(start, start + size) for start in range(0, batch, size))


def _power(spectrum: Tensor) -> Tensor:
    """|F|^2; abs() of complex64 costs more than the transform itself."""
    return spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)


def _set_amplitude(spectrum: Tensor, target: Tensor, whole: bool) -> None:
    """Replace the amplitude of a half plane, or of the window that ``target`` covers, in place."""
    power = _power(spectrum)
    floor = power.amax((-2, -1), keepdim=True) * PHASE_FLOOR**2
    if whole:
        _scale_to(spectrum, power, target, floor)
        return
    height, reach = spectrum.shape[-2], target.shape[-1] - 1
    # Frequencies 0..b lie in the first rows, -b..-1 in the last ones. For 2b = H both name the row at H / 2: its copies
    # in the target are equal, and the second replacement finds the amplitude that the first one left.
    for rows, part in (
        (slice(0, reach + 1), target[..., reach:, :]),
        (slice(height - reach, height), target[..., :reach, :]),
    ):
        window = spectrum[..., rows, : reach + 1]
        _scale_to(window, _power(window), part, floor)


def _scale_to(spectrum: Tensor, power: Tensor, target: Tensor, floor: Tensor) -> None:
    # complex times real: twice as fast as a product of the pair of real numbers with a broadcast ratio
    spectrum.mul_(power.rsqrt().mul_(target).masked_fill_(power <= floor, 1.0))
    if _may_hold_zero(power):
        spectrum.real.add_(torch.where(power == 0, target, 0.0))


def _may_hold_zero(power: Tensor) -> bool:
    """Zeros are rare, and their pass costs as much as the replacement; a device or a trace cannot be asked cheaply."""
    if kind_of(power.device).runs_ahead or torch.compiler.is_compiling():
        return True
    return power.numel() > 0 and float(power.amin()) == 0


def _low_reach(height: int, width: int, low_fraction: float) -> int:
    if not 0 < low_fraction <= 0.5:
        raise ValueError(f"low_fraction is {low_fraction}: choose a value above 0 and up to 0.5")
    return math.floor(min(height, width) * low_fraction)
