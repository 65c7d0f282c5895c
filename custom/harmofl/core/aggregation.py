"""Streaming weighted mean of contributions: validated as a whole, independent of the order of arrival."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harmofl.core.direction import WIDTH, Reading, VectorReader, all_finite
from harmofl.core.exact_sum import PIECE, Doubles, ExactSum, Floats
from harmofl.sections import one_line, outside_text

Array = NDArray[np.generic]
Arrays = Mapping[str, Array]

_LARGEST_WEIGHT = 2**63  # far beyond any number of images; times a float32 it stays finite in float64


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


@dataclass(frozen=True)
class Measured:
    """How long an added contribution is, and where it points.

    Attributes:
        norm: L2 norm of the measured entries together, in float64.
        rest_norm: that of the other float entries.
        factor: what all float entries were multiplied by before they were added.
        direction: random projection of the measured entries; see `VectorReader`.
    """

    norm: float
    rest_norm: float
    factor: float
    direction: Doubles


@dataclass(frozen=True)
class NormLimits:
    """The largest norms of a contribution that is added as it is, of measured entries and of the others.

    A longer one is scaled down as a whole, so that an entry ends between what it was and what was sent: measured
    entries to `scaled_norm`, the others to their limit, whichever is less.
    """

    norm: float = math.inf
    scaled_norm: float = math.inf
    rest_norm: float = math.inf

    def factor(self, norm: float, rest_norm: float) -> float:
        """What to multiply a contribution of these norms by; 1 where it is within both limits."""
        factors = [1.0]
        if norm > self.norm:
            factors.append(self.scaled_norm / norm)
        if rest_norm > self.rest_norm:
            factors.append(self.rest_norm / rest_norm)
        return min(factors)


NO_LIMITS = NormLimits()


class EntryGroup:
    """Float entries of one type that are read as one vector: a large one alone, or all small ones together."""

    def __init__(
        self, names: list[str], reference: Arrays, *, measured: bool, generator: np.random.Generator | None
    ) -> None:
        """Group the named entries of `reference`; directions are kept of measured ones, where a generator is given."""
        self._names, self._reference = names, reference
        self._type = reference[names[0]].dtype
        self.size = sum(reference[name].size for name in names)
        self.measured = measured
        self._reader = VectorReader(self.size, generator if measured else None)

    def read(self, entries: Arrays) -> tuple[Floats, Reading]:
        """The vector of a contribution, checked and measured.

        Raises:
            ContributionError: a value is not finite in the reference's type; names its entry.
        """
        parts: list[Any] = [entries[name].reshape(-1) for name in self._names]
        values: Floats = parts[0] if len(parts) == 1 else np.concatenate(parts)
        reading = self._reader.read(values, self._type)
        if reading is None:
            with np.errstate(over="ignore"):
                bad = [name for name, part in zip(self._names, parts, strict=True) if not all_finite(part, self._type)]
            raise ContributionError(f"entry {bad[0]} holds values that are not finite")
        return values, reading

    def split(self, values: Doubles, factors: Mapping[str, float]) -> dict[str, Array]:
        """A vector as entries, in the reference's type and shape; `factors` are applied in float64, in place."""
        result, start = {}, 0
        for name in self._names:
            expected = self._reference[name]
            part = values[start : start + expected.size]
            if name in factors:
                part *= factors[name]
            result[name] = part.astype(self._type).reshape(expected.shape)
            start += expected.size
        return result


class ContributionMean(ABC):
    """What any mean over contributions does: check a whole one, measure it, take it, or none of it.

    Integer and boolean entries are their maximum. Subclasses say what becomes of the float ones.
    """

    def __init__(self, reference: Arrays, measured: frozenset[str] = frozenset()) -> None:
        """Prepare for contributions with the names, shapes and kinds of number of `reference`.

        Args:
            reference: name -> array.
            measured: float entries whose norm and direction are of interest. The projection of directions is drawn
                anew for each mean, so that no site can know it.
        """
        self._reference = {name: np.asarray(value) for name, value in reference.items()}
        together: dict[tuple[np.dtype[np.generic], bool, str], list[str]] = {}
        for name, value in self._reference.items():
            if value.dtype.kind == "f":
                alone = name if value.size >= PIECE else ""
                together.setdefault((value.dtype, name in measured, alone), []).append(name)
        generator = np.random.default_rng() if measured else None
        self._groups = [
            EntryGroup(names, self._reference, measured=key[1], generator=generator) for key, names in together.items()
        ]
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
            group.read(entries)

    def add(self, contribution: Arrays, weight: float, limits: NormLimits = NO_LIMITS) -> Measured:
        """Check the whole contribution, then add it, scaled down where it is longer than the limits.

        Raises:
            ContributionError: see `check`; nothing was added.
        """
        entries = _matching(contribution, self._reference, weight)
        read = [group.read(entries) for group in self._groups]  # nothing is added before all are checked
        told = [(group.measured, reading.norm) for group, (_, reading) in zip(self._groups, read, strict=True)]
        norm, rest_norm = (math.hypot(*(one for measured, one in told if measured is which)) for which in (True, False))
        factor = limits.factor(norm, rest_norm)
        for index, (values, _) in enumerate(read):
            self._take(index, values, float(weight), factor)
        for name, value in self._reference.items():
            if value.dtype.kind != "f":
                received, held = entries[name].astype(value.dtype), self._maximum.get(name)
                self._maximum[name] = received if held is None else np.maximum(held, received)
        self._weight += Fraction(float(weight))
        self.count += 1
        direction: Doubles = np.sum([reading.direction for _, reading in read] or [np.zeros(WIDTH)], axis=0)
        return Measured(norm, rest_norm, factor, direction)

    def mean(self, factors: Mapping[str, float] | None = None) -> dict[str, Array]:
        """The mean of float entries in the reference's dtype, and the maxima, with the reference's shapes.

        Args:
            factors: of float entries, by name; applied in float64, before the rounding to the reference's dtype.

        Raises:
            ContributionError: nothing was added.
        """
        if self.count == 0:
            raise ContributionError("no contribution was accepted")
        result = {name: value.reshape(self._reference[name].shape) for name, value in self._maximum.items()}
        for index, group in enumerate(self._groups):
            result |= group.split(self._middle(index), factors or {})
        return {name: result[name] for name in self._reference}

    @abstractmethod
    def _take(self, index: int, values: Floats, weight: float, factor: float) -> None:
        """Take factor * values, the vector of a group of entries."""

    @abstractmethod
    def _middle(self, index: int) -> Doubles:
        """What a group's vectors come to."""


class StreamingMean(ContributionMean):
    """Weighted mean of float entries, maximum of integer and boolean ones, one contribution at a time.

    Sums are exact (`ExactSum`), so that the mean does not depend on the order of arrival, whatever the magnitudes. It
    is the exact one rounded to float64 twice, in sum and quotient, and then to the reference's type. Memory is 8 bytes
    a value, and as much again where the magnitudes or weights of an entry differ widely, whatever the number of sites.
    What a contribution is scaled by depends on this contribution and the limits alone.
    """

    def __init__(self, reference: Arrays, measured: frozenset[str] = frozenset()) -> None:
        """Begin without sums: a check alone needs none."""
        super().__init__(reference, measured)
        self._sums: dict[int, ExactSum] = {}

    def _take(self, index: int, values: Floats, weight: float, factor: float) -> None:
        if index not in self._sums:
            self._sums[index] = ExactSum(values.size)
        self._sums[index].add(values, weight * factor)

    def _middle(self, index: int) -> Doubles:
        values = self._sums[index].nearest()
        values /= self.total_weight
        return values
