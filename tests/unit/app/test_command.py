"""The command itself: what it imports, what it returns, where its messages go."""

import subprocess
import sys
from pathlib import Path

import pytest

from harmofl.app.cli import main

LEAN = """
import sys
from harmofl.app.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"torch", "monai", "nvflare", "pydantic", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "check" in done.stdout and "simulate" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [[], ["train"], ["check"], ["check", "data"], ["simulate"], ["simulate", "job", "--threads", "0"]]
    + [["simulate", "job", "--demo", "--data", "x"]],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: harmofl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (["--set", "training.local_epoch=2"], "did you mean 'training.local_epochs'?"),
        (["--set", "federation.minimum_sites=3"], "--set federation.minimum_sites=2"),
        (["--threads", "3"], "at most 2"),
        (["--workspace", "has blank"], "with a blank"),
        (["--workspace", "."], "no simulator workspace"),
    ],
)
def test_simulate_refuses_before_flare_starts(
    job: Path, extra: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(job), *extra]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("harmofl simulate: ") and part in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not Path("simulator_workspace").exists()


def test_simulate_names_every_site_without_data_and_the_first_one_last(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    assert main(["simulate", str(job), "--data", "data"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("harmofl simulate: failed: site HK: no data for site HK")
    assert lines[1].startswith("harmofl simulate: failed: site BIDMC: no data for site BIDMC")


def test_simulate_refuses_two_sites_that_read_one_folder(
    job: Path, sites_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # the root holds cases itself, so that each site alone would take it
    monkeypatch.setenv("HARMOFL_DATA_ROOT", str(sites_root / "HK"))
    assert main(["simulate", str(job)]) == 1
    assert "site HK: would read" in capsys.readouterr().out


def test_a_workspace_around_the_data_is_refused(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in ("old/startup", "old/server", "old/data/HK"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "old/server/log.txt").touch()
    assert main(["simulate", str(job), "--workspace", "old", "--data", "old/data"]) == 2
    assert "every run empties the workspace" in capsys.readouterr().err
    assert (tmp_path / "old/data/HK").is_dir()


@pytest.mark.parametrize("kept", ["checkpoint", "state"])
def test_a_workspace_that_holds_what_the_run_goes_on_from_is_refused(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    for made in ("old/startup", "old/server/simulate_job"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "old/server/log.txt").touch()
    checkpoint = tmp_path / "old/server/simulate_job/FL_global_model.pt"
    checkpoint.touch()
    extra = ["--set", f"federation.resume_from={checkpoint}"] if kept == "checkpoint" else []
    if kept == "state":
        monkeypatch.setenv("HARMOFL_STATE_ROOT", str(tmp_path / "old/state"))
    assert main(["simulate", str(job), "--workspace", "old", *extra]) == 2
    assert "every run empties the workspace; name another" in capsys.readouterr().err
    assert checkpoint.is_file()


def test_a_checkpoint_by_a_relative_path_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(job), "--set", "federation.resume_from=FL_global_model.pt"]) == 2
    assert "give an absolute one" in capsys.readouterr().err


def test_a_workspace_inside_the_data_is_refused(
    job: Path, sites_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sites_root)
    assert main(["simulate", str(job), "--data", "."]) == 2
    assert "which is never written to; name another" in capsys.readouterr().err
    assert not (sites_root / "simulator_workspace").exists()


def test_a_workspace_that_cannot_be_made_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["simulate", str(job), "--workspace", "file/below"]) == 2
    assert "file/below: cannot be written (Not a directory); name another folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["meta.json", "app/config/experiment.json"])
def test_text_that_is_not_utf8_is_named(
    job: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / name).write_bytes(b'{"name": "Universit\xe4t"}')
    assert main(["simulate", str(job)]) == 2
    assert f"{name}: is not UTF-8 text; save it as UTF-8" in capsys.readouterr().err
