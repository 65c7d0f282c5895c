"""A site that stands above others in FLARE's client hierarchy: it hands its task to them and sums what they answer.

FLARE 2.9 lets the sites below a site fetch the task that this one is doing, once it says that it is ready, and hands
it their answers as events; `nvflare.edge` builds on the same, with a controller of its own. A relay has no images: it
checks each answer as the server would, measures its difference, adds it to the sum, and forgets it.
"""

import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal

from harmofl.core.contributions import ContributionError
from harmofl.core.direction import cosine_to_rest
from harmofl.core.server_rules import RoundMean
from harmofl.core.training import arrays_sha256
from harmofl.experiment import Experiment
from harmofl.flare.amplitude_message import MessageError
from harmofl.flare.claims import check_numbers
from harmofl.flare.progress import PROGRESS
from harmofl.flare.relay_message import GatheredAnswers, SiteNotes, pack_gathered, read_measure
from harmofl.flare.round_norms import add_difference
from harmofl.flare.server_run import ServerRun
from harmofl.flare.task_header import TRAIN_TASK, TaskHeader
from harmofl.flare.wire import UpdateMessage, pack_model, payload_bytes, read_error, unpack_model, unpack_update
from harmofl.sections import outside_text

POLL = 0.25  # seconds between two looks at whether all have answered
SHARE = 0.9  # of federation.round_timeout: the sum must reach the server before its own time is up


class RelayTask:
    """One task at a relay, and what its sites have answered so far. FLARE hands answers over from several threads."""

    def __init__(
        self,
        experiment: Experiment,
        header: TaskHeader,
        task_name: str,
        task: Shareable,
        *,
        sites: Collection[str],
        folder: Path,
    ) -> None:
        """Open it.

        Args:
            experiment: as this site resolves it, which is as the server does.
            header: of the task.
            task_name: of FLARE.
            task: as it came from the server.
            sites: directly below this one.
            folder: for the books of the round, which nobody reads.

        Raises:
            MessageError: the task has another form.
        """
        self.task_id = task.get_header(ReservedKey.TASK_ID)
        self._name, self._lock = task_name, threading.Lock()
        self._run = ServerRun(experiment, header.demo, folder, sorted(sites), run_id=header.run_id)
        self._run.task_begun = time.monotonic()
        self._updates: dict[str, UpdateMessage] = {}
        self._bytes: dict[str, int] = {}
        self._mean: RoundMean | None = None
        if task_name == TRAIN_TASK:
            measure = read_measure(task)
            # as the sites' networks hold it: a model may travel in float16
            weights = {
                name: value.astype(np.float32) if value.dtype == np.float16 else value
                for name, value in unpack_model(task).weights.items()
            }
            self._run.model_sha256 = arrays_sha256(weights)
            self._mean = self._run.rule.open_round(
                weights, measure.usual, usual_steps=measure.usual_steps, first=measure.first
            )

    @property
    def waiting(self) -> list[str]:
        """Sites that have not answered."""
        with self._lock:
            return [site for site in self._run.expected if site not in self._updates and site not in self._run.refused]

    def take(self, site: str, answer: Shareable) -> None:
        """Check a site's answer and add it, or note why not; a second one is left out."""
        with self._lock:
            if site not in self._run.expected or site in self._updates or site in self._run.refused:
                PROGRESS.warning(f"{outside_text(site)}: an answer that this relay does not wait for is left out")
                return
            try:
                self._add(site, answer)
            except (ContributionError, MessageError) as error:
                self._run.refused[site] = str(error)
            except Exception as error:  # a value that cannot even be read
                self._run.refused[site] = f"unreadable contribution ({type(error).__name__})"
            if site in self._run.refused:
                PROGRESS.warning(f"{outside_text(site)}: contribution refused: {self._run.refused[site]}")

    def result(self) -> Shareable:
        """What goes to the server in the place of the answers."""
        with self._lock:
            run = self._run
            silent = [site for site in run.expected if site not in self._updates and site not in run.refused]
            cosines = cosine_to_rest({site: held.direction for site, held in run.sent.items()})
            notes = {site: self._notes(site, cosines.get(site)) for site in self._updates}
            partial = self._mean.partial() if self._mean is not None and self._mean.count else None
            refused = {**run.refused, **dict.fromkeys(silent, "no answer at its relay")}
            PROGRESS.info(f"{self._name}: answers of {len(self._updates)} of {len(run.expected)} sites sent on")
            return pack_gathered(GatheredAnswers(dict(self._updates), notes, refused, partial))

    def _add(self, site: str, answer: Shareable) -> None:
        if answer.get_return_code() not in (ReturnCode.OK, None):
            code, reason = read_error(answer)
            raise MessageError(f"{code}: {reason}")
        update = unpack_update(answer)
        check_numbers(site, update, self._run, self._name)
        if self._mean is not None:
            if update.difference is None:
                raise MessageError("the answer carries no weights")
            if update.numbers.get("received_sha256") != self._run.model_sha256:
                raise MessageError("the site did not train the model that was sent in this round")
            add_difference(self._mean, site, update, self._run)
        elif update.difference is not None:
            raise MessageError(f"an answer to {self._name} carries no weights")
        self._bytes[site] = payload_bytes(update)["weights"]
        self._updates[site] = UpdateMessage(None, update.amplitude, update.numbers)

    def _notes(self, site: str, cosine: float | None) -> SiteNotes:
        sent = self._run.sent.get(site)
        if sent is None:
            return SiteNotes(weight_bytes=self._bytes[site])
        return SiteNotes(
            weight_bytes=self._bytes[site], norm=sent.norm, factor=sent.factor, outlier=sent.note, cosine=cosine
        )


def sites_below(fl_ctx: FLContext) -> list[str]:
    """The sites directly below this one in FLARE's client hierarchy; none where it is a leaf, or there is none."""
    forest = fl_ctx.get_prop(FLContextKey.CLIENT_HIERARCHY)
    nodes: Mapping[str, Any] = getattr(forest, "nodes", None) or {}
    node = nodes.get(fl_ctx.get_identity_name())
    return [] if node is None else sorted(child.obj.name for child in node.children)


def _pack_again(data: Shareable) -> None:
    """Pack a model's small arrays together: FLARE sends each of those that it has unpacked as a file of its own."""
    if len(data) > 1:  # the task `amplitude` has headers alone
        packed = pack_model(unpack_model(data))
        data.update({key: value for key, value in packed.items() if key != ReservedHeaderKey.HEADERS})


def gather(task: RelayTask, data: Shareable, experiment: Experiment, abort_signal: Signal) -> Shareable:
    """Let the sites below fetch the task, and wait until all have answered or the time of a round is nearly up."""
    limit = experiment.federation.round_timeout
    end = time.monotonic() + SHARE * limit if limit else None
    _pack_again(data)
    data.set_header(ReservedKey.TASK_IS_READY, True)
    while task.waiting and (end is None or time.monotonic() < end):
        if abort_signal.triggered:
            return make_reply(ReturnCode.TASK_ABORTED)
        time.sleep(POLL)
    return task.result()
