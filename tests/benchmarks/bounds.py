"""What the bounds between server and sites cost: the server's checks of an answer, a site's checks of a task."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.core.training import arrays_sha256
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import FILE_NAME, Experiment
from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.participant import Participant
from harmofl.flare.server_run import _KEY, ServerRun
from harmofl.flare.site import resolve_job, site_config
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import (
    Arrays,
    ModelMessage,
    UpdateMessage,
    pack_model,
    pack_update,
    read_error,
    unpack_model,
)
from tests.benchmarks.federation import FEW, changes
from tests.benchmarks.rows import Row, ratio
from tests.benchmarks.served_rounds import SILENT
from tests.benchmarks.training import resolved

JOBS = {"harmofl_prostate": "unet", "harmofl_camelyon17": "densenet121"}
RUN_ID = "job"  # outside simulation a run is called as its job
HOSPITAL: dict[str, Any] = {
    "name": "benchmark",
    "task": "prostate",
    "data": {"height": 64, "width": 64},
    "network": {"name": "unet", "width": 16},
    "amplitude": {"minimum_sites": 3},
    "training": {"optimizer": "adam", "learning_rate": 1e-3, "batch_size": 8},
    "federation": {"rounds": 1, "minimum_sites": 3},
}
FLARE_S = "FLARE's float32 accumulator, which checks nothing and depends on the order of arrival"
IMAGES = [311, 57, 402, 123, 250, 77]  # as many as sites


def measure() -> list[Row]:
    """All rows; under a minute."""
    common_decomposers.register()
    return [*(row for job, name in JOBS.items() for row in aggregation(job, name)), task()]


def aggregation(job: str, name: str) -> list[Row]:
    """One answer into the mean by the aggregator, with all that it checks: form, claims, finite values, norms.

    FLARE's accumulator, which its InTimeAccumulateWeightedAggregator adds with, gets the arrays of that answer.
    """
    experiment = resolved(job, "federation.weights=samples")
    with tempfile.TemporaryDirectory() as folder:
        run = ServerRun(experiment, False, Path(folder), [f"site-{index}" for index in range(FEW)])
        model = run.initial_weights()
        run.model_sha256 = arrays_sha256(model)
        context: FLContext = FLContextManager(None, "server", "job", {}, {}).new_context()
        for key, value in (
            (_KEY, run),
            (AppConstants.CURRENT_ROUND, 1),
            (AppConstants.GLOBAL_MODEL, make_model_learnable(model, {})),
        ):
            context.set_prop(key, value, private=True, sticky=True)
        # a tenth: no longer than steps of this learning rate can make it, as an honest site's is
        sent = [{name: _tenth(value) for name, value in held.items()} for held in changes(model, FEW)]
        answers = [answer_of(index, sent[index], experiment, run.model_sha256) for index in range(FEW)]
        aggregator, sums = HarmoFLAggregator(), {n: np.zeros(v.shape) for n, v in model.items() if v.dtype.kind == "f"}
        turns, flare = {"checked": 0, "bare": 0, "flare": 0}, WeightedAggregationHelper()

        def add_checked() -> None:
            index = turns["checked"] % FEW
            turns["checked"] += 1
            if not aggregator.accept(answers[index], context):
                raise RuntimeError(f"an answer was refused: {run.refused}")

        def add_bare() -> None:
            contribution = sent[turns["bare"] % FEW]
            turns["bare"] += 1
            for key, total in sums.items():
                np.add(total, contribution[key], out=total)
            for key in sums:
                contribution[key].max()

        def add_by_flare() -> None:
            index = turns["flare"] % FEW
            turns["flare"] += 1
            flare.add(sent[index], IMAGES[index], f"site-{index}", 1)

        found, beside = (
            ratio(add_checked, bare, seconds=6.0, before_measured=aggregator.accepted.clear)
            for bare in (add_bare, add_by_flare)
        )
    what = f"an answer of {name} with all checks and its norm, weights by samples"
    return [
        Row(what, "float64 in-place add plus one read pass", found.median, 1.6, found.noise),
        Row(f"{what}, beside FLARE", FLARE_S, beside.median, 2.5, beside.noise),
    ]


def _tenth(value: np.ndarray) -> np.ndarray:
    return value * np.float32(0.1) if value.dtype.kind == "f" else value


def answer_of(index: int, difference: Arrays, experiment: Experiment, received: str) -> Shareable:
    """A site's answer as the server has it from the wire."""
    given, images = experiment.training, IMAGES[index] * experiment.training.local_epochs
    numbers = {
        "cases": {"training": IMAGES[index], "validation": 2, "test": 2},
        "steps": given.local_epochs * -(-IMAGES[index] // given.batch_size),
        "images": images,
        "loss": 0.5,
        "validation": 0.5,
        "received_sha256": received,
    }
    answer: Shareable = fobs.loads(fobs.dumps(pack_update(UpdateMessage(difference, None, numbers))))
    answer.add_cookie(AppConstants.CONTRIBUTION_ROUND, 1)
    answer.set_peer_props({ReservedKey.IDENTITY_NAME: f"site-{index}"})
    return answer


def task() -> Row:
    """A hospital's round by the executor, with every check of task and answer, against participant and packing alone.

    What the executor adds is read anew with each task: header, the site's own settings and limits, the job's
    experiment, the form of the model and of the answer.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        root, config = Path(folder), Path(folder) / "config"
        patched.setenv("HARMOFL_STATE_ROOT", str(root / "state"))
        patched.delenv("HARMOFL_DATA_ROOT", raising=False)
        write_prostate_site(root / "data" / "HK", "siemens_3t_surface", cases=16, seed=0, matrix=64, slices=8)
        config.mkdir()
        (config / FILE_NAME).write_text(json.dumps(HOSPITAL), encoding="utf-8")
        context = hospital(root, config)
        site, experiment = site_config(context), resolve_job(context, False)
        participant = Participant(experiment, site, RUN_ID, lambda: False, SILENT)
        model = ServerRun(experiment, False, root, ["HK"]).initial_weights()
        received = pack_model(ModelMessage(model, participant.estimate_amplitude().amplitude))
        header = TaskHeader(run_id=RUN_ID, experiment_hash=experiment.hash, demo=False, round_number=0)
        sent, executor = header.attach(received), HarmoFLExecutor()

        def checked() -> None:
            answer = executor.execute("train", sent, context, Signal())
            if answer.get_return_code() not in (None, ReturnCode.OK):
                raise RuntimeError(f"the task failed: {read_error(answer)}")

        def bare() -> None:
            pack_update(Participant(experiment, site, RUN_ID, lambda: False, SILENT).train(0, unpack_model(sent)))

        found = ratio(checked, bare, seconds=20.0)
    what = "a hospital's task with all its checks, 10 patients, 64 x 64 pixels, one epoch"
    return Row(what, "participant and packing alone", found.median, 1.05, found.noise)


def hospital(root: Path, config: Path) -> FLContext:
    """A site's context outside simulation, with a privacy scope and a job's config folder."""
    context: FLContext = FLContextManager(None, "HK", "job", {}, {}).new_context()
    scope = {"data_root": str(root / "data"), "device": "cpu", "workers": 0, "threads": 1}
    workspace = SimpleNamespace(
        get_app_config_dir=lambda job: str(config),
        get_root_dir=lambda: str(root),
    )
    for key, value in (
        (FLContextKey.SIMULATE_MODE, False),
        (FLContextKey.JOB_META, {"submitter_name": "lead@hk.org", "submitter_org": "hk"}),
        (FLContextKey.SCOPE_PROPERTIES, scope),
        (FLContextKey.WORKSPACE_OBJECT, workspace),
        (FLContextKey.WORKSPACE_ROOT, str(root)),
    ):
        context.set_prop(key, value, private=True, sticky=True)
    return context
