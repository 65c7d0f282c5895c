"""Executors whose training is honest and whose answer is not: HK sends another difference in round 1."""

import numpy as np
from nvflare.apis.dxo import from_shareable

from harmofl.flare.executor import HarmoFLExecutor


class _Changes(HarmoFLExecutor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        in_round = task_name == "train" and shareable.get_header("current_round") == 1
        if in_round and fl_ctx.get_identity_name() == "HK":
            dxo = from_shareable(result)
            self.change(dxo.data)
            dxo.update_shareable(result)
        return result


class Huge(_Changes):
    """1e30 in each weight."""

    def change(self, difference):
        for value in difference.values():
            if value.dtype.kind == "f":
                value[...] = np.float32(1e30) * np.sign(value)


class Reversed(_Changes):
    """-10 times what training changed."""

    def change(self, difference):
        for value in difference.values():
            if value.dtype.kind == "f":
                np.multiply(value, -10, out=value)
