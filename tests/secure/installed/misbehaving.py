"""Executors that a drill has installed at the sites: HK goes wrong on purpose, every other site works."""

import time
from pathlib import Path

from harmofl.flare.executor import HarmoFLExecutor

HOLD, HOLDING = Path.home() / "hold", Path.home() / "holding"  # a test writes the one, HK then writes the other


def _is_hk(fl_ctx, task_name, shareable, round_number):
    at_hk = fl_ctx.get_identity_name() == "HK" and task_name == "train"
    return at_hk and shareable.get_header("current_round") == round_number


class FailsThenLate(HarmoFLExecutor):
    """HK fails in round 1, is late in round 2 and works again after that."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        if _is_hk(fl_ctx, task_name, shareable, 1):
            raise RuntimeError("/data/HK/Jane_Doe.nii.gz is broken")
        result = super()._perform(task_name, shareable, fl_ctx, abort_signal)
        if _is_hk(fl_ctx, task_name, shareable, 2):
            time.sleep(20)  # the others wait 12 s
        return result


class Slow(HarmoFLExecutor):
    """HK takes eleven times as long for round 0."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        started = time.monotonic()
        result = super()._perform(task_name, shareable, fl_ctx, abort_signal)
        if _is_hk(fl_ctx, task_name, shareable, 0):
            time.sleep(10 * (time.monotonic() - started))
        return result


class Holds(HarmoFLExecutor):
    """HK stands still in the task, and round, that the file names which holds it."""

    def _perform(self, task_name, shareable, fl_ctx, abort_signal):
        place = f"{task_name} {shareable.get_header('current_round')}" if task_name == "train" else task_name
        if fl_ctx.get_identity_name() == "HK" and HOLD.exists() and HOLD.read_text() == place:
            HOLDING.touch()
            while HOLD.exists() and not abort_signal.triggered:
                time.sleep(0.2)
        return super()._perform(task_name, shareable, fl_ctx, abort_signal)
