"""A site's limits in its own tasks: on data in files, and in the executor while a task runs."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal

from harmofl.core.training import TrainingStoppedError, state_arrays
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import set_key
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_settings import LimitSettings, SiteSettings
from harmofl.flare.state import SiteState
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import AmplitudeStatistic, ModelMessage, pack_model, pack_update, read_error, unpack_update
from harmofl.tasks import resolve_experiment, untrained_network
from tests.loose_limits import REHEARSAL

CASES = 8  # 5 for training, 1 for validation, 2 for test


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_prostate_site(folder / "HK", "siemens_1.5t_endorectal", CASES, 0, matrix=64, slices=3)
    return folder


def site(root: Path, folder: Path, **limits: Any) -> SiteConfig:
    settings = SiteSettings(limits=LimitSettings(**limits))
    return SiteConfig("HK", False, root, folder, device="cpu", settings=settings)


def test_the_default_limits_hold_in_every_task(root: Path, tmp_path: Path, written: dict[str, Any]) -> None:
    experiment = resolve_experiment(written)
    message = ModelMessage(state_arrays(untrained_network(experiment)))

    def participant(**limits: Any) -> Participant:
        return Participant(experiment, site(root, tmp_path, **limits), "run", lambda: False, logging.getLogger("HK"))

    for task in (lambda held: held.estimate_amplitude(), lambda held: held.train(0, message)):
        with pytest.raises(SiteError, match="HK has 5 training patients, its limits.training_patients is 6"):
            task(participant(training_patients=6))
    told = unpack_update(pack_update(participant().evaluate(message))).numbers
    assert told["cases"] == {"training": 5, "validation": 1, "test": 2}
    assert told["validation"] is None and told["not_sent"]["validation"] == ["dice"]
    assert "test" not in told and told["limits"]["scored_patients"] == 2
    names = {*told["summaries"]["final"], *told["not_sent"].get("final", [])}
    assert names == {"dice", "published_dice"}, "each score is summarized or said to be of too few"
    trained = participant(scored_patients=1).train(0, message).numbers
    assert trained["limits"]["scored_patients"] == 1 and "not_sent" not in trained


def test_the_weights_that_no_site_sends_need_no_patients(root: Path, tmp_path: Path, written: dict[str, Any]) -> None:
    set_key(written, "method", "local_only")
    experiment = resolve_experiment(written)
    held = Participant(
        experiment, site(root, tmp_path, training_patients=6), "run", lambda: False, logging.getLogger("HK")
    )
    assert held.train(0, ModelMessage({})).difference == {}
    # the loss of the training patients leaves all the same, and is a score of theirs
    few = site(root, tmp_path, training_patients=1, scored_patients=6)
    with pytest.raises(SiteError, match="5 training patients, its limits.scored_patients is 6: a training loss of"):
        Participant(experiment, few, "run2", lambda: False, logging.getLogger("HK")).train(0, ModelMessage({}))


@pytest.mark.parametrize(("aborted", "code"), [(False, "task_seconds"), (True, "TASK_ABORTED")])
def test_the_executor_stops_a_task_that_takes_too_long(
    written: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, aborted: bool, code: str
) -> None:
    experiment = resolve_experiment(written)
    limits = {**REHEARSAL, "task_seconds": 1}

    class Endless:
        """Asks between its batches whether to stop."""

        def __init__(self, *arguments: Any, **_: Any) -> None:
            self.experiment, self._should_stop = experiment, arguments[3]
            self.state = SiteState(tmp_path / "state", "0123abcd")

        def train(self, *_: Any) -> None:
            while not self._should_stop():
                pass
            raise TrainingStoppedError("stopped between two batches")

    monkeypatch.setattr("harmofl.flare.participant.Participant", Endless)
    monkeypatch.setattr("harmofl.flare.executor.site_config", lambda _: site(tmp_path, tmp_path, **limits))
    monkeypatch.setattr("harmofl.flare.executor.resolve_job", lambda context, demo: experiment)
    fl_ctx = FLContextManager(None, "HK", "0123abcd", {}, {}).new_context()
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, False)
    fl_ctx.set_prop(FLContextKey.JOB_META, {"submitter_name": "lead@hk.org", "submitter_org": "hk"})
    header = TaskHeader(run_id="0123abcd", experiment_hash=experiment.hash, demo=False, round_number=0)
    message = ModelMessage({"w": np.zeros(1, np.float32)}, AmplitudeStatistic(np.zeros((3, 11), np.float32), 1))
    signal = Signal()
    if aborted:
        signal.trigger("aborted")
    reply = HarmoFLExecutor().execute("train", header.attach(pack_model(message)), fl_ctx, signal)
    told, line = read_error(reply)
    assert told == code
    assert aborted or line.startswith("site HK stopped the task after 1 s, its limits.task_seconds; lower training.")
