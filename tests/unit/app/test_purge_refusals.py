"""`harmofl purge` where a site says something that cannot be used: nothing is removed."""

from pathlib import Path

import pytest

from harmofl.app.cli import main
from tests.unit.app.provisioned import set_privacy

RUN = "a" * 32


@pytest.fixture
def run(site: Path) -> Path:
    """The folder of a run."""
    folder = site / "harmofl/state" / RUN
    folder.mkdir(parents=True)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["purge", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_a_data_root_that_is_no_text(site: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_privacy(site, data_root=5)
    assert "data_root in local/privacy.json must be text" in refused(capsys, str(site), RUN)
    assert run.is_dir()


def test_a_relative_state_root(
    site: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(site)
    monkeypatch.setenv("HARMOFL_STATE_ROOT", "harmofl")
    assert "HARMOFL_STATE_ROOT is a relative path" in refused(capsys, str(site), "--all")
    assert run.is_dir()


def test_two_runs_of_one_id_are_not_guessed_between(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [site / "harmofl/state" / name for name in ("abc1", "ABC1")]
    for folder in folders:
        folder.mkdir(parents=True)
    said = refused(capsys, str(site), "Abc-1")
    assert "Abc-1: is more than one run" in said and "ABC1, abc1; name one as it stands here" in said
    assert all(folder.is_dir() for folder in folders)
    assert main(["purge", str(site), "abc1"]) == 0
    assert [folder.is_dir() for folder in folders] == [False, True]
