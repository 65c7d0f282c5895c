"""Servers that write the header of HK's tasks as they please; a job names them in its config_fed_server.json."""

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from harmofl.flare.controller import HarmoFLScatterAndGather

ELSEWHERE = "HK/../../../../.."
_HEADER = "harmofl.header"


class _ForgesHeaders(HarmoFLScatterAndGather):
    """Changes the header of what goes to HK, from round 1 on; every other site gets an honest one."""

    changes: dict = {}

    def handle_event(self, event_type, fl_ctx):
        super().handle_event(event_type, fl_ctx)
        if event_type != EventType.AFTER_TASK_DATA_FILTER:
            return
        data, peer = fl_ctx.get_prop(FLContextKey.TASK_DATA), fl_ctx.get_peer_context()
        if not isinstance(data, Shareable) or peer.get_identity_name() != "HK":
            return
        held = data.get_header(_HEADER)
        if held and held["round_number"] > 0:
            # a new dict: the copy for each site shares its headers with the others'
            data[ReservedHeaderKey.HEADERS] = {
                **data[ReservedHeaderKey.HEADERS],
                _HEADER: {**held, **self.changes},
            }


class ClimbsOut(_ForgesHeaders):
    """Names sites of pooled data whose names lead out of the kit."""

    changes = {"pooled_sites": [ELSEWHERE, "HK"]}


class PoolsPlainly(_ForgesHeaders):
    """Names pooled data of a site with a good name."""

    changes = {"pooled_sites": ["HK"]}


class TakesAnotherRun(_ForgesHeaders):
    """Names a run of another job."""

    changes = {"run_id": "f" * 32}
