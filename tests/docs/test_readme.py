"""What README says is what the project holds."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

from harmofl.evidence.results import Results, RoundRecord
from harmofl.experiment import Experiment
from harmofl.sections import known_keys
from harmofl.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "jobs" / "README.md", ROOT / "tests" / "README.md"]
RUN = "pip install -r requirements.txt && nvflare simulator jobs/harmofl_prostate"
TEST = "pip install -r tests/requirements.txt && pytest"


def test_both_commands_stand_in_the_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:25]
    assert RUN in first_screen and TEST in first_screen


def test_ci_runs_the_readme_test_command_and_then_the_slow_drills() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index(TEST) < lines.index("pytest -m slow")
    assert any("python3 -m venv" in line for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_hold(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(#[^)]*)?\)", page.read_text())
    files = [target for target, _ in targets if not target.startswith("http")]
    missing = [target for target in files if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("schema", [Results, RoundRecord], ids=["results", "rounds"])
def test_every_key_of_the_evidence_is_documented(schema: type[BaseModel]) -> None:
    text = (ROOT / "jobs" / "README.md").read_text()
    assert not [name for name in schema.model_fields if f"`{name}`" not in text]


def test_every_setting_is_documented() -> None:
    text = (ROOT / "jobs" / "README.md").read_text()
    tasks = [import_module(f"harmofl.tasks.{name}").TASK for name in TASKS]
    sections = [Experiment, *(section for task in tasks for section in (task.reader, task.demo))]
    keys = {key.rsplit(".", 1)[-1] for section in sections for key in known_keys(section)}
    assert not {key for key in keys if f"`{key}`" not in text}
