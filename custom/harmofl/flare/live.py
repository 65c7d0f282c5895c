"""What a running job answers to whoever submitted it and watches: rounds, sites, scores, time left."""

import time
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.widgets.info_collector import InfoCollector

from harmofl.flare.round_norms import round_warnings
from harmofl.flare.server_run import ServerRun
from harmofl.flare.state import write_text_atomically
from harmofl.sections import one_line

GROUP = "harmofl"
FAILURE_FILE = "failure.txt"
# whoever watches asks every few seconds: sites in all rounds that are told, and rounds that are told of any number
MOST_SITES, LEAST_ROUNDS = 20_000, 20
PACE_ROUNDS = 10  # that tell how long the next ones will take
MOST_REASON = 2000  # letters of why a job failed, which names each missing site with its own reason


def tell_progress(run: ServerRun, fl_ctx: FLContext) -> None:
    """Add this job's progress to the statistics that FLARE collects when someone with the right to view asks."""
    collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
    if collector is not None:
        collector.set_info(GROUP, progress(run))


def progress(run: ServerRun) -> dict[str, Any]:
    """Plain data about the run so far, of many rounds and sites the newest rounds alone.

    Scores are of the model that a round began with.
    """
    told = max(LEAST_ROUNDS, MOST_SITES // len(run.expected))
    return {
        "experiment": run.experiment.name,
        "rounds": run.experiment.federation.rounds,
        "sites": run.expected,
        "start_round": run.start_round,
        "waiting_for": sorted(run.waiting),
        "seconds_left": seconds_left(run),
        "amplitude_sites": run.amplitude_sites,
        "closed": [
            {
                "round": record.round,
                "accepted": record.sites_accepted,
                "refused": record.sites_refused,
                "scored": run.experiment.federation.validates(record.round),
                "mean": record.validation_mean,
                "worst": _worst(record.validation),
                "norms": [min(record.norm.values()), max(record.norm.values())] if record.norm else None,
                "warnings": round_warnings(record),
            }
            for record in run.rounds[-told:]
            if record.round >= run.start_round
        ],
    }


def seconds_left(run: ServerRun) -> float | None:
    """Seconds until the last round closes at the pace of this job's last rounds, None before the first one closed.

    What came before the first round closed (sites that join, amplitude, decoding) comes once, and load that has passed
    is no pace: from the second round on neither counts.
    """
    if not run.closed:
        return None
    marks = run.closed[-(PACE_ROUNDS + 1) :] if len(run.closed) > 1 else [run.started, *run.closed]
    pace = (marks[-1] - marks[0]) / (len(marks) - 1)
    left = run.experiment.federation.rounds - run.start_round - len(run.closed)
    return max(0.0, pace * left - (time.monotonic() - run.closed[-1]))


def note_failure(folder: Path, reason: str) -> None:
    """Keep why the job failed beside its models, for whoever downloads it; the first reason is the one that counts."""
    path = folder / FAILURE_FILE
    if not path.exists():
        write_text_atomically(one_line(reason, MOST_REASON) + "\n", path)


def _worst(scores: dict[str, float | None]) -> list[Any] | None:
    defined = {site: score for site, score in scores.items() if score is not None}
    worst = min(defined, key=lambda site: (defined[site], site), default=None)
    return None if worst is None else [worst, defined[worst]]
