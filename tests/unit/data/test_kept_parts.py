"""A split beside an earlier one: nobody moves, new patients fill the parts that are furthest below their fraction."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.data.patches import split_by_slide
from harmofl.data.splits import PARTS, KeptParts, Part, Split, keep_parts, split_cases, split_slices_as_published
from tests.unit.data.test_patch_splits import index_of

NUMBERS = st.sets(st.integers(0, 60), min_size=3, max_size=20)


def parts(split: Split[str]) -> dict[str, Part]:
    return {name: part for part in PARTS for name in getattr(split, part)}


def split_beside(known: dict[str, Part], names: Iterable[str], seed: int = 0) -> dict[str, Part]:
    kept = KeptParts(known.get)
    with keep_parts(kept):
        found = parts(split_cases(names, seed))
    assert kept.used == found
    return found


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.integers(0, 100))
def test_nobody_ever_moves_whoever_comes_and_goes(folders: list[set[int]], seed: int) -> None:
    memory: dict[str, Part] = {}
    for number, folder in enumerate(folders):
        names = [f"p{patient}" for patient in folder]
        found = split_beside(memory, names, seed)
        if number == 0:
            assert found == parts(split_cases(names, seed)), "a site that never ran keeps the split as it is"
        assert found.keys() == set(names)
        assert all(found[name] == memory[name] for name in names if name in memory)
        memory |= found


def test_new_patients_go_where_the_fraction_lacks_most() -> None:
    memory = split_beside({}, [f"p{number}" for number in range(25)])
    assert [list(memory.values()).count(part) for part in PARTS] == [16, 4, 5]
    grown = split_beside(memory, [f"p{number}" for number in range(50)])
    assert [list(grown.values()).count(part) for part in PARTS] == [32, 8, 10]
    # of three patients two were training; the fourth fills the part that nobody is in
    assert split_beside({"a": "train", "b": "train", "c": "test"}, "abcd")["d"] == "val"
    # 2 validation patients left: the next ones take their place, and it is theirs when they come back
    left = {name: part for name, part in memory.items() if part != "val"}
    assert [part for name, part in split_beside(memory, [*left, "n1", "n2"]).items() if name in ("n1", "n2")] == [
        "val"
    ] * 2
    assert split_beside(memory, memory) == memory


def test_with_kept_parts_no_patient_changes_places_for_a_label() -> None:
    # patient: (normal, tumor) patches; anew, whoever has no tumor would change places
    patients = {f"p{number}": (4, 0 if number < 6 else 4) for number in range(10)}
    index = index_of(patients)
    kept = KeptParts({}.get)
    with keep_parts(kept):
        anew = split_by_slide(index, 0)
    assert {finding.code for finding in anew.findings} == {"split_filled"}
    assert all((index.tumor[getattr(anew, part)] == 1).any() for part in ("train", "test"))
    without = {name: part for name, part in kept.used.items() if patients[name][1] == 0}
    again = KeptParts(without.get)
    fewer = index_of({name: patients[name] for name in without})
    with keep_parts(again):
        later = split_by_slide(fewer, 0)
    assert again.used == without
    assert {finding.code for finding in later.findings} == {"one_label"}
    assert "patients stay in the parts of this site's first job" in later.findings[0].message


@pytest.mark.parametrize("more", [False, True])
def test_a_split_by_slices_says_whether_it_is_of_the_same_slices(more: bool) -> None:
    slices = [("a", 0), ("a", 1), ("b", 0)]
    digests = []
    for held in (slices, slices[::-1] + [("b", 1)] * more):
        kept = KeptParts({}.get)
        with keep_parts(kept):
            split_slices_as_published(held, 0)
        digests.append(kept.whole)
    assert None not in digests and (digests[0] == digests[1]) == (not more)
