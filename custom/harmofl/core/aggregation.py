"""Streaming weighted mean of contributions: validated as a whole, independent of the order of arrival."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harmofl.core.exact_sum import PIECE, ExactSum, Floats
from harmofl.sections import one_line, outside_text

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]

_LARGEST_WEIGHT = 2**63  # far beyond any number of images; times a float32 it stays finite in float64
_HALF_INFINITE = 0x7C00  # the exponent of infinity and NaN in float16


class ContributionError(ValueError):
    """A contribution that must not enter the mean; one printable line without paths or patient names."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def _matching(contribution: Arrays, reference: Arrays, weight: float) -> dict[str, Array]:
    """The entries as arrays, checked in all but their values."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < _LARGEST_WEIGHT:
        raise ContributionError(f"weight {outside_text(weight)} is not a positive finite number")
    _name_check("misses", [name for name in reference if name not in contribution])
    _name_check("has unknown", [name for name in contribution if name not in reference])
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


def _name_check(verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = sorted(outside_text(name) for name in names)[:3]
        raise ContributionError(f"{verb} entries: {', '.join(shown)}{more}")


class _Group:
    """Float entries of one type that are summed as one vector: a large one alone, or all small ones together."""

    def __init__(self, names: list[str], reference: Arrays) -> None:
        self._names, self._reference = names, reference
        self._type = reference[names[0]].dtype
        self._sum: ExactSum | None = None  # made with the first contribution: a check alone needs none

    def values(self, entries: Arrays) -> Floats:
        """The vector of a contribution, checked.

        Raises:
            ContributionError: a value is not finite in the reference's type; names its entry.
        """
        parts: list[Any] = [entries[name].reshape(-1) for name in self._names]
        values: Floats = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not _is_finite(values, self._type):
            bad = [name for name, part in zip(self._names, parts, strict=True) if not _is_finite(part, self._type)]
            raise ContributionError(f"entry {bad[0]} holds values that are not finite")
        return values

    def add(self, values: Floats, weight: float) -> None:
        """Add what `values` gave."""
        self._sum = self._sum or ExactSum(values.size)
        self._sum.add(values, weight)

    def mean(self, total_weight: float, factors: Mapping[str, float]) -> dict[str, Array]:
        """By name the mean of what was added, in the reference's type and shape."""
        assert self._sum is not None
        values, result, start = self._sum.nearest(), {}, 0
        values /= total_weight
        for name in self._names:
            expected = self._reference[name]
            part = values[start : start + expected.size]
            if name in factors:
                part *= factors[name]
            result[name] = part.astype(self._type).reshape(expected.shape)
            start += expected.size
        return result


def _is_finite(values: Floats, kind: np.dtype[np.generic]) -> bool:
    """Whether all values are finite in a type; a vector of that type is read once, and no copy is made of it."""
    with np.errstate(over="ignore", invalid="ignore"):
        if values.dtype == kind and np.isfinite(np.dot(values, values)):
            return True
        pieces = (values[start : start + PIECE] for start in range(0, values.size, PIECE))
        if values.itemsize == 2:  # bits: NumPy's own test of float16 takes ten times as long
            return not any((piece.view(np.uint16) & _HALF_INFINITE).max() == _HALF_INFINITE for piece in pieces)
        # a float64 beyond float32 is not finite in the mean
        return all(bool(np.isfinite(piece.astype(kind, copy=False)).all()) for piece in pieces)


class StreamingMean:
    """Weighted mean of float entries, maximum of integer and boolean ones, one contribution at a time.

    Sums are exact (`ExactSum`), so that the mean does not depend on the order of arrival, whatever the magnitudes. It
    is the exact one rounded to float64 twice, in sum and quotient, and then to the reference's type. Memory is 8 bytes
    a value, and as much again where the magnitudes or weights of an entry differ widely, whatever the number of sites.
    """

    def __init__(self, reference: Arrays) -> None:
        """Prepare for contributions with the names, shapes and kinds of number of `reference`."""
        self._reference = {name: np.asarray(value) for name, value in reference.items()}
        together: dict[tuple[np.dtype[np.generic], str], list[str]] = {}
        for name, value in self._reference.items():
            if value.dtype.kind == "f":
                alone = name if value.size >= PIECE else ""
                together.setdefault((value.dtype, alone), []).append(name)
        self._groups = [_Group(names, self._reference) for names in together.values()]
        self._maximum: dict[str, Array] = {}
        self._weight = Fraction()
        self.count = 0

    @property
    def total_weight(self) -> float:
        """Sum of the weights, rounded once."""
        return float(self._weight)

    def check(self, contribution: Arrays, weight: float) -> None:
        """Check a whole contribution without adding any of it.

        Args:
            contribution: name -> array as received; 0-d arrays may arrive as NumPy scalars.
            weight: in the mean.

        Raises:
            ContributionError: weight not positive and finite, names missing or unknown, shape or kind of number
                differs, or a value is not finite; the first three differing names are given.
        """
        entries = _matching(contribution, self._reference, weight)
        for group in self._groups:
            group.values(entries)

    def add(self, contribution: Arrays, weight: float) -> None:
        """Check the whole contribution, then add it.

        Raises:
            ContributionError: see `check`; nothing was added.
        """
        entries = _matching(contribution, self._reference, weight)
        vectors = [group.values(entries) for group in self._groups]  # nothing is added before all are checked
        for group, values in zip(self._groups, vectors, strict=True):
            group.add(values, float(weight))
        for name, value in self._reference.items():
            if value.dtype.kind != "f":
                received, held = entries[name].astype(value.dtype), self._maximum.get(name)
                self._maximum[name] = received if held is None else np.maximum(held, received)
        self._weight += Fraction(float(weight))
        self.count += 1

    def mean(self, factors: Mapping[str, float] | None = None) -> dict[str, Array]:
        """The weighted mean (float entries in the reference's dtype) and the maxima, with the reference's shapes.

        Args:
            factors: of float entries, by name; applied in float64, before the rounding to the reference's dtype.

        Raises:
            ContributionError: nothing was added.
        """
        if self.count == 0:
            raise ContributionError("no contribution was accepted")
        result = {name: value.reshape(self._reference[name].shape) for name, value in self._maximum.items()}
        for group in self._groups:
            result |= group.mean(self.total_weight, factors or {})
        return {name: result[name] for name in self._reference}
