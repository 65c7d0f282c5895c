"""The Gaussian mechanism for a mean over patients: a clipped mean, and noise calibrated to it.

A release is (epsilon, delta)-differentially private per patient when replacing all images of one patient changes the
probability of any outcome by no more than a factor e^epsilon, but for delta.

What is released is f = c + (1/n) sum_p m_p, with one move m_p a patient that depends on that patient's own images
alone, and |m_p| <= d after clipping, d = relative clip times a scale. c, d and n are equal for two data sets that
differ in the images of one patient q: the center and the scale follow from settings that everybody knows, and a patient
of whom no image can be read or shows anything has the move 0 and still counts in n. So
|f - f'| = |m_q - m'_q| / n <= (|m_q| + |m'_q|) / n <= 2 d / n, which is the sensitivity, reached by opposite moves. n
itself is not hidden, nor which patients train: both are taken as given, and must not follow from anybody's images. Nor
is it hidden that nothing is released, where too few patients show anything or every one is clipped: these events depend
on the images, and the guarantee holds for what is released. All work is float64.
"""

import math
import secrets
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harmofl.core.amplitude import Intensity, widened
from harmofl.core.radial import log_profile
from harmofl.core.spectra import Region, statistic_shape

_NOBODY = object()
PRECISION = 1e-12  # relative, of a calibrated sigma


def gaussian_delta(epsilon: float, sigma: float, sensitivity: float) -> float:
    """The smallest delta of Gaussian noise at a given epsilon, exact for every epsilon > 0.

    Balle and Wang 2018, Theorem 8, with r = sigma / sensitivity:
    ``Phi(1 / (2 r) - epsilon r) - e^epsilon Phi(-1 / (2 r) - epsilon r)``. The second term is written with the scaled
    erfc, since e^epsilon alone overflows.
    """
    from scipy.special import erfcx, ndtr

    ratio = sigma / sensitivity
    near, far = 1 / (2 * ratio) - epsilon * ratio, 1 / (2 * ratio) + epsilon * ratio
    return float(ndtr(near) - math.exp(-near * near / 2) * erfcx(far / math.sqrt(2)) / 2)


def calibrate_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """The least standard deviation of Gaussian noise that makes a release (epsilon, delta)-differentially private.

    Raises:
        ValueError: epsilon or sensitivity not above 0, delta not between 0 and 1, or a sigma too large for a number.
    """
    if not (epsilon > 0 and 0 < delta < 1 and sensitivity > 0):
        raise ValueError("epsilon and sensitivity must be above 0, delta between 0 and 1")
    low = high = 1.0
    while gaussian_delta(epsilon, high, 1.0) > delta:
        high *= 2
    if not math.isfinite(high * sensitivity):
        raise ValueError("the noise would be infinite: lower relative_clip, or raise epsilon or delta")
    while gaussian_delta(epsilon, low, 1.0) <= delta:
        low /= 2
    while high > low * (1 + PRECISION):  # delta falls with sigma; the larger end always suffices
        middle = math.sqrt(low * high)
        if gaussian_delta(epsilon, middle, 1.0) > delta:
            low = middle
        else:
            high = middle
    return high * sensitivity


def gaussian_noise(shape: tuple[int, ...], sigma: float) -> NDArray[np.float64]:
    """Independent normal values from the entropy of the operating system, so that no seed gives them back."""
    from scipy.special import ndtri

    count = math.prod(shape)
    numbers = np.frombuffer(secrets.token_bytes(8 * count), np.uint64) >> np.uint64(11)
    return sigma * ndtri((numbers + 0.5) / 2.0**53).reshape(shape)


class ClippingCenter(NamedTuple):
    """What patients are clipped around, and the unit of the distance; both public.

    Attributes:
        values: float64 of the shape that ``statistic_shape`` gives.
        scale: what a relative clip of 1 is, in the units of the statistic.
    """

    values: Tensor
    scale: float


def clipping_center(
    region: Region,
    channels: int,
    height: int,
    width: int,
    low_fraction: float,
    *,
    intensity: Intensity = "window",
) -> ClippingCenter:
    """The amplitude of an image that nobody took: it follows from an experiment's settings, no data is looked at.

    Its intensities have mean 0 and deviation 1 after ``zscore``; else mean 1/2 and deviation 1 / sqrt(12), those of
    intensities spread evenly over 0 to 1. Its amplitude falls as 1 / f. The scale of ``dc``, ``low`` and ``full`` is
    the norm of the whole spectrum of such an image, H W sqrt(C (mean^2 + deviation^2)) by Parseval; for ``site_gain``
    sqrt(C bins), which is a factor e in every bin. ``none`` counts as 0 to 1, as pictures are: where raw intensities
    lie elsewhere, every patient is clipped.
    """
    mean, deviation = (0.0, 1.0) if intensity == "zscore" else (0.5, math.sqrt(1 / 12))
    shape, pixels = statistic_shape(region, channels, height, width, low_fraction), height * width
    amplitude = deviation * _falling_amplitude(height, width)
    if region == "site_gain":
        values = log_profile(amplitude[None, None].float(), height, width)[0].double()
        return ClippingCenter(values.expand(shape).clone(), math.sqrt(math.prod(shape)))
    amplitude[0, 0] = mean * pixels
    if region == "dc":
        amplitude = amplitude[:1, :1]
    elif region == "low":
        reach = shape[-1] - 1
        amplitude = amplitude[torch.arange(-reach, reach + 1) % height, : reach + 1]
    return ClippingCenter(amplitude.expand(shape).clone(), pixels * math.sqrt(channels * (mean**2 + deviation**2)))


def _falling_amplitude(height: int, width: int) -> Tensor:
    """|rfft2| of an image of mean 0 and deviation 1 whose amplitude falls as 1 / f, (H, W // 2 + 1) float64."""
    rows, columns = torch.fft.fftfreq(height).double(), torch.fft.rfftfreq(width).double()
    squared = rows.square()[:, None] + columns.square()
    twice = torch.full((width // 2 + 1,), 2.0, dtype=torch.float64)  # a half plane holds most coefficients once of two
    twice[0] = 1
    if width % 2 == 0:
        twice[-1] = 1
    power = squared.reciprocal()
    power[0, 0] = 0
    # mean power 1 over all coefficients but DC, which deviation 1 gives but for 1 / (H W)
    return (power * (height * width - 1) / (power * twice).sum()).sqrt() * math.sqrt(height * width)


class ClippedMean:
    """Mean over patients of each patient's mean statistic, moved to within a distance of a center.

    ``x -> center + (x - center) min(1, d / |x - center|)`` with the Euclidean norm and d = clip times the center's
    scale. A channel in which no image of a patient has contrast counts as the center, and so does a patient without an
    image, so that the number of patients does not depend on what the images hold.

    Args:
        center: what is public, see ``clipping_center``.
        clip: the distance in multiples of the center's scale, above 0.
        patients: number of patients behind the mean.
    """

    def __init__(self, center: ClippingCenter, clip: float, patients: int) -> None:
        self._center, self._patients = center.values.double().cpu(), patients
        self.distance = clip * center.scale
        self._moves = torch.zeros_like(self._center)
        self._sum = torch.zeros_like(self._center)
        self._current: Hashable = _NOBODY
        self._images_of_patient = torch.zeros(len(self._center), dtype=torch.int64)  # by channel
        self._finished: set[Hashable] = set()
        self._shown = torch.zeros(len(self._center), dtype=torch.int64)
        self.images = 0
        self._clipped = self._moved = 0

    def add(self, statistics_B: Tensor, patients: Sequence[Hashable], contrast_BC: Tensor | None = None) -> None:
        """Take in per-image statistics, (B, C, ...), and whose each is; all images of a patient must come in a row.

        Args:
            statistics_B: a row an image.
            patients: whose each image is.
            contrast_BC: which channels of which images have contrast; None where all have.

        Raises:
            ValueError: a statistic is not finite, or a patient comes back after another one.
        """
        if not bool(torch.isfinite(statistics_B).all()):
            raise ValueError("the amplitude of a batch is not finite: its images hold NaN or infinite intensities")
        counted = torch.ones(statistics_B.shape[:2], dtype=torch.bool) if contrast_BC is None else contrast_BC.cpu()
        each = statistics_B.double().cpu() * widened(counted, statistics_B)
        start = 0
        for patient, group in groupby(patients):
            rows = slice(start, start + len(list(group)))
            if patient != self._current:
                self._close()
                if patient in self._finished:
                    raise ValueError("the images of a patient must come in a row")
                self._current = patient
            self._sum += each[rows].sum(0)
            self._images_of_patient += counted[rows].sum(0)
            start = rows.stop
        self.images += int(counted.any(1).sum())

    def result(self) -> Tensor:
        """The mean, float64, once every image is in."""
        self._close()
        return self._center + self._moves / self._patients

    @property
    def clipped(self) -> int:
        """How many patients lay farther from the center than the distance, once every image is in."""
        self._close()
        return self._clipped

    @property
    def moved(self) -> int:
        """How many patients have an image with contrast, once every image is in."""
        self._close()
        return self._moved

    @property
    def shown(self) -> int:
        """How many patients have contrast in the channel in which the fewest have, once every image is in."""
        self._close()
        return int(self._shown.min())

    def _close(self) -> None:
        """Clip the patient whose images are all in."""
        if self._current is _NOBODY:
            return
        count = widened(self._images_of_patient, self._sum)
        move = torch.where(count > 0, self._sum / count.clamp_min(1) - self._center, 0.0)
        norm = float(torch.linalg.vector_norm(move))
        self._moves += move * min(1.0, self.distance / norm) if norm else 0.0
        self._clipped += norm > self.distance
        self._moved += bool((self._images_of_patient > 0).any())
        self._shown += self._images_of_patient > 0
        self._finished.add(self._current)
        self._current = _NOBODY
        self._sum.zero_()
        self._images_of_patient.zero_()
