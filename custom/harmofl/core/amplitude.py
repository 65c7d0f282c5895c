"""Amplitude normalization (HarmoFL Eqs 2-4): the running amplitude of a site and the layer in front of the network."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from harmofl.core.contrast import has_contrast
from harmofl.core.device_kinds import kind_of
from harmofl.core.radial import site_gain
from harmofl.core.spectra import (
    Region,
    amplitude_spectrum,
    apply_gain,
    replace_amplitude,
    site_gain_filter,
    statistic_shape,
    zscore,
)

__all__ = [
    "AmplitudeNormalization",
    "Estimation",
    "Intensity",
    "Region",
    "RunningAmplitude",
    "amplitude_spectrum",
    "replace_amplitude",
    "site_gain_filter",
    "statistic_shape",
    "zscore",
]

Intensity = Literal["window", "zscore", "none"]
Estimation = Literal["first_batch", "running_mean", "before_training"]
LEAST_WEIGHT = 0.1  # of the heaviest image's weight: below, an image hides nobody in a mean


class RunningAmplitude:
    """Mean of per-image statistics over the batches of one site, channel by channel.

    ``first_batch`` keeps the mean of the first batch (what the released code computes). ``running_mean`` is
    A_k = (1 - v) A_(k-1) + v m_k from A_0 = 0 (Eq 3), divided by 1 - (1 - v)^k: seven batches alone would leave it at
    half scale. ``before_training`` is the exact mean over all images. Sums are float64. A channel of an image without
    contrast enters nothing: a batch that shows none in a channel is no batch of that channel.

    Where the images are numbered, the weight of each in the mean is kept, so that those who stand behind the mean can
    be counted.
    """

    def __init__(self, estimation: Estimation, momentum: float) -> None:
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum is {momentum}: choose a value above 0 and up to 1")
        self.estimation = estimation
        self.momentum = momentum
        self._total: Tensor | None = None
        self._batches = torch.zeros(0, dtype=torch.int64)  # (C,): of each channel those that entered
        self._counts = torch.zeros(0, dtype=torch.int64)  # (C,): images that entered
        self._weights = torch.zeros(0, 0, dtype=torch.float64)  # (C, N): of each item in the mean, up to a factor
        self._images = 0
        self._blank = 0

    def update(self, statistics_B: Tensor, contrast_BC: Tensor | None = None, items_B: Tensor | None = None) -> None:
        """Take in one batch of per-image statistics, (B, C, ...).

        Args:
            statistics_B: float32, a row an image.
            contrast_BC: which channels of which images have contrast; None where all have.
            items_B: number of each image in its data set; without it nobody stands behind these images.

        Raises:
            ValueError: a statistic is not finite; the mean is unchanged then.
        """
        if self.settled:
            return
        if not bool(torch.isfinite(statistics_B).all()):
            raise ValueError("the amplitude of a batch is not finite: its images hold NaN or infinite intensities")
        statistics = statistics_B.detach()
        counted = torch.ones(statistics.shape[:2], dtype=torch.bool) if contrast_BC is None else contrast_BC.cpu()
        self._blank += int((~counted).any(1).sum())
        if self._total is None:
            self._total = torch.zeros(statistics.shape[1:], dtype=torch.float64, device=statistics.device)
            self._batches = self._counts = torch.zeros(statistics.shape[1], dtype=torch.int64)
            self._weights = torch.zeros(statistics.shape[1], 0, dtype=torch.float64)
        elif self.estimation == "first_batch":
            counted = counted & (self._batches == 0)  # each channel keeps the first batch that shows it
        self._add(statistics, counted)
        self._weigh(counted, items_B)
        self._batches = self._batches + counted.any(0)
        self._counts = self._counts + counted.sum(0)
        self._images += int(counted.any(1).sum())

    def _add(self, statistics_B: Tensor, counted_BC: Tensor) -> None:
        assert self._total is not None
        if not bool(counted_BC.all()):
            wide = widened(counted_BC.to(statistics_B.device), statistics_B)
            statistics_B = torch.where(wide, statistics_B, 0.0)
        total = statistics_B.sum(0, dtype=torch.float64)
        previous, count = self._total.to(total.device), counted_BC.sum(0).to(total.device)
        if self.estimation != "before_training":
            total /= widened(count.clamp_min(1), total)
        if self.estimation == "running_mean":
            moved = (1 - self.momentum) * previous + self.momentum * total
            self._total = torch.where(widened(count > 0, total), moved, previous)
        else:
            self._total = previous + total

    def _weigh(self, counted_BC: Tensor, items_B: Tensor | None) -> None:
        """Keep what each item weighs in the mean, up to a factor that is the same for all of a channel."""
        count, each = counted_BC.sum(0), torch.ones(counted_BC.shape[1], dtype=torch.float64)
        if self.estimation == "running_mean":
            self._weights[count > 0] *= 1 - self.momentum
            each = self.momentum / count.clamp_min(1)
        if items_B is None or not len(items_B):
            return
        items = items_B.cpu()
        missing = int(items.max()) + 1 - self._weights.shape[1]
        if missing > 0:
            self._weights = torch.nn.functional.pad(self._weights, (0, missing))
        self._weights.index_add_(1, items, counted_BC.T * each[:, None].double())

    @property
    def weights(self) -> Tensor:
        """What each numbered image weighs in the mean of each channel, up to a factor a channel, (C, N) float64."""
        return self._weights

    def behind(self) -> Tensor:
        """Which numbered images stand behind the mean of each channel, (C, N) bool.

        Those are the ones that weigh at least a tenth of what the heaviest image does. In a first batch and in an exact
        mean all weigh the same; a running mean forgets: at momentum 0.1 the last 22 batches of a size count.
        """
        if not self._weights.numel():
            return torch.zeros(self._weights.shape, dtype=torch.bool)
        heaviest = self._weights.amax(1, keepdim=True)
        return (self._weights > 0) & (self._weights >= LEAST_WEIGHT * heaviest)

    @property
    def settled(self) -> bool:
        """Whether further batches change nothing."""
        return self.estimation == "first_batch" and self.began and bool((self._batches > 0).all())

    @property
    def began(self) -> bool:
        """Whether a batch was seen."""
        return self._total is not None

    @property
    def mean(self) -> Tensor:
        """The mean so far, float32; NaN in a channel that no image showed.

        Raises:
            ValueError: no batch was seen.
        """
        if self._total is None:
            raise ValueError("no amplitude yet: no batch was observed")
        divisor = torch.ones(len(self._batches), dtype=torch.float64)
        if self.estimation == "before_training":
            divisor = self._counts.double()
        elif self.estimation == "running_mean":
            powers = [1 - (1 - self.momentum) ** batches for batches in self._batches.tolist()]
            divisor = torch.tensor(powers, dtype=torch.float64)
        divisor = torch.where(self._batches > 0, divisor, torch.nan)
        return (self._total / widened(divisor.to(self._total.device), self._total)).float()

    @property
    def images(self) -> int:
        """Number of images behind the mean: those that have contrast in a channel."""
        return self._images

    @property
    def blank(self) -> int:
        """Number of images that were left out, in one channel at least."""
        return self._blank

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a continued mean needs, as tensors."""
        return {
            "total": torch.empty(0, dtype=torch.float64) if self._total is None else self._total.clone(),
            "batches": self._batches.clone(),
            "counts": self._counts.clone(),
            "weights": self._weights.clone(),
            "images": torch.tensor(self._images),
            "blank": torch.tensor(self._blank),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved mean of the same estimation and momentum."""
        self._batches, self._counts = state["batches"].clone(), state["counts"].clone()
        self._weights = state["weights"].clone()
        self._images, self._blank = int(state["images"]), int(state["blank"])
        self._total = state["total"].clone() if len(self._batches) else None


def widened(values: Tensor, like: Tensor) -> Tensor:
    """Values with dimensions of size 1 behind theirs, until they have as many as `like`."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


class AmplitudeNormalization(torch.nn.Module):
    """The intensity step, then the amplitude step: one definition for training, evaluation, prediction and export.

    ``window`` and ``none`` leave intensities as the reader made them; ``zscore`` standardizes every image and channel.
    The amplitude step replaces the region's amplitude by the target, or filters with the site's gain. Without a target
    it does nothing. A channel of an image without contrast stays as it is (0 after ``zscore``), whatever the region:
    it is in no statistic, and an amplitude put in its place would draw something that nobody saw. Statistics move only
    in ``observe``, never in ``forward``, so that the second pass of a perturbed step and any evaluation leave them
    alone.

    Buffers, all in the state dict: ``target`` (the global amplitude), ``own`` (site_gain: this site's profile, which
    stays local), ``frozen``, ``has_own`` and ``images`` (number of images behind the target). ``local`` is the running
    amplitude of this site; it has a state dict of its own.
    """

    target: Tensor
    own: Tensor
    gain: Tensor
    frozen: Tensor
    has_own: Tensor
    images: Tensor

    def __init__(
        self,
        *,
        intensity: Intensity,
        region: Region,
        low_fraction: float,
        estimation: Estimation,
        momentum: float,
        channels: int,
        height: int,
        width: int,
    ) -> None:
        super().__init__()
        self.intensity = intensity
        self.region = region
        self.low_fraction = low_fraction
        self.size = (height, width)
        self.local = RunningAmplitude(estimation, momentum)
        shape = statistic_shape(region, channels, height, width, low_fraction)
        self.register_buffer("target", torch.zeros(shape))
        self.register_buffer("own", torch.zeros(shape if region == "site_gain" else (0,)))
        self.register_buffer("frozen", torch.tensor(False))
        self.register_buffer("has_own", torch.tensor(False))
        self.register_buffer("images", torch.tensor(0))
        self.register_buffer("gain", torch.empty(0), persistent=False)
        # Copies of the two flags: reading a buffer on a GPU in every forward pass would wait for the device.
        self._frozen = self._has_own = False

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalize a batch.

        Args:
            images_BCHW: (B, C, H, W) of the size given at construction, any floating dtype.

        Returns:
            The batch in the input's dtype and memory format; no gradient flows back.

        Raises:
            RuntimeError: site_gain has its target but not the site's own profile.
        """
        with torch.no_grad(), torch.autocast(images_BCHW.device.type, enabled=False):
            target = self._current_target()
            if self.intensity != "zscore":
                if target is None:
                    return images_BCHW
                return _blank_kept(self._normalized(images_BCHW, target, None), images_BCHW, images_BCHW)
            standardized = zscore(images_BCHW)
            normalized = self._normalized(standardized, target, standardized)
            return _blank_kept(normalized, images_BCHW, torch.zeros(())).to(images_BCHW.dtype)

    def observe(
        self,
        images_BCHW: Tensor,
        gather: Callable[[Tensor], Tensor] | None = None,
        items_B: Tensor | None = None,
    ) -> None:
        """Take one batch into the local statistic: once a batch, before its forward pass; nothing once frozen.

        Args:
            images_BCHW: the batch, or this process's part of it.
            gather: makes the statistics of the whole batch of those of its part.
            items_B: number of each image in its data set, int64 on the images' device.

        Raises:
            ValueError: the images hold NaN or infinite intensities.
        """
        if self.region == "off" or self._frozen or self.local.settled:
            return
        whole = gather or (lambda own: own)
        contrast = whole(has_contrast(images_BCHW).to(torch.uint8)) > 0
        self.local.update(whole(self.statistics(images_BCHW)), contrast, None if items_B is None else whole(items_B))

    def statistics(self, images_BCHW: Tensor) -> Tensor:
        """Per-image statistics of a batch after the intensity step, (B, ...) float32; nothing is recorded.

        Raises:
            ValueError: region off, which has no statistic.
        """
        images = zscore(images_BCHW) if self.intensity == "zscore" else images_BCHW
        return amplitude_spectrum(images, self.region, self.low_fraction)

    @property
    def local_statistic(self) -> Tensor | None:
        """This site's mean statistic so far, float32, NaN in a channel without contrast; None before a batch."""
        return self.local.mean if self.local.began else None

    @property
    def local_images(self) -> int:
        """Number of images behind the local statistic."""
        return self.local.images

    def freeze(self, target: Tensor, images: int) -> None:
        """Fix the global amplitude.

        Args:
            target: global statistic as the server averaged it, the shape of ``self.target``.
            images: number of images behind it, at least 1.

        Raises:
            ValueError: the target does not fit, is not finite, or is a negative amplitude; no image stands behind it.
        """
        if self.region == "off":
            raise ValueError("region off takes no global amplitude: choose dc, low, full or site_gain")
        self._check(target, "global amplitude")
        if self.region != "site_gain" and bool((target < 0).any()):
            raise ValueError("the global amplitude has negative values: an amplitude is 0 or more")
        if images < 1:
            raise ValueError(f"the global amplitude stands on {images} images: at least 1 is needed")
        self.target.copy_(target)
        self.images.fill_(images)
        self.frozen.fill_(True)
        self._refresh()

    def set_own(self, profile: Tensor) -> None:
        """Set this site's own mean log profile, (C, bins), for site_gain; a channel all of NaN is not known: gain 1.

        Raises:
            ValueError: another region, a wrong shape, or values that are not finite.
        """
        if self.region != "site_gain":
            raise ValueError(f"region {self.region} has no own profile: only site_gain has")
        unknown = profile.isnan().all(-1, keepdim=True)
        self._check(torch.where(unknown, 0.0, profile), "own profile")
        self.own.copy_(profile)
        self.has_own.fill_(True)
        self._refresh()

    def _current_target(self) -> Tensor | None:
        if self._frozen:
            if self.region == "site_gain" and not self._has_own:
                raise RuntimeError("site_gain lacks this site's own profile: observe its images, then call set_own")
            return self.target
        # While a site_gain is being estimated, target and own profile are the same local mean: a gain of 1.
        if self.region in ("off", "site_gain") or self.local.estimation == "before_training":
            return None
        return self.local_statistic

    def _normalized(self, images_BCHW: Tensor, target: Tensor | None, out: Tensor | None) -> Tensor:
        if target is None:
            return images_BCHW
        if self.region == "site_gain":
            return apply_gain(images_BCHW, self.gain, out)
        return replace_amplitude(images_BCHW, target, self.region, self.low_fraction, out)

    def _check(self, statistic: Tensor, name: str) -> None:
        if statistic.shape != self.target.shape:
            got, expected = tuple(statistic.shape), tuple(self.target.shape)
            raise ValueError(f"the {name} has shape {got}, region {self.region} at this image size needs {expected}")
        if not bool(torch.isfinite(statistic).all()):
            raise ValueError(f"the {name} has values that are not finite")

    def _refresh(self) -> None:
        self._frozen, self._has_own = bool(self.frozen), bool(self.has_own)
        if self._frozen and self._has_own:
            self.gain = site_gain(self.target, self.own, *self.size)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AmplitudeNormalization":
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # model.half() would push the DC amplitude of a 384 x 384 image beyond float16's 65504.
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def _blank_kept(normalized: Tensor, images_BCHW: Tensor, instead: Tensor) -> Tensor:
    """The normalized batch, with `instead` where a channel of an image has no contrast."""
    contrast = has_contrast(images_BCHW)
    # what nearly every batch is; a device or a trace cannot be asked cheaply
    if not kind_of(contrast.device).runs_ahead and not torch.compiler.is_compiling() and bool(contrast.all()):
        return normalized
    return torch.where(widened(contrast, normalized), normalized, instead.to(normalized))
