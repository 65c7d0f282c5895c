"""What an amplitude statistic of real images can be: bounds on what somebody says to have measured.

Let x be a plane of N = H W intensities and F its unnormalized transform, as ``rfft2`` gives it. Then

- F(0) = sum x = N m, with m the mean intensity;
- Parseval: sum over all N coefficients of |F|^2 = N sum x^2, so that without F(0)
  P = sum |F(k)|^2, k != 0, = N sum (x - m)^2 = N^2 v, with v the variance (of the population).

``zscore`` makes m = 0 and v <= 1: F(0) = 0 and sqrt(P) <= N. Intensities from 0 to L have 0 <= m <= L, and from
x^2 <= L x follows v = mean(x^2) - m^2 <= m (L - m): F(0) <= N L and sqrt(P) <= N sqrt(m (L - m)), at most N L / 2.

Both hold for means of amplitudes over images: sqrt(P) is a norm, so that of a mean is at most the mean of the norms,
and m -> sqrt(m (L - m)) is concave. They hold for any weights that sum to 1, so for a running mean, and for a mean of
which patients were moved toward the center of ``gaussian_mechanism.clipping_center``, since the center keeps them too.

``site_gain`` holds p_b, in bin b of n_b coefficients the logarithm of the mean of |F| / sqrt(N), at least log 1e-6. A
mean is at most the root of the mean square: sum n_b exp(2 p_b) <= P / N, at most N for ``zscore`` and N L^2 / 4 else.
The left side is convex in p, so that it holds for means of profiles too.
"""

import math

import numpy as np
from numpy.typing import NDArray

from harmofl.core.amplitude import Intensity
from harmofl.core.radial import PROFILE_FLOOR, bin_sizes
from harmofl.core.spectra import Region, statistic_shape

Doubles = NDArray[np.float64]

TOLERANCE = 1e-3  # relative; float32 transforms of float16 intensities keep to the bounds but for 1e-5
FAR = 8.0  # standard deviations: one of a million normal values lies beyond once in 10^9 releases


def amplitude_problem(
    values: NDArray[np.floating],
    region: Region,
    *,
    height: int,
    width: int,
    low_fraction: float,
    intensity: Intensity,
    largest: float | None,
    sigma: float = 0.0,
) -> str | None:
    """Why no images can have this mean amplitude statistic; None where some can.

    Args:
        values: (C, ...) as ``statistic_shape`` says.
        region: not ``off``.
        height: rows of the images in pixels.
        width: columns of the images in pixels.
        low_fraction: of region ``low``.
        intensity: the step before the transform.
        largest: intensity before that step, where the smallest is 0; None where images may hold any.
        sigma: standard deviation of the normal noise on each value; values below 0 may have been set to 0 after it.
    """
    shape = statistic_shape(region, len(values), height, width, low_fraction)
    if tuple(values.shape) != shape:
        return f"shape {tuple(values.shape)}, not {shape}"
    held = values.astype(np.float64)
    if not np.isfinite(held).all():
        return "values that are not finite"
    peak = 1.0 if intensity == "zscore" else largest
    if region == "site_gain":
        deviation = peak if intensity == "zscore" or peak is None else peak / 2
        return _profile_problem(held, (height, width), deviation, sigma)
    if held.min() < 0:
        return "values below 0"
    if peak is None:
        return None
    middle = shape[1] // 2 if region == "low" else 0  # row of zero frequency: `low` counts its rows from -b
    is_centered = intensity == "zscore"
    return _spectrum_problem(held, middle, size=(height, width), is_centered=is_centered, largest=peak, sigma=sigma)


def _profile_problem(profiles: Doubles, size: tuple[int, int], deviation: float | None, sigma: float) -> str | None:
    """Of log profiles (C, bins) of images whose intensities deviate by at most so much, None for any."""
    lowest = math.log(PROFILE_FLOOR) - TOLERANCE - FAR * sigma
    if profiles.min() < lowest:
        return f"a log profile of {profiles.min():.4g}, the lowest is {lowest:.4g}"
    if deviation is None:
        return None
    sizes = bin_sizes(*size).numpy()
    filled, power = sizes > 0, math.prod(size) * deviation**2
    most = np.log(power / sizes[filled]) / 2 + TOLERANCE + FAR * sigma
    beyond = profiles[:, filled] - most
    if beyond.max() > 0:
        channel, place = np.unravel_index(beyond.argmax(), beyond.shape)
        return f"a log profile of {profiles[:, filled][channel, place]:.4g}, an image has at most {most[place]:.4g}"
    if sigma:
        return None
    found = (sizes[filled] * np.exp(2 * profiles[:, filled])).sum(1).max()
    if found > power * (1 + TOLERANCE) ** 2:
        return f"a log profile of power {found:.4g}, an image has at most {power:.4g}"
    return None


def _spectrum_problem(
    amplitudes: Doubles, middle: int, *, size: tuple[int, int], is_centered: bool, largest: float, sigma: float
) -> str | None:
    """Of amplitudes (C, rows, columns) that are 0 or more, with zero frequency in column 0 of row `middle`."""
    (height, width), pixels = size, math.prod(size)
    noise = FAR * sigma
    rounding = TOLERANCE * pixels * largest
    direct = amplitudes[:, middle, 0]
    most = (0.0 if is_centered else pixels * largest) + rounding + noise
    if direct.max() > most:
        return f"{direct.max():.4g} at zero frequency, an image of {height} x {width} pixels has at most {most:.4g}"
    mean = np.clip(direct / pixels, 0, largest)
    limits = np.full(len(mean), pixels * largest) if is_centered else pixels * np.sqrt(mean * (largest - mean))
    if sigma:  # the noise hides the mean too, and its own norm is far from sqrt(n) sigma as rarely as one value from 0
        limits = np.full(len(mean), pixels * largest / (1 if is_centered else 2))
        limits += math.sqrt(2) * sigma * (math.sqrt(amplitudes[0].size) + FAR)
    weights = _multiplicity(amplitudes.shape[1:], height, width)
    weights[middle, 0] = 0
    norms = np.sqrt((weights * amplitudes**2).sum((1, 2)))
    beyond = norms - limits - rounding
    if beyond.max() > 0:
        worst = int(beyond.argmax())
        return f"norm {norms[worst]:.4g} without zero frequency, an image has at most {limits[worst] + rounding:.4g}"
    return None


def _multiplicity(shape: tuple[int, ...], height: int, width: int) -> Doubles:
    """How many coefficients of the whole plane each value stands for: a half plane holds most of them once of two."""
    rows, columns = shape
    weights = np.full(shape, 2.0)
    weights[:, 0] = 1
    if width % 2 == 0 and columns == width // 2 + 1:
        weights[:, -1] = 1
    if rows == height + 1:  # `low` as wide as the plane: its first and its last row name one frequency
        weights[[0, -1]] /= 2
    return weights
