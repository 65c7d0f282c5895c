"""Which types an answer may hold: FLARE cannot take apart any other, and would wait for the round's time limit.

The server would refuse it as a whole (`harmofl.flare.site_messages`). What a site cannot send is therefore refused at
the site itself, by name.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.shareable import Shareable

from harmofl.flare.packed_arrays import PackedArrays

# exact classes: FLARE's serializer looks up the class itself, and takes no subclass for its parent
_VALUES = (type(None), bool, float, bytes, np.float64, np.float32, np.int64, np.int32, DataKind)
_MAPPINGS = (dict, OrderedDict, PackedArrays, Shareable)
_SEQUENCES = (list, tuple, set)
_WHOLE = range(-(2**63), 2**64)  # what msgpack holds
_SHOWN = re.compile(r"[\w.\[\]-]{1,200}", re.ASCII)


def unknown_type(answer: Any) -> str:
    """Where an answer holds something that FLARE's wire does not know, and what; empty where it holds nothing such.

    The line may leave the site: it names places and types, no values.
    """
    for place, problem in _unknown(answer, ()):
        name = ".".join(place)
        return f"{name if _SHOWN.fullmatch(name) else 'a part of it'} is {problem}"
    return ""


def _unknown(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    kind = type(value)
    if kind in _MAPPINGS:
        for key, held in value.items():
            if type(key) not in (str, int):
                yield place, f"a mapping with a {type(key).__name__} for a key"
            yield from _unknown(held, (*place, str(key)))
    elif kind in _SEQUENCES:
        for position, held in enumerate(value):
            yield from _unknown(held, (*place[:-1], f"{''.join(place[-1:])}[{position}]"))
    elif kind is DXO:
        yield from _unknown({"data": value.data, "meta": value.meta}, place)
    elif problem := _problem(value):
        yield place, problem


def _problem(value: Any) -> str:
    """Why a value that holds no others cannot travel, empty where it can."""
    kind = type(value)
    if kind is np.ndarray:
        return "" if value.dtype.kind in "biufc" else f"an array of {value.dtype.name}"
    if kind is int:
        return "" if value in _WHOLE else "a whole number of more than 64 bits"
    if kind is str:
        return "" if _encodes(value) else "text that UTF-8 cannot hold"
    return "" if kind in _VALUES else f"of type {kind.__module__}.{kind.__qualname__}"


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
