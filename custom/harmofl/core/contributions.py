"""What a site sends to a mean: checked by form, in one line where it is refused."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from harmofl.sections import one_line, outside_text

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]

LARGEST_WEIGHT = 2**40  # far beyond any number of images; so many as a mean takes add up to an exact float64


class ContributionError(ValueError):
    """A contribution that must not enter the mean; one printable line without paths or patient names."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def matching_entries(contribution: Arrays, reference: Arrays, weight: int) -> dict[str, Array]:
    """The entries as arrays, checked in all but their values.

    Raises:
        ContributionError: weight not a whole number from 1 on, names missing or unknown, shape or kind of number
            differs; the first three differing names are given.
    """
    whole = isinstance(weight, int | np.integer) and not isinstance(weight, bool)
    if not whole or not 1 <= weight <= LARGEST_WEIGHT:
        raise ContributionError(f"weight {outside_text(weight)} is not a whole number from 1 to 2^40")
    names_check("misses", [name for name in reference if name not in contribution])
    names_check("has unknown", [name for name in contribution if name not in reference])
    entries = {}
    for name, expected in reference.items():
        value = np.asarray(contribution[name])
        if value.shape != expected.shape:
            raise ContributionError(f"entry {name} has shape {value.shape}, not {expected.shape}")
        if value.dtype.kind not in "biuf" or (expected.dtype.kind == "f") != (value.dtype.kind == "f"):
            raise ContributionError(f"entry {name} holds {value.dtype}, not {expected.dtype}")
        odd = value.dtype.kind == "f" and (value.itemsize > 8 or not value.dtype.isnative)
        entries[name] = value.astype(np.float64) if odd else value
    return entries


def names_check(verb: str, names: list[str]) -> None:
    """Refuse where there are such names.

    Raises:
        ContributionError: tells the first three.
    """
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = sorted(outside_text(name) for name in names)[:3]
        raise ContributionError(f"{verb} entries: {', '.join(shown)}{more}")
