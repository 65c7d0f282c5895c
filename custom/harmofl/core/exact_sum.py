"""Sums of many arrays without any loss, so that the order of the summands cannot show; nearly as fast as plain ones."""

import math

import numpy as np
from numpy.typing import NDArray

from harmofl.core.rounding import InexactFlag

Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]
Expansion = list[Doubles]

PIECE = 65_536  # elements added at a time: fewer cost calls, more do not stay in a core's cache
_BLOCK = PIECE // 8  # elements looked at closer where one of them was rounded
_MANY = _BLOCK // 8  # rounded ones at a time from which all of a block get vectors of their own


class ExactSum:
    """The sum of weight * values over many vectors; each product is rounded to float64, the sum is exact.

    Sums of float32 numbers are nearly always exact in float64, and the processor tells when one is not. The element is
    then summed apart as an expansion, a few float64 numbers whose sum is exact (two-sum: Knuth; expansions: Shewchuk
    1997), and is NaN in the plain sum, where it so rounds nothing more. Where many of a block are rounded, because the
    products fill a float64 already, the whole block is an expansion: two vectors for numbers within 2^100 of each
    other, nine for all that float64 holds of float32 numbers. Memory is 8 bytes a value and rarely more; it does not
    grow with the number of vectors.
    """

    def __init__(self, size: int) -> None:
        """Begin with zeros."""
        self._sum = np.zeros(size)
        self._apart = np.empty(0, np.intp)
        self._expansion: Expansion = [np.empty(0), np.empty(0)]  # of the elements summed apart
        self._blocks: dict[int, Expansion] = {}  # by begin of the block, what its part of the sum has rounded away
        self._flag = InexactFlag()
        self._buffers = np.empty((2, min(PIECE, size)))

    def add(self, values: Floats, weight: float) -> None:
        """Add weight * values.

        Args:
            values: (size,) finite float16, float32 or float64.
            weight: finite, as its products are.
        """
        if self._apart.size:
            rest = _absorb(self._expansion, values[self._apart].astype(np.float64) * weight)
            if rest is not None:
                self._expansion.append(rest)
        for start in range(0, values.size, PIECE):
            part, held = values[start : start + PIECE], self._sum[start : start + PIECE]
            added, total = self._buffers[:, : part.size]
            np.copyto(added, part)
            if weight != 1:
                np.multiply(added, weight, out=added)
            if not self._add_exactly(held, added, total):
                for first in range(0, part.size, _BLOCK):
                    block = slice(first, first + _BLOCK)
                    self._add_block(start + first, held[block], added[block], total[block])

    def nearest(self) -> Doubles:
        """The float64 numbers nearest to the sums, (size,)."""
        result = self._sum.copy()
        for begin, rests in self._blocks.items():
            part = result[begin : begin + _BLOCK]
            part[:] = _nearest([part, *rests])
        result[self._apart] = _nearest(self._expansion)
        return result

    def _add_exactly(self, held: Doubles, added: Doubles, total: Doubles) -> bool:
        """Add if nothing is rounded; else leave it."""
        self._flag.clear()
        np.add(held, added, out=total)
        exact = not self._flag.raised()
        if exact:
            held[:] = total
        return exact

    def _add_block(self, begin: int, held: Doubles, added: Doubles, total: Doubles) -> None:
        if begin in self._blocks:
            rest = _absorb([held, *self._blocks[begin]], added)
            if rest is not None:
                self._blocks[begin].append(rest)
            return
        if self._add_exactly(held, added, total):
            return
        lost = _lost(held, added, total)
        held[:] = total
        where = np.flatnonzero(lost)
        if where.size > _MANY:
            self._blocks[begin] = [lost]
            return
        self._apart = np.concatenate([self._apart, begin + where])
        first, second, *others = self._expansion
        zeros = np.zeros(where.size)
        self._expansion = [np.concatenate([first, total[where]]), np.concatenate([second, lost[where]])]
        self._expansion += [np.concatenate([other, zeros]) for other in others]
        held[where] = np.nan


def _lost(held: Doubles, added: Doubles, total: Doubles) -> Doubles:
    """What rounding took from total = held + added; 0 where an element is summed apart."""
    shadow = total - held
    lost = total - shadow
    np.subtract(held, lost, out=lost)
    np.subtract(added, shadow, out=shadow)
    np.add(lost, shadow, out=lost)
    np.copyto(lost, 0.0, where=np.isnan(lost))
    return lost


def _absorb(expansion: Expansion, rest: Doubles) -> Doubles | None:
    """Add to an expansion in place; returns what needs one more vector."""
    for held in expansion:
        total = held + rest
        rest = _lost(held, rest, total)
        held[:] = total
        if not rest.any():
            return None
    return rest


def _nearest(expansion: Expansion) -> Doubles:
    """The sum, rounded once."""
    result = expansion[0] + expansion[1]
    parts = np.stack(expansion)
    for index in np.flatnonzero(parts[2:].any(axis=0)).tolist():
        result[index] = math.fsum(parts[:, index])
    return result
