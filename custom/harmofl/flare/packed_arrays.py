"""Entries of a model on FLARE's wire: small ones travel as one array, for each array costs about 500 bytes there."""

import math
from typing import Any

import numpy as np
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposer import Decomposer

from harmofl.sections import outside_text

SMALL = 65_536  # elements; copying a larger array costs more than its 500 bytes are worth
MOST_DIMENSIONS = 32  # NumPy 1 has no array of more
LONGEST_NAME = 500  # characters
_TYPES = {f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)} | {"b1"}


class PackedArrays(dict[str, np.ndarray]):
    """Arrays by name. To filters and to whoever receives them they are a plain dict; only serialization differs."""


class UnreadableArrays(dict[str, np.ndarray]):
    """Stands for arrays whose message contradicts itself, and holds none; `problem` is one line that says how.

    It is no exception: outside simulation FLARE ends the server's process of a job where an answer cannot be decoded.
    """

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem


class _FormError(ValueError):
    """A message's arrays have another form."""


class PackedArraysDecomposer(Decomposer):
    """How FLARE serializes `PackedArrays`; what arrives is a plain dict with the same entries in the same order.

    The message holds a list of [name, shape, type] with the type "" for a large entry, the large arrays in their order,
    and for each type one vector of all small entries in their order.
    """

    def supported_type(self) -> type[PackedArrays]:
        """The class that this handles."""
        return PackedArrays

    def decompose(self, target: PackedArrays, manager: DatumManager | None = None) -> dict[str, Any]:
        """To lists, text and arrays."""
        entries: list[list[Any]] = []
        large: list[np.ndarray] = []
        small: dict[str, list[np.ndarray]] = {}
        for name, value in target.items():
            array = np.asarray(value)
            kind = array.dtype.str[1:]
            if array.size >= SMALL or kind not in _TYPES or not array.dtype.isnative:
                entries.append([name, [], ""])
                large.append(array)
            else:
                entries.append([name, list(array.shape), kind])
                small.setdefault(kind, []).append(array.reshape(-1))
        return {
            "entries": entries,
            "large": large,
            "small": {kind: np.concatenate(arrays) for kind, arrays in small.items()},
        }

    def recompose(self, data: Any, manager: DatumManager | None = None) -> dict[str, np.ndarray]:
        """The entries; `UnreadableArrays` where the lists do not belong together or something has another form.

        Nothing is allocated but views: sizes are checked against the arrays that came along.
        """
        try:
            return _entries(*_lists(data))
        except _FormError as error:
            return UnreadableArrays(str(error))


def _lists(data: Any) -> tuple[list[Any], list[np.ndarray], dict[str, np.ndarray]]:
    """The three parts of a message, each of its form."""
    entries, large, small = (data.get(key) if isinstance(data, dict) else None for key in ("entries", "large", "small"))
    if not (isinstance(entries, list) and isinstance(large, list) and isinstance(small, dict)):
        raise _FormError("its arrays are not listed in the form that HarmoFL has")
    if not all(isinstance(array, np.ndarray) for array in (*large, *small.values())):
        raise _FormError("it lists arrays that are none")
    for kind, array in small.items():
        if not isinstance(kind, str) or kind not in _TYPES or array.dtype != np.dtype(kind) or array.ndim != 1:
            raise _FormError(f"its small entries of type {outside_text(kind)} are no vector of that type")
    return entries, large, small


def _entries(listed: list[Any], large: list[np.ndarray], small: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ends = dict.fromkeys(small, 0)
    waiting = iter(large)
    result: dict[str, np.ndarray] = {}
    for entry in listed:
        name, shape, kind = _entry(entry)
        if name in result:
            raise _FormError(f"it names entry {outside_text(name)} twice")
        if kind:
            start, size = ends.get(kind, 0), math.prod(shape)
            if kind not in small or size > len(small[kind]) - start:
                raise _FormError(f"entry {outside_text(name)} is larger than what was sent of it")
            ends[kind] = start + size
            result[name] = small[kind][start : ends[kind]].reshape(shape)
        elif (array := next(waiting, None)) is not None:
            result[name] = array
        else:
            raise _FormError("it lists more arrays than it holds")
    if next(waiting, None) is not None or any(len(small[kind]) != end for kind, end in ends.items()):
        raise _FormError("it holds more than the arrays that it lists")
    return result


def _entry(entry: Any) -> tuple[str, list[int], str]:
    """Name, shape and type of a listed entry."""
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise _FormError("an entry is not listed by name, shape and type")
    name, shape, kind = entry
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise _FormError(f"an entry is named by {outside_text(name)}, which is no name of an entry")
    if not isinstance(kind, str) or kind not in {*_TYPES, ""}:
        raise _FormError(f"entry {outside_text(name)} has type {outside_text(kind)}")
    # exact types: a bool is an int, and a product of text would be gigabytes of text
    fits = isinstance(shape, list | tuple) and len(shape) <= MOST_DIMENSIONS
    if not fits or any(type(size) is not int or not 0 <= size < 2**40 for size in shape):
        raise _FormError(f"entry {outside_text(name)} has a shape that is no list of sizes")
    return name, list(shape), kind


fobs.register(PackedArraysDecomposer)
