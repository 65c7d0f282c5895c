"""Patches are split by patient, both labels in each part where possible."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harmofl.data.patch_index import PatchIndex, read_index
from harmofl.data.patches import split_by_slide, split_patches_as_published
from tests.wilds import row, write_index


def index_of(patients: dict[str, tuple[int, int]], folder: Path = Path("nowhere")) -> PatchIndex:
    """An index of patients with so many normal and so many tumor patches."""
    named = [(name, label) for name, counts in patients.items() for label in (0, 1) for _ in range(counts[label])]
    names = tuple(patients)
    code = np.array([names.index(name) for name, _ in named], np.int32)
    ones = np.ones(len(named), np.int32)
    position = np.arange(len(named), dtype=np.int32)
    labels = np.array([label for _, label in named], np.int8)
    slides = tuple((name, "0") for name in names)
    return PatchIndex(folder, names, slides, code, code, ones, position, position, labels, ones, ones, ())


def patients_of(index: PatchIndex, rows: np.ndarray) -> set[str]:
    return {index.patients[code] for code in index.patient[rows]}


@given(st.lists(st.integers(0, 99), min_size=3, max_size=20, unique=True), st.integers(0, 9))
def test_patients_are_whole_and_every_patch_serves_once(numbers, seed):
    index = index_of({f"{number:03d}": (2, 3) for number in numbers})
    split = split_by_slide(index, seed)
    assert np.array_equal(np.sort(np.concatenate([split.train, split.val, split.test])), np.arange(len(index)))
    groups = [patients_of(index, rows) for rows in (split.train, split.val, split.test)]
    assert all(groups)
    assert sum(map(len, groups)) == len(numbers)


def test_new_slides_and_patients_move_no_old_patient():
    old = index_of({f"{number:03d}": (3, 3) for number in range(20, 32)})
    new = index_of({f"{number:03d}": (3, 9) for number in range(20, 40)})
    compared = 0
    for seed in range(12):
        before, after = split_by_slide(old, seed), split_by_slide(new, seed)
        if before.findings or after.findings:  # a small site needed a patient moved, which the notice says
            continue
        compared += 1
        for part in ("train", "val", "test"):
            kept = {f"{number:03d}" for number in range(20, 32)} & patients_of(new, getattr(after, part))
            assert patients_of(old, getattr(before, part)) == kept
    assert compared >= 3


def test_two_slides_of_one_patient_stay_together(tmp_path):
    lines = [row(n, f"{n % 8:03d}", tumor=n // 8 % 2, slide=str(n // 16 * 8 + n % 8)) for n in range(32)]
    index = read_index(write_index(tmp_path, *lines), [0])
    assert len(index.slides) == 16
    split = split_by_slide(index, 1)
    parts = [patients_of(index, rows) for rows in (split.train, split.val, split.test)]
    assert sum(map(len, parts)) == 8


def test_a_label_that_a_part_lacks_is_brought_by_the_smallest_patient():
    """Most patients have no tumor: those who have are moved until each part has some."""
    names = [f"{number:03d}" for number in range(20)]
    for seed in range(10):
        with_tumor = split_by_slide(index_of({name: (1, 1) for name in names}), seed)
        index = index_of({name: (1, 1) for name in names})
        in_train = sorted(patients_of(index, with_tumor.train))[:4]
        sizes = {name: (1, 9 - place) for place, name in enumerate(in_train)}
        index = index_of({name: sizes.get(name, (5, 0)) for name in names})
        split = split_by_slide(index, seed)
        for rows in (split.train, split.val, split.test):
            assert set(index.tumor[rows]) == {0, 1}
        assert [finding.code for finding in split.findings] == ["split_filled"] * 2
        # of 1 + 9, 1 + 8, 1 + 7, 1 + 6 patches the last two are the smallest
        assert patients_of(index, np.concatenate([split.val, split.test])) >= set(in_train[2:])


def test_where_no_patient_can_be_spared_a_warning_says_so():
    patients = {f"{number:03d}": (2, 0) for number in range(9)} | {"009": (1, 4)}
    findings = split_by_slide(index_of(patients), 0).findings
    assert [(finding.severity, finding.code) for finding in findings] == [("warning", "one_label")] * 2
    assert all("no tumor patch" in finding.message for finding in findings)


def test_too_few_patients():
    index = index_of({"000": (3, 3), "001": (3, 3)})
    split = split_by_slide(index, 0)
    assert (len(split.train), len(split.val), len(split.test)) == (12, 0, 0)
    assert [finding.code for finding in split.findings] == ["too_few_cases"]


def test_as_published_permutes_patches_and_warns():
    index = index_of({f"{number:03d}": (10, 10) for number in range(5)})
    split, again, other = (split_patches_as_published(index, seed) for seed in (0, 0, 1))
    assert (len(split.train), len(split.val), len(split.test)) == (64, 16, 20)
    assert np.array_equal(np.sort(np.concatenate([split.train, split.val, split.test])), np.arange(100))
    assert np.array_equal(split.test, again.test)
    assert not np.array_equal(split.test, other.test)
    assert patients_of(index, split.train) == patients_of(index, split.test)
    assert [(finding.severity, finding.code) for finding in split.findings] == [("warning", "patch_leakage")]
