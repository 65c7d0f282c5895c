"""What README says is what the project holds."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

from harmofl.app.cli import _parser
from harmofl.evidence.results import Results, RoundRecord
from harmofl.experiment import Experiment
from harmofl.flare.site_settings import LimitSettings, SiteSettings
from harmofl.sections import known_keys
from harmofl.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in ROOT.glob("**/README.md") if not {".venv", "venv", "custom"} & set(path.parts))
RUN = "pip install -r requirements.txt && nvflare simulator jobs/harmofl_prostate"
TEST = "pip install -r tests/requirements.txt && pytest"


def test_both_commands_stand_in_the_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:25]
    assert RUN in first_screen and TEST in first_screen


def test_ci_runs_the_readme_test_command_and_then_the_slow_drills() -> None:
    """In two runs side by side: what the second leaves out is what the first one runs."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    drills = [(number, line) for number, line in enumerate(lines) if line.startswith("pytest -m slow")]
    assert all(number > lines.index(TEST) for number, _ in drills)
    (first, second) = (line for _, line in drills)
    suites = {part for part in first.split() if part.startswith("tests/")}
    assert "tests/secure" in suites and all((ROOT / suite).exists() for suite in suites)
    assert suites == {part.removeprefix("--ignore=") for part in second.split() if part.startswith("--ignore=")}
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


def test_every_property_of_a_site_is_in_the_table_of_what_a_site_sets() -> None:
    text = (ROOT / "jobs" / "README.md").read_text().partition("## What a site sets\n")[2]
    sets, _, limits = text.partition("### Limits of a site\n")
    rows = [line for line in sets.splitlines() if line.startswith("| ")]
    assert not [name for name in SiteSettings.model_fields if not any(f"`{name}`" in row for row in rows)]
    rows = [line for line in limits.partition("\n### ")[0].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert named == set(LimitSettings.model_fields)


def test_every_harmofl_command_on_a_page_is_one() -> None:
    """Whatever a shell block calls is taken by the command line."""
    parser = _parser()
    told = [(page, line) for page in PAGES for line in commands(page.read_text(), "harmofl")]
    assert len(told) > 10
    for page, line in told:
        try:
            parser.parse_args(shlex.split(line, comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{page.relative_to(ROOT)}: {line}")


def test_every_script_on_a_page_is_there() -> None:
    told = [(page, line) for page in PAGES for line in commands(page.read_text(), "python")]
    scripts = {(page, part) for page, line in told for part in shlex.split(line) if part.endswith(".py")}
    assert len(scripts) >= 4
    assert not [(page, script) for page, script in scripts if not (ROOT / script).is_file()]


def commands(text: str, program: str) -> list[str]:
    """Lines of the shell blocks of a page that call a program, also behind an assignment of the environment."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [found[1] for line in lines if (found := re.match(rf"(?:\w+=\S+ )*({program} .*)", line))]


def test_every_setting_is_documented() -> None:
    text = (ROOT / "jobs" / "README.md").read_text()
    tasks = [import_module(f"harmofl.tasks.{name}").TASK for name in TASKS]
    sections = [Experiment, *(section for task in tasks for section in (task.reader, task.demo))]
    keys = {key.rsplit(".", 1)[-1] for section in sections for key in known_keys(section)}
    assert not {key for key in keys if f"`{key}`" not in text}
