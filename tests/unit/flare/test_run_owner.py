"""Whose a run is, and that nobody else resumes it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.workspace import Workspace

from harmofl.experiment import ExperimentError
from harmofl.flare import server_run
from harmofl.flare.persistor import save_model_file
from harmofl.flare.run_owner import OWNER_FILE, refuse_run_of_another
from harmofl.flare.server_run import ServerRun, open_run
from harmofl.flare.server_store import FINAL_MODEL
from harmofl.flare.site import SiteError
from harmofl.flare.state import SiteState, StateError

FIRST, SECOND, THIRD = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abc")
LEAD = {"submitter_name": "lead@ucl.org", "submitter_org": "ucl", "submitter_role": "lead"}
OTHER = {"submitter_name": "lead@hk.org", "submitter_org": "hk", "submitter_role": "lead"}
ADMIN = {"submitter_name": "admin@consortium.org", "submitter_org": "consortium", "submitter_role": "project_admin"}
SAME_NAME = LEAD | {"submitter_org": "hk"}
Open = Callable[..., ServerRun]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The store of a server."""
    return tmp_path / "server" / "harmofl" / "runs"


@pytest.fixture
def opened(
    make_run: Callable[..., ServerRun], weights: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Open:
    """Open the run of a job at a real server, and close a round of it."""
    (tmp_path / "server" / "startup").mkdir(parents=True)
    (tmp_path / "server" / "local").mkdir()
    for name in ("lock_run", "open_tracking"):
        monkeypatch.setattr(server_run, name, lambda *args, **options: None)

    def run(job: str, submitter: dict[str, str], resumes: str | None = None) -> ServerRun:
        experiment = make_run({"federation.resume_from": resumes}).experiment
        monkeypatch.setattr(server_run, "read_job_settings", lambda context: {})
        monkeypatch.setattr(server_run, "resolve_job", lambda context, demo: experiment)
        monkeypatch.setattr(ServerRun, "whole_model", lambda self, weights: dict(weights))
        held = open_run(context_of(job, submitter, tmp_path), ["A", "B", "C"])
        save_model_file(weights, held, held.start_round + 1, held.folder / FINAL_MODEL)
        return held

    return run


def context_of(job: str, submitter: dict[str, str], folder: Path) -> FLContext:
    engine = SimpleNamespace()
    context = FLContextManager(engine, "server", job, {}, {}).new_context()
    app = folder / "jobs" / job
    app.mkdir(parents=True)
    context.set_prop(FLContextKey.APP_ROOT, str(app))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(folder / "server"), site_name="server"))
    context.set_prop(FLContextKey.JOB_META, submitter)
    return context


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_submitter_resumes_his_run(opened: Open, runs: Path) -> None:
    first = opened(FIRST, LEAD)
    second = opened(SECOND, LEAD, FIRST)
    assert (second.run_id, second.start_round) == (first.run_id, 1)
    assert {json.loads((runs / job / OWNER_FILE).read_text())["name"] for job in (FIRST, SECOND)} == {"lead@ucl.org"}


@pytest.mark.parametrize("stranger", [OTHER, SAME_NAME], ids=["another lead", "a lead of this name elsewhere"])
def test_nobody_else_does_and_nothing_is_touched(
    opened: Open, runs: Path, stranger: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(FIRST, LEAD)
    before = files_of(runs)
    monkeypatch.setattr(server_run.Checkpoint, "load", None, raising=True)  # not even read
    with pytest.raises(ExperimentError) as caught:
        opened(SECOND, stranger, FIRST)
    assert str(caught.value) == (
        f"federation.resume_from: job {FIRST} was not submitted by {stranger['submitter_name']} of hk; its submitter "
        "or a project admin may resume it"
    )
    assert "lead@ucl.org" not in str(caught.value) or stranger is SAME_NAME, "whose it is stays with the server"
    assert files_of(runs) == before and not (runs / SECOND).exists()


def test_a_project_admin_does_and_the_run_stays_its_owner_s(opened: Open) -> None:
    opened(FIRST, LEAD)
    opened(SECOND, ADMIN, FIRST)
    assert opened(THIRD, LEAD, SECOND).start_round == 2
    with pytest.raises(ExperimentError, match="was not submitted by lead@hk.org"):
        opened("d" + THIRD[1:], OTHER, SECOND)


def test_a_run_of_a_version_without_owners_is_a_project_admin_s(opened: Open, runs: Path) -> None:
    opened(FIRST, LEAD)
    (runs / FIRST / OWNER_FILE).unlink()
    with pytest.raises(ExperimentError, match="kept no owner of a run, so only a project admin may resume it"):
        opened(SECOND, LEAD, FIRST)
    assert opened(THIRD, ADMIN, FIRST).start_round == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "lead@hk.org"}', "[" * 100_000])
def test_an_owner_that_cannot_be_read_lets_nobody_in(opened: Open, runs: Path, text: str) -> None:
    opened(FIRST, LEAD)
    (runs / FIRST / OWNER_FILE).write_text(text)
    with pytest.raises(StateError, match=r"owner.json of the run that this job resumes cannot be read"):
        opened(SECOND, OTHER, FIRST)


def at_site(folder: Path, submitter: dict[str, str], trains: bool = True) -> None:
    """A task of this submitter's job comes to a site, which trains a round then."""
    context = FLContextManager(None, "HK", FIRST, {}, {}).new_context()
    context.set_prop(FLContextKey.JOB_META, submitter)
    state = SiteState(folder, "run")
    refuse_run_of_another(state, "HK", context)
    if trains:
        state.save_round(0, {})


def test_a_site_keeps_what_it_remembers_for_the_submitter(tmp_path: Path) -> None:
    at_site(tmp_path, LEAD)
    before = files_of(tmp_path)
    for stranger in (OTHER, SAME_NAME):
        with pytest.raises(SiteError, match="site HK keeps this run for another submitter") as caught:
            at_site(tmp_path, stranger)
        assert caught.value.code == "run_of_another" and "@" not in str(caught.value)
    assert files_of(tmp_path) == before
    at_site(tmp_path, ADMIN)
    at_site(tmp_path, LEAD)
    with pytest.raises(SiteError):
        at_site(tmp_path, OTHER)


def test_a_run_of_a_version_without_owners_gets_one_when_it_trains(tmp_path: Path) -> None:
    SiteState(tmp_path, "run").save_round(0, {})
    at_site(tmp_path, OTHER, trains=False)
    at_site(tmp_path, LEAD)
    with pytest.raises(SiteError):
        at_site(tmp_path, OTHER)


@pytest.mark.parametrize("meta", [{}, {"submitter_name": "", "submitter_org": ""}, {"submitter_name": 1}])
def test_a_job_of_nobody_does_not_start(opened: Open, meta: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="FLARE does not say who submitted this job"):
        opened(FIRST, meta)
