"""Which sets may be released beside others, against every linear combination of small numbers."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmofl.core.released_sets import patients_between, reveals_few


def whole(patients: str) -> dict[str, str]:
    """A set in which each patient has one part."""
    return {patient: patient for patient in patients}


def brute(released: list[dict[str, str]], offered: dict[str, str], limit: int) -> bool:
    """Every combination with coefficients of -2 to 2.

    A combination of 4 sums that is 0 for as many patients as possible has 3 x 3 determinants of zeros and ones for its
    coefficients, and those are -2 to 2 (Hadamard).
    """
    rows = [*released, offered]
    columns = sorted({column for row in rows for column in row})
    left = []
    for numbers in product(range(-2, 3), repeat=len(rows)):
        if numbers[-1]:
            sums = [
                sum(number * (column in row) for number, row in zip(numbers, rows, strict=True)) for column in columns
            ]
            patients = {
                row[column]
                for column, total in zip(columns, sums, strict=True)
                if total
                for row in rows
                if column in row
            }
            left.append(len(patients))
    return 0 not in left and min(left) < limit


@pytest.mark.parametrize(
    ("released", "offered", "reveals"),
    [
        (["abcdefg"], "abcdefgh", True),  # the two of the attack: h alone
        (["abcdefgh"], "abcdefg", True),  # a patient who went
        (["abcdefg"], "abcdefgh"[::-1][:7], True),  # one went and one came
        (["abcdefg"], "abcdefghijkl", False),  # five came
        (["abcdefg"], "bcdefghijkl", False),  # one went and five came: six are left in the difference
        (["abcdefg"], "abcdefg", False),  # the same set again
        (["abcdefg"], "hijkl", False),  # others
        (["abcdefg"], "hijk", True),  # too few by themselves
        # pairwise these differ by 5 or more: abcdef - abcdeghijk + ghijk = f
        (["abcdef", "abcdeghijk"], "ghijk", True),
        # what follows from the earlier ones is known already
        (["abcde", "abcdefghij"], "fghij", False),
    ],
)
def test_combinations_of_fewer_than_five_patients(released: list[str], offered: str, reveals: bool) -> None:
    assert reveals_few([whole(part) for part in released], whole(offered), 5) == reveals
    assert brute([whole(part) for part in released], whole(offered), 5) == reveals


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1), max_size=3),
    st.sets(st.sampled_from("abcdefgh"), min_size=1),
    st.integers(1, 5),
)
def test_it_is_what_all_combinations_say(released: list[set[str]], offered: set[str], limit: int) -> None:
    sets = [whole("".join(sorted(part))) for part in released]
    one = whole("".join(sorted(offered)))
    assert reveals_few(sets, one, limit) == brute(sets, one, limit)


def test_a_patient_with_other_images_is_another_part_of_the_same_patient() -> None:
    first = whole("abcdefg")
    second = {**whole("bcdefg"), "a with one image more": "a"}
    assert reveals_few([first], second, 5), "the one image more is left"
    assert patients_between(first, second) == 1
    five = {f"{patient} with one image more": patient for patient in "abcde"} | whole("fg")
    assert not reveals_few([first], five, 5)
    assert patients_between(first, five) == 5


def test_what_was_known_before_the_limit_rose_does_not_count_against_a_new_set() -> None:
    earlier = [whole("ab"), whole("abcdefg")]
    assert not reveals_few(earlier, whole("hijkl"), 5)
    assert reveals_few(earlier, whole("abcdefgh"), 5)


def test_with_too_many_subsets_to_look_at_it_errs_on_the_safe_side() -> None:
    # 20 patients, each missing from one of 20 sets, and each of another pattern
    everybody = "abcdefghijklmnopqrst"
    earlier = [whole(everybody.replace(patient, "")) for patient in everybody[:15]]
    assert reveals_few(earlier, whole(everybody), 12)
