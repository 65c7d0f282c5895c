"""The table of benchmarks in the documentation is the one that was measured."""

import json
from pathlib import Path

from tests.benchmarks.__main__ import HEAD, line
from tests.benchmarks.rows import Row

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def test_the_table_says_what_was_measured() -> None:
    told = json.loads((FOLDER / "measured.json").read_text())
    rows = [Row(**{key: value for key, value in row.items() if key != "passed"}) for row in told]
    assert len(rows) > 30
    table = "\n".join([HEAD, *map(line, rows)])
    text = (FOLDER / "README.md").read_text()
    assert f"\n\n{table}\n\n" in text
    for row in rows:  # whoever is short has a reason
        assert row.passed or f"- {row.what}: " in text, row.what
