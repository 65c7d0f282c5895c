"""Servers that write a task's header as they please; the drills name them in a job's config_fed_server.json."""

from nvflare.apis.shareable import Shareable

from harmofl.flare.controller import HarmoFLScatterAndGather

ELSEWHERE = "HK/../../../../.."


class _Forged:
    """A header without any check, which holds what another server would have written and some changes."""

    def __init__(self, held, **changes):
        self.held = {**held, **changes}

    def attach(self, shareable: Shareable) -> Shareable:
        shareable.set_header("harmofl.header", self.held)
        return shareable


class _ForgesHeaders(HarmoFLScatterAndGather):
    changes: dict = {}

    def start_controller(self, fl_ctx):
        super().start_controller(fl_ctx)
        honest = self.run.header

        def forged(round_number):
            header = honest(round_number)
            return _Forged(header.model_dump(mode="json"), **self.changes) if round_number == 1 else header

        self.run.header = forged


class ClimbsOut(_ForgesHeaders):
    """From round 1 on its header names sites of pooled data whose names lead out of the kit."""

    changes = {"pooled_sites": [ELSEWHERE, "HK"]}


class PoolsPlainly(_ForgesHeaders):
    """From round 1 on its header names pooled data of sites with good names."""

    changes = {"pooled_sites": ["HK"]}


class TakesAnotherRun(_ForgesHeaders):
    """From round 1 on its header names a run of another job."""

    changes = {"run_id": "f" * 32}
