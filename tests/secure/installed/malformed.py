"""An executor that a drill has installed at the sites: HK answers what nobody can use, every other site works."""

import os
import time

import numpy as np
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.utils import fobs
from nvflare.widgets.fed_event import FED_EVENT_TOPIC, FedEventHeader

from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.packed_arrays import PackedArrays, PackedArraysDecomposer
from harmofl.flare.wire import error_reply

FORGED = "2026-11-30 12:00:00,000 - INFO - round 9: 3 of 3 sites accepted"
LINE = f"disk full\n{FORGED}\x1b[2J\x1b]0;title\x07\u202eyad a"
CUT = "malformed.cut"
_rounds = [5, 4, 3, 2, 1, 0]  # still to come, the next one last: one process trains them all


class Unknown:
    """A class that the server does not have."""

    def __init__(self):
        self.name = "unknown"


class Malformed(HarmoFLExecutor):
    """HK: a forged line, gigabytes of shape, an unknown class, cut bytes, a large array, events and codes to abort."""

    def handle_event(self, event_type, fl_ctx):
        if event_type != EventType.AFTER_TASK_RESULT_FILTER or fl_ctx.get_identity_name() != "HK":
            super().handle_event(event_type, fl_ctx)
            return
        answer = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        spoil = {"amplitude": _forged_line, "evaluate": _leave}.get(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        for_rounds = (_shape_of_gigabytes, _unknown_class, _cut_bytes, _large_array, _try_to_abort, _unsafe_job)
        if spoil is None:
            spoil = for_rounds[_rounds.pop()]
        spoil(answer, fl_ctx)


def _forged_line(answer, fl_ctx):
    _replace(answer, error_reply(f"odd\x1b[31m\n{FORGED}", LINE))


def _shape_of_gigabytes(answer, fl_ctx):
    honest = PackedArraysDecomposer.decompose

    def once(self, target, manager=None):
        PackedArraysDecomposer.decompose = honest
        told = honest(self, target, manager)
        told["entries"][-1][1] = ["a", 3_000_000_000]
        return told

    PackedArraysDecomposer.decompose = once


def _unknown_class(answer, fl_ctx):
    answer["extra"] = Unknown()


def _cut_bytes(answer, fl_ctx):
    honest = fobs.dumps

    def once(value, *arguments, **named):
        parts = honest(value, *arguments, **named)
        if isinstance(value, Shareable) and value.get_header(CUT):
            fobs.dumps = honest
            return [b"".join(bytes(part) for part in parts)[:-40]]
        return parts

    answer.set_header(CUT, True)
    fobs.dumps = once


def _large_array(answer, fl_ctx):
    answer["DXO"]["data"] = PackedArrays({"w": np.zeros((64, 2**20), np.float32)})  # 256 MiB


def _try_to_abort(answer, fl_ctx):
    engine, job = fl_ctx.get_engine(), fl_ctx.get_job_id()
    event = Shareable()  # not fired here, where it would end this site's own part
    event.set_header(FedEventHeader.EVENT_TYPE, EventType.FATAL_SYSTEM_ERROR)
    event.set_header(FedEventHeader.TIMESTAMP, time.time())
    engine.send_aux_request(targets=None, topic=FED_EVENT_TOPIC, request=event, timeout=5.0, fl_ctx=fl_ctx)
    command = new_cell_message({}, Shareable())
    engine.get_cell().send_request(
        channel="server_command", target=f"server.{job}", topic="abort", request=command, timeout=5.0
    )


def _leave(answer, fl_ctx):
    os._exit(0)  # FLARE ends a job for all where a process ends with 1


def _unsafe_job(answer, fl_ctx):
    _replace(answer, make_reply(ReturnCode.UNSAFE_JOB))


def _replace(answer, other):
    """In place: FLARE sends this object."""
    answer.clear()
    answer.update(other)
