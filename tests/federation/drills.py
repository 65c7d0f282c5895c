"""Code that a test puts into a job's custom folder: sites and servers that misbehave on purpose."""

# Each drill is an executor that goes wrong at site HK and works at every other site.
EXECUTORS = '''
import os
import time
from pathlib import Path
import numpy as np
from nvflare.apis.dxo import DataKind, from_shareable
from harmofl.flare.executor import HarmoFLExecutor


class Raises(HarmoFLExecutor):
    """Fails in round 1 with a text that names a file."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        if fl_ctx.get_identity_name() == "HK" and task_name == "train" and shareable.get_header("current_round") == 1:
            raise RuntimeError("/data/HK/Jane_Doe.nii.gz is broken")
        return super()._perform(task_name, shareable, fl_ctx, abort_signal)


class SendsNaN(HarmoFLExecutor):
    """Poisons one weight of every update."""

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if fl_ctx.get_identity_name() == "HK" and task_name == "train":
            dxo = from_shareable(result)
            next(iter(dxo.data.values())).flat[0] = np.nan
            dxo.update_shareable(result)
        return result


class SendsAnUnknownType(HarmoFLExecutor):
    """Puts something into every update that FLARE's wire does not know."""

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if fl_ctx.get_identity_name() == "HK" and task_name == "train":
            dxo = from_shareable(result)
            dxo.data[next(iter(dxo.data))] = Path("Jane_Doe.nii.gz")
            dxo.update_shareable(result)
        return result


class JoinsLate(HarmoFLExecutor):
    """Misses the amplitude task and round 0."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        missed = task_name == "amplitude" or (task_name == "train" and shareable.get_header("current_round") == 0)
        if fl_ctx.get_identity_name() == "HK" and missed:
            raise RuntimeError("not there yet")
        return super()._perform(task_name, shareable, fl_ctx, abort_signal)


class FailsInEvaluation(HarmoFLExecutor):
    """Trains, but cannot evaluate."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        if fl_ctx.get_identity_name() == "HK" and task_name == "evaluate":
            raise RuntimeError("/data/HK/Jane_Doe.nii.gz is gone")
        return super()._perform(task_name, shareable, fl_ctx, abort_signal)


class SlowToMeasure(HarmoFLExecutor):
    """Takes long for its amplitude."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        if fl_ctx.get_identity_name() == "HK" and task_name == "amplitude":
            time.sleep(5)
        return super()._perform(task_name, shareable, fl_ctx, abort_signal)


class AnswersInTurn(HarmoFLExecutor):
    """Answers once the site before it in DRILL_ORDER has; each leaves a file named after it in DRILL_FOLDER."""

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if task_name == "train":
            order, folder = os.environ["DRILL_ORDER"].split(), Path(os.environ["DRILL_FOLDER"])
            turn = order.index(fl_ctx.get_identity_name())
            while turn and not (folder / order[turn - 1]).exists():
                time.sleep(0.1)
            time.sleep(3 * bool(turn))  # the answer before this one leaves its process after its file is there
            (folder / order[turn]).touch()
        return result
'''

CONTROLLERS = '''
from nvflare.app_common.app_event_type import AppEventType
from harmofl.flare.controller import HarmoFLScatterAndGather


class StopsAfterRoundOne(HarmoFLScatterAndGather):
    """A server that is lost after it saved round 1."""

    def handle_event(self, event_type, fl_ctx):
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.ROUND_DONE and self._current_round == 1:
            self.system_panic("the server is lost", fl_ctx)


class CannotWriteItsBooks(HarmoFLScatterAndGather):
    """A folder lies where the round's record belongs."""

    def handle_event(self, event_type, fl_ctx):
        if event_type == AppEventType.ROUND_STARTED:
            (self.run.folder / "round_metrics.jsonl" / "in_the_way").mkdir(parents=True)
        super().handle_event(event_type, fl_ctx)
'''
