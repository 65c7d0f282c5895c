"""Streaming weighted mean of contributions: validated as a whole, independent of the order of arrival."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from harmofl.core.contributions import Array, Arrays, ContributionError, matching_entries
from harmofl.core.direction import WIDTH, Reading, Visit
from harmofl.core.entry_groups import EntryGroup
from harmofl.core.grid_sum import FAR, MOST, NEAR, PIECE, Doubles, Floats, GridSum, Integers, as_doubles, scale_exponent
from harmofl.core.partial_sum import PartialSum

Judge = Callable[[Arrays, "Measured"], None]
_NORM_ROUNDED = 1.001  # a norm is known to three digits at least, and no value is beyond it


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


class ContributionMean(ABC):
    """What any mean over contributions does: check a whole one, measure it, take it, or none of it.

    Integer and boolean entries are their maximum. Subclasses say what becomes of the float ones.
    """

    def __init__(
        self, reference: Arrays, measured: frozenset[str] = frozenset(), exponents: Mapping[str, int] | None = None
    ) -> None:
        """Prepare for contributions with the names, shapes and kinds of number of `reference`.

        Args:
            reference: name -> array.
            measured: float entries whose norm and direction are of interest. The projection of directions is drawn
                anew for each mean, so that no site can know it.
            exponents: of the scales of float entries, where these matter: a group has one scale.
        """
        self._reference = {name: np.asarray(value) for name, value in reference.items()}
        together: dict[tuple[np.dtype[np.generic], bool, int], list[str]] = {}
        for name, value in self._reference.items():
            if value.dtype.kind == "f":
                exponent = exponents.get(name, 0) if exponents is not None else 0
                together.setdefault((value.dtype, name in measured, exponent), []).append(name)
        generator = np.random.default_rng() if measured else None
        self._groups = [
            EntryGroup(names, self._reference, measured=measures, exponent=exponent, generator=generator)
            for (_, measures, exponent), names in together.items()
        ]
        self._maximum: dict[str, Array] = {}
        self.total_weight = 0
        self.count = 0

    def check(self, contribution: Arrays, weight: int) -> None:
        """Check a whole contribution without adding any of it.

        Args:
            contribution: name -> array as received; 0-d arrays may arrive as NumPy scalars.
            weight: in the mean, a whole number.

        Raises:
            ContributionError: weight not a number from 1 on, names missing or unknown, shape or kind of number
                differs, or a value is not finite; the first three differing names are given.
        """
        entries = matching_entries(contribution, self._reference, weight)
        for group in self._groups:
            group.read(entries)

    def add(self, contribution: Arrays, weight: int, limits: NormLimits = NO_LIMITS, share: float = 1.0) -> Measured:
        """Check the whole contribution, then add it, scaled down where it is longer than the limits.

        Args:
            contribution: name -> array.
            weight: in the mean, a whole number.
            limits: of the norms of the contribution.
            share: what measured entries are multiplied by before they are added; limits and norms are of what was sent.

        Raises:
            ContributionError: see `check`; nothing was added.
        """
        entries = matching_entries(contribution, self._reference, weight)
        measured = self._take(
            entries, [weight * share if one.measured else float(weight) for one in self._groups], limits
        )
        for name, value in self._reference.items():
            if value.dtype.kind != "f":
                self._raise_maximum(name, entries[name].astype(value.dtype))
        self.total_weight += int(weight)
        self.count += 1
        return measured

    def mean(self, factor: float = 1.0) -> dict[str, Array]:
        """The mean of float entries in the reference's dtype, and the maxima, with the reference's shapes.

        Args:
            factor: of measured entries; applied in float64, before the rounding to the reference's dtype.

        Raises:
            ContributionError: nothing was added.
        """
        if self.count == 0:
            raise ContributionError("no contribution was accepted")
        result = {name: value.reshape(self._reference[name].shape) for name, value in self._maximum.items()}
        for index, group in enumerate(self._groups):
            result |= group.split(self._middle(index), factor if group.measured else 1.0)
        return {name: result[name] for name in self._reference}

    def _measured(self, readings: list[Reading], limits: NormLimits) -> Measured:
        told = [(group.measured, reading.norm) for group, reading in zip(self._groups, readings, strict=True)]
        norm, rest_norm = (math.hypot(*(one for measured, one in told if measured is which)) for which in (True, False))
        direction: Doubles = np.sum([reading.direction for reading in readings] or [np.zeros(WIDTH)], axis=0)
        return Measured(norm, rest_norm, limits.factor(norm, rest_norm), direction)

    def _raise_maximum(self, name: str, received: Array) -> None:
        held = self._maximum.get(name)
        self._maximum[name] = received if held is None else np.asarray(np.maximum(held, received))

    @abstractmethod
    def _take(self, entries: Arrays, weights: list[float], limits: NormLimits) -> Measured:
        """Check the float entries and take them with the weights of their groups, scaled; all or none of them."""

    @abstractmethod
    def _middle(self, index: int) -> Doubles:
        """What a group's vectors come to."""


class StreamingMean(ContributionMean):
    """Weighted mean of float entries, maximum of integer and boolean ones, one contribution at a time.

    Sums are made on a common grid (`harmofl.core.grid_sum`, which says by how much that moves the mean), so that
    neither the order of arrival nor a tree of partial sums changes a bit. Memory is 8 bytes a value, and as much again
    for entries of a scale of which a contribution was more than 2^22 scales long, whatever the number of sites. What a
    contribution is scaled by, and whether it fits, depends on this contribution, the reference and the limits alone.
    """

    def __init__(self, reference: Arrays, measured: frozenset[str] = frozenset(), floor: float = 1.0) -> None:
        """Begin without sums: a check alone needs none.

        Args:
            reference: name -> array of the model that was sent, whose magnitudes make the scales.
            measured: see `ContributionMean`.
            floor: least scale of an entry, a power of two.
        """
        self._exponents = {
            name: scale_exponent(np.asarray(value), floor)
            for name, value in reference.items()
            if np.asarray(value).dtype.kind == "f"
        }
        super().__init__(reference, measured, self._exponents)
        self._sums: list[GridSum] = []
        self._buffer: Doubles = np.empty(min(PIECE, max((group.size for group in self._groups), default=0)))

    def check(self, contribution: Arrays, weight: int) -> None:
        """Check a whole contribution without adding any of it.

        Raises:
            ContributionError: see `ContributionMean.check`; also a value too far from its entry's scale.
        """
        entries = matching_entries(contribution, self._reference, weight)
        readings = [group.read(entries) for group in self._groups]
        self._far_groups(entries, [float(weight)] * len(readings), readings)

    def partial(self, weighted_steps: int = 0) -> PartialSum:
        """The sum so far, to be merged elsewhere.

        Args:
            weighted_steps: of FedNova, see `PartialSum`.

        Raises:
            ContributionError: nothing was added.
        """
        if self.count == 0:
            raise ContributionError("no contribution was accepted")
        low: dict[str, Integers] = {}
        high: dict[str, Integers] = {}
        for group, total in zip(self._groups, self._totals(), strict=True):
            low |= group.entries_of(total.low())
            far = total.high()
            if far is not None:
                high |= group.entries_of(far.copy())
        maxima = {name: value.reshape(self._reference[name].shape) for name, value in self._maximum.items()}
        return PartialSum(self.count, self.total_weight, weighted_steps, dict(self._exponents), low, high, maxima)

    def merge(self, partial: PartialSum, judge: Judge | None = None) -> Measured:
        """Check a partial sum that comes from outside, then add it.

        Args:
            partial: of a mean with this reference, floor and measured entries.
            judge: is given the partial sum's mean as entries and what it measures; raises to refuse it.

        Returns:
            Norms and direction of the partial sum's mean; the factor is 1, as nothing is scaled.

        Raises:
            ContributionError: see `PartialSum.check`, also a mean that is not finite; nothing was added.
        """
        partial.check(self._reference, self._exponents)
        if self.count + partial.count > MOST:
            raise ContributionError(f"a mean is of at most {MOST} contributions, these would be one of more")
        mean: dict[str, Array] = {}
        for group in self._groups:
            values = as_doubles(*_integers(group, partial), math.ldexp(1.0, group.exponent))
            values /= partial.weight
            mean |= group.split(values, 1.0)
        measured = self._measured([group.read(mean) for group in self._groups], NO_LIMITS)
        if judge is not None:
            judge(mean, measured)
        for group, total in zip(self._groups, self._totals(), strict=True):
            total.merge(*_integers(group, partial))
        for name, value in partial.maxima.items():
            self._raise_maximum(name, value)
        self.total_weight += partial.weight
        self.count += partial.count
        return measured

    def _totals(self) -> list[GridSum]:
        if not self._sums:
            self._sums = [GridSum(group.size, group.exponent) for group in self._groups]
        return self._sums

    def _take(self, entries: Arrays, weights: list[float], limits: NormLimits) -> Measured:
        """Add the pieces as they are read, and take them back where the whole is none to add as it is."""
        if self.count == MOST:
            raise ContributionError(f"a mean is of at most {MOST} contributions")
        added: list[int] = []
        near: frozenset[int] = frozenset()
        try:
            readings = self._add_pieces(entries, weights, near, added)
            measured = self._measured(readings, limits)
            scaled = [weight * measured.factor for weight in weights]
            far = self._far_groups(entries, scaled, readings)
        except BaseException:
            self._take_back(entries, weights, near, added)
            raise
        if not far and measured.factor == 1:
            return measured
        self._take_back(entries, weights, near, added)
        added = []
        try:
            self._add_pieces(entries, scaled, far, added)
        except BaseException:
            self._take_back(entries, scaled, far, added)
            raise
        return measured

    def _add_pieces(
        self, entries: Arrays, weights: list[float], far: frozenset[int], added: list[int]
    ) -> list[Reading]:
        """Read all groups and add each piece as it is read; `added` receives by group how many are in the sum."""
        totals = self._totals()

        def adding(index: int) -> Visit:
            def add(start: int, piece: Floats) -> None:
                totals[index].add(start, piece, weights[index], self._buffer, far=index in far)
                added[index] += 1

            added.append(0)
            return add

        return [group.read(entries, adding(index)) for index, group in enumerate(self._groups)]

    def _take_back(self, entries: Arrays, weights: list[float], far: frozenset[int], added: list[int]) -> None:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for index, count in enumerate(added):
                for start, piece in islice(self._groups[index].pieces(entries), count):
                    self._sums[index].take_back(start, piece, weights[index], self._buffer, far=index in far)

    def _far_groups(self, entries: Arrays, weights: list[float], readings: list[Reading]) -> frozenset[int]:
        """Which groups hold a value beyond the range of one integer; the norm settles nearly all.

        Raises:
            ContributionError: a value is beyond that of two; names its entry.
        """
        far = set()
        for index, (group, weight, reading) in enumerate(zip(self._groups, weights, readings, strict=True)):
            scale = math.ldexp(1.0, group.exponent)
            if _NORM_ROUNDED * reading.norm * weight <= NEAR * scale:
                continue
            for name in group.names:
                largest = _largest(entries[name]) * weight
                if largest > FAR * scale:
                    raise ContributionError(
                        f"entry {name} is {largest:.3g} with its weight, above {FAR * scale:.3g}, the most that fits "
                        "into the server's sum; set federation.norm_bound, or lower training.learning_rate"
                    )
                if largest > NEAR * scale:
                    far.add(index)
        return frozenset(far)

    def _middle(self, index: int) -> Doubles:
        values = self._totals()[index].nearest()
        values /= self.total_weight
        return values


def _integers(group: EntryGroup, partial: PartialSum) -> tuple[Integers, Integers | None]:
    """A group's vectors of a partial sum."""
    high = None
    if any(name in partial.high for name in group.names):
        zeros = {name: np.zeros_like(partial.low[name]) for name in group.names}
        high = group.vector({**zeros, **{name: value for name, value in partial.high.items() if name in zeros}})
    return group.vector(partial.low), high


def _largest(value: Array) -> float:
    return max(float(value.max(initial=0)), -float(value.min(initial=0)))
