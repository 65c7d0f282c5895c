"""Amplitude normalization against one pass over the batch and against the bare transforms, in time and memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.spectra import Region, _chunks, amplitude_spectrum
from tests.benchmarks.rows import Row, peak_allocated, ratio

SHAPES = ((16, 3, 384, 384), (128, 3, 96, 96))  # batches of the prostate and of the patch job
LOW = 0.1


def measure() -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        size = " x ".join(map(str, shape))
        rows.append(mean_shift(images, size))
        for region in ("full", "low"):
            rows += replacement(images, region, size)
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


def normalizing(images: Tensor, region: Region) -> Callable[..., Tensor]:
    """The layer's own step toward an amplitude; writes into a tensor where one is given."""
    _, channels, height, width = images.shape
    layer = AmplitudeNormalization(
        intensity="window",
        region=region,
        low_fraction=LOW,
        estimation="before_training",
        momentum=0.1,
        channels=channels,
        height=height,
        width=width,
    )
    layer.freeze(amplitude_spectrum(images[:1], region, LOW)[0], 1)
    return lambda batch, out=None: layer(batch) if out is None else layer._normalized(batch, layer.target, out)
