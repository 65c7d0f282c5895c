"""Whether a vector is finite, how long it is and where it points, from one read of it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from harmofl.core.grid_sum import PIECE, Doubles, Floats

Pieces = Callable[[], Iterable[tuple[int, Floats]]]  # gives a vector anew each time: begin of each piece and its values
Visit = Callable[[int, Floats], object]

WIDTH = 1_024  # numbers that a direction is kept in
_SHARED = 16  # rows of a block that share the signs of their columns
_LEAST, _MOST = 1e-30, 1e30  # sums of squares between which float32 loses nothing that counts


@dataclass(frozen=True)
class Reading:
    """What one read of a vector tells.

    Attributes:
        norm: its length (L2), to six digits, so that how a processor sums does not show.
        direction: (WIDTH,) its projection, zeros where none was asked for.
    """

    norm: float
    direction: Doubles


class VectorReader:
    """Reads vectors of one size: finite check, norm, and a random projection in which directions can be compared.

    The projection is a count sketch (Charikar, Chen, Farach-Colton, 2002): element i is added, with a random sign, to
    number i mod WIDTH. The inner product of two projections is that of the vectors on average; its standard deviation
    is at most sqrt(2 / WIDTH) = 0.044 times the product of the two lengths where these lie spread over the elements. Of
    a vector of 32 768 elements or more, 16 rows of 1 024 share the signs of their columns and have a sign each, which
    costs half as much; where rows are parallel to each other, the deviation can grow to sqrt(2 / WIDTH + 2 / B) for B
    blocks of 16 384 elements with equal energy. A vector of zeros has no direction.
    """

    def __init__(self, size: int, generator: np.random.Generator | None = None) -> None:
        """Draw the signs.

        Args:
            size: elements of each vector.
            generator: draws them; None for no projection.
        """
        self._shared = _SHARED if size >= 2 * _SHARED * WIDTH else 1
        self._block = self._shared * WIDTH
        self._signs: tuple[Floats, Floats] | None = None
        if generator is not None:
            blocks = math.ceil(size / self._block)
            rows = _random_signs(generator, blocks * self._shared)
            # each piece takes its columns' signs one further on, so that no two blocks have the same
            pieces = math.ceil(size / PIECE)
            columns = _random_signs(generator, min(blocks, PIECE // self._block) * WIDTH + pieces)
            self._signs = rows.reshape(blocks, 1, self._shared), columns

    def read(self, pieces: Pieces, kind: np.dtype[np.generic], visit: Visit | None = None) -> Reading | None:
        """Read a vector once; None where a value is not finite in `kind`, a type of floats.

        Only a vector whose squares leave the range of float32 is read again, in float64.

        Args:
            pieces: of the vector, all but the last of `PIECE` elements, float32 or float64.
            kind: type of floats.
            visit: is given each piece once, while it is in the processor's cache.
        """
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            squares, direction = self._sums(pieces(), 1.0, visit)
            # a float64 beyond float32 is infinite in float32; of float16 that takes a look of its own
            if _LEAST < squares < _MOST and kind.itemsize > 2:
                return Reading(_six_digits(math.sqrt(squares)), direction)
            if not all(all_finite(piece, kind) for _, piece in pieces()):
                return None
            top = max((float(np.abs(piece).max()) for _, piece in pieces()), default=0.0)
            if top == 0:
                return Reading(0.0, np.zeros(WIDTH))
            squares, direction = self._sums(pieces(), top, None)
            return Reading(_six_digits(top * math.sqrt(squares)), top * direction)

    def _sums(self, pieces: Iterable[tuple[int, Floats]], top: float, visit: Visit | None) -> tuple[float, Doubles]:
        """Sum of squares and projection of values / top."""
        squares, direction = 0.0, np.zeros(WIDTH)
        for start, piece in pieces:
            part = piece if top == 1 else piece / np.float64(top)
            whole = part.size // self._block * self._block
            squares += self._add(part[:whole], start, direction)
            if whole < part.size:
                padded = np.zeros(self._block, part.dtype)
                padded[: part.size - whole] = part[whole:]
                squares += self._add(padded, start + whole, direction)
            if visit is not None:
                visit(start, piece)
        return squares, direction

    def _add(self, part: Floats, start: int, direction: Doubles) -> float:
        """Add whole blocks, which begin at element `start`, to the projection; the sum of their squares."""
        if not part.size:
            return 0.0
        rows = part.reshape(-1, WIDTH)
        if self._signs is not None:
            piece, first = start // PIECE, start // self._block
            offset = piece + start % PIECE // self._block * WIDTH
            count = part.size // self._block
            of_rows = self._signs[0][first : first + count]
            added = np.matmul(of_rows, part.reshape(count, self._shared, WIDTH)).reshape(count, WIDTH)
            added *= self._signs[1][offset : offset + count * WIDTH].reshape(count, WIDTH)
            direction += added.sum(axis=0)
        return float(np.vecdot(rows, rows).sum(dtype=np.float64))


def all_finite(values: Floats, kind: np.dtype[np.generic]) -> bool:
    """Whether all values are finite in a type of floats."""
    # a float64 beyond float32 is not finite in the mean
    return all(
        bool(np.isfinite(values[start : start + PIECE].astype(kind, copy=False)).all())
        for start in range(0, values.size, PIECE)
    )


def cosine_to_rest(directions: dict[str, Doubles]) -> dict[str, float]:
    """By site the mean of the cosines between its direction and each of the others; empty for fewer than two.

    Each of the others counts the same, whatever its length, so that one long difference does not turn the rest over;
    and where others cancel each other, the mean is near 0.
    """
    lengths = {site: length for site, held in directions.items() if (length := float(np.linalg.norm(held))) > 0}
    if len(lengths) < 2:
        return {}
    total = np.zeros(len(directions[next(iter(lengths))]))
    for site in sorted(lengths):
        total += directions[site] / lengths[site]

    def cosine(site: str) -> float:
        unit = directions[site] / lengths[site]
        return round(float(unit @ (total - unit)) / (len(lengths) - 1), 3)

    return {site: cosine(site) for site in lengths}


def _random_signs(generator: np.random.Generator, count: int) -> Floats:
    return 2 * generator.integers(0, 2, count, np.int8).astype(np.float32) - 1


def _six_digits(number: float) -> float:
    return float(f"{number:.6g}")
