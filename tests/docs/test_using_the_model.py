"""The page on using a model says what the commands are."""

import re
import shlex
from pathlib import Path

import pytest

from harmofl.app.cli import _parser
from harmofl.app.cli_model import FORMATS
from harmofl.app.export import FILES
from harmofl.evidence.evaluation import Evaluation

PAGE = Path(__file__).resolve().parents[2] / "docs" / "using-the-model.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_command_is_one() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("harmofl ")]
    assert {line.split()[1] for line in lines} == {"predict", "evaluate", "export"}
    for line in lines:
        try:
            _parser().parse_args(shlex.split(line)[1:])
        except SystemExit:
            pytest.fail(line)


def test_every_key_and_format_is_documented() -> None:
    assert not [name for name in Evaluation.model_fields if f"`{name}`" not in TEXT]
    assert set(FORMATS) == set(FILES)
    assert not [name for name in FORMATS if f"`{name}`" not in TEXT]
