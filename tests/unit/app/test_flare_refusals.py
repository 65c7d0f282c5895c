"""Paths, job folders and job descriptions that FLARE cannot use are refused before anything is made."""

import json
import os
import shlex
import shutil
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.utils.format_check import name_check

from harmofl.app import flare_refusals
from harmofl.app.cli import main
from harmofl.app.flare_refusals import refuse_job, unusable_path, unusable_python
from harmofl.app.job import JobError
from harmofl.job_folder import JOB_NAME, SITE_NAME
from tests.unit.app.provisioned import Lines, Packed

ROOT = Path(__file__).resolve().parents[3]
Seen = pytest.CaptureFixture[str]


def survives(path: str) -> bool:
    """Whether FLARE's own way to split a command line gives the path back."""
    try:
        return shlex.split(f"python -o {path} --client HK", True)[2:3] == [path]
    except ValueError:
        return False


@pytest.mark.parametrize("mark", [*(string.printable), "é", "\u00a0", "\u2028"])
def test_a_path_is_refused_where_flare_would_split_it(mark: str) -> None:
    path = f"/data/a{mark}b"
    assert bool(unusable_path(Path(path))) == (not survives(path) or mark == os.pathsep)


def test_what_is_wrong_with_a_path_is_said_once() -> None:
    told = unusable_path(Path("/a b/c d/#1"))
    assert told == "FLARE cannot start processes in a path with a blank or #"


@pytest.mark.parametrize(
    "name",
    ["my nuclei job", "harmofl_nuclei", "v1.2-b", ".hidden", "-job", "_job", "job#2", "jöb", "job\n", "a", "1", "a;b"],
)
def test_names_are_those_that_flare_takes(name: str) -> None:
    # FLARE's pattern ends with $, which a line break may follow; a folder's name with one is refused here
    assert (JOB_NAME.fullmatch(name) is None) == (name_check(name, "job_name")[0] or "\n" in name)
    assert (SITE_NAME.fullmatch(name) is None) == (name_check(name, "client")[0] or "\n" in name)


@pytest.mark.parametrize("folder", ["has blank", "run#1", "it's", "a\\b", "a:b"])
def test_simulate_refuses_the_workspace(job: Path, tmp_path: Path, folder: str, capsys: Seen) -> None:
    before = sorted(tmp_path.iterdir())
    assert main(["simulate", str(job), "--workspace", folder]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"harmofl simulate: --workspace {tmp_path / folder}: FLARE cannot") and told.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_simulate_refuses_its_default_workspace_below_such_a_folder(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Seen
) -> None:
    (tmp_path / "my work").mkdir()
    monkeypatch.chdir(tmp_path / "my work")
    assert main(["simulate", str(job)]) == 2
    assert "with a blank; name another folder with --workspace" in capsys.readouterr().err
    assert not list((tmp_path / "my work").iterdir())


def test_a_python_below_such_a_folder_is_named(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Seen
) -> None:
    assert unusable_python() == ""
    monkeypatch.setattr(sys, "executable", "/home/me/my venv/bin/python")
    assert main(["simulate", str(job)]) == 2
    assert "/home/me/my venv/bin/python: FLARE cannot start processes" in capsys.readouterr().err
    assert not (tmp_path / "simulator_workspace").exists()


@pytest.mark.parametrize("folder", ["my kit", "kit#1", "kit*"])
def test_preflight_names_the_path_of_a_kit(site: Path, tmp_path: Path, data: None, lines: Lines, folder: str) -> None:
    assert not [line for line in lines(site) if "FLARE cannot start" in line]
    moved = shutil.move(site, tmp_path / folder)
    (told,) = [line for line in lines(moved) if "FLARE cannot start" in line]
    assert told.startswith(f"error: kit: {tmp_path / folder}: ") and told.endswith("move it to a path without")


def test_preflight_names_the_workspace_of_a_kit(
    site: Path, data: None, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVFL_WORKSPACE", "/var/lib/my site")
    assert [line for line in lines(site) if line.startswith("error: NVFL_WORKSPACE: /var/lib/my site: FLARE cannot")]


def test_bundle_refuses_a_name_that_flare_refuses(job: Path, tmp_path: Path, capsys: Seen) -> None:
    named = job.rename(tmp_path / "my nuclei job")
    assert main(["bundle", str(named), "-o", "dist"]) == 2
    told = capsys.readouterr().err
    assert "job folder 'my nuclei job': FLARE refuses the name" in told and told.count("\n") == 1
    assert not (tmp_path / "dist").exists()


def test_resume_refuses_a_name_that_flare_refuses(job: Path, tmp_path: Path, capsys: Seen) -> None:
    named = job.rename(tmp_path / "my nuclei job")
    assert main(["resume", str(named), "0f605ead-0000", "-o", "again"]) == 2
    assert "FLARE refuses the name" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_resume_refuses_to_submit_from_a_path_that_does_not_come_through(
    job: Path, kits: Any, tmp_path: Path, capsys: Seen
) -> None:
    kit = str(kits.folder / "lead@ucl.org")
    assert main(["resume", str(job), "0f605ead-0000", "-o", "'quoted'", "--kit", kit]) == 2
    assert "-o 'quoted': FLARE cannot submit a job from a path with quotes" in capsys.readouterr().err
    assert not (tmp_path / "'quoted'").exists()


def test_preflight_names_a_job_that_flare_would_refuse(
    site: Path, job: Path, data: None, lines: Lines, packed: Packed
) -> None:
    assert not [line for line in lines(site, packed()) if "FLARE refuses" in line]
    assert [line for line in lines(site, job.rename(job.with_name("my job"))) if "FLARE refuses the name" in line]


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda meta: meta.update(min_clients="two"), "min_clients is 'two'"),
        (lambda meta: meta.update(min_clients=0), "min_clients 0 must be positive"),
        (lambda meta: meta.update(resource_spec=[]), "Invalid resource_spec"),
        (lambda meta: meta.update(mandatory_clients=["UCL"]), "Mandatory clients {'UCL'} are not in the deploy_map"),
        (lambda meta: meta["deploy_map"].update(app=["BIDMC", "HK"]), "does not name the server"),
        (lambda meta: meta["deploy_map"]["app"].append("HK"), "names HK twice"),
        (lambda meta: meta.update(deploy_map={"my app": ["server", "HK"]}), '"my app" is no name of an app'),
    ],
)
def test_a_job_that_flare_refuses_is_not_bundled(
    job: Path, tmp_path: Path, edit: Edit, part: str, capsys: Seen
) -> None:
    meta = json.loads((job / "meta.json").read_text())
    edit(meta)
    (job / "meta.json").write_text(json.dumps(meta))
    assert main(["bundle", str(job), "-o", "dist"]) == 2
    told = capsys.readouterr().err
    assert "meta.json" in told and part in told and told.count("\n") == 1
    assert not (tmp_path / "dist").exists()


def test_simulate_refuses_a_job_that_flare_refuses(job: Path, tmp_path: Path, capsys: Seen) -> None:
    (job / "app/config/config_fed_client.json").unlink()
    assert main(["simulate", str(job)]) == 2
    assert "FLARE refuses the job: App 'app' will be deployed to client but" in capsys.readouterr().err
    assert not (tmp_path / "simulator_workspace").exists()


def test_whatever_flares_check_raises_is_one_line(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "meta.json").write_text(json.dumps({"deploy_map": {"app": 1}}))
    with pytest.raises(JobError, match="FLARE refuses the job"):
        refuse_job(job)


def test_the_shipped_jobs_pass_flares_check() -> None:
    for meta in sorted((ROOT / "jobs").glob("*/meta.json")):
        refuse_job(meta.parent)
        flare_refusals.refuse_job_name(meta.parent.name)
