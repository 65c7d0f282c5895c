"""Entries of a model on FLARE's wire: small ones travel as one array, for each array costs about 500 bytes there."""

import math
from typing import Any

import numpy as np
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposer import Decomposer

SMALL = 65_536  # elements; copying a larger array costs more than its 500 bytes are worth
_TYPES = {f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)} | {"b1"}


class PackedArrays(dict[str, np.ndarray]):
    """Arrays by name. To filters and to whoever receives them they are a plain dict; only serialization differs."""


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
        """The entries.

        Raises:
            ValueError: the lists do not belong together, or something in them has another form.
        """
        try:
            return _entries(data["entries"], list(data["large"]), dict(data["small"]))
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(f"a message's arrays have another form ({type(error).__name__})") from None


def _entries(listed: Any, large: list[Any], small: dict[str, Any]) -> dict[str, np.ndarray]:
    if not all(isinstance(array, np.ndarray) for array in (*large, *small.values())):
        raise ValueError("a message lists arrays that are none")
    ends = dict.fromkeys(small, 0)
    result: dict[str, np.ndarray] = {}
    for name, shape, kind in listed:
        if name in result:
            raise ValueError("a message names an array twice")
        if kind:
            start = ends[kind]
            ends[kind] += math.prod(shape)
            result[name] = small[kind][start : ends[kind]].reshape(shape)
        elif large:
            result[name] = large.pop(0)
        else:
            raise ValueError("a message lists more arrays than it holds")
    if large or any(len(small[kind]) != end for kind, end in ends.items()):
        raise ValueError("a message holds more than the arrays that it lists")
    return result


fobs.register(PackedArraysDecomposer)
