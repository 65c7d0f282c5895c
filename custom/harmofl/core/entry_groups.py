"""EntryGroup: float entries that are read, and added, as one vector."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harmofl.core.contributions import Array, Arrays, ContributionError
from harmofl.core.direction import Reading, VectorReader, Visit, all_finite
from harmofl.core.grid_sum import PIECE, Doubles, Floats

Kind = TypeVar("Kind", bound=np.generic)


class EntryGroup:
    """Float entries of one type and scale that are read as one vector, in the order of the reference."""

    def __init__(
        self,
        names: list[str],
        reference: Arrays,
        *,
        measured: bool,
        exponent: int,
        generator: np.random.Generator | None,
    ) -> None:
        """Group entries.

        Args:
            names: of the entries.
            reference: name -> array.
            measured: whether their norm and direction are of interest.
            exponent: of their scale.
            generator: draws the projection of directions; None where none are kept.
        """
        self.names, self._reference, self.exponent = names, reference, exponent
        self._type = reference[names[0]].dtype
        self.measured = measured
        stops = np.cumsum([reference[name].size for name in names]).tolist()
        self.size: int = stops[-1]
        self.places = {name: slice(stop - reference[name].size, stop) for name, stop in zip(names, stops, strict=True)}
        self._parts = self._parts_of_pieces()
        self._buffer = np.empty(min(PIECE, self.size), np.float64 if self._type.itemsize == 8 else np.float32)
        self._reader = VectorReader(self.size, generator if measured else None)

    def pieces(self, entries: Arrays) -> Iterator[tuple[int, Floats]]:
        """The vector of a contribution, piece by piece, each until the next is asked for.

        Yields:
            first element and values, `PIECE` of them or what is left; float32, float64 for a model in float64.
        """
        flat = {name: entries[name].reshape(-1) for name in self.names}
        for index, parts in enumerate(self._parts):
            start = index * PIECE
            values: list[Any] = [flat[name][place] for name, place in parts]
            if len(values) == 1 and values[0].dtype == self._buffer.dtype:
                yield start, values[0]
                continue
            piece = self._buffer[: min(PIECE, self.size - start)]
            with np.errstate(over="ignore"):
                np.concatenate(values, out=piece, casting="same_kind")
            yield start, piece

    def read(self, entries: Arrays, visit: Visit | None = None) -> Reading:
        """Check and measure the vector of a contribution.

        Args:
            entries: checked by form.
            visit: is given each piece once.

        Raises:
            ContributionError: a value is not finite in the reference's type; names its entry.
        """
        reading = self._reader.read(lambda: self.pieces(entries), self._type, visit)
        if reading is None:
            with np.errstate(over="ignore"):
                parts: list[tuple[str, Any]] = [(name, entries[name].reshape(-1)) for name in self.names]
                bad = next(name for name, part in parts if not all_finite(part, self._type))
            raise ContributionError(f"entry {bad} holds values that are not finite")
        return reading

    def split(self, values: Doubles, factor: float) -> dict[str, Array]:
        """A vector times the factor as entries, in the reference's type and shape; `values` are overwritten."""
        if factor != 1:
            values *= factor
        return {name: part.astype(self._type) for name, part in self.entries_of(values).items()}

    def entries_of(self, vector: NDArray[Kind]) -> dict[str, NDArray[Kind]]:
        """Views of a vector as entries."""
        return {name: vector[place].reshape(self._reference[name].shape) for name, place in self.places.items()}

    def vector(self, entries: Mapping[str, NDArray[Kind]]) -> NDArray[Kind]:
        """The entries as one new vector of their own type."""
        return np.concatenate([entries[name].reshape(-1) for name in self.names])

    def _parts_of_pieces(self) -> list[list[tuple[str, slice]]]:
        """By piece the entries that it consists of, and which of their elements."""
        pieces: list[list[tuple[str, slice]]] = [[] for _ in range(-(-self.size // PIECE))]
        for name, place in self.places.items():
            for index in range(place.start // PIECE, -(-place.stop // PIECE)):
                begin, end = max(place.start, index * PIECE), min(place.stop, (index + 1) * PIECE)
                if begin < end:
                    pieces[index].append((name, slice(begin - place.start, end - place.start)))
        return pieces
