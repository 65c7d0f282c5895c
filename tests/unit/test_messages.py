"""How messages are worded: one is one, and none guesses at a cause."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import harmofl
from harmofl.data.findings import count_text

ROOT = Path(harmofl.__file__).parents[2]
SOURCES = sorted([*Path(harmofl.__file__).parent.rglob("*.py"), *(ROOT / "poc").glob("*.py")])
GUESSES = re.compile(r"\b(likely|probably|perhaps|maybe|presumably|possibly|seems? to be|a bug)\b", re.IGNORECASE)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 holes"), (1, "1 hole"), (2, "2 holes"), (21, "21 holes"), (1_000_000, "1000000 holes")]
)
def test_one_is_one(number: int, text: str) -> None:
    assert count_text(number, "hole") == text


def test_a_plural_of_its_own() -> None:
    assert [count_text(number, "patch", "patches") for number in (1, 2)] == ["1 patch", "2 patches"]


def counts_of(tree: ast.AST) -> Iterator[str]:
    """`{len(...)} words` and `{x.words} words` in f-strings; after `of` the whole of a share is counted."""
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        for before, number, after in zip([None, *text.values], text.values, text.values[1:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            counted = isinstance(number.value, ast.Call) and ast.unparse(number.value.func) == "len"
            if isinstance(number.value, ast.Attribute):
                noun = number.value.attr.rsplit("_", 1)[-1]
                counted = noun.endswith("s") and re.match(rf" {noun}\b", str(after.value)) is not None
            share = isinstance(before, ast.Constant) and re.search(r"\bof (the )?$", str(before.value))
            if counted and not share and re.match(r" [a-z]+s\b", str(after.value)):
                yield f"{ast.unparse(number.value)}{after.value}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_message_counts_1_things_or_guesses(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(counts_of(tree)) == []
    spoken = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    documented = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    }
    assert [text for text in spoken if text not in documented and GUESSES.search(text)] == []
