"""Patches of a site: split by patient, and decoded when asked for."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from harmofl.data.findings import CaseError, DataRootError, Finding, count_text, refusal
from harmofl.data.patch_index import PatchIndex
from harmofl.data.rasters import Picture, read_rgb
from harmofl.data.splits import FRACTIONS, PARTS, SITE, Part, known_parts, note_parts, note_whole, split_cases

LABELS = ("normal", "tumor")  # names of the classes 0 and 1
SAMPLE = 500  # patches decoded before training
MARGIN = 4  # a folder exactly at a limit of 1 % is refused by its sample less than once in a million times
SHOWN = 3  # file names in one finding
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PatchSplit:
    """Which rows of an index serve for what, in the order of the file."""

    train: Rows
    val: Rows
    test: Rows
    findings: tuple[Finding, ...] = ()


class UnreadablePatchesError(DataRootError):
    """More patches cannot be read than the limit allows; one line, also when raised in a worker process."""

    def __init__(self, message: str) -> None:
        """Keep the last line: a DataLoader hands on the worker's whole traceback as the message."""
        super().__init__(message.strip().rsplit("\n", 1)[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


def split_by_slide(index: PatchIndex, seed: int, fractions: tuple[float, float, float] = FRACTIONS) -> PatchSplit:
    """Split patches so that all slides of a patient stay together, by the rules of `split_cases`.

    In Camelyon17 some patients gave several slides, and slides of one patient are no independent test. Where a part
    lacks a label, the smallest patient who brings it and leaves both labels where it was changes places with a patient
    of that part, with a notice: the number of patients in each part stays. Where none can change places, one is moved;
    where none can be spared, a warning says that scores of this part are undefined. New slides of known patients
    change no part unless a label was missing; `split_cases` says what new patients change. Where patients have parts
    since an earlier job nobody changes places, and the warning stands alone.

    Args:
        index: patches of one site.
        seed: seed of the experiment.
        fractions: of patients in training, validation and test, positive multiples of 1/25.
    """
    patients = [index.patients[code] for code in np.unique(index.patient)]
    split = split_cases(patients, seed, fractions)
    parts: dict[Part, list[str]] = {part: list(getattr(split, part)) for part in PARTS}
    counts = _patient_labels(index)
    findings = list(split.findings)
    fixed = bool(known_parts(patients))
    for part in PARTS:
        if parts[part]:
            findings += _missing_labels(parts, part, counts) if fixed else _complete_labels(parts, part, counts)
    note_parts(parts)
    code = {name: position for position, name in enumerate(index.patients)}
    train, val, test = (np.flatnonzero(np.isin(index.patient, [code[name] for name in parts[part]])) for part in PARTS)
    return PatchSplit(train, val, test, tuple(findings))


def split_patches_as_published(index: PatchIndex, seed: int) -> PatchSplit:
    """Permute all patches of a site and cut them 64/16/20, as random patch splits do (HarmoFL, released index files).

    Neighboring patches of one slide land in training and test: the scores are not those of new patients.

    Args:
        index: patches of one site.
        seed: seed of the permutation.
    """
    permuted = np.random.default_rng(seed).permutation(len(index))
    note_whole(*(held.tobytes() for held in (index.slide, index.x, index.y)), repr(index.slides).encode())
    first, second = len(permuted) * 64 // 100, len(permuted) * 80 // 100
    message = "patches of one slide are in training and test (as published), test scores are too high"
    leak = Finding("warning", "patch_leakage", SITE, message, "split by patient for results that count")
    train, val, test = (np.sort(part) for part in np.split(permuted, [first, second]))
    return PatchSplit(train, val, test, (leak,))


def _patient_labels(index: PatchIndex) -> dict[str, NDArray[np.int64]]:
    """Return the number of normal and of tumor patches of each patient."""
    size = len(index.patients) * len(LABELS)
    table = np.bincount(index.patient.astype(np.int64) * len(LABELS) + index.tumor, minlength=size)
    return dict(zip(index.patients, table.reshape(-1, len(LABELS)), strict=True))


def _complete_labels(parts: dict[Part, list[str]], part: Part, counts: dict[str, NDArray[np.int64]]) -> list[Finding]:
    """Bring patients into a part until it holds both labels, as far as the other parts can spare them."""
    findings = []
    for label in np.flatnonzero(_labels_of(parts[part], counts) == 0):
        message = f"{part}, which would have no {LABELS[label]} patch; more cases may change this"
        if exchange := _exchange(parts, part, int(label), counts):
            coming, leaving, giver = exchange
            parts[part][parts[part].index(leaving)] = coming
            parts[giver][parts[giver].index(coming)] = leaving
            message = f"changes places with patient {leaving}: from {giver} to {message}"
            findings.append(Finding("notice", "split_filled", f"patient {coming}", message))
        elif spare := _spare(parts, int(label), counts):
            _, moved, giver = min(spare)
            parts[giver].remove(moved)
            parts[part].append(moved)
            findings.append(Finding("notice", "split_filled", f"patient {moved}", f"moved from {giver} to {message}"))
        else:
            findings.append(_one_label(part, int(label), "and no other part can spare a patient with one"))
    return findings


def _missing_labels(parts: dict[Part, list[str]], part: Part, counts: dict[str, NDArray[np.int64]]) -> list[Finding]:
    """Name the labels that a part lacks where nobody may move."""
    lacking = np.flatnonzero(_labels_of(parts[part], counts) == 0).tolist()
    return [_one_label(part, label, "and patients stay in the parts of this site's first job") for label in lacking]


def _one_label(part: Part, label: int, why: str) -> Finding:
    message = f"{part} holds no {LABELS[label]} patch {why}"
    return Finding("warning", "one_label", SITE, message, "add patients, or expect undefined scores")


def _labels_of(patients: Sequence[str], counts: dict[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    return sum((counts[name] for name in patients), np.zeros(len(LABELS), np.int64))


def _exchange(
    parts: dict[Part, list[str]], part: Part, label: int, counts: dict[str, NDArray[np.int64]]
) -> tuple[str, str, Part] | None:
    """Two patients who change places so that both parts hold both labels, the smallest who bring the missing one."""
    held = {other: _labels_of(names, counts) for other, names in parts.items()}
    found = [
        (int(counts[coming].sum()), coming, int(counts[leaving].sum()), leaving, giver)
        for giver in PARTS
        for coming in parts[giver]
        if counts[coming][label]
        for leaving in parts[part]
        if (held[giver] - counts[coming] + counts[leaving]).all()
        and (held[part] - counts[leaving] + counts[coming]).all()
    ]
    if not found:
        return None
    _, coming, _, leaving, giver = min(found)
    return coming, leaving, giver


def _spare(
    parts: dict[Part, list[str]], label: int, counts: dict[str, NDArray[np.int64]]
) -> list[tuple[int, str, Part]]:
    """Patients with a label whose part holds both labels without them: number of patches, name, part."""
    held = {part: _labels_of(names, counts) for part, names in parts.items()}
    return [
        (int(counts[name].sum()), name, giver)
        for giver in PARTS
        for name in parts[giver]
        if counts[name][label] and (held[giver] - counts[name]).all()
    ]


class Patches(Dataset[tuple[Tensor, Tensor]]):
    """Patches as (image (3, H, W) float32 in 0..1, label int64), decoded when asked for.

    A patch that is missing, damaged or of another size never stops training by itself: it is marked, and the next
    patch of the same label in the order of the rows takes its place, the same one with any number of workers. Marks
    are shared by the processes of a DataLoader and skip the file from then on. With more marks than the limit, the
    access raises. Scores should leave out what `bad` names after a pass.

    Args:
        index: patches of one site.
        rows: which of them, in this order.
        height: rows of pixels.
        width: columns of pixels.
        bad_share: part of the patches that may be unreadable, rounded up to whole patches.
    """

    def __init__(self, index: PatchIndex, rows: Rows, height: int, width: int, bad_share: float = 0.01) -> None:
        self.index, self.rows = index, np.asarray(rows, np.int64)
        self.labels = index.tumor[self.rows].astype(np.int64)
        self._size, self._bad_share = (height, width), bad_share
        self._marks = torch.zeros(len(self.rows), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        """Return the number of patches, readable or not."""
        return len(self.rows)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        """Return image and label of a patch, or of the one that stands in for it.

        Raises:
            UnreadablePatchesError: if more patches than the limit cannot be read, or none of this label can.
        """
        image, label = self.stored(item)
        return image.contiguous().float().div_(255), label

    def stored(self, item: int) -> tuple[Tensor, Tensor]:
        """Return the same in uint8, the image in 0..255."""
        position = range(len(self))[item]
        for candidate in self._same_label(position):
            image = self._image(candidate)
            if image is not None:
                return image, torch.from_numpy(self.labels)[position]
        message = f"no {LABELS[self.labels[position]]} patch can be read ({len(self.bad())} of {len(self)} are bad)"
        raise UnreadablePatchesError(f"{message}; check the disk and export the patches again")

    def bad(self) -> Rows:
        """Return the positions found unreadable so far, in any process."""
        return np.flatnonzero(self._marks.numpy())

    def check(self, seed: int) -> list[Finding]:
        """Decode a seeded sample before training: 500 patches, or all if there are fewer.

        Returns:
            What was converted, one finding for each rule.

        Raises:
            UnreadablePatchesError: if more than the limit is unreadable, or of the sample more than 4 times the
                limit's share.
        """
        count = min(SAMPLE, len(self))
        sample = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        notices: dict[tuple[str, str], list[Finding]] = defaultdict(list)
        bad = 0
        for position in sample.tolist():
            try:
                _, findings = self._decode(position)
            except CaseError as error:
                bad += 1
                self._mark(position, error)
                if bad > math.ceil(MARGIN * self._bad_share * count):
                    self._refuse(f"{count_text(bad, 'patch', 'patches')} of a sample of {count} cannot be read", error)
            else:
                for finding in findings:
                    notices[finding.code, finding.message].append(finding)
        return [_together(found) for found in notices.values()]

    def findings(self) -> list[Finding]:
        """Return one finding for each kind of unreadable patch met so far, with a few names and the count."""
        kinds: dict[str, list[Finding]] = defaultdict(list)
        for finding in self._problems():
            kinds[finding.code].append(finding)
        return [_together(found) for found in kinds.values()]

    def skipped(self) -> dict[str, int]:
        """Return the number of unreadable patches met so far, by code of the finding; nothing in it names a file."""
        return dict(Counter(finding.code for finding in self._problems()))

    def _same_label(self, position: int) -> Iterator[int]:
        """Yield the position itself, then, only if asked for more, those of its label that follow, in a circle."""
        yield position
        same = np.flatnonzero(self.labels == self.labels[position])
        start = int(np.searchsorted(same, position)) + 1
        yield from np.roll(same, -start)[:-1].tolist()

    def _image(self, position: int) -> Tensor | None:
        if self._marks.numpy()[position]:  # a tensor takes microseconds to tell
            return None
        try:
            picture, _ = self._decode(position)
        except CaseError as error:
            self._mark(position, error)
            return None
        return torch.from_numpy(picture).permute(2, 0, 1)

    def _decode(self, position: int) -> tuple[Picture, list[Finding]]:
        name = self.index.name(int(self.rows[position]))
        picture, findings = read_rgb(self.index.folder / name, name)
        if picture.shape[:2] != self._size:
            sizes = " instead of ".join(f"{width} x {height}" for height, width in (picture.shape[:2], self._size))
            fix = "cut it again or correct data.height and data.width"
            raise refusal("patch_size", name, f"the patch has {sizes} pixels (width x height)", fix)
        return picture, findings

    def _mark(self, position: int, error: CaseError) -> None:
        self._marks[position] = True
        bad = len(self.bad())
        if bad > math.ceil(self._bad_share * len(self)):
            self._refuse(f"{bad} of {count_text(len(self), 'patch', 'patches')} cannot be read", error)

    def _refuse(self, message: str, error: CaseError) -> None:
        example = error.finding
        raise UnreadablePatchesError(
            f"{message}, {100 * self._bad_share:g} % may; the last was {example.subject}: {example.message};"
            f" {example.fix}"
        ) from error

    def _problems(self) -> Iterator[Finding]:
        """Say of each marked patch what is wrong with it."""
        for position in self.bad().tolist():
            try:
                self._decode(position)
            except CaseError as error:
                yield error.finding
            else:
                name, message = self.index.name(int(self.rows[position])), "the patch could not be read for a while"
                yield Finding("error", "unreadable_image", name, message, "check the disk")


def _together(findings: Sequence[Finding]) -> Finding:
    """Return one finding for several of one kind: a few names, the count, and what is wrong with the first."""
    first, count = findings[0], len(findings)
    if count == 1:
        return first
    names = ", ".join(finding.subject for finding in findings[:SHOWN])
    more = f" and {count - SHOWN} more" if count > SHOWN else ""
    return Finding(
        first.severity, first.code, f"{names}{more}", f"{count} patches; the first: {first.message}", first.fix
    )
