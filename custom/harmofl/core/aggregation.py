"""Streaming weighted mean of contributions: validated as a whole, independent of the order of arrival."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.generic]]

_LARGEST_WEIGHT = 2**63  # far beyond any number of images; times a float32 it stays finite in float64
_CHUNK = 16_384  # elements; four float64 blocks of it stay in a core's cache


class ContributionError(ValueError):
    """A contribution that must not enter the mean; the message is one line without paths or patient names."""


def check_contribution(contribution: Arrays, reference: Arrays, weight: float) -> None:
    """Check a whole contribution before any of it is added.

    Args:
        contribution: name -> array as received; 0-d arrays may arrive as NumPy scalars.
        reference: the global state's entries that every contribution must match in name, shape and kind of number.
        weight: the contribution's weight in the mean.

    Raises:
        ContributionError: weight not positive and finite, names missing or unknown, shape or kind of number differs,
            or a value is not finite; the first three differing names are given.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < _LARGEST_WEIGHT:
        raise ContributionError(f"weight {weight!r} is not a positive finite number")
    _name_check("misses", [name for name in reference if name not in contribution])
    _name_check("has unknown", [name for name in contribution if name not in reference])
    for name, expected in reference.items():
        value = np.asarray(contribution[name])
        if value.shape != expected.shape:
            raise ContributionError(f"entry {name} has shape {value.shape}, not {expected.shape}")
        if value.dtype.kind not in "biuf" or (expected.dtype.kind == "f") != (value.dtype.kind == "f"):
            raise ContributionError(f"entry {name} holds {value.dtype}, not {expected.dtype}")
        with np.errstate(over="ignore"):  # a float64 beyond float32 is not finite in the mean
            finite = bool(np.isfinite(value.astype(expected.dtype, copy=False)).all())
        if not finite:
            raise ContributionError(f"entry {name} holds values that are not finite")


def _name_check(verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ContributionError(f"{verb} entries: {', '.join(sorted(names)[:3])}{more}")


class StreamingMean:
    """Weighted mean of float entries, maximum of integer and boolean ones, in two float64 accumulators a value.

    Each add is a two-sum (Knuth): what a float64 sum rounds away is kept in a second accumulator. Both together are
    exact as long as the contributions of one entry lie within 2^55 of each other, so the mean does not depend on the
    order of arrival; it is within one float32 unit of the exact one. Memory is 16 bytes a value, whatever the number
    of sites.
    """

    def __init__(self, reference: Arrays) -> None:
        """Prepare for contributions with the names, shapes and kinds of number of `reference`."""
        self._reference = {name: np.asarray(value) for name, value in reference.items()}
        self._high: dict[str, NDArray[np.float64]] = {}
        self._low: dict[str, NDArray[np.float64]] = {}
        self._maximum: dict[str, NDArray[np.generic]] = {}
        for name, value in self._reference.items():
            if np.issubdtype(value.dtype, np.floating):
                self._high[name] = np.zeros(value.size)
                self._low[name] = np.zeros(value.size)
        self.total_weight = 0.0
        self.count = 0

    def check(self, contribution: Arrays, weight: float) -> None:
        """Check a contribution without adding it.

        Raises:
            ContributionError: see `check_contribution`.
        """
        check_contribution(contribution, self._reference, weight)

    def add(self, contribution: Arrays, weight: float) -> None:
        """Check the whole contribution, then add it.

        Raises:
            ContributionError: see `check_contribution`; nothing was added.
        """
        self.check(contribution, weight)
        for name, high in self._high.items():
            _add_compensated(high, self._low[name], np.asarray(contribution[name]).reshape(-1), float(weight))
        for name, value in self._reference.items():
            if name not in self._high:
                received = np.asarray(contribution[name]).astype(value.dtype)
                held = self._maximum.get(name)
                self._maximum[name] = received if held is None else np.maximum(held, received)
        self.total_weight += float(weight)
        self.count += 1

    def mean(self, factors: Mapping[str, float] | None = None) -> dict[str, NDArray[np.generic]]:
        """The weighted mean (float entries in the reference's dtype) and the maxima, with the reference's shapes.

        Args:
            factors: of float entries, by name; applied in float64, before the rounding to the reference's dtype.

        Raises:
            ContributionError: nothing was added.
        """
        if self.count == 0:
            raise ContributionError("no contribution was accepted")
        result: dict[str, NDArray[np.generic]] = {}
        for name, value in self._reference.items():
            if name in self._high:
                mean = (self._high[name] + self._low[name]) / self.total_weight
                if factors is not None and name in factors:
                    mean *= factors[name]
                result[name] = mean.astype(value.dtype).reshape(value.shape)
            else:
                result[name] = self._maximum[name].reshape(value.shape)
        return result


def _add_compensated(
    high: NDArray[np.float64], low: NDArray[np.float64], values: NDArray[np.generic], weight: float
) -> None:
    """Add weight * values to the pair (high, low) in place, without loss (two-sum)."""
    for start in range(0, high.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        held = high[part]
        added = values[part].astype(np.float64) * weight
        total = held + added
        shadow = total - held
        low[part] += (held - (total - shadow)) + (added - shadow)
        high[part] = total
