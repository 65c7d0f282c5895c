"""`harmofl purge`: it takes what a run left and nothing else, and nothing from under a running job."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harmofl.app.cli import main
from harmofl.flare.state import Checkpoint, SiteState

FIRST, LATER, OTHER = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abc")
RUN, OTHER_RUN = FIRST.replace("-", ""), OTHER.replace("-", "")


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def write_kit(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    (folder / "startup").mkdir(parents=True)
    (folder / "local").mkdir()
    server = {
        "name": "consortium",
        "service": {"target": "server:8002", "scheme": "grpc"},
        "admin_server": "server",
        "admin_port": 8003,
        "identity": "server",
    }
    (folder / "startup" / f"fed_{kind}.json").write_text(json.dumps({"servers": [server], **settings}))
    return folder


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HARMOFL_STATE_ROOT", "NVFL_WORKSPACE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's kit with two runs, a cache, and what is not ours."""
    kit = write_kit(tmp_path / "HK", "client", {"client": {"fqsn": "HK"}})
    write_runs(kit / "harmofl")
    (kit / FIRST / "app_HK" / "config").mkdir(parents=True)
    (kit / FIRST / "log.txt").write_text("FLARE's")
    return kit


def write_runs(root: Path) -> None:
    for run, rounds in ((RUN, (4, 5)), (OTHER_RUN, ())):
        state = SiteState(root / "state", run)
        state.save_once("findings", {"count": 3})
        for number in rounds:
            state.save_round(number, {"moments": torch.zeros(25_000)})  # 100 kB
    (root / "cache").mkdir()
    (root / "cache" / "volume.npz").write_bytes(bytes(2_000_000))


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The server's kit with a run of two jobs and a run of one."""
    kit = write_kit(tmp_path / "server", "server", {})
    for job, run, next_round in ((FIRST, RUN, 3), (LATER, RUN, 6), (OTHER, OTHER_RUN, 1)):
        Checkpoint(
            model={"w": torch.zeros(2)},
            experiment={},
            experiment_hash="",
            run_id=run,
            next_round=next_round,
            amplitude=None,
            amplitude_images=0,
            amplitude_sites=(),
            record={},
        ).save(kit / "harmofl" / "runs" / job / "FL_global_model.pt")
    return kit


def purged(capsys: pytest.CaptureFixture[str], kit: Path, *arguments: str, code: int = 0) -> str:
    assert main(["purge", str(kit), *arguments]) == code
    shown = capsys.readouterr()
    assert bool(shown.err) == (code == 2) and shown.err.count("\n") <= 1
    return shown.out + shown.err


def test_without_a_run_it_lists_and_removes_nothing(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(site)
    lines = purged(capsys, site).splitlines()
    assert lines[0] == f"harmofl purge: in {site / 'harmofl'}:"
    assert f"run {RUN}: 0.2 MB, last change 20" in lines[1] and lines[1].endswith("rounds 4, 5")
    assert f"run {OTHER_RUN}: 0.0 MB" in lines[2] and lines[2].endswith("no round")
    assert "cache of decoded images: 2.0 MB, last change" in lines[3]
    assert "nothing was removed" in lines[4]
    assert files_of(site) == before


@pytest.mark.parametrize("name", [RUN, FIRST, FIRST.upper()])
def test_a_run_goes_and_all_else_stays(site: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = files_of(site)
    shown = purged(capsys, site, name)
    assert f"removed run {RUN}: {site}/harmofl/state/{RUN}, 0.2 MB" in shown
    gone = {f"harmofl/state/{RUN}/{file}.pt" for file in ("findings", "round_000004", "round_000005")}
    assert before - files_of(site) == gone and not (site / "harmofl/state" / RUN).exists()


def test_all_runs_without_and_with_the_cache(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    purged(capsys, site, "--all")
    assert files_of(site / "harmofl") == {"cache/volume.npz"}
    assert "removed cache" in purged(capsys, site, "--cache")
    assert files_of(site) == {f"{FIRST}/log.txt", "startup/fed_client.json"}
    assert "nothing to remove" in purged(capsys, site, "--all", "--cache")
    assert "nothing is kept in" in purged(capsys, site)


def test_the_cache_alone(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_of(site)
    purged(capsys, site, "--cache")
    assert before - files_of(site) == {"harmofl/cache/volume.npz"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([LATER], f"no run {LATER} in"),
        ([LATER], f"there are {RUN}, {OTHER_RUN}; a job that went on from another one keeps the run id"),
        (["../cache"], "'../cache' is no run"),
        (["."], "'.' is no run"),
        ([""], "'' is no run"),
        (["/etc"], "'/etc' is no run"),
        ([RUN, "--all"], "not both"),
    ],
)
def test_mistakes_remove_nothing(
    site: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = files_of(site.parent)
    assert message in purged(capsys, site, *arguments, code=2)
    assert files_of(site.parent) == before


def test_only_a_site_or_server_has_something_to_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a startup kit" in purged(capsys, tmp_path, code=2)
    admin = {"username": "lead@ucl.org", "project_name": "p", "host": "h", "port": 1, "scheme": "http"}
    kit = write_kit(tmp_path / "lead", "admin", {"admin": {**admin, "server_identity": "server"}})
    assert "is the kit of a person" in purged(capsys, kit, "--all", code=2)


def test_a_link_is_not_followed(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(site / "harmofl/state" / RUN, elsewhere)
    (site / "harmofl/state" / RUN).symlink_to(elsewhere)
    held = files_of(elsewhere)
    shown = purged(capsys, site, "--all", code=1)
    assert f"failed: run {RUN}" in shown and f"a link leads to {elsewhere}, which is not followed" in shown
    assert f"removed run {OTHER_RUN}" in shown
    assert files_of(elsewhere) == held and (site / "harmofl/state" / RUN).is_symlink()


def test_a_link_to_the_folder_of_all_runs_or_of_the_images_is_not_followed(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("state", "cache"):
        shutil.move(site / "harmofl" / name, tmp_path / name)
        (site / "harmofl" / name).symlink_to(tmp_path / name)
    held = files_of(tmp_path)
    assert purged(capsys, site, "--all", "--cache", code=1).count("which is not followed") == 3
    assert files_of(tmp_path) == held


def test_a_link_inside_a_run_goes_without_what_it_points_to(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Case00.nii.gz").write_text("image")
    (site / "harmofl/state" / RUN / "link").symlink_to(tmp_path / "data")
    purged(capsys, site, RUN)
    assert files_of(tmp_path / "data") == {"Case00.nii.gz"}


@pytest.mark.parametrize("told_by", ["privacy.json", "environment"])
def test_data_in_the_way_is_not_removed(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    data = site / "harmofl/cache/data"
    data.mkdir()
    if told_by == "environment":
        monkeypatch.setenv("HARMOFL_DATA_ROOT", str(data))
    else:
        scope = {"name": "s", "properties": {"data_root": str(data)}}
        (site / "local/privacy.json").write_text(json.dumps({"scopes": [scope], "default_scope": "s"}))
    assert "holds the data of this site" in purged(capsys, site, "--all", "--cache", code=2)
    assert (site / "harmofl/state" / RUN).is_dir() and data.is_dir()
    purged(capsys, site, "--all")


def test_what_cannot_be_removed_is_told(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmtree(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    shown = purged(capsys, site, RUN, code=1)
    assert f"failed: run {RUN}: {site}/harmofl/state/{RUN} cannot be removed (Permission denied)" in shown


def test_a_state_root_of_its_own(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARMOFL_STATE_ROOT", str(tmp_path / "states"))
    for name in ("HK", "UCL"):
        write_runs(tmp_path / "states" / name)
    before = files_of(tmp_path)
    purged(capsys, site, "--all", "--cache")
    gone = before - files_of(tmp_path)
    assert gone == {path for path in before if path.startswith("states/HK/")}


def test_a_server_lists_the_jobs_of_a_run_and_removes_all_of_them(
    server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (server / "harmofl/runs" / LATER / "best_FL_global_model.pt").write_bytes(b"best")
    shown = purged(capsys, server)
    assert f"rounds 2, 5, jobs {FIRST}, {LATER}" in shown and f"rounds 0, jobs {OTHER}" in shown
    shown = purged(capsys, server, LATER)  # the job that went on from the first one
    assert shown.count(f"removed run {RUN}: ") == 2
    assert files_of(server / "harmofl") == {f"runs/{OTHER}/FL_global_model.pt"}


def test_a_damaged_checkpoint_is_its_own_run(server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = server / "harmofl/runs" / LATER / "FL_global_model.pt"
    path.write_bytes(path.read_bytes()[:100])
    assert f"no round, jobs {LATER}, its checkpoint cannot be read" in purged(capsys, server)
    purged(capsys, server, LATER)
    assert {path.split("/")[1] for path in files_of(server / "harmofl")} == {FIRST, OTHER}


@pytest.fixture
def running() -> Iterator[Any]:
    """Start processes that look like FLARE's process of a job."""
    started: list[subprocess.Popen[bytes]] = []

    def start(workspace: str, job: str, side: str = "client.worker_process") -> None:
        module = f"nvflare.private.fed.app.{side}"
        options = ["-m", workspace, "-w", "startup", "-n", job, "-c", "HK"]
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", module, *options])
        started.append(process)
        while module not in psutil.Process(process.pid).cmdline():  # between fork and exec
            os.sched_yield()

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_nothing_is_taken_from_under_a_running_job(
    site: Path, capsys: pytest.CaptureFixture[str], running: Any
) -> None:
    running(str(site), FIRST)
    before = files_of(site)
    for arguments in ([RUN], ["--all"], ["--cache"], [OTHER, "--cache"]):
        assert f"job {FIRST} is running here; abort it first" in purged(capsys, site, *arguments, code=2)
    assert files_of(site) == before
    purged(capsys, site, OTHER)


def test_jobs_of_other_kits_do_not_count_and_those_in_containers_do(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], running: Any
) -> None:
    running(str(tmp_path), FIRST)  # a neighbor on the same machine
    purged(capsys, site, RUN)
    running("/not/a/folder/of/this/machine", OTHER)
    assert f"job {OTHER} is running here" in purged(capsys, site, OTHER, code=2)


def test_a_running_job_that_goes_on_from_another_may_be_of_any_run(
    site: Path, capsys: pytest.CaptureFixture[str], running: Any
) -> None:
    running(str(site), LATER)
    path = site / LATER / "app_HK/config/experiment.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"federation": {"resume_from": FIRST}}))
    assert f"job {LATER} is running here" in purged(capsys, site, RUN, code=2)
    path.write_text(json.dumps({"federation": {"resume_from": None}}))
    purged(capsys, site, RUN)


def test_a_job_that_runs_at_the_server(server: Path, capsys: pytest.CaptureFixture[str], running: Any) -> None:
    running(str(server), LATER, "server.runner_process")
    assert f"job {LATER} is running here" in purged(capsys, server, FIRST, code=2)
    purged(capsys, server, OTHER)
