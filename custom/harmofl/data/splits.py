"""Training, validation and test cases of a site: by patient, seeded, and stable when cases are added."""

import hashlib
import re
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
BLOCK, RUN = 25, 5
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
    """Split cases so that all cases of a patient stay together.

    The part of a patient depends on the seed and on the patient's name only, so that new cases move no old one. Of
    patients with a trailing number every block of 25 numbers is dealt by the fractions, and every 5 consecutive
    numbers share the test patients evenly, so that small sites are balanced too. Other names are drawn by a hash.
    Where a part would be empty, one patient is moved there and a notice says so.

    Args:
        names: names of the cases, in any order.
        seed: seed of the experiment.
        fractions: of training, validation and test, positive multiples of 1/25.
        patient: gives the patient of a case; each case is its own by default.

    Raises:
        ValueError: if the fractions are not positive multiples of 1/25 that sum to 1.
    """
    counts = _block_counts(fractions)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in set(names):
        groups[patient(name)].append(name)
    parts: dict[Part, list[str]] = {part: [] for part in PARTS}
    for group in groups:
        parts[_part(group, seed, counts)].append(group)
    findings: tuple[Finding, ...] = ()
    if len(groups) < len(PARTS):
        message = f"{count_text(len(groups), 'patient')} cannot be training, validation and test"
        findings = (Finding("error", "too_few_cases", SITE, message, "provide at least 3 patients"),)
        parts = {"train": list(groups), "val": [], "test": []}
    elif not all(parts.values()):
        findings = _fill_empty_parts(parts, seed)
    ordered = {part: _in_order(name for group in parts[part] for name in groups[group]) for part in PARTS}
    return Split(ordered["train"], ordered["val"], ordered["test"], findings)


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


def _block_counts(fractions: Sequence[float]) -> dict[Part, int]:
    counts = [round(BLOCK * fraction) for fraction in fractions]
    exact = all(abs(BLOCK * fraction - count) < 1e-6 for fraction, count in zip(fractions, counts, strict=True))
    if not exact or sum(counts) != BLOCK or min(counts) < 1:
        raise ValueError(f"split fractions {tuple(fractions)} are not positive multiples of 0.04 that sum to 1")
    return dict(zip(PARTS, counts, strict=True))


def _part(patient: str, seed: int, counts: dict[Part, int]) -> Part:
    numbered = re.search(r"[0-9]+$", patient)
    if numbered:
        series, number = patient[: numbered.start()].casefold(), int(numbered[0])
        return _dealt_block(seed, series, number // BLOCK, counts)[number % BLOCK]
    drawn = _draw(seed, "name", patient) * BLOCK >> 64
    if drawn < counts["test"]:
        return "test"
    return "val" if drawn < counts["test"] + counts["val"] else "train"


def _dealt_block(seed: int, series: str, block: int, counts: dict[Part, int]) -> list[Part]:
    """Deal test, then validation, then training to the 5 runs of a block in turn, and shuffle each run."""
    runs: list[list[Part]] = [[] for _ in range(BLOCK // RUN)]
    order = sorted(range(len(runs)), key=lambda run: _draw(seed, series, block, "run", run))
    deck: list[Part] = [part for part in ("test", "val", "train") for _ in range(counts[part])]
    for turn, part in enumerate(deck):
        runs[order[turn % len(runs)]].append(part)
    for position, run in enumerate(runs):
        ranks = sorted(range(RUN), key=lambda slot: _draw(seed, series, block, "slot", position, slot))
        runs[position] = [run[rank] for rank in ranks]
    return [part for run in runs for part in run]


def _fill_empty_parts(parts: dict[Part, list[str]], seed: int) -> tuple[Finding, ...]:
    findings = []
    for part in PARTS:
        if parts[part]:
            continue
        giver = max(PARTS, key=lambda other: len(parts[other]))
        moved = min(parts[giver], key=lambda patient: _draw(seed, "move", patient))
        parts[giver].remove(moved)
        parts[part].append(moved)
        message = f"moved from {giver} to {part}, which would have been empty; more cases may change this"
        findings.append(Finding("notice", "split_filled", moved, message))
    return tuple(findings)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural_key))


def _slices_in_order(keys: Iterable[SliceKey]) -> tuple[SliceKey, ...]:
    return tuple(sorted(keys, key=lambda key: (natural_key(key[0]), key[1])))
