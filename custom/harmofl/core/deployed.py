"""A trained model as it is used and shipped: normalization and network in one graph without state.

It computes what `AmplitudeNormalization` computes, without loops over chunks, without writing in place and without
complex numbers, so that TorchScript and ONNX can hold it. Fourier transforms are products with matrices of cosines and
sines, which cost a few percent of the network and are exact to float32: the DFT of onnxruntime 1.32 is off by 1e-4 at
384 pixels. Sums run over columns first, for the same reason.
"""

import math

import torch
from torch import Tensor, nn

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.contrast import contrast_of_planes
from harmofl.core.radial import GAIN_LIMIT, PROFILE_FLOOR, bin_count, profile_weights, site_gain
from harmofl.core.spectra import PHASE_FLOOR, STD_FLOOR


class DeployedNormalization(nn.Module):
    """The intensity step, then the amplitude step towards the frozen global amplitude.

    For `site_gain` the own profile is a given one, of a hospital or of a case, or else the mean over the images of a
    case that are given beside those to normalize. No image of another case changes what comes out. What has no
    contrast is left out of that mean and stays as it is, as in training.
    """

    def __init__(self, trained: AmplitudeNormalization, own_profile: Tensor | None = None) -> None:
        """Take over what training froze.

        Args:
            trained: with its global amplitude frozen, unless its region is `off`.
            own_profile: (C, bins) mean log profile of a hospital's or a case's images, for `site_gain`.

        Raises:
            ValueError: no amplitude was frozen, or an own profile for another region or of another shape.
        """
        super().__init__()
        region, (height, width) = trained.region, trained.size
        target = trained.target.detach().cpu().float()
        if region != "off" and not bool(trained.frozen):
            raise ValueError("no global amplitude was frozen, so this model cannot normalize an image")
        if own_profile is not None and (region != "site_gain" or own_profile.shape != target.shape):
            raise ValueError(f"an own profile of shape {tuple(own_profile.shape)} does not fit region {region}")
        self.standardize, self.size = trained.intensity == "zscore", trained.size
        self.step: nn.Module = nn.Identity()
        if region == "dc":
            self.step = _MeanShift(target / (height * width))
        elif region in ("low", "full"):
            self.step = _Replacement(*_plane(target, height, width, whole=region == "full"), self.size)
        elif own_profile is not None and not torch.equal(own_profile.cpu(), target):  # equal: a gain of 1
            self.step = _FixedGain(site_gain(target, own_profile.float().cpu(), height, width), self.size)
        elif region == "site_gain" and own_profile is None:
            self.step = _CaseGain(target, self.size)

    def forward(self, images_BCHW: Tensor, case_NCHW: Tensor | None = None) -> Tensor:
        """Normalize images (B, C, H, W) of the size of training, float32; `case_NCHW` are all of their case."""
        images = images_BCHW.float()
        if isinstance(self.step, nn.Identity) and not self.standardize:
            return images
        if case_NCHW is not None:
            case = case_NCHW.float()
            normalized = self.step(self._intensity(images), self._intensity(case), _planes_that_count(case))
        else:
            normalized = self.step(self._intensity(images))
        blank = images * 0 if self.standardize else images
        return torch.where(_planes_that_count(images), normalized, blank)

    def _intensity(self, images: Tensor) -> Tensor:
        return _zscore(images) if self.standardize else images


class DeployedModel(nn.Module):
    """Logits (B, K) or (B, K, H, W) of images as the reader leaves them."""

    def __init__(self, normalization: DeployedNormalization, network: nn.Module) -> None:
        super().__init__()
        self.normalization, self.network = normalization, network

    def forward(self, images_BCHW: Tensor, case_NCHW: Tensor | None = None) -> Tensor:
        """Logits of images (B, C, H, W) of the size of training; `case_NCHW` as in `DeployedNormalization`."""
        return self.network(self.normalization(images_BCHW, case_NCHW))


class _MeanShift(nn.Module):
    """`dc`: every image and channel gets the target's mean."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, images: Tensor) -> Tensor:
        return images - images.mean((-2, -1), keepdim=True) + self.mean


class _FixedGain(nn.Module):
    """`site_gain` of one hospital: the same real gain for every image."""

    gain: Tensor

    def __init__(self, gain: Tensor, size: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("gain", gain)
        self.fourier = _Fourier(*size)

    def forward(self, images: Tensor) -> Tensor:
        real, imaginary = self.fourier(images)
        return self.fourier.inverse(real * self.gain, imaginary * self.gain)


class _CaseGain(nn.Module):
    """`site_gain` with the mean log profile of the images of a case."""

    target: Tensor
    weights: Tensor
    spread: Tensor

    def __init__(self, target: Tensor, size: tuple[int, int]) -> None:
        super().__init__()
        bins = bin_count(*size)
        self.register_buffer("target", target)
        self.register_buffer("weights", profile_weights(*size))
        # Smoothing and interpolation are linear: the logarithm of the gain of a unit step in one bin is its row.
        self.register_buffer("spread", site_gain(torch.eye(bins), torch.zeros(bins, bins), *size).log().flatten(1))
        self.fourier = _Fourier(*size)

    def forward(self, images: Tensor, case: Tensor, counted: Tensor) -> Tensor:
        real, imaginary = self.fourier(images)
        step = (self.target - self._profile(case, counted)).clamp(-GAIN_LIMIT, GAIN_LIMIT)
        gain = (step @ self.spread).exp().unflatten(-1, real.shape[-2:])
        return self.fourier.inverse(real * gain, imaginary * gain)

    def _profile(self, case: Tensor, counted: Tensor) -> Tensor:
        """Mean over the images that have contrast; a channel in which none has keeps the target, a gain of 1."""
        real, imaginary = self.fourier(case)
        amplitude = (real.square() + imaginary.square()).sqrt()
        profile = (amplitude.flatten(-2) @ self.weights).clamp_min(PROFILE_FLOOR).log()
        share = counted.squeeze(-1).float()
        number = share.sum(0)
        return torch.where(number > 0, (profile * share).sum(0) / number.clamp_min(1.0), self.target)


class _Replacement(nn.Module):
    """`low` and `full`: the amplitude replaced within the region, the phase kept, as `spectra.replace_amplitude`."""

    target: Tensor
    within: Tensor
    zero_frequency: Tensor

    def __init__(self, target: Tensor, within: Tensor, size: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("target", target)
        self.register_buffer("within", within)
        zero_frequency = torch.zeros(within.shape)
        zero_frequency[0, 0] = size[0] * size[1]
        self.register_buffer("zero_frequency", zero_frequency)
        self.fourier = _Fourier(*size)

    def forward(self, images: Tensor) -> Tensor:
        level = images[..., :1, :1]  # without it the coefficients of a constant image would be noise instead of 0
        real, imaginary = self.fourier(images - level)
        real = real + level * self.zero_frequency
        power = real.square() + imaginary.square()
        floor = power.amax((-2, -1), keepdim=True) * PHASE_FLOOR**2
        replaced = (power > floor) & self.within
        ratio = torch.where(replaced, self.target / torch.where(replaced, power, 1.0).sqrt(), 1.0)
        without_phase = torch.where((power == 0) & self.within, self.target, 0.0)
        return self.fourier.inverse(real * ratio + without_phase, imaginary * ratio)


class _Fourier(nn.Module):
    """`rfft2` and its inverse by products with matrices."""

    row_cos: Tensor
    row_sin: Tensor
    column_cos: Tensor
    column_sin: Tensor
    back_cos: Tensor
    back_sin: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        half = width // 2 + 1
        rows, columns = _angles(height, height, height), _angles(width, half, width)
        # A column of the half plane stands for its conjugate too, except the first and, for even widths, the last.
        share = torch.full((half,), 2.0, dtype=torch.float64)
        share[0] = 1.0
        if width % 2 == 0:
            share[-1] = 1.0
        back = share.unsqueeze(1) / (height * width)
        for name, matrix in (
            ("row_cos", rows.cos()),
            ("row_sin", rows.sin()),
            ("column_cos", columns.cos()),
            ("column_sin", columns.sin()),
            ("back_cos", columns.cos().T * back),
            ("back_sin", columns.sin().T * back),
        ):
            self.register_buffer(name, matrix.float().contiguous())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of the half plane, (..., H, W // 2 + 1) each."""
        real, imaginary = images @ self.column_cos, -(images @ self.column_sin)
        return (
            self.row_cos @ real + self.row_sin @ imaginary,
            self.row_cos @ imaginary - self.row_sin @ real,
        )

    def inverse(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """Images (..., H, W) of a half plane; what is imaginary where it must be real is left out, as `irfft2` does."""
        along = self.row_cos @ real - self.row_sin @ imaginary
        across = self.row_cos @ imaginary + self.row_sin @ real
        return along @ self.back_cos - across @ self.back_sin


def _planes_that_count(images: Tensor) -> Tensor:
    """Which channels of which images have contrast, (B, C, 1, 1) bool."""
    return contrast_of_planes(images).unsqueeze(-1).unsqueeze(-1)


def _angles(positions: int, frequencies: int, length: int) -> Tensor:
    """2 pi k n / length in float64, (positions, frequencies)."""
    turns = torch.outer(torch.arange(positions), torch.arange(frequencies)) % length
    return turns.double() * (2 * math.pi / length)


def _zscore(images: Tensor) -> Tensor:
    """`spectra.zscore` without writing in place."""
    centered = images - images.mean(-1, keepdim=True).mean(-2, keepdim=True)
    centered = centered - centered.mean(-1, keepdim=True).mean(-2, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True).mean(-2, keepdim=True)
    return centered / variance.sqrt().clamp_min(STD_FLOOR)


def _plane(target: Tensor, height: int, width: int, *, whole: bool) -> tuple[Tensor, Tensor]:
    """The target laid out over the half plane, and where it counts."""
    if whole:
        return target, torch.ones(height, width // 2 + 1, dtype=torch.bool)
    reach = target.shape[-1] - 1
    rows = torch.arange(-reach, reach + 1) % height
    plane, within = torch.zeros(len(target), height, width // 2 + 1), torch.zeros(height, width // 2 + 1)
    plane[:, rows, : reach + 1] = target
    within[rows, : reach + 1] = 1
    return plane, within > 0
