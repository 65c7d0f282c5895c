"""What a site tells the server about a failure, and what it keeps to itself."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.logging.job_log_streamer import JobLogStreamer

from harmofl.core.training import NotFiniteError, TrainingError, TrainingStoppedError
from harmofl.data.findings import DataRootError
from harmofl.experiment import RULES, ExperimentError, resolve
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_settings import LimitSettings, NoiseSettings, SiteSettings
from harmofl.flare.state import SiteState
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import MessageError, read_error

SECRET = "/data/Jane_Doe.nii.gz"


@pytest.fixture(params=[False, True], ids=["hospital", "simulated"])
def fl_ctx(request: pytest.FixtureRequest) -> FLContext:
    context = FLContextManager(None, "HK", "job", {}, {}).new_context()
    context.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    context.set_prop(FLContextKey.SIMULATE_MODE, request.param)
    return context


def failing(error: BaseException) -> HarmoFLExecutor:
    executor = HarmoFLExecutor()

    def perform(*_: Any) -> Shareable:
        raise error

    executor._perform = perform  # type: ignore[method-assign]
    return executor


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (SiteError("no_data", "site HK has no case"), "no_data", "site HK has no case"),
        (DataRootError(f"{SECRET} is missing"), "data_root", "its data folder cannot be used"),
        (TrainingError("lower training.learning_rate"), "TrainingError", "lower training.learning_rate"),
        (NotFiniteError("the received model"), "NotFiniteError", "site HK: the received model"),
        (MessageError("no header"), "MessageError", "no header"),
        (ExperimentError("data.height: is missing"), "ExperimentError", "data.height"),
        (torch.OutOfMemoryError(SECRET), "out_of_memory", "lower training.batch_size"),
        (MemoryError(), "out_of_memory", "lower training.batch_size"),
        (RuntimeError(f"{SECRET} is broken"), "internal_error", "failed in train (RuntimeError)"),
        (FileNotFoundError(2, "No such file", SECRET), "internal_error", "failed in train (FileNotFoundError)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_leaves_as_a_code_and_a_line_without_names(
    fl_ctx: FLContext, caplog: pytest.LogCaptureFixture, error: Exception, code: str, part: str
) -> None:
    reply = failing(error).execute("train", Shareable(), fl_ctx, Signal())
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    told, line = read_error(reply)
    assert told == code and part in line and "\n" not in line
    assert "Jane_Doe" not in str(dict(reply))
    naming = {record.name for record in caplog.records if "Jane_Doe" in record.getMessage()}
    if SECRET in str(error) and code != "out_of_memory":
        assert naming == {"harmofl.findings"}, "the site itself must be able to find out, and nobody else"
    else:
        assert naming == set()
    if not fl_ctx.get_prop(FLContextKey.SIMULATE_MODE):
        # FLARE's kits stream error_log.txt, which takes errors and worse, to the server
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert errors and not any("Jane_Doe" in message for message in errors)


class Engine:
    """A site's engine with one component of the job."""

    def __init__(self, component: object) -> None:
        self.component = component

    def get_all_components(self) -> dict[str, object]:
        return {"streamer": self.component}

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Nobody listens."""


@pytest.mark.parametrize("allowed", [True, False])
def test_a_job_without_code_cannot_stream_what_names_patients(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, tmp_path: Path
) -> None:
    """FLARE lets a job name JobLogStreamer, of any file in the job's folder, unless the site says no."""
    for name in ("startup", "local"):
        (tmp_path / name).mkdir()
    (tmp_path / "local" / "resources.json").write_text(json.dumps({"allow_log_streaming": allowed}))
    engine = Engine(JobLogStreamer(log_file_name="findings.txt"))
    context = FLContextManager(engine, "HK", "job", {}, {}).new_context()
    context.set_prop(FLContextKey.WORKSPACE_ROOT, str(tmp_path))
    context.set_prop(FLContextKey.SIMULATE_MODE, False)
    executor = HarmoFLExecutor()
    monkeypatch.setattr(executor, "_perform", lambda *_: make_reply(ReturnCode.OK))
    reply = executor.execute("train", Shareable(), context, Signal())
    assert reply.get_return_code() == (ReturnCode.EXECUTION_EXCEPTION if allowed else ReturnCode.OK)
    if allowed:
        code, line = read_error(reply)
        assert code == "log_stream" and "site HK: the job streams logs of this site" in line
        assert "allow_log_streaming to false" in line


def test_a_stopped_task_is_no_failure(fl_ctx: FLContext) -> None:
    reply = failing(TrainingStoppedError("stopped")).execute("train", Shareable(), fl_ctx, Signal())
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED


def test_an_unknown_task_is_said_to_be_unknown(fl_ctx: FLContext) -> None:
    reply = HarmoFLExecutor().execute("validate", Shareable(), fl_ctx, Signal())
    assert reply.get_return_code() == ReturnCode.TASK_UNKNOWN


def test_a_site_that_asks_for_noise_and_lists_no_filter_sends_nothing(
    fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noise = NoiseSettings(relative_clip=0.8, epsilon=1.0, delta=1e-5)
    config = SiteConfig("HK", False, tmp_path, tmp_path, amplitude_noise=noise)
    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: config)
    task = TaskHeader(run_id="run", experiment_hash="0" * 16, demo=False, round_number=0).attach(Shareable())
    code, line = read_error(HarmoFLExecutor().execute("amplitude", task, fl_ctx, Signal()))
    assert code == "noise_settings" and "do not list harmofl.flare.filters.AmplitudeFilter" in line


def test_a_site_outside_simulation_takes_no_part_in_training_on_pooled_data(
    fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: dict[str, Any]
) -> None:
    experiment = resolve(written | {"method": "central"})
    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: SiteConfig("HK", False, tmp_path, tmp_path))
    monkeypatch.setattr("harmofl.flare.executor.resolve_job", lambda context, demo: experiment)
    task = TaskHeader(
        run_id="run", experiment_hash=experiment.hash, demo=False, round_number=0, pooled_sites=("BMC", "HK")
    ).attach(Shareable())
    code, line = read_error(HarmoFLExecutor().execute("train", task, fl_ctx, Signal()))
    assert (code, line) == ("pooled_data", "site HK takes no part in training on pooled data")


def test_a_site_that_approves_jobs_looks_before_a_task(
    fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated = fl_ctx.get_prop(FLContextKey.SIMULATE_MODE)
    config = SiteConfig("HK", simulated, tmp_path, tmp_path, settings=SiteSettings(approval="required"))

    def refuse(context: FLContext) -> None:
        raise SiteError("approval_pending", "site HK has not approved this job yet")

    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: config)
    monkeypatch.setattr("harmofl.flare.executor.require_approval_of_running_job", refuse)
    task = TaskHeader(run_id="run", experiment_hash="0" * 16, demo=True, round_number=0).attach(Shareable())
    code, _ = read_error(HarmoFLExecutor().execute("train", task, fl_ctx, Signal()))
    assert code == ("demo_differs" if simulated else "approval_pending")


def test_a_job_of_another_submitter_gets_nothing_of_a_run(
    fl_ctx: FLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: dict[str, Any]
) -> None:
    experiment = resolve(written)
    settings = SiteSettings(limits=LimitSettings(minimum_sites=2))
    config = SiteConfig("HK", False, tmp_path, tmp_path, settings=settings)
    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: config)
    monkeypatch.setattr("harmofl.flare.executor.resolve_job", lambda context, demo: experiment)
    monkeypatch.setattr(HarmoFLExecutor, "_dispatch", staticmethod(lambda *_: pytest.fail("the task was begun")))
    SiteState(tmp_path / "state", "job").save_once("rules", dict(RULES))
    SiteState(tmp_path / "state", "job").save_once("owner", {"name": "lead@ucl.org", "org": "ucl"})
    fl_ctx.set_prop(FLContextKey.JOB_META, {"submitter_name": "lead@hk.org", "submitter_org": "hk"})
    task = TaskHeader(run_id="job", experiment_hash=experiment.hash, demo=False, round_number=0).attach(Shareable())
    code, line = read_error(HarmoFLExecutor().execute("train", task, fl_ctx, Signal()))
    assert code == "run_of_another" and "site HK keeps this run for another submitter" in line
