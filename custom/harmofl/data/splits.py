"""Training, validation and test cases of a site: by patient, seeded, in the promised shares at small sites too."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from harmofl.data.findings import Finding, count_text
from harmofl.data.layout import natural_key

SliceKey = tuple[str, int]
Part = Literal["train", "val", "test"]
Item = TypeVar("Item", str, SliceKey)

PARTS: tuple[Part, ...] = ("train", "val", "test")
FRACTIONS = (0.64, 0.16, 0.20)  # HarmoFL, released index files
PARTS_OF_ONE = 25  # fractions are whole multiples of 1/25, so that equal ones compare equal
SITE = "site"  # subject of a finding about the whole folder


@dataclass(frozen=True)
class Split(Generic[Item]):
    """Which cases (names) or slices (name, slice) serve for what, each in natural order."""

    train: tuple[Item, ...]
    val: tuple[Item, ...]
    test: tuple[Item, ...]
    findings: tuple[Finding, ...] = ()


def split_cases(
    names: Iterable[str],
    seed: int,
    fractions: tuple[float, float, float] = FRACTIONS,
    patient: Callable[[str], str] = str,
) -> Split[str]:
    """Split cases so that all cases of a patient stay together, by `patient_counts` and thus fairly at small sites too.

    The patients stand in an order that depends on the seed and on each one's name alone. The first are the test
    patients, then come those of validation, then those of training. How far that is stable:

    - One more case of a known patient changes no part, nor does the order of the names.
    - One more patient, or one less (a damaged file), changes the part of at most two others: one between test and
      validation, one between validation and training, none between test and training. k patients change at most 2 k.
    - After several new patients a former test patient can be a training patient. The split has no memory and cannot
      say so: a model trained before has not seen that patient, one trained since has.

    Args:
        names: names of the cases, in any order.
        seed: seed of the experiment.
        fractions: of training, validation and test, positive multiples of 1/25.
        patient: gives the patient of a case; each case is its own by default.

    Raises:
        ValueError: if the fractions are not positive multiples of 1/25 that sum to 1.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in set(names):
        groups[patient(name)].append(name)
    counts = patient_counts(len(groups), fractions)
    # validation lies between test and training, so that it takes several new patients to move one from test to training
    dealt = [part for part in reversed(PARTS) for _ in range(counts[part])]
    parts: dict[Part, list[str]] = {part: [] for part in PARTS}
    for part, group in zip(
        dealt, sorted(groups, key=lambda group: (_draw(seed, "patient", group), group)), strict=True
    ):
        parts[part] += groups[group]
    findings: tuple[Finding, ...] = ()
    if len(groups) < len(PARTS):
        message = f"{count_text(len(groups), 'patient')} cannot be training, validation and test"
        findings = (Finding("error", "too_few_cases", SITE, message, "provide at least 3 patients"),)
    train, val, test = (_in_order(parts[part]) for part in PARTS)
    return Split(train, val, test, findings)


def patient_counts(patients: int, fractions: tuple[float, float, float] = FRACTIONS) -> dict[Part, int]:
    """How many of a site's patients serve for what.

    One patient more enlarges one part by one and no part ever shrinks. From 3 patients on no part is empty. By the
    default fractions each count is within 1 of its fraction of the patients; by others too, once the smallest fraction
    gives a whole patient. Each next patient goes to the part that is furthest below its fraction.

    Args:
        patients: of the site; fewer than 3 are all training.
        fractions: of training, validation and test, positive multiples of 1/25.

    Raises:
        ValueError: if the fractions are not positive multiples of 1/25 that sum to 1.
    """
    shares = _shares(fractions)
    if patients < len(PARTS):
        return {"train": patients, "val": 0, "test": 0}
    counts: dict[Part, int] = dict.fromkeys(PARTS, 1)
    for total in range(len(PARTS) + 1, patients + 1):
        counts[max(PARTS, key=lambda part: total * shares[part] - PARTS_OF_ONE * counts[part])] += 1  # noqa: B023
    return counts


def split_slices_as_published(slices: Iterable[SliceKey], seed: int) -> Split[SliceKey]:
    """Permute all given slices of a site and cut them 64/16/20, as the released code of HarmoFL does.

    Neighboring slices of one patient land in training and test: the scores are not those of new patients.

    Args:
        slices: (case, slice) of every slice with foreground.
        seed: seed of the permutation.
    """
    permuted = sorted(set(slices), key=lambda key: _draw(seed, "slice", *key))
    first, second = len(permuted) * 64 // 100, len(permuted) * 80 // 100
    message = "slices of one patient are in training and test (as published), test scores are too high"
    leak = Finding("warning", "slice_leakage", SITE, message, "split by case for results that count")
    train, val, test = permuted[:first], permuted[first:second], permuted[second:]
    return Split(_slices_in_order(train), _slices_in_order(val), _slices_in_order(test), (leak,))


def _draw(*key: object) -> int:
    """Return a 64-bit number that is the same for a key on every platform (Python's hash is not)."""
    text = "\x1f".join(str(part) for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _shares(fractions: Sequence[float]) -> dict[Part, int]:
    shares = [round(PARTS_OF_ONE * fraction) for fraction in fractions]
    exact = all(abs(PARTS_OF_ONE * fraction - share) < 1e-6 for fraction, share in zip(fractions, shares, strict=True))
    if not exact or sum(shares) != PARTS_OF_ONE or min(shares) < 1:
        raise ValueError(f"split fractions {tuple(fractions)} are not positive multiples of 0.04 that sum to 1")
    return dict(zip(PARTS, shares, strict=True))


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural_key))


def _slices_in_order(keys: Iterable[SliceKey]) -> tuple[SliceKey, ...]:
    return tuple(sorted(keys, key=lambda key: (natural_key(key[0]), key[1])))
