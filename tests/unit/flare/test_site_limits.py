"""What a hospital's limits refuse, what they hold back, and that a simulated run has none."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from harmofl.core.classification import Estimate
from harmofl.experiment import resolve, set_key
from harmofl.flare import site_limits
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.released_scores import released_scores, released_validation
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_limits import TaskClock, exceeded, limits_in_force, refuse_few_patients
from harmofl.flare.site_settings import LimitSettings, SiteSettings
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import SiteNumbers, read_error
from harmofl.job_folder import JobFolder
from harmofl.tasks import Evaluation

JOBS = sorted(path for path in (Path(__file__).parents[3] / "jobs").iterdir() if path.is_dir())
DEFAULT = LimitSettings()


def job(written: dict[str, Any], **changes: Any) -> Any:
    """An experiment within the default limits, with changes of `section__key`."""
    for key in ("federation.minimum_sites", "amplitude.minimum_sites"):
        set_key(written, key, 3)
    for key, value in changes.items():
        set_key(written, key.replace("__", "."), value)
    return resolve(written)


@pytest.mark.parametrize("folder", JOBS, ids=lambda path: path.name)
def test_the_shipped_jobs_stay_within_the_default_limits(folder: Path) -> None:
    held = JobFolder.read(folder, {})
    assert exceeded(DEFAULT, resolve(held.settings), len(held.sites)) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"federation__minimum_sites": 1}, "federation.minimum_sites is 1, limits.minimum_sites is 3; raise it to 3"),
        ({"amplitude__minimum_sites": 2}, "amplitude.minimum_sites is 2, limits.minimum_sites is 3; raise it to 3"),
        ({"data__height": 1088}, "data.height is 1088, limits.image_size is 1024; lower it to 1024"),
        ({"data__width": 1088}, "data.width is 1088, limits.image_size is 1024; lower it to 1024"),
        ({"training__batch_size": 257}, "training.batch_size is 257, limits.batch_size is 256"),
        ({"training__local_epochs": 21}, "training.local_epochs is 21, limits.local_epochs is 20"),
        ({"federation__rounds": 1001}, "federation.rounds is 1001, limits.rounds is 1000"),
        ({"amplitude__region": "low"}, "amplitude.region is low, limits.regions allows dc, site_gain"),
        (
            {"amplitude__estimation": "first_batch", "amplitude__minimum_cases": 4},
            "amplitude.estimation is first_batch, limits.estimations allows before_training, running_mean",
        ),
    ],
)
def test_every_setting_over_a_limit_is_named_with_the_fix(
    written: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    assert exceeded(DEFAULT, job(written), 3) == []
    (found,) = exceeded(DEFAULT, job(written, **changes), 3)
    assert str(found).startswith(line) and "ask the hospital" in found.fix


def test_an_amplitude_that_is_not_shared_has_no_limits(written: dict[str, Any]) -> None:
    assert exceeded(DEFAULT, job(written, method="fedavg", amplitude__minimum_sites=1)) == []


def test_a_job_for_one_hospital_alone_is_named_in_full(written: dict[str, Any]) -> None:
    alone = job(written, federation__minimum_sites=1, amplitude__minimum_sites=1)
    assert [found.setting for found in exceeded(DEFAULT, alone, 1)] == [
        "federation.minimum_sites",
        "amplitude.minimum_sites",
        "deploy_map",
    ]
    assert exceeded(LimitSettings(minimum_sites=1), alone, 1) == []


def site(tmp_path: Path, simulated: bool = False, **limits: Any) -> SiteConfig:
    settings = SiteSettings(limits=LimitSettings(**limits))
    return SiteConfig("HK", simulated, tmp_path / "no_such_data", tmp_path, settings=settings)


@pytest.mark.parametrize("started_at", [["HK"], ["HK", "UCL", "BMC"]])
def test_a_site_refuses_before_it_reads_any_data(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started_at: list[str]
) -> None:
    experiment = job(written, federation__minimum_sites=3 if len(started_at) == 1 else 2)
    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: site(tmp_path))
    monkeypatch.setattr("harmofl.flare.executor.resolve_job", lambda context, demo: experiment)
    fl_ctx = FLContextManager(None, "HK", "0123abcd", {}, {}).new_context()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    fl_ctx.set_prop(FLContextKey.JOB_META, {"job_clients": started_at})
    header = TaskHeader(run_id="0123abcd", experiment_hash=experiment.hash, demo=False, round_number=0)
    code, line = read_error(HarmoFLExecutor().execute("train", header.attach(Shareable()), fl_ctx, Signal()))
    told = "deploy_map names 1 site, " if len(started_at) == 1 else "federation.minimum_sites is 2, "
    assert code == "limits" and line.startswith(f"site HK does not run this job: {told}limits.minimum_sites is 3")
    assert not list(tmp_path.iterdir())


def test_weights_of_few_patients_do_not_leave(tmp_path: Path) -> None:
    refuse_few_patients(site(tmp_path), 5)
    refuse_few_patients(site(tmp_path, simulated=True), 1)
    with pytest.raises(SiteError, match="site HK has 4 training patients, its limits.training_patients is 5") as caught:
        refuse_few_patients(site(tmp_path), 4)
    assert caught.value.code == "limits"


def test_a_task_that_computes_too_long_stops_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, aborted = SimpleNamespace(seconds=100.0), SimpleNamespace(said=False)
    monkeypatch.setattr(site_limits.time, "monotonic", lambda: now.seconds)
    clock = TaskClock(site(tmp_path, task_seconds=60), lambda: aborted.said)
    now.seconds = 159.9
    assert not clock.should_stop()
    clock.refuse_late()
    now.seconds = 160.0
    assert clock.should_stop()
    with pytest.raises(SiteError, match="stopped the task after 60 s, its limits.task_seconds; lower") as caught:
        clock.refuse_late()
    assert caught.value.code == "task_seconds"
    aborted.said = True
    clock.refuse_late()
    endless = TaskClock(site(tmp_path, simulated=True, task_seconds=60), lambda: False)
    now.seconds = 1e9
    assert not endless.should_stop()


SCORES = {"dice": [0.5, 0.75, math.nan, 1.0], "sensitivity": [math.nan, 0.25, math.nan, math.nan]}
EVALUATION = Evaluation(
    0.75,
    SCORES,
    {"accuracy": Estimate(0.75, math.nan, math.nan, 8, 2, "too_few", ((2, 4), (4, 4)))},
    patients=[0, 0, 1, 2],
)


def test_scores_leave_as_mean_and_interval_of_enough_patients() -> None:
    """Dice: cases 0.5 and 0.75 are of patient 0, one is undefined, 1.0 is of patient 2: mean 2.25 / 3, two patients.

    Sensitivity is defined for one case of patient 0 alone; below three patients there is no interval.
    """
    told = released_scores({"final": EVALUATION}, DEFAULT)
    assert told["summaries"]["final"] == {
        "dice": {
            "mean": 0.75,
            "low": None,
            "high": None,
            "no_interval": "too_few",
            "cases": 3,
            "undefined": 1,
            "patients": 2,
        }
    }
    assert told["not_sent"] == {"final": ["sensitivity"]}
    assert told["pooled"]["final"]["accuracy"]["by_patient"] == [] and "test" not in told and "patients" not in told
    SiteNumbers.model_validate(told)
    few = released_scores({"final": EVALUATION}, LimitSettings(scored_patients=3))
    assert few["not_sent"] == {"final": ["accuracy", "dice", "sensitivity"]} and few["summaries"] == {"final": {}}


def test_a_hospital_that_allows_it_and_a_simulated_run_send_each_case() -> None:
    open_limits = LimitSettings(case_scores=True, scored_patients=1)
    for limits in (open_limits, None):
        told = released_scores({"final": EVALUATION}, limits)
        assert told["test"] == {"final": SCORES} and told["patients"] == {"final": [0, 0, 1, 2]}
        assert told["pooled"]["final"]["accuracy"]["by_patient"] == [[2, 4], [4, 4]]
        assert "summaries" not in told and "not_sent" not in told
        SiteNumbers.model_validate(told)


def test_a_validation_score_of_few_patients_is_not_sent() -> None:
    assert released_validation(EVALUATION, "dice", DEFAULT) == {"validation": 0.75}
    told = released_validation(EVALUATION, "dice", LimitSettings(scored_patients=3))
    assert told == {"validation": None, "not_sent": {"validation": ["dice"]}}
    assert released_validation(EVALUATION, "dice", None) == {"validation": 0.75}


def test_the_limits_in_force_are_told_and_hold_known_names_only(tmp_path: Path) -> None:
    told = limits_in_force(site(tmp_path, minimum_sites=2))
    assert (told["minimum_sites"], told["minimum_cases"], told["case_scores"]) == (2, 5, False)
    assert told["regions"] == ["dc", "site_gain"]
    assert SiteNumbers.model_validate({"limits": told}).limits == told
    assert limits_in_force(site(tmp_path, simulated=True)) == {}
