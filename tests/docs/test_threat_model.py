"""docs/threat-model.md names tests that exist, and every field that crosses a boundary."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from harmofl.core.partial_sum import PartialSum
from harmofl.experiment import Experiment
from harmofl.flare.amplitude_message import AmplitudeStatistic
from harmofl.flare.relay_message import RoundMeasure, SiteNotes
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import SiteNumbers
from tests.docs.test_pains import NAMED, ROOT, defined

PAGE = ROOT / "docs" / "threat-model.md"
TEXT = PAGE.read_text(encoding="utf-8")
QUOTED = set(re.findall(r"`([^`]+)`", TEXT))


def table_below(title: str) -> list[list[str]]:
    part = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


@pytest.mark.parametrize("row", table_below("What each can send or choose"), ids=lambda row: row[1][:40])
def test_each_bound_has_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == 4
    named = NAMED.findall(row[3])
    assert named and len(re.findall(r"`[^`]*\.py", row[3])) == len(named)
    missing = [f"{file}::{name}" for file, name, _ in named if name not in defined(ROOT / file)]
    assert not missing


def test_a_test_named_in_the_text_exists() -> None:
    named = NAMED.findall(TEXT)
    assert len(named) > 40
    assert not [name for file, name, _ in named if not (ROOT / file).is_file() or name not in defined(ROOT / file)]


@pytest.mark.parametrize("message", [TaskHeader, SiteNumbers, AmplitudeStatistic, SiteNotes, RoundMeasure, PartialSum])
def test_every_field_of_a_message_stands_in_it(message: type) -> None:
    fields = message.model_fields if issubclass(message, BaseModel) else message.__dataclass_fields__  # type: ignore[attr-defined]
    assert len(fields) > 2
    assert not set(fields) - QUOTED


def test_every_setting_of_a_job_stands_in_it() -> None:
    listed = {name for row in table_below("Every setting of a job") for name in re.findall(r"`([^`]+)`", row[0])}
    known = set()
    for name, field in Experiment.model_fields.items():
        kind = field.annotation
        inner = isinstance(kind, type) and issubclass(kind, BaseModel)
        known |= {f"{name}.{part}" for part in kind.model_fields} if inner else {name}  # type: ignore[union-attr]
    assert len(known) > 40
    assert known == listed


def test_every_file_that_it_links_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (PAGE.parent / target).is_file(), target
    assert Path(ROOT / "SECURITY.md").is_file()
