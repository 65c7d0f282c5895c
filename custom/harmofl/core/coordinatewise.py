"""Median and trimmed mean of contributions, value by value: they hold all contributions of a round."""

import math

import numpy as np

from harmofl.core.aggregation import ContributionMean, Measured, NormLimits
from harmofl.core.contributions import Array, Arrays, ContributionError
from harmofl.core.grid_sum import PIECE, Doubles

FEWEST = 3  # the median of two is their mean


class CoordinatewiseMean(ContributionMean):
    """Of each value the mean of the middle contributions; integer and boolean entries are their maximum.

    The median leaves one or two of the middle, the trimmed mean cuts off the same number at both ends (Yin et al., ICML
    2018, definitions 1 and 2). Every contribution counts the same, whatever its weight. The result does not depend on
    the order of arrival. Memory is that of all contributions as they were sent, until the round has closed.
    """

    def __init__(
        self, reference: Arrays, measured: frozenset[str] = frozenset(), trimmed_share: float | None = None
    ) -> None:
        """Prepare for contributions like `reference`.

        Args:
            reference: name -> array.
            measured: see `ContributionMean`.
            trimmed_share: of the contributions cut off at each end, at least one; None for the median.
        """
        super().__init__(reference, measured)
        self._share = trimmed_share
        self._held: dict[int, list[tuple[Array, float]]] = {}

    @property
    def cut(self) -> int:
        """How many are cut off at each end of the contributions so far."""
        if self._share is None:
            return (self.count - 1) // 2
        return max(1, math.floor(self._share * self.count))

    def _take(self, entries: Arrays, weights: list[float], limits: NormLimits) -> Measured:
        measured = self._measured([group.read(entries) for group in self._groups], limits)
        # copies: what was received may be a view of a whole message, or be written to
        vectors = [group.vector(entries) for group in self._groups]
        for index, values in enumerate(vectors):
            self._held.setdefault(index, []).append((values, measured.factor))
        return measured

    def _middle(self, index: int) -> Doubles:
        held, cut = self._held[index], self.cut
        if self.count < FEWEST:
            raise ContributionError(f"federation.aggregation: {self.count} of at least {FEWEST} contributions came")
        result = np.empty(self._groups[index].size)
        for start in range(0, result.size, PIECE):
            piece = slice(start, start + PIECE)
            rows = np.stack([values[piece].astype(np.float64) * factor for values, factor in held])
            rows.sort(axis=0)
            # sorted values are added in one order, whatever the order of arrival
            result[piece] = rows[cut : self.count - cut].mean(axis=0)
        return result
