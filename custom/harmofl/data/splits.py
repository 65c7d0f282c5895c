"""Training, validation and test cases of a site: by patient, seeded, in the promised shares at small sites too."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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


class KeptParts:
    """The parts that a site's patients have since its first job, and those that a reading of its folder uses.

    Attributes:
        used: by patient the part that this reading gives each.
        whole: digest of everything that was split, where a split deals all anew whenever something comes.
    """

    def __init__(self, part_of: Callable[[str], Part | None]) -> None:
        """Keep what tells the part that a patient has already, None for a new one."""
        self._part_of = part_of
        self.used: dict[str, Part] = {}
        self.whole: str | None = None

    def known(self, patients: Iterable[str]) -> dict[str, Part]:
        """Those of the patients who have a part already, with it."""
        found = {patient: self._part_of(patient) for patient in patients}
        return {patient: part for patient, part in found.items() if part is not None}


_KEPT: ContextVar[KeptParts | None] = ContextVar("kept_parts", default=None)


@contextmanager
def keep_parts(kept: KeptParts) -> Iterator[None]:
    """Let every split made inside leave patients in the parts that they have, whoever makes it."""
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)


def known_parts(patients: Iterable[str]) -> dict[str, Part]:
    """Those of the patients who have a part since an earlier job, with it; none where nothing is kept."""
    kept = _KEPT.get()
    return {} if kept is None else kept.known(patients)


def note_parts(parts: Mapping[Part, Iterable[str]]) -> None:
    """Tell whoever keeps parts which patients a split put where; a later note of a patient counts."""
    if kept := _KEPT.get():
        kept.used.update({patient: part for part, patients in parts.items() for patient in patients})


def note_whole(*content: bytes) -> None:
    """Tell whoever keeps parts what was split, of a split that has no part of its own for a patient."""
    if kept := _KEPT.get():
        kept.whole = hashlib.sha256(b"\x1f".join(content)).hexdigest()


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
    - After several new patients a former test patient can be a training patient. The split itself has no memory and
      cannot say so: a model trained before has not seen that patient, one trained since has.
    - Inside `keep_parts` patients who have a part stay there, and each new one, in the same order, goes to the part
      that is furthest below its fraction.

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
    ordered = sorted(groups, key=lambda group: (_draw(seed, "patient", group), group))
    known = known_parts(ordered)
    dealt = _dealt_beside(known, ordered, fractions) if known else _dealt_anew(ordered, fractions)
    note_parts(dealt)
    parts = {part: [name for group in dealt[part] for name in groups[group]] for part in PARTS}
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


def _dealt_anew(ordered: Sequence[str], fractions: tuple[float, float, float]) -> dict[Part, list[str]]:
    """The patients of each part, where nobody has one yet."""
    counts = patient_counts(len(ordered), fractions)
    # validation lies between test and training, so that it takes several new patients to move one from test to training
    parts = [part for part in reversed(PARTS) for _ in range(counts[part])]
    return {part: [patient for at, patient in zip(parts, ordered, strict=True) if at == part] for part in PARTS}


def _dealt_beside(
    known: Mapping[str, Part], ordered: Sequence[str], fractions: tuple[float, float, float]
) -> dict[Part, list[str]]:
    """The patients of each part, where some have one: nobody moves, and an empty part comes first."""
    shares = _shares(fractions)
    dealt: dict[Part, list[str]] = {part: [name for name in ordered if known.get(name) == part] for part in PARTS}
    for patient in ordered:
        if patient in known:
            continue
        counts = Counter({part: len(dealt[part]) for part in PARTS})
        total = counts.total() + 1
        part = max(PARTS, key=lambda part: (not counts[part], total * shares[part] - PARTS_OF_ONE * counts[part]))  # noqa: B023
        dealt[part].append(patient)
    return dealt


def split_slices_as_published(slices: Iterable[SliceKey], seed: int) -> Split[SliceKey]:
    """Permute all given slices of a site and cut them 64/16/20, as the released code of HarmoFL does.

    Neighboring slices of one patient land in training and test: the scores are not those of new patients.

    Args:
        slices: (case, slice) of every slice with foreground.
        seed: seed of the permutation.
    """
    permuted = sorted(set(slices), key=lambda key: _draw(seed, "slice", *key))
    note_whole(*(f"{name}\x1e{index}".encode() for name, index in sorted(permuted)))
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
