"""PAINS.md names tests that exist and, where the reference documents are at hand, leaves no case out."""

import ast
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "PAINS.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)(\[[^`]+\])?`")
STATES = re.compile(r"passes|(in part|not offered|not testable): \S.+")
COPIED = 9  # as many words in a row as a sentence of another document would share, and no name or term does


@dataclass(frozen=True)
class Row:
    """A line of one of the page's tables."""

    case: str
    happens: str
    held_by: str
    state: str


def rows() -> list[Row]:
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    assert all(len(row) == 4 for row in cells), [row for row in cells if len(row) != 4]
    return [Row(*row) for row in cells if row[0] != "case"]


ROWS = rows()
CATALOGUE = [row for row in ROWS if re.fullmatch(r"[A-D]\d+", row.case)]
INPUTS = [row for row in ROWS if "/" in row.case or row.case.startswith(("make_", "show_"))]


@cache
def defined(path: Path) -> set[str]:
    """Names of a file's tests, of its test classes and of the tests in these."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith(("test_", "Test"))}


def missing_tests(row: Row) -> list[str]:
    named = NAMED.findall(row.held_by)
    return [
        f"{file}::{name}" for file, name, _ in named if not (ROOT / file).is_file() or name not in defined(ROOT / file)
    ]


def test_every_row_is_of_a_case_and_no_case_has_two() -> None:
    assert len(CATALOGUE) > 80 and len(INPUTS) > 20
    assert len(CATALOGUE) + len(INPUTS) == len(ROWS)
    assert not [case for case, count in Counter(row.case for row in ROWS).items() if count > 1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_a_row_names_tests_that_exist_and_a_state(row: Row) -> None:
    assert row.happens and len(row.happens) < 160
    assert STATES.fullmatch(row.state), f"{row.state!r} is no state"
    assert missing_tests(row) == []
    # whatever stands between backticks with a path is a test of the form that was looked up
    assert len(re.findall(r"`[^`]*\.py", row.held_by)) == len(NAMED.findall(row.held_by))
    if row.state == "passes":
        assert NAMED.search(row.held_by), "what passes is held by a test"
    else:
        assert NAMED.search(row.held_by) or row.held_by.startswith("none: "), "the nearest test, or why there is none"


@pytest.mark.parametrize("state", ["open", "", "-", "in part", "not testable: ", "passes: nearly", "Passes"])
def test_what_is_no_state_is_refused(state: str) -> None:
    """A row that is open, or in part without a reason, is work that is left."""
    assert not STATES.fullmatch(state)


def test_a_test_that_does_not_exist_is_found() -> None:
    here = "tests/docs/test_pains.py"
    assert missing_tests(Row("A1", "", f"`{here}::test_a_test_that_does_not_exist_is_found`", "")) == []
    for name in (f"{here}::test_gone", "tests/docs/gone.py::test_it", f"{here}::rows", f"{here}::TestGone::test_it"):
        assert missing_tests(Row("A1", "", f"`{name}`", "")) == [name]


@pytest.fixture
def reference() -> Path:
    """The folder of the reference documents; the folder of failing inputs lies beside it."""
    folder = Path(os.environ.get("HARMOFL_REFERENCE", ROOT.parent / "shared" / "reference"))
    if not (folder / "known-pains.md").is_file():
        pytest.skip("no reference documents: HARMOFL_REFERENCE names no folder with known-pains.md")
    return folder


def test_no_known_pain_is_missing(reference: Path) -> None:
    text = (reference / "known-pains.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^### ([A-C]\d+) ", text, re.MULTILINE)) | set(
        re.findall(r"^\| (D\d+) \|", text, re.MULTILINE)
    )
    assert {row.case for row in CATALOGUE} == known


def test_no_failing_input_is_missing(reference: Path) -> None:
    """A case is called by its script and, where the script makes several, by a word that stands in its row alone."""
    table = (reference.parent / "cases" / "README.md").read_text(encoding="utf-8").splitlines()
    lines = [line for line in table if line.startswith("| ") and not line.startswith("| case |")]
    found: dict[str, list[str]] = {row.case: [] for row in INPUTS}
    for case, matches in found.items():
        script, _, word = case.partition("/")
        matches += [line for line in lines if f"{script}.py" in line and re.search(rf"\b{word}\b", line)]
    assert not {case: len(matches) for case, matches in found.items() if len(matches) != 1}
    assert not set(lines) - {matches[0] for matches in found.values()}
    assert len(lines) == len(INPUTS)


def test_no_sentence_is_copied_and_no_place_of_a_machine_is_named(reference: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(work|home|tmp|root|data)\b|\.\./", page)
    texts = [(reference / "known-pains.md").read_text(), (reference.parent / "cases" / "README.md").read_text()]
    theirs = {run for text in texts for run in runs_of_words(text)}
    assert not [run for row in ROWS for run in runs_of_words(f"{row.happens}. {row.state}") if run in theirs]


def runs_of_words(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    return [tuple(words[start : start + COPIED]) for start in range(len(words) - COPIED + 1)]
