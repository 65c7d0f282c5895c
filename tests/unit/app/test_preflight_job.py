"""A job against a kit: its sites, rights and code, and what is installed."""

import hashlib
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import harmofl
from harmofl.app.kit import open_kit
from harmofl.app.machine import check_installed
from tests.unit.app.provisioned import LEAD, MEMBER, Lines, Packed, Provisioning, change, closed_port, write

pytestmark = pytest.mark.usefixtures("data")


def test_a_job_for_other_sites(site: Path, job: Path, lines: Lines) -> None:
    path = job / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"deploy_map": {"app": ["server", "BIDMC", "UCL"]}}))
    (line,) = lines(site, job)
    assert "deploys to BIDMC, UCL, not to HK" in line


def test_a_job_of_a_scope_that_the_site_does_not_have(site: Path, job: Path, lines: Lines) -> None:
    path = job / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scope": "research"}))
    (line,) = lines(site, job)
    assert "privacy scope research is none of this site's (harmofl)" in line


def test_a_task_that_the_job_brings_is_not_run(site: Path, job: Path, lines: Lines) -> None:
    path = job / "app/config/experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": "disks.Disks"}))
    assert lines(site, job) == []
    assert any("brings its own task" in line and "--allow-code" in line for line in lines(site, job, state="note"))


def test_code_is_held_against_the_sites_authorization(site: Path, packed: Packed, lines: Lines) -> None:
    made = packed()
    assert lines(site, made) == []
    policy = json.loads((site / "local/authorization.json.default").read_text())
    policy["permissions"]["lead"]["byoc"] = "none"
    write(site, "authorization.json", policy)
    (line,) = lines(site, made)
    assert "brings code (BYOC), which is not allowed here" in line and "--preinstalled" in line
    write(site, "authorization.json", {"format_version": "1.0"})
    (line,) = lines(site, made)
    assert "FLARE refuses it (invalid policy config: missing permissions)" in line


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        (None, "harmofl.flare.executor.HarmoFLExecutor"),  # the list of stock FLARE
        (["nvflare."], "harmofl.flare.executor.HarmoFLExecutor"),
        (["harmofl.core."], "harmofl.flare.executor.HarmoFLExecutor"),
        (["harmofl"], "must end with '.'"),
        (["harmofl."], None),
        (["*"], None),
    ],
)
def test_classes_are_held_against_the_allow_list(
    site: Path, packed: Packed, lines: Lines, allowed: list[str] | None, refused: str | None
) -> None:
    if allowed is not None:
        change(site, "resources.json", class_allow_list=allowed)
    shown = lines(site, packed(preinstalled=True))
    assert bool(shown) == (refused is not None)
    if refused:
        (line,) = shown
        assert refused in line and "class_allow_list" in line


def test_a_servers_allow_list_is_for_its_own_classes(server: Path, packed: Packed, lines: Lines) -> None:
    (line,) = lines(server, packed(preinstalled=True))
    assert "harmofl.flare.persistor.CheckpointPersistor" in line and "Executor" not in line


def rewrite(made: Path, **keys: Any) -> None:
    path = made / "app/config/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_bundle_of_this_package(site: Path, packed: Packed, lines: Lines) -> None:
    good = [line for line in lines(site, packed(), state="ok") if "bundle" in line]
    assert any("fits all" in line for line in good) and any(
        "the installed package is the bundled" in line for line in good
    )


@pytest.mark.parametrize("files", [5, None, []])
def test_a_manifest_that_lists_no_files(site: Path, packed: Packed, lines: Lines, files: Any) -> None:
    made = packed()
    rewrite(made, files=files)
    (line,) = lines(site, made)
    assert line == "error: manifest.json: lists no files; ask the lead for the bundle as it was made"


def test_a_bundle_of_another_version(site: Path, packed: Packed, lines: Lines) -> None:
    made = packed()
    rewrite(made, harmofl="0.0.9")
    (line,) = lines(site, made)
    assert f"made with 0.0.9, {harmofl.__version__} is installed and wins" in line


def test_a_bundle_with_other_code_than_installed(site: Path, packed: Packed, lines: Lines) -> None:
    made = packed()
    files = json.loads((made / "app/config/manifest.json").read_text())["files"]
    code = made / "app/custom/harmofl/core/losses.py"
    code.write_text(code.read_text() + "\n")
    edited = lines(site, made)
    assert len(edited) == 1
    assert edited[0].startswith("error: manifest.json: does not fit app/custom/harmofl/core/losses.py; ask the lead")
    files["app/custom/harmofl/core/losses.py"] = hashlib.sha256(code.read_bytes()).hexdigest()
    rewrite(made, files=files, commit="abc123")  # as a lead with this code would have made it
    (line,) = lines(site, made)
    assert "wins over the bundled copy and differs in core/losses.py; install commit abc123 here" in line


def test_a_file_that_no_manifest_lists(site: Path, packed: Packed, lines: Lines) -> None:
    made = packed()
    (made / "app/config/.__nvfl_sig.json").write_text("{}")  # FLARE's Python API leaves it
    assert lines(site, made) == []
    (made / "app/custom/more.py").write_text("")
    (line,) = lines(site, made)
    assert "does not fit app/custom/more.py" in line


def test_a_job_folder_is_no_bundle(site: Path, job: Path, lines: Lines) -> None:
    assert any("is not a bundle" in line for line in lines(site, job, state="note"))


@pytest.mark.parametrize("name", [LEAD, MEMBER])
def test_who_may_submit(kits: Provisioning, tmp_path: Path, job: Path, lines: Lines, name: str) -> None:
    kit = kits.copy(name, tmp_path / "person", port=closed_port())
    refused = [f"error: {MEMBER}: role member may not submit; let a lead submit the job"]
    assert lines(kit, job) == (refused if name == MEMBER else [])


def test_what_is_installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version
    other = {"nvflare": "2.8.0"}
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    assert [check.state for check in list(check_installed(open_kit(site)))] == ["ok"]
    monkeypatch.setattr(metadata, "version", lambda name: other.get(name) or installed(name))
    (check,) = list(check_installed(open_kit(site)))
    assert check.state == "error" and check.subject == "nvflare"
    assert "is 2.8.0, but harmofl" in check.message and ">=2.9" in check.message and "pip install" in check.fix


def test_start_sh_runs_the_python3_of_the_path(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    check = list(check_installed(open_kit(site)))[-1]
    assert check.state == "warning" and str(tmp_path / "python3") in check.message


def test_a_job_with_a_link_is_not_looked_at(site: Path, packed: Packed, lines: Lines, tmp_path: Path) -> None:
    job = packed(preinstalled=True)
    (job / "app/config/more.json").symlink_to(tmp_path)
    assert lines(site, job) == [
        "error: small_job: app/config/more.json: is a link, which no job may hold; put the file itself there"
    ]


def test_a_pattern_of_the_job_is_an_error_at_site_and_server(site: Path, server: Path, job: Path, lines: Lines) -> None:
    for kit in (site, server):
        (line,) = lines(kit, job, "data.patient_pattern=^(Jane)")
        assert line.startswith("error: data.patient_pattern: hospitals run no pattern of a job on file names")
    assert lines(site, job, "data.patient_from=before_separator") == []


def test_a_scope_of_the_site_that_is_for_other_software(site: Path, job: Path, lines: Lines) -> None:
    path = job / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scope": "research"}))
    privacy = json.loads((site / "local/privacy.json").read_text())
    write(site, "privacy.json", privacy | {"scopes": [*privacy["scopes"], {"name": "research", "properties": {}}]})
    (line,) = lines(site, job)
    assert "the job asks for privacy scope research, which lists no filter of this package, and is refused" in line
