"""PartialSum: what some sites' contributions add up to, to be sent on and merged with others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harmofl.core.contributions import LARGEST_WEIGHT, Array, Arrays, ContributionError, names_check
from harmofl.core.grid_sum import LARGEST_PART, MOST, Integers
from harmofl.sections import outside_text

_DIGITS = 40  # of weighted steps


@dataclass(frozen=True)
class PartialSum:
    """The sum of some contributions, in integers: merged in any order and any tree, it gives the same mean.

    Attributes:
        count: contributions in it.
        weight: sum of their weights.
        weighted_steps: for FedNova the sum of weight times tau in 2^-20 steps, else 0.
        exponents: by float entry that of its scale (`harmofl.core.grid_sum.scale_exponent`).
        low: by float entry the sum in grids, in the entry's shape.
        high: the same in 2^32 grids, of entries of which a contribution was far from the scale.
        maxima: integer and boolean entries, in the model's type.
    """

    count: int
    weight: int
    weighted_steps: int
    exponents: Mapping[str, int]
    low: Mapping[str, Integers]
    high: Mapping[str, Integers]
    maxima: Arrays

    def message(self) -> dict[str, Any]:
        """As plain numbers, text and arrays, for any serializer."""
        return {
            "count": self.count,
            "weight": self.weight,
            "weighted_steps": str(self.weighted_steps),  # may be beyond 64 bits
            "exponents": dict(self.exponents),
            "low": dict(self.low),
            "high": dict(self.high),
            "maxima": dict(self.maxima),
        }

    @classmethod
    def from_message(cls, message: Any) -> "PartialSum":
        """Read what came from outside; whether it is of the model at hand, `StreamingMean.merge` checks.

        Raises:
            ContributionError: it has another form.
        """
        form = {
            "count": int,
            "weight": int,
            "weighted_steps": str,
            "exponents": Mapping,
            "low": Mapping,
            "high": Mapping,
            "maxima": Mapping,
        }
        if not isinstance(message, Mapping) or message.keys() != form.keys():
            raise ContributionError(f"a partial sum needs {', '.join(form)} and nothing else")
        wrong = [name for name, kind in form.items() if not isinstance(message[name], kind)]
        steps = message["weighted_steps"]
        if wrong or not (steps.isascii() and steps.isdecimal() and len(steps) <= _DIGITS):
            raise ContributionError(f"{(wrong or ['weighted_steps'])[0]} of the partial sum has another form")
        held = {
            name: {str(key): np.asarray(value) for key, value in message[name].items()}
            for name in ("low", "high", "maxima")
        }
        return cls(message["count"], message["weight"], int(steps), dict(message["exponents"]), **held)

    def check_numbers(self) -> None:
        """Hold its numbers against each other.

        Raises:
            ContributionError: one is no whole number, or none that so many contributions make.
        """
        if not _whole(self.count) or not 1 <= self.count <= MOST:
            raise ContributionError(f"partial sum of {outside_text(self.count)} contributions, not of 1 to {MOST}")
        if not _whole(self.weight) or not self.count <= self.weight <= self.count * LARGEST_WEIGHT:
            raise ContributionError(f"{outside_text(self.weight)} is no weight of {self.count} contributions")
        if not _whole(self.weighted_steps) or self.weighted_steps < 0:
            raise ContributionError("the weighted steps of the partial sum are no whole number from 0 on")

    def check(self, reference: Arrays, exponents: Mapping[str, int]) -> None:
        """Hold it against the model whose contributions it is said to be of.

        Args:
            reference: name -> array, as of the mean.
            exponents: of the scales of its float entries.

        Raises:
            ContributionError: a number or array has another form, or is beyond what so many contributions make.
        """
        self.check_numbers()
        whole = [name for name in reference if name not in exponents]
        for given, expected in ((self.exponents, exponents), (self.low, exponents), (self.maxima, whole)):
            names_check("misses", [name for name in expected if name not in given])
            names_check("has unknown", [name for name in given if name not in expected])
        names_check("has unknown", [name for name in self.high if name not in exponents])
        for name, exponent in exponents.items():
            told = self.exponents[name]
            if not _whole(told) or told != exponent:
                raise ContributionError(
                    f"entry {name} was summed with scale 2^{outside_text(told)}, not 2^{exponent}: "
                    "the relay had another model or federation.scale_floor"
                )
        for name in whole:
            _form_check(name, self.maxima[name], reference[name].shape, reference[name].dtype)
        most = self.count * LARGEST_PART
        for part in (self.low, self.high):
            for name, sums in part.items():
                _form_check(name, sums, reference[name].shape, np.dtype(np.int64))
                if sums.size and not -most <= int(sums.min()) <= int(sums.max()) <= most:
                    raise ContributionError(f"entry {name} holds sums that {self.count} contributions cannot make")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _form_check(name: str, value: Array, shape: tuple[int, ...], kind: np.dtype[np.generic]) -> None:
    if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != kind:
        raise ContributionError(f"entry {name} of the partial sum is not {kind} of shape {shape}")
