"""Where a kit's processes will write, with a planted failure of each kind."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harmofl.app import storage
from harmofl.app.kit import Check, open_kit
from harmofl.app.machine import Demand
from tests.unit.app.provisioned import LEAD, Lines, Provisioning

GIB = 2**30
DEMAND = Demand(model=10**6, training=10**8, process=10**8, images=10**7, batch=10**6, workers=0, resources={})


def see(kind: str, kit: Path, *demand: Demand | None) -> list[Check]:
    return list(getattr(storage, f"check_{kind}")(open_kit(kit), *demand))


def store(server: Path, *places: Path | str) -> None:
    """Let a server keep its snapshots and its jobs in these places."""
    text = (server / "local/resources.json.default").read_text()
    for name, place in zip(("snapshot-storage", "jobs-storage"), places, strict=True):
        assert f"/tmp/nvflare/{name}" in text
        text = text.replace(f"/tmp/nvflare/{name}", str(place))
    (server / "local/resources.json").write_text(text)


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the temporary folders of these tests count as folders that last."""
    monkeypatch.setattr(storage, "TEMPORARY", Path("/nowhere"))


def test_storage_in_tmp_is_a_warning(server: Path) -> None:
    checks = see("storage", server)  # as provisioned: snapshots and jobs
    assert [check.state for check in checks] == ["warning", "warning"] and checks[0].fix


@pytest.mark.usefixtures("lasting")
def test_storage_in_the_kit_or_in_a_folder_that_is_there(server: Path, tmp_path: Path) -> None:
    store(server, server / "snapshots", tmp_path / "jobs")
    assert [check.state for check in see("storage", server)] == ["ok"]


@pytest.mark.usefixtures("lasting")
def test_a_kit_that_was_moved_still_names_its_old_folder(server: Path, tmp_path: Path, lines: Lines) -> None:
    store(server, server / "snapshots", server / "jobs")
    moved = server.rename(tmp_path / "moved")
    checks = see("storage", moved)
    assert [check.state for check in checks] == ["error", "error"]
    assert f"stored in {server}/snapshots, but {server} is not a folder" in checks[0].message
    assert f"prepare_kit.py {moved} --force" in checks[0].fix
    assert len(lines(moved)) == 2, "nothing says it again"


@pytest.mark.usefixtures("lasting")
def test_a_kit_that_was_copied_does_not_write_into_the_other_one(server: Path, tmp_path: Path) -> None:
    store(server, server / "deep/snapshots", server / "jobs")
    shutil.copytree(server, tmp_path / "copy")
    checks = see("storage", tmp_path / "copy")
    assert [check.state for check in checks] == ["error", "error"]
    assert all(f"which is below another kit, {server}" in check.message for check in checks)


@pytest.mark.usefixtures("lasting")
def test_storage_that_cannot_be_written(server: Path) -> None:
    store(server, "/proc/snapshots", server / "jobs")  # nobody can create a file there, not even root
    assert [check.state for check in see("storage", server)] == ["ok"]
    checks = see("disk", server, None)
    assert [(check.subject, check.state) for check in checks] == [
        ("workspace", "ok"),
        ("state", "ok"),
        ("storage", "error"),
    ]
    assert "/proc cannot be written" in checks[-1].message


@pytest.mark.usefixtures("lasting")
def test_storage_on_a_full_disk(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk/jobs").mkdir(parents=True)
    store(server, tmp_path / "disk/snapshots", tmp_path / "disk/jobs")
    free = {server: 2 * GIB, tmp_path / "disk": 10 * 2**20, tmp_path / "disk/jobs": 20 * 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    checks = see("disk", server, DEMAND)
    assert [check.state for check in checks] == ["ok", "ok", "error", "error"]
    assert f"{tmp_path}/disk is writable, 10.0 MiB free" in checks[2].message


def test_a_person_has_no_state(kits: Provisioning) -> None:
    assert [check.subject for check in see("disk", kits.folder / LEAD, None)] == ["workspace"]


def test_a_relative_state_root_is_an_error(site: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    monkeypatch.setenv("HARMOFL_STATE_ROOT", "states")
    workspace, state = see("disk", site, None)
    assert workspace.state == "ok" and state.state == "error"
    assert "HARMOFL_STATE_ROOT is a relative path; give an absolute one" in state.message
    assert sum("HARMOFL_STATE_ROOT" in line for line in lines(site)) == 1


def disk_of(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=int(free)))


def test_a_full_disk(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 10 * 10**6 + 10**7 + 800 * 2**20  # ten models, the images, the logs
    disk_of(monkeypatch, needed - 1)
    assert [check.state for check in see("disk", site, DEMAND)] == ["error", "error"]
    disk_of(monkeypatch, needed)
    assert [check.state for check in see("disk", site, DEMAND)] == ["ok", "ok"]
    disk_of(monkeypatch, GIB - 1)
    assert [check.state for check in see("disk", site, None)] == ["warning", "warning"]


def test_a_disk_probe_leaves_nothing(site: Path) -> None:
    before = sorted(site.rglob("*"))
    assert [check.state for check in see("disk", site, None)] == ["ok", "ok"]
    assert sorted(site.rglob("*")) == before


def test_a_state_root_that_cannot_be_written(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARMOFL_STATE_ROOT", "/proc/states")  # nobody can create a file there, not even root
    workspace, state = see("disk", site, None)
    assert workspace.state == "ok"
    assert state.state == "error" and "/proc cannot be written" in state.message and state.fix


def test_a_read_only_workspace(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    check = see("disk", site, None)[0]
    assert check.state == "error" and f"{site} cannot be written (Read-only file system)" in check.message
