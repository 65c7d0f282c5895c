"""The study in jobs/README.md says what its runs say."""

import csv
from collections import Counter
from pathlib import Path

from tests.benchmarks.study_table import RUNS, tables

ROOT = Path(__file__).resolve().parents[2]


def numbers(line: str) -> tuple[str, ...]:
    """The cells of a table's row that hold numbers alone, the ratio of passes left out."""
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    plain = [cell for cell in cells if cell and not set(cell) - set("0123456789.,+-[] ")]
    return tuple(cell for cell in plain if cell not in ("1.0", "2.0"))


def test_every_row_of_the_study_stands_in_its_runs() -> None:
    with RUNS.open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    printed = {numbers(line) for line in tables(runs)}
    text = (ROOT / "jobs" / "README.md").read_text()
    section = text[text.index("## Does HarmoFL beat FedAvg?") : text.index("## Compare methods on your data")]
    rows = [found for line in section.splitlines() if line.startswith("| ") and (found := numbers(line))]
    pooled = [row for row in rows if " " not in row[0].split("[")[0].strip()]  # differences over all nine pairs alone
    told = {row[-len(one) :] for row in printed for one in pooled}
    assert len(rows) > 50
    assert [row for row in rows if row not in printed and row not in told] == []


def test_the_study_kept_to_its_number_of_runs() -> None:
    with RUNS.open(encoding="utf-8") as file:
        stages = Counter(row["stage"] for row in csv.DictReader(file))
    assert stages == {"screen": 66, "confirm": 36, "unseen": 18, "long": 6, "real": 18, "variant": 6}
