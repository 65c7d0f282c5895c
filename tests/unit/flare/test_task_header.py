"""A task's header is read by a strict model and compared with the experiment before anything is written."""

from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from harmofl.experiment import Experiment, resolve
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.run_owner import refuse_other_run
from harmofl.flare.site import SiteConfig
from harmofl.flare.state import SiteState
from harmofl.flare.task_header import TaskHeader, read_header
from harmofl.flare.wire import MessageError, read_error
from tests.loose_limits import LOOSE

HELD: dict[str, Any] = {
    "run_id": "0123abcd",
    "experiment_hash": "89c82bf707d952a8",
    "demo": False,
    "round_number": 2,
    "best_round": 1,
    "pooled_sites": [],
}
CLIMBING = "HK/../../../../.."


def with_header(**changes: Any) -> Shareable:
    task = Shareable()
    task.set_header("harmofl.header", HELD | changes)
    return task


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"site": "A"}, "unknown key"),
        ({CLIMBING: 1}, "unknown key"),
        ({"run_id": "../0123"}, "run_id"),
        ({"run_id": "a" * 65}, "run_id"),
        ({"run_id": "a\n"}, "run_id"),
        ({"run_id": 3}, "run_id"),
        ({"experiment_hash": "89C82BF707D952A8"}, "experiment_hash"),
        ({"experiment_hash": "89c82bf7"}, "experiment_hash"),
        ({"demo": 0}, "demo"),
        ({"round_number": -1}, "round_number"),
        ({"round_number": True}, "round_number"),
        ({"round_number": 2.0}, "round_number"),
        ({"round_number": 10**9}, "round_number"),
        ({"best_round": "1"}, "best_round"),
        ({"pooled_sites": [CLIMBING]}, "pooled_sites.0"),
        ({"pooled_sites": ["HK", "UCL/"]}, "pooled_sites.1"),
        ({"pooled_sites": ["a" * 65]}, "pooled_sites.0"),
        ({"pooled_sites": "HK"}, "pooled_sites"),
        ({"pooled_sites": ["HK"] * 1001}, "pooled_sites"),
    ],
)
def test_a_header_with_something_else_is_refused_by_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(MessageError) as caught:
        read_header(with_header(**changes))
    line = str(caught.value)
    assert line.startswith(f"the task's header cannot be used: {key}: ") and "\n" not in line and CLIMBING not in line


def test_a_key_that_is_missing_is_named() -> None:
    task = Shareable()
    task.set_header("harmofl.header", {key: value for key, value in HELD.items() if key != "demo"})
    with pytest.raises(MessageError, match="demo: Field required"):
        read_header(task)


@pytest.mark.parametrize("told", [1, 3, "2", True])
def test_flare_s_round_and_the_header_s_must_be_the_same(told: Any) -> None:
    task = with_header()
    task.set_header("current_round", 2)
    assert read_header(task).round_number == 2
    task.set_header("current_round", told)
    with pytest.raises(MessageError, match="different rounds"):
        read_header(task)


@pytest.mark.parametrize(
    ("task", "changes", "part"),
    [
        ("train", {"round_number": 2}, ""),
        ("train", {"round_number": 3}, "of round 3"),
        ("evaluate", {"round_number": 3, "best_round": 2}, ""),
        ("evaluate", {"round_number": 4}, "of round 4"),
        ("evaluate", {"round_number": 2}, "is evaluated after them"),
        ("amplitude", {"round_number": 0, "best_round": None}, ""),
        ("amplitude", {"round_number": 3}, "of round 3"),
        ("train", {"best_round": 3}, "the best one is 3"),
        ("train", {"pooled_sites": ["HK"]}, "names pooled_sites"),
    ],
)
def test_rounds_lie_within_those_of_the_experiment(
    written: dict[str, Any], task: str, changes: dict[str, Any], part: str
) -> None:
    """The experiment has rounds 0, 1 and 2; the evaluation comes after them, as round 3."""
    header = read_header(with_header(**changes))
    try:
        header.refuse_misfit(task, resolve(written), simulated=True)
        assert not part
    except MessageError as error:
        assert part and part in str(error)


def test_pooled_sites_are_believed_in_a_simulated_run_on_pooled_data_only(written: dict[str, Any]) -> None:
    header, pooled = read_header(with_header(pooled_sites=["BMC", "HK"])), resolve(written | {"method": "central"})
    header.refuse_misfit("train", pooled, simulated=True)
    with pytest.raises(MessageError, match="only a simulated run on pooled data"):
        header.refuse_misfit("train", pooled, simulated=False)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in which a site that trains on data of its own would keep its state."""
    site = SiteConfig("HK", False, tmp_path / "data", tmp_path / "state_root", settings=LOOSE)
    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: site)
    return tmp_path


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, written: dict[str, Any]) -> Experiment:
    """The running job's experiment."""
    experiment = resolve(written)
    monkeypatch.setattr("harmofl.flare.executor.resolve_job", lambda context, demo: experiment)
    return experiment


@pytest.fixture
def fl_ctx() -> FLContext:
    context = FLContextManager(None, "HK", "0123-abcd", {}, {}).new_context()
    context.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    context.set_prop(FLContextKey.SIMULATE_MODE, False)
    return context


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"pooled_sites": ["HK"]}, "names pooled_sites"),
        ({"pooled_sites": [CLIMBING]}, "pooled_sites.0"),
        ({"round_number": 3}, "of round 3"),
        ({"run_id": "ffff0123"}, "not of this job"),
    ],
)
def test_nothing_is_written_for_a_task_whose_header_is_refused(
    fl_ctx: FLContext, place: Path, job: Experiment, changes: dict[str, Any], part: str
) -> None:
    task = with_header(experiment_hash=job.hash, **changes)
    code, line = read_error(HarmoFLExecutor().execute("train", task, fl_ctx, Signal()))
    assert code == "MessageError" and part in line and not list(place.iterdir())


def test_a_run_is_its_job_s_or_the_one_that_its_job_goes_on_with(written: dict[str, Any], tmp_path: Path) -> None:
    def state(run: str) -> SiteState:
        return SiteState(tmp_path, run)

    own = resolve(written)
    resuming = resolve(written | {"federation": written["federation"] | {"resume_from": "aaaa-0001"}})
    assert own.hash == resuming.hash
    refuse_other_run(state("aaaa0001"), "AAAA-0001", own)  # called as its job; begins the run
    refuse_other_run(state("aaaa0001"), "bbbb-0002", resuming)  # goes on with it
    refuse_other_run(state("cccc0003"), "bbbb-0002", resuming)  # of which this site has nothing: it joins late
    with pytest.raises(MessageError, match="not of this job"):
        refuse_other_run(state("aaaa0001"), "bbbb-0002", own)
    other = resolve(written | {"seed": 7, "federation": written["federation"] | {"resume_from": "aaaa-0001"}})
    with pytest.raises(MessageError, match=f"begun with experiment {own.hash}, this job has {other.hash}"):
        refuse_other_run(state("aaaa0001"), "dddd-0004", other)


def test_a_header_is_the_same_in_a_message() -> None:
    header = TaskHeader.model_validate(HELD)
    assert read_header(header.attach(Shareable())) == header
