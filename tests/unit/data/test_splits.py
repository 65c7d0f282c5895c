import random
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harmofl.data.splits import Split, split_cases, split_slices_as_published

SEEDS = st.integers(0, 1000)
NUMBERS = st.sets(st.integers(0, 120), min_size=3, max_size=40)
NAMES = st.sets(st.text("abcdefgh", min_size=1, max_size=6), min_size=3, max_size=40)

# case numbers of the six-site prostate set (SAML)
HK = list(range(38, 50))
BIDMC = [0, *range(2, 13)]
RUNMC = list(range(30))
UCL = [1, *range(26, 38)]
I2CVB = list(range(19))


def cases(numbers) -> list[str]:
    return [f"Case{number:02d}" for number in numbers]


def parts(split: Split) -> dict[str, str]:
    return {name: part for part in ("train", "val", "test") for name in getattr(split, part)}


def short(split: Split) -> str:
    return " | ".join(
        " ".join(name.removeprefix("Case") for name in part) for part in (split.train, split.val, split.test)
    )


@given(NUMBERS | NAMES, SEEDS)
def test_disjoint_complete_and_never_empty(chosen: set, seed: int) -> None:
    names = [str(item) for item in chosen]
    split = split_cases(names, seed)
    assert sorted([*split.train, *split.val, *split.test]) == sorted(names)
    assert split.train
    assert split.val
    assert split.test


@given(NUMBERS, SEEDS)
def test_b22_order_of_the_directory_does_not_matter(chosen: set[int], seed: int) -> None:
    names = cases(sorted(chosen))
    shuffled = random.Random(seed).sample(names, len(names))
    assert split_cases(shuffled, seed) == split_cases(names, seed)


@given(NUMBERS | NAMES, NUMBERS | NAMES, SEEDS)
def test_added_cases_move_no_old_one(old: set, new: set, seed: int) -> None:
    before = split_cases([str(item) for item in old], seed)
    assume(not before.findings)
    after = parts(split_cases([str(item) for item in old | new], seed))
    assert {name: after[name] for name in parts(before)} == parts(before)


@given(st.integers(0, 40), SEEDS)
def test_blocks_and_runs_are_balanced(block: int, seed: int) -> None:
    part = parts(split_cases(cases(range(25 * block, 25 * block + 25)), seed))
    dealt = list(part.values())
    assert [dealt.count(name) for name in ("train", "val", "test")] == [16, 4, 5]  # 64 %, 16 %, 20 % of 25
    by_number = [part[name] for name in cases(range(25 * block, 25 * block + 25))]
    for start in range(0, 25, 5):
        run = by_number[start : start + 5]
        assert run.count("test") == 1
        assert run.count("val") <= 1


@given(SEEDS)
def test_fractions_at_the_real_sites(seed: int) -> None:
    # Runs of five that lie fully in a site give one test case each, cut runs at most one; one run in a block of 25
    # has no validation case.
    sizes = {
        "HK": (HK, range(2, 4), range(1, 4)),  # 38-39, 40-44, 45-49
        "BIDMC": (BIDMC, range(1, 4), range(1, 4)),  # 0 2-4, 5-9, 10-12; empty parts are filled
        "RUNMC": (RUNMC, range(6, 7), range(4, 6)),  # block 0 whole, run 25-29
        "UCL": (UCL, range(1, 5), range(1, 5)),  # 1, 26-29, 30-34, 35-37
        "I2CVB": (I2CVB, range(3, 5), range(2, 5)),  # three runs and 15-18
    }
    for site, (numbers, tests, validations) in sizes.items():
        split = split_cases(cases(numbers), seed)
        assert len(split.test) in tests, site
        assert len(split.val) in validations, site


def test_same_on_every_platform() -> None:
    # written once; a change moves the test cases of every site and needs a new major version
    assert short(split_cases(cases(HK), 0)) == "38 41 42 43 46 47 49 | 40 48 | 39 44 45"
    assert short(split_cases(cases(BIDMC), 0)) == "00 03 05 06 07 09 10 11 | 02 12 | 04 08"
    assert short(split_cases(["anna", "berta", "carla", "dora"], 5)) == "anna | carla | berta dora"
    slices = [("Case00", index) for index in range(10)]
    assert split_slices_as_published(slices, 0).test == (("Case00", 6), ("Case00", 7))


def test_seeds_differ() -> None:
    assert len({short(split_cases(cases(RUNMC), seed)) for seed in range(20)}) == 20


@given(SEEDS)
def test_names_without_numbers_follow_the_fractions(seed: int) -> None:
    unique = ["".join(letters) for letters in product("abcdefghij", repeat=3)]
    split = split_cases(unique, seed)
    # binomial, n cases: 4.5 standard deviations sqrt(n p (1 - p)) around n p
    for part, fraction in ((split.train, 0.64), (split.val, 0.16), (split.test, 0.2)):
        spread = 4.5 * (len(unique) * fraction * (1 - fraction)) ** 0.5
        assert abs(len(part) - fraction * len(unique)) < spread


@given(NUMBERS, SEEDS)
def test_cases_of_one_patient_stay_together(chosen: set[int], seed: int) -> None:
    visits = [f"P{number:03d}_{visit}" for number in chosen for visit in ("first", "second")]
    split = split_cases(visits, seed, patient=lambda name: name.split("_")[0])
    part = parts(split)
    for number in chosen:
        assert part[f"P{number:03d}_first"] == part[f"P{number:03d}_second"]


def test_numbers_count_only_at_the_end_of_a_name() -> None:
    # if digits anywhere counted, all would be number 2, fall into one part, and the others would be filled
    names = ["".join(letters) + "_t2_axial" for letters in product("abcdef", repeat=2)]
    assert split_cases(names, 0).findings == ()


@given(st.sets(st.integers(0, 50), min_size=3, max_size=3), SEEDS)
def test_three_cases_give_one_each(chosen: set[int], seed: int) -> None:
    split = split_cases(cases(chosen), seed)
    assert (len(split.train), len(split.val), len(split.test)) == (1, 1, 1)
    assert {finding.severity for finding in split.findings} <= {"notice"}


def test_filling_moves_as_few_as_possible_and_says_so() -> None:
    names = cases([0, 1, 2, 5, 6])
    for seed in range(50):
        split = split_cases(names, seed)
        filled = [finding for finding in split.findings if finding.code == "split_filled"]
        alone = parts(split_cases(cases(range(25)), seed))  # the whole block: nothing is moved there
        moved = {name for name in names if parts(split)[name] != alone[name]}
        assert moved == {finding.subject for finding in filled}
        missing = {"train", "val", "test"} - {alone[name] for name in names}
        assert len(moved) == len(missing)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_below_three_cases_is_an_error(count: int) -> None:
    split = split_cases(cases(range(count)), 0)
    assert [(finding.code, finding.severity) for finding in split.findings] == [("too_few_cases", "error")]
    assert list(split.train) == cases(range(count))


def test_two_patients_with_many_visits_are_too_few() -> None:
    visits = [f"P{patient}_{visit}" for patient in range(2) for visit in range(5)]
    split = split_cases(visits, 0, patient=lambda name: name.split("_")[0])
    assert split.findings[0].code == "too_few_cases"


def test_other_fractions() -> None:
    split = split_cases(cases(range(50)), 0, fractions=(0.52, 0.24, 0.24))
    assert (len(split.train), len(split.val), len(split.test)) == (26, 12, 12)


@pytest.mark.parametrize("fractions", [(0.6, 0.2, 0.1), (0.65, 0.15, 0.2), (1.0, 0.0, 0.0), (1.2, -0.4, 0.2)])
def test_fractions_that_cannot_be_dealt_are_refused(fractions) -> None:
    with pytest.raises(ValueError, match=r"0\.04"):
        split_cases(cases(range(5)), 0, fractions)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        # slices of RUNMC, BMC, I2CVB, UCL, BIDMC, HK and the lengths of the released index files
        (411, (263, 65, 83)),
        (384, (245, 62, 77)),
        (468, (299, 75, 94)),
        (175, (112, 28, 35)),
        (261, (167, 41, 53)),
        (157, (100, 25, 32)),
    ],
)
def test_published_slice_split_has_the_published_sizes(count: int, sizes: tuple[int, int, int]) -> None:
    slices = [(f"Case{index // 15:02d}", index % 15) for index in range(count)]
    split = split_slices_as_published(slices, 3)
    assert (len(split.train), len(split.val), len(split.test)) == sizes
    assert sorted([*split.train, *split.val, *split.test]) == sorted(slices)
    assert split == split_slices_as_published(slices[::-1], 3)
    assert [(finding.code, finding.severity) for finding in split.findings] == [("slice_leakage", "warning")]
    shared = {name for name, _ in split.train} & {name for name, _ in split.test}
    assert shared  # this is the leak
