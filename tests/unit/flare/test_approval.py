"""A site's approval: what the hash covers, and what a site lets in."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes

from harmofl.experiment import ExperimentError
from harmofl.flare import approval
from harmofl.flare.approval import (
    Decision,
    app_digests,
    arrivals,
    job_hash,
    require_approval_of_running_job,
    write_decision,
)
from harmofl.flare.deployer import ApprovedJobDeployer
from harmofl.flare.site import SiteError

META: dict[str, Any] = {"name": "prostate", "deploy_map": {"app": ["server", "HK"]}, "min_clients": 1}
# as FLARE's server adds it to what was submitted, seen in a run of 2.9.0
ADDED = {
    "submitter_name": "lead@ucl.org",
    "submitter_org": "ucl",
    "submitter_role": "lead",
    "job_folder_name": "job",
    "job_id": "9a4d1a4e-0000-4000-8000-000000000000",
    "submit_time": 1764544446.5,
    "submit_time_iso": "2026-11-30T23:14:06+00:00",
    "start_time": "",
    "duration": "N/A",
    "data_storage_format": 2,
    "status": "DISPATCHED",
    "study": "default",
    "schedule_count": 1,
    "last_schedule_time": 1764544447.5,
    "schedule_history": ["scheduled"],
    "byoc": True,
    "job_clients": [{"client_name": "HK"}],
}
FILES = {
    "config/experiment.json": '{"task": "prostate"}',
    "config/config_fed_client.json": '{"executors": []}',
    "custom/mine/task.py": "x = 1\n",
}
JOB_ID = ADDED["job_id"]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The app of a job as it was handed over."""
    for name, text in FILES.items():
        path = tmp_path / "job" / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "job" / "app"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The folder local of a site that approves jobs."""
    folder = tmp_path / "HK" / "local"
    folder.mkdir(parents=True)
    (tmp_path / "HK" / "startup").mkdir()
    write_scopes(folder, ("harmofl", {"approval": "required", "data_root": "/data"}), ("open", {"approval": "off"}))
    return folder


def write_scopes(local: Path, *scopes: tuple[str, dict[str, Any]]) -> None:
    listed = [{"name": name, "properties": properties} for name, properties in scopes]
    (local / "privacy.json").write_text(json.dumps({"scopes": listed, "default_scope": scopes[0][0]}))


def decide(local: Path, job: str, decision: str = "approved") -> None:
    held = Decision.model_validate(
        {"decision": decision, "job": "prostate", "decided_at": "2026-11-30T23:00:00+00:00", "decided_by": "officer"}
    )
    write_decision(local, job, held)


def hash_of(app: Path, meta: dict[str, Any] = META) -> str:
    return job_hash(app_digests(app), meta)


def arrive(local: Path, app: Path, meta: dict[str, Any] | None = None) -> str:
    """What the site answers when FLARE's server sends it an app; the answer of FLARE itself is empty."""
    data = zip_directory_to_bytes(str(app), "")
    workspace = Workspace(str(local.parent), site_name="HK")
    context = FLContextManager(None, "HK", JOB_ID, {}, {}).new_context()
    return ApprovedJobDeployer().deploy(  # by name, as FLARE's client engine calls it
        workspace=workspace,
        job_id=JOB_ID,
        job_meta={**META, **ADDED, **(meta or {})},
        app_name="app",
        app_data=data,
        fl_ctx=context,
    )


def was_taken_in(local: Path) -> bool:
    return (local.parent / JOB_ID / "app_HK" / "config").is_dir()


def test_what_arrives_has_the_hash_of_what_was_handed_over(app: Path, tmp_path: Path) -> None:
    shown = hash_of(app)
    for folder in (app, app / "config", app / "custom", app / "custom/mine"):  # as `nvflare job submit` signs a job
        (folder / ".__nvfl_sig.json").write_text("signed")
        (folder / ".__nvfl_submitter.crt").write_text("by a lead")
    (app / "config/config_fed_client.json").write_text('{\n  "executors": [\n  ]\n}\n')  # as it writes this file anew
    with zipfile.ZipFile(io.BytesIO(zip_directory_to_bytes(str(app), ""))) as packed:
        packed.extractall(tmp_path / "arrived")
    assert job_hash(app_digests(tmp_path / "arrived"), META | ADDED) == shown


CHANGES: dict[str, Callable[[Path], Any]] = {
    "a byte of the settings": lambda app: (app / "config/experiment.json").write_text('{"task": "prostatf"}'),
    "a byte of the code": lambda app: (app / "custom/mine/task.py").write_text("x = 2\n"),
    "a byte of FLARE's configuration": lambda app: (app / "config/config_fed_client.json").write_text(
        '{"executors": [1]}'
    ),
    "another file": lambda app: (app / "config/config_fed_client.conf").write_text(""),
    "a hidden file": lambda app: (app / "custom/.hidden").write_text(""),
    "a file of another name": lambda app: (app / "custom/mine/task.py").rename(app / "custom/mine/tasks.py"),
    "an empty folder": lambda app: (app / "custom/torch").mkdir(),
    "a folder that is called as a signature": lambda app: (app / "custom/.__nvfl_sig.json").mkdir(),
    "a missing file": lambda app: (app / "custom/mine/task.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_differs_in_the_app_is_another_job(app: Path, change: str) -> None:
    before = hash_of(app)
    CHANGES[change](app)
    assert hash_of(app) != before


@pytest.mark.parametrize(
    "meta",
    [
        {"scope": "open"},
        {"launcher_spec": {"HK": {"docker": {"image": "another"}}}},
        {"resource_spec": {"HK": {"num_of_gpus": 1}}},
        {"deploy_map": {"app": ["server", "HK", "UCL"]}},
        {"study": "another"},
        {"custom_props": {"a": 1}},
        {"a_key_that_is_not_known_today": 1},
    ],
    ids=lambda meta: next(iter(meta)),
)
def test_whatever_differs_in_the_meta_data_is_another_job(app: Path, meta: dict[str, Any]) -> None:
    assert hash_of(app, META | meta) != hash_of(app)


def test_what_nobody_can_read_has_no_hash(app: Path) -> None:
    (app / "custom/data").symlink_to("/etc")
    with pytest.raises(ExperimentError, match="custom/data: is a link"):
        app_digests(app)
    (app / "custom/data").unlink()
    (app / "custom/__pycache__").mkdir()  # a compiled file without a check of its source runs in place of it
    (app / "custom/__pycache__/task.cpython-311.pyc").write_bytes(b"compiled")
    with pytest.raises(ExperimentError, match="custom/__pycache__: is compiled Python code, which nobody can read"):
        app_digests(app)
    assert app_digests(app, imported=True).keys() == {*FILES, "config/", "custom/", "custom/mine/"}


@pytest.mark.parametrize("code", ["pending", "rejected"])
def test_a_job_that_is_not_approved_is_named_and_not_taken_in(app: Path, local: Path, code: str) -> None:
    if code == "rejected":
        decide(local, hash_of(app), "rejected")
    answer = arrive(local, app)
    words = {"pending": "site HK has not approved this job yet", "rejected": "site HK has rejected this job"}
    assert answer == f"approval_{code}: {words[code]}" and not was_taken_in(local)
    waiting = arrivals(local.parent / "harmofl")
    assert list(waiting) == [hash_of(app)]
    assert (waiting[hash_of(app)].submitter, waiting[hash_of(app)].job) == ("lead@ucl.org", "prostate")


def test_an_approved_job_is_taken_in_until_a_byte_changes(app: Path, local: Path) -> None:
    decide(local, hash_of(app))
    assert arrive(local, app) == "" and was_taken_in(local)
    (app / "custom/mine/task.py").write_text("x = 2\n")
    assert arrive(local, app).startswith("approval_pending")


def test_approval_is_off_unless_the_site_says_so(app: Path, local: Path) -> None:
    write_scopes(local, ("harmofl", {}))
    assert arrive(local, app) == "" and was_taken_in(local)


def test_the_scope_that_the_job_runs_in_decides(app: Path, local: Path) -> None:
    assert arrive(local, app, {"scope": "open"}) == "" and was_taken_in(local)


@pytest.mark.parametrize("scope", ["was_there_before", "Harmofl", ["harmofl"]])
def test_a_scope_that_is_not_in_the_file_takes_no_job_in(app: Path, local: Path, scope: Any) -> None:
    # FLARE's parent process knows the scopes of the file that it began with, and does not read it again
    assert arrive(local, app, {"scope": scope}) == (
        "site_settings: local/privacy.json: has no scope of the name that the job asks for in its meta.json"
    )
    assert not was_taken_in(local)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("privacy.json", "{", "site_settings: local/privacy.json: line 1: "),
        ("privacy.json", "[]", "site_settings: local/privacy.json cannot be read (AttributeError)"),
        ("privacy.json", '{"scopes": [{"name": "a", "properties": {"approval": "yes"}}], "default_scope": "a"}',
         "site_settings: local/privacy.json: approval: "),
        ("approvals/{job}.json", "{", "approval_file: local/approvals: the decision about job "),
        ("approvals/{job}.json", '{"decision": "yes"}', "approval_file: local/approvals: the decision about job "),
    ],
)  # fmt: skip
def test_a_site_that_cannot_be_understood_takes_no_job_in(
    app: Path, local: Path, name: str, text: str, code: str
) -> None:
    decide(local, hash_of(app))
    (local / name.format(job=hash_of(app))).write_text(text)
    answer = arrive(local, app)
    assert answer.startswith(code) and not was_taken_in(local)
    assert str(local.parent) not in answer and "\n" not in answer


def test_a_job_with_a_compiled_file_is_refused_by_name(app: Path, local: Path) -> None:
    (app / "custom/evil.pyc").write_bytes(b"compiled")
    assert arrive(local, app) == (
        "approval_refused: site HK: custom/evil.pyc: is compiled Python code, which nobody can read; bundle the job "
        "without it"
    )


def test_a_server_cannot_fill_the_disk_with_jobs_that_wait(
    app: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "MOST_WAITING", 3)
    for number in range(5):
        arrive(local, app, {"min_clients": number, "name": "\x1b[2J" + "x" * 5000})
        folder = local.parent / "harmofl" / approval.WAITING
        for path in folder.glob("*.json"):  # the order of arrival, also on a file system with coarse times
            os.utime(path, ns=(path.stat().st_mtime_ns - 10**9,) * 2)
    held = arrivals(local.parent / "harmofl")
    wanted = {hash_of(app, META | {"min_clients": number, "name": "\x1b[2J" + "x" * 5000}) for number in (2, 3, 4)}
    assert held.keys() == wanted
    assert all(len(arrival.job) == 200 and arrival.job.isprintable() for arrival in held.values())


def running(local: Path, meta: dict[str, Any]) -> FLContext:
    context = FLContextManager(None, "HK", JOB_ID, {}, {}).new_context()
    context.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(local.parent), site_name="HK"))
    context.set_prop(FLContextKey.JOB_META, meta)
    return context


def test_the_executor_looks_again(app: Path, local: Path) -> None:
    decide(local, hash_of(app))
    assert arrive(local, app) == ""
    taken_in, context = local.parent / JOB_ID / "app_HK", running(local, META | ADDED)
    (taken_in / "custom/mine/__pycache__").mkdir()
    (taken_in / "custom/mine/__pycache__/task.cpython-311.pyc").write_bytes(b"as Python writes it")
    require_approval_of_running_job(context)
    (taken_in / "custom/mine/task.py").write_text("x = 2\n")
    with pytest.raises(SiteError, match="has not approved") as caught:
        require_approval_of_running_job(context)
    assert caught.value.code == "approval_pending"
