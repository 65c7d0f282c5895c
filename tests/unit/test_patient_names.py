"""Whose a case is, by its name, and patterns whose cost has no end."""

import re
import subprocess
import sys

import pytest

from harmofl.experiment import ExperimentError, resolve, set_key
from harmofl.patient_names import LONGEST_NAME, costly_pattern, patient_in, pattern_problem

# take without end on a name of some 30 characters, by repeated groups, by many open parts or by many choices
ENDLESS = [
    r"^(([A-Za-z0-9_-])+)+\.$",
    r"^(a+)+$",
    r"(a|a)*b",
    r"(a|aa)+$",
    r"(?:a?){40}b",
    r"(?P<p>(?:a|b|ab)*)c",
    "a?" * 40 + "a" * 40,
    "(?:a|a)" * 25 + "b",
    r"a*a*a*a*a*a*a*a*a*b",
    r"(a)(?#x)*b",
    r"(?x)(a|a) *b",
    r"(a{1,9}){1,99}b",
    r"\((a+)\)+[)](a+)+b",
]
USUAL = [
    r"^P[0-9]+",
    r"^(P[0-9]{3})(?:_[0-9]+)?",
    r"^([^_.-]+)",
    r"^.{8}",
    r"(?i:pat)-?(\d+)",
    r"^(\w+?)[_-]visit\d+$",
    r"^(?P<p>[A-Z]+-[0-9]+)",
    r"(?:HK|UCL)_(\d{4})",
    r"[]()*+]x",
    r"\(\d+\)",
]


@pytest.mark.parametrize(
    ("form", "name", "patient"),
    [
        ("name", "P1_visit-2.b", "P1_visit-2.b"),
        ("before_separator", "P1_visit-2", "P1"),
        ("before_separator", "P1.2_3", "P1"),
        ("before_separator", "TCGA-50-5931", "TCGA"),
        ("before_separator", "Case07", "Case07"),
        ("before_separator", "_hidden", "_hidden"),  # nothing stands before it
        (2, "P1_visit2", "P1"),
        (64, "P1", "P1"),
    ],
)
def test_a_closed_form_takes_a_part_of_the_name(written, form, name, patient):
    assert patient_in(name, form) == patient
    set_key(written, "data.patient_from", form)
    assert resolve(written).data.patient_of(name) == patient


def test_a_pattern_comes_before_the_closed_form():
    assert patient_in("P1_v-2", "before_separator", "^(P[0-9]_v)") == "P1_v"
    assert patient_in("P1_v-2", "before_separator", "^(Q)") == "P1_v-2"


@pytest.mark.parametrize("form", ["first", "^(P)", 0, -1, 65, 2.5, True, None, [], {"characters": 3}])
def test_another_form_is_refused_with_those_that_there_are(written, form):
    set_key(written, "data.patient_from", form)
    expected = "data.patient_from: must be 'name', 'before_separator' or a number of characters, 1 to 64"
    with pytest.raises(ExperimentError, match=expected):
        resolve(written)


def test_two_words_about_patients_are_refused(written):
    set_key(written, "data.patient_from", 3)
    set_key(written, "data.patient_pattern", "^P")
    with pytest.raises(ExperimentError, match="patient_from and patient_pattern both say whose a case is"):
        resolve(written)


def test_the_form_of_before_has_the_hash_of_before(written, monkeypatch):
    before = resolve(written).hash
    monkeypatch.setattr("harmofl.experiment.LEFT_OUT_AT_DEFAULT", {})
    assert resolve(written).hash != before, "the default is not in the hash"
    monkeypatch.undo()
    set_key(written, "data.patient_from", "name")
    assert resolve(written).hash == before
    set_key(written, "data.patient_from", "before_separator")
    assert resolve(written).hash != before


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_could_take_without_end_is_refused(pattern):
    assert re.compile(pattern) and not pattern_problem(pattern)
    assert costly_pattern(pattern)


@pytest.mark.parametrize("pattern", USUAL)
def test_a_usual_pattern_is_taken(pattern):
    assert not pattern_problem(pattern) and not costly_pattern(pattern)


def test_what_is_taken_ends_on_the_longest_names():
    # the worst of what is taken: two open parts, one more choice, the engine goes through all and finds nothing; in a
    # process of its own, since no thread of Python can end a search that does not end
    patterns = [
        r"(.*)(.*)x",
        r".*.*?(?:x|y)",
        r"(a*)\1*b",
        r"(?:.*_)?.*x",
        r"(?:a|a).*(?:a|a).*x",
        r".{0,255}.{0,255}[xy]",
        r"(?=.*b).*c",
    ]
    assert not [pattern for pattern in patterns if costly_pattern(pattern)]
    code = f"import re\nfor p in {patterns!r}:\n for n in ('a' * {LONGEST_NAME}, 'a_' * 127):\n  re.search(p, n)"
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True)


@pytest.mark.parametrize("pattern", ["(P", "[", "a**", "(?P<Jane>a)(?P<Jane>b)", "a{99999999999}", "x" * 201])
def test_what_is_wrong_with_a_pattern_is_said_without_it(pattern):
    problem = pattern_problem(pattern)
    assert problem and "\n" not in problem and "Jane" not in problem and pattern not in problem
