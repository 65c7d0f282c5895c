"""How far sites pull a round apart: client drift, and the distance between their amplitude profiles."""

from collections.abc import Collection, Mapping, Sequence
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


def client_drift(differences: Sequence[Arrays], parameters: Collection[str]) -> Drift:
    """Drift of the updates that sites made to one global model.

    All three numbers follow from the inner products of the updates, in float64.

    Args:
        differences: by site what its training added to each entry.
        parameters: names of the entries that are trained; running statistics and counters are left out.

    Raises:
        ValueError: no site.
    """
    if not differences:
        raise ValueError("drift needs the update of at least one site")
    count = len(differences)
    products = np.zeros((count, count))
    for name in sorted(parameters):
        rows = np.stack([np.asarray(difference[name], np.float64).ravel() for difference in differences])
        products += rows @ rows.T
    squares, mean_square = np.diag(products), max(float(products.mean()), 0.0)
    # mean over i of ||d_i - mean||^2 = mean of ||d_i||^2 - ||mean||^2; rounding may leave a little below 0
    dispersion = float(np.sqrt(max(float(squares.mean()) - mean_square, 0.0)))
    lengths = np.sqrt(squares)
    cosine = None
    if count > 1 and (lengths > 0).all():
        cosines = products / np.outer(lengths, lengths)
        cosine = float(cosines[np.triu_indices(count, 1)].mean())
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
