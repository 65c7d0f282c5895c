"""Amplitude normalization against one pass over the batch, the bare transforms and the released step."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.spectra import Region, _chunks, amplitude_spectrum
from tests.benchmarks.released import aligned
from tests.benchmarks.rows import Row, peak_allocated, ratio

SHAPES = ((16, 3, 384, 384), (128, 3, 96, 96))  # batches of the prostate and of the patch job
LOW = 0.1
# By region the largest part of the released step's time; the default preset has site_gain, as_published dc.
RELEASED: dict[Region, float] = {"dc": 1 / 30, "full": 1 / 5, "site_gain": 1 / 5}


def measure() -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        size = " x ".join(map(str, shape))
        rows.append(mean_shift(images, size))
        for region in ("full", "low", "site_gain"):
            rows += replacement(images, region, size)
        rows += [beside_released(images, region, size, limit) for region, limit in RELEASED.items()]
    return rows


def mean_shift(images: Tensor, size: str) -> Row:
    normalize, out = normalizing(images, "dc"), torch.empty_like(images)

    def one_pass() -> None:
        images.sum()
        torch.add(images, 1.0, out=out)

    # both write to memory that is there: fresh pages cost the allocator's time, not the step's
    found = ratio(lambda: normalize(images, out), one_pass)
    return Row(f"amplitude dc, {size}", "one read, read, write pass", found.median, 1.15, found.noise)


def replacement(images: Tensor, region: Region, size: str) -> list[Row]:
    normalize, out = normalizing(images, region), torch.empty_like(images)
    height, width = images.shape[-2:]

    def transforms() -> None:
        for rows in _chunks(images):  # faster than the whole batch at once, so the stricter reference
            out[rows] = torch.fft.irfft2(torch.fft.rfft2(images[rows]), s=(height, width))

    found = ratio(lambda: normalize(images, out), transforms)
    batch = images.numel() * images.element_size()
    memory = peak_allocated(lambda: normalize(images)) / batch
    return [
        Row(f"amplitude {region}, {size}", "bare rfft2 + irfft2", found.median, 1.6, found.noise),
        Row(f"amplitude {region}, {size}, extra memory with its result", "the batch", memory, 1.5),
    ]


def beside_released(images: Tensor, region: Region, size: str, limit: float) -> Row:
    """Against the released code's step, whose cost is one for all regions: complex transforms image by image.

    Ours with the intensity step of the preset that has the region, and into memory of its own as in training.
    """
    normalize = normalizing(images, region, "zscore" if region == "site_gain" else "window")
    theirs = images.clone()
    target = np.ones((*images.shape[2:], images.shape[1]))
    found = ratio(lambda: normalize(images), lambda: aligned(theirs, target))
    return Row(
        f"amplitude {region} beside the released step, {size}", "the released step", found.median, limit, found.noise
    )


def normalizing(
    images: Tensor, region: Region, intensity: Literal["window", "zscore"] = "window"
) -> Callable[..., Tensor]:
    """The layer's own step toward an amplitude; writes into a tensor where one is given."""
    _, channels, height, width = images.shape
    layer = AmplitudeNormalization(
        intensity=intensity,
        region=region,
        low_fraction=LOW,
        estimation="before_training",
        momentum=0.1,
        channels=channels,
        height=height,
        width=width,
    )
    statistic = amplitude_spectrum(images[:1], region, LOW)[0]
    layer.freeze(statistic, 1)
    if region == "site_gain":
        layer.set_own(statistic)
    return lambda batch, out=None: layer(batch) if out is None else layer._normalized(batch, layer.target, out)
