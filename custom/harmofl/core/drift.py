"""How far sites pull a round apart: client drift, and the distance between their amplitude profiles."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Drift:
    """Client drift of one round; None where it is undefined: with one site, or with updates of length 0.

    Attributes:
        dispersion: root mean square over sites of ||d_i - mean d||, the spread of the local models after the round.
        relative: the same over ||mean d||, free of learning rate and network size.
        cosine: mean over pairs of sites of the cosine between their updates; 1 where all pull one way.
    """

    dispersion: float
    relative: float | None
    cosine: float | None


class DriftOfRound:
    """Drift of the updates that sites made to one global model, one update after the other, in float64.

    Memory holds two sums in the place of the updates, whose number it does not depend on: with d_i the updates and
    u_i = d_i / ||d_i||, the mean over i of ||d_i - mean||^2 is the mean of ||d_i||^2 minus ||mean||^2, and the sum over
    pairs of u_i . u_j is half of ||sum of u_i||^2 minus the number of sites.
    """

    def __init__(self, parameters: Collection[str]) -> None:
        """Begin a round.

        Args:
            parameters: names of the entries that are trained; running statistics and counters are left out.
        """
        self._parameters = sorted(parameters)
        self._count, self._squares, self._still = 0, 0.0, False
        self._sum: NDArray[np.float64] | None = None
        self._units: NDArray[np.float64] | None = None

    def add(self, difference: Arrays) -> None:
        """Add what a site's training added to each entry."""
        flat = [np.asarray(difference[name], np.float64).ravel() for name in self._parameters]
        update = np.concatenate(flat) if flat else np.zeros(0)
        square = float(update @ update)
        if self._sum is None or self._units is None:
            self._sum, self._units = np.zeros_like(update), np.zeros_like(update)
        self._sum += update
        if square > 0:
            update /= np.sqrt(square)
            self._units += update
        self._count, self._squares, self._still = self._count + 1, self._squares + square, self._still or square == 0

    def drift(self) -> Drift:
        """The drift of what was added.

        Raises:
            ValueError: no site.
        """
        if self._sum is None or self._units is None:
            raise ValueError("drift needs the update of at least one site")
        count = self._count
        mean_square = float(self._sum @ self._sum) / count**2
        # rounding may leave a little below 0
        dispersion = float(np.sqrt(max(self._squares / count - mean_square, 0.0)))
        cosine = None
        if count > 1 and not self._still:
            cosine = (float(self._units @ self._units) - count) / (count * (count - 1))
        return Drift(dispersion, dispersion / float(np.sqrt(mean_square)) if mean_square > 0 else None, cosine)


def profile_distances(profiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance between every two sites: root mean square difference of their log amplitude profiles.

    Args:
        profiles: mean log amplitude by radial frequency, (sites, ...); a distance of 0.1 is about 10 % of amplitude.

    Returns:
        (sites, sites), symmetric with zeros on the diagonal.
    """
    flat = profiles.reshape(len(profiles), -1)
    distances: NDArray[np.float64] = np.sqrt(np.square(flat[:, None] - flat[None]).mean(-1))
    return distances


def mean_distance(profiles: NDArray[np.float64]) -> float | None:
    """Mean of `profile_distances` over pairs of sites; None with one site."""
    if len(profiles) < 2:
        return None
    return float(profile_distances(profiles)[np.triu_indices(len(profiles), 1)].mean())
