"""Patches are split by patient, both labels in each part where possible."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harmofl.data.patch_index import PatchIndex, read_index
from harmofl.data.patches import split_by_slide, split_patches_as_published
from harmofl.data.splits import PARTS
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


def test_new_slides_move_nobody_and_a_new_patient_two_at_most():
    names = [f"{number:03d}" for number in range(20, 32)]
    old, slides = index_of(dict.fromkeys(names, (3, 3))), index_of(dict.fromkeys(names, (3, 9)))
    grown = index_of(dict.fromkeys([*names, "032"], (3, 9)))
    moved = []
    for seed in range(12):
        before, same, after = (split_by_slide(index, seed) for index in (old, slides, grown))
        place, again, later = (
            {name: part for part in PARTS for name in patients_of(index, getattr(split, part))}
            for index, split in ((old, before), (slides, same), (grown, after))
        )
        assert again == place
        moved.append(sum(place[name] != later[name] for name in names))
        assert not before.findings + after.findings
    assert max(moved) <= 2


def test_two_slides_of_one_patient_stay_together(tmp_path):
    lines = [row(n, f"{n % 8:03d}", tumor=n // 8 % 2, slide=str(n // 16 * 8 + n % 8)) for n in range(32)]
    index = read_index(write_index(tmp_path, *lines), [0])
    assert len(index.slides) == 16
    split = split_by_slide(index, 1)
    parts = [patients_of(index, rows) for rows in (split.train, split.val, split.test)]
    assert sum(map(len, parts)) == 8


def test_a_label_that_a_part_lacks_is_brought_by_the_smallest_patient_in_exchange():
    """Most patients have no tumor: those who have change places until each part has some; the shares stay."""
    names = [f"{number:03d}" for number in range(20)]
    for seed in range(10):
        index = index_of(dict.fromkeys(names, (1, 1)))
        in_train = sorted(patients_of(index, split_by_slide(index, seed).train))[:4]
        sizes = {name: (1, 9 - place) for place, name in enumerate(in_train)}
        index = index_of({name: sizes.get(name, (5, 0)) for name in names})
        split = split_by_slide(index, seed)
        for rows in (split.train, split.val, split.test):
            assert set(index.tumor[rows]) == {0, 1}
        assert [finding.code for finding in split.findings] == ["split_filled"] * 2
        # of 1 + 9, 1 + 8, 1 + 7, 1 + 6 patches the last two are the smallest
        assert patients_of(index, np.concatenate([split.val, split.test])) >= set(in_train[2:])
        # 12.8, 3.2 and 4 of 20
        assert [len(patients_of(index, getattr(split, part))) for part in PARTS] == [13, 3, 4]


def test_where_none_can_change_places_a_patient_is_moved():
    """7 patients: 5, 1 and 1. Whoever replaced the only one with normal patches would take them away with him."""
    for seed in range(10):
        names = [f"{number:03d}" for number in range(7)]
        plain = index_of(dict.fromkeys(names, (1, 1)))
        split = split_by_slide(plain, seed)
        (alone,), train = patients_of(plain, split.val), sorted(patients_of(plain, split.train))
        labels = {name: (1, 1) for name in names} | {alone: (4, 0)} | dict.fromkeys(train[:2], (0, 3))
        labels |= dict.fromkeys(train[2:], (3, 0))
        index = index_of(labels)
        split = split_by_slide(index, seed)
        assert patients_of(index, split.val) == {alone, train[0]}
        assert set(index.tumor[split.train]) == set(index.tumor[split.val]) == {0, 1}
        assert [finding.message.split(",")[0] for finding in split.findings] == ["moved from train to val"]


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
