"""The Gaussian mechanism for a mean over patients: a clipped mean, and noise calibrated to it.

A release is (epsilon, delta)-differentially private per patient when replacing all images of one patient changes the
probability of any outcome by no more than a factor e^epsilon, but for delta. A clipped mean over n patients moves by no
more than 2 clip / n then, which is its sensitivity; n itself is not hidden. All work is float64.
"""

import math
import secrets
from collections.abc import Hashable, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harmofl.core.radial import log_profile
from harmofl.core.spectra import Region, statistic_shape

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
        raise ValueError("the noise would be infinite: lower clip, or raise epsilon or delta")
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


def clipping_center(region: Region, channels: int, height: int, width: int, low_fraction: float) -> Tensor:
    """What patients are clipped around: public, from the size of an image alone.

    0 for ``dc``, ``low`` and ``full``. For ``site_gain`` the log profile of an amplitude that falls as 1 / f and has
    mean power 1 over all coefficients but DC, which is the power of a z-scored image.

    Returns:
        float64 of the shape that ``statistic_shape`` gives.
    """
    if region != "site_gain":
        return torch.zeros(statistic_shape(region, channels, height, width, low_fraction), dtype=torch.float64)
    rows, columns = torch.fft.fftfreq(height).double(), torch.fft.rfftfreq(width).double()
    squared = rows.square()[:, None] + columns.square()
    twice = torch.full((width // 2 + 1,), 2.0, dtype=torch.float64)  # a half plane holds most coefficients once of two
    twice[0] = 1
    if width % 2 == 0:
        twice[-1] = 1
    power = squared.reciprocal()
    power[0, 0] = 0
    amplitude = (power * (height * width - 1) / (power * twice).sum()).sqrt()
    profile = log_profile((amplitude * math.sqrt(height * width))[None, None].float(), height, width)
    return profile[0].double().expand(channels, -1).clone()


class ClippedMean:
    """Mean over patients of each patient's mean statistic, moved to within a distance of a center.

    ``x -> center + (x - center) min(1, clip / |x - center|)`` with the Euclidean norm. A patient without an image
    counts as the center, so that the number of patients does not depend on what can be read.

    Args:
        center: what is public, see ``clipping_center``.
        clip: the distance, above 0.
        patients: number of patients behind the mean.
    """

    def __init__(self, center: Tensor, clip: float, patients: int) -> None:
        self._center, self._clip, self._patients = center.double().cpu(), clip, patients
        self._moves = torch.zeros_like(self._center)
        self._sum = torch.zeros_like(self._center)
        self._current: Hashable = None
        self._images_of_patient = 0
        self._finished: set[Hashable] = set()
        self.images = 0

    def add(self, statistics_B: Tensor, patients: Sequence[Hashable]) -> None:
        """Take in per-image statistics, (B, ...), and whose each is; all images of a patient must come in a row.

        Raises:
            ValueError: a statistic is not finite, or a patient comes back after another one.
        """
        if not bool(torch.isfinite(statistics_B).all()):
            raise ValueError("the amplitude of a batch is not finite: its images hold NaN or infinite intensities")
        start = 0
        for patient, group in groupby(patients):
            count = len(list(group))
            if patient != self._current or not self._images_of_patient:
                self._close()
                if patient in self._finished:
                    raise ValueError("the images of a patient must come in a row")
                self._current = patient
            self._sum += statistics_B[start : start + count].sum(0, dtype=torch.float64).cpu()
            self._images_of_patient += count
            start += count
        self.images += start

    def result(self) -> Tensor:
        """The mean, float64, once every image is in."""
        self._close()
        return self._center + self._moves / self._patients

    def _close(self) -> None:
        """Clip the patient whose images are all in."""
        if not self._images_of_patient:
            return
        move = self._sum / self._images_of_patient - self._center
        norm = float(torch.linalg.vector_norm(move))
        self._moves += move * min(1.0, self._clip / norm) if norm else 0.0
        self._finished.add(self._current)
        self._sum.zero_()
        self._images_of_patient = 0
