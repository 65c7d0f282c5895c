"""Sums of many vectors on a common grid: exact there, so that neither order nor grouping of the summands can show.

Every entry of a model has a scale, the power of two at or above the largest magnitude in the model that was sent, and
at least a floor that the job sets. Every weighted difference is rounded to a multiple of the grid, 2^-29 of the scale,
which is pre-rounding as in reproducible summation (Demmel and Ahrens, IEEE Trans. Computers 2015) with a grid that is
known before the first summand comes. Multiples of a grid are integers, and sums of integers modulo 2^64 are exact,
associative and commutative: they may be made in any order and in any tree, and masks that cancel modulo 2^64 may lie on
them.

Error. Rounding moves w * d, weight times difference, by at most half of the grid, 2^-30 of the scale. For weights
w_1, ..., w_n of at least 1 the mean, sum(w_i d_i) / sum(w_i), so moves by at most n 2^-30 / sum(w_i), which is at most
2^-30 scales. The product itself is exact where its digits fit into a float64: 24 of a float32 and those of a whole
weight below 2^29. Any other product is rounded to float64 first, by 2^-53 of itself. The total and its quotient by the
weights are rounded once each in float64, as in any mean.

Range. With M = 1.5 * 2^52 grids, w * d + M lies where float64 has a distance of one grid, so that the addition rounds
to the grid (halves to even), and its bits as an integer are those of M plus the multiple. That holds up to 2^51 grids,
`NEAR` = 2^22 scales, and 4,095 such summands stay within 2^63 grids. Summands of a vector that has one further out are
split into multiples of 2^32 grids and a rest and have a second integer each, up to `FAR` = 2^54 scales.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

PIECE = 65_536  # elements added at a time: fewer cost calls, more do not stay in a core's cache
MOST = 4_095  # summands
NEAR, FAR = 2.0**22, 2.0**54  # largest |weight * value| in scales, by one integer and by two
LARGEST_PART = 2**51  # magnitude of one summand in either integer
_GRID, _SPLIT = -29, 32  # exponents: of the grid in scales, of the second integer's unit in grids
_LARGEST_HALF = 65_504.0  # finite float16


def scale_exponent(values: Array, floor: float) -> int:
    """The exponent of an entry's scale: of the power of two at or above its largest magnitude, and the floor.

    The magnitude is rounded to float16 first, so that a model that was rounded to float16 on its way has the scales
    that it had before.
    """
    largest = float(np.abs(values).max(initial=0))
    rounded = float(np.float16(largest)) if largest < _LARGEST_HALF else largest
    mantissa, exponent = math.frexp(max(rounded, floor))
    return exponent - (mantissa == 0.5)


class GridSum:
    """The sum of weight * values over many vectors, each rounded to the grid; memory is 8 bytes an element.

    Once a vector was far out, it is 16 bytes. Vectors are added piece by piece, and may be taken back so: what a piece
    adds depends on the piece and its weight alone. Who adds sees to it that each vector is finite and within the range,
    or takes it back, and that there are not more than `MOST`.
    """

    def __init__(self, size: int, exponent: int) -> None:
        """Begin with zeros.

        Args:
            size: elements.
            exponent: of the scale, see `scale_exponent`.
        """
        self.scale = math.ldexp(1.0, exponent)
        self._grid = math.ldexp(self.scale, _GRID)
        self._magic = 1.5 * 2.0**52 * self._grid
        self._low: Integers = np.zeros(size, np.int64)
        self._high: Integers | None = None
        self._near = 0  # vectors that brought the bits of M with them

    def add(self, start: int, piece: Floats, weight: float, buffer: Doubles, *, far: bool = False) -> None:
        """Add a piece of a vector.

        Args:
            start: its first element, 0 for the first piece of a vector.
            piece: (n,) floats, n at most `PIECE`.
            weight: finite.
            buffer: (n,) or longer, overwritten.
            far: the vector is not within `NEAR`; all its pieces are then added so.
        """
        low = self._low[start : start + piece.size]
        if far:
            self._add_parts(start, *self._split(piece, weight))
        else:
            np.add(low, self._rounded(piece, weight, buffer), out=low)
            self._near += start == 0

    def take_back(self, start: int, piece: Floats, weight: float, buffer: Doubles, *, far: bool = False) -> None:
        """Undo `add`, bit for bit, whatever the piece holds."""
        low = self._low[start : start + piece.size]
        if far:
            rest, high = self._split(piece, weight)
            self._add_parts(start, -rest, -high)
        else:
            np.subtract(low, self._rounded(piece, weight, buffer), out=low)
            self._near -= start == 0

    def low(self) -> Integers:
        """The first integers, (size,), in grids."""
        brought = self._near * int(np.float64(self._magic).view(np.int64)) % 2**64
        return self._low - np.uint64(brought).astype(np.int64)

    def high(self) -> Integers | None:
        """The second integers, (size,), in 2^32 grids; None where all summands were near."""
        return self._high

    def merge(self, low: Integers, high: Integers | None) -> None:
        """Add the integers of another sum with this scale."""
        self._add_parts(0, low, high)

    def nearest(self) -> Doubles:
        """The sums as float64, (size,)."""
        return as_doubles(self.low(), self._high, self.scale)

    def _add_parts(self, start: int, low: Integers, high: Integers | None) -> None:
        if high is not None:
            if self._high is None:
                self._high = np.zeros(self._low.size, np.int64)
            self._high[start : start + high.size] += high
        self._low[start : start + low.size] += low

    def _rounded(self, piece: Floats, weight: float, buffer: Doubles) -> Integers:
        """The piece times weight plus M, as integers."""
        part = buffer[: piece.size]
        np.copyto(part, piece)
        if weight != 1:
            np.multiply(part, weight, out=part)
        np.add(part, self._magic, out=part)  # an operation of its own: fused with the product it would round otherwise
        return part.view(np.int64)

    def _split(self, piece: Floats, weight: float) -> tuple[Integers, Integers]:
        """The piece times weight in grids, rounded, as a rest and multiples of 2^32."""
        grids = piece.astype(np.float64)
        grids *= weight
        grids /= self._grid  # a power of two
        high = np.rint(np.ldexp(grids, -_SPLIT))
        # exact: both are multiples of the last digit of `grids`, and near each other where `high` is not 0
        grids -= np.ldexp(high, _SPLIT)
        return np.rint(grids).astype(np.int64), high.astype(np.int64)


def as_doubles(low: Integers, high: Integers | None, scale: float) -> Doubles:
    """Sums of integers on the grid of a scale as float64."""
    result = low.astype(np.float64)
    if high is not None:
        result += np.ldexp(high.astype(np.float64), _SPLIT)
    result *= math.ldexp(scale, _GRID)
    return result
