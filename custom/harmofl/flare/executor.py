"""HarmoFLExecutor: receives a task at a site, lets the participant do it, answers with a result or a reason."""

import logging
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare.apis.client import ClientDictKey
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

import harmofl
from harmofl.data.findings import count_text
from harmofl.experiment import RULES, Experiment, ExperimentError
from harmofl.flare.allowed_names import allowed_names, refuse_other_names
from harmofl.flare.approval import require_approval_of_running_job
from harmofl.flare.filters import note_offer, note_run, require_filter
from harmofl.flare.log_records import guard_log_records
from harmofl.flare.log_streams import refuse_log_stream
from harmofl.flare.progress import FINDINGS, PROGRESS, show_progress_on_console
from harmofl.flare.received_amplitude import refuse_amplitude_task, refuse_other_amplitude
from harmofl.flare.site import SiteConfig, SiteError, is_simulated, resolve_job, simulated_data_root, site_config
from harmofl.flare.site_limits import TaskClock, refuse_excess
from harmofl.flare.task_header import AMPLITUDE_TASK, EVALUATE_TASK, TRAIN_TASK, TaskHeader, read_header
from harmofl.flare.wire import MessageError, UpdateMessage, error_reply, pack_update, unpack_model
from harmofl.flare.wire_types import unknown_type

if TYPE_CHECKING:
    from harmofl.flare.relay import RelayTask


class HarmoFLExecutor(Executor):
    """Does the tasks `amplitude`, `train` and `evaluate`. It holds no state: each task may run in a new process."""

    def __init__(self) -> None:
        """Let the console show progress lines."""
        super().__init__()
        show_progress_on_console()
        self._gathering: RelayTask | None = None
        self.register_event_handler(EventType.POST_TASK_ASSIGNMENT_SENT, self._note_handled)
        self.register_event_handler(EventType.POST_TASK_RESULT_RECEIVED, self._take_answer)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Do one task.

        Returns:
            The packed result, TASK_UNKNOWN, TASK_ABORTED, or an error reply with a code and one line; the exception
            itself, which may name files, stays in the site's log.
        """
        guard_log_records()
        if task_name not in (AMPLITUDE_TASK, TRAIN_TASK, EVALUATE_TASK):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            refuse_log_stream(fl_ctx)
            is_relay = fl_ctx.get_prop(ReservedKey.IS_LEAF) is False
            perform = self._gather if is_relay else self._perform
            answer = perform(task_name, shareable, fl_ctx, abort_signal)
            if problem := unknown_type(answer):
                raise MessageError(f"the answer cannot be sent: {problem}")
            return answer
        except Exception as error:
            return self._explain(error, task_name, fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Look at an answer once more when the site's filters and any other executor have had their say."""
        super().handle_event(event_type, fl_ctx)
        answer = fl_ctx.get_prop(FLContextKey.TASK_RESULT) if event_type == EventType.AFTER_TASK_RESULT_FILTER else None
        if not isinstance(answer, Shareable) or not (problem := unknown_type(answer)):
            return
        line = f"site {fl_ctx.get_identity_name()}: the answer cannot be sent: {problem}"
        self.log_error(fl_ctx, line)
        # in place: FLARE sends this object
        answer.clear()
        answer.update(error_reply(MessageError.__name__, line))

    def _gather(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """At a site that stands above others: have them do the task, and sum what they answer."""
        from harmofl.flare.relay import RelayTask, gather, sites_below

        header = read_header(shareable)
        experiment = resolve_job(fl_ctx, header.demo)
        _refuse_other_experiment(experiment, header, fl_ctx.get_identity_name())
        folder = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
        self._gathering = RelayTask(experiment, header, task_name, shareable, sites=sites_below(fl_ctx), folder=folder)
        try:
            return gather(self._gathering, shareable, experiment, abort_signal)
        finally:
            self._gathering = None

    def _note_handled(self, event_type: str, fl_ctx: FLContext) -> None:
        fl_ctx.set_prop(FLContextKey.EVENT_PROCESSED, True, private=True, sticky=False)

    def _take_answer(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE hands a relay the answer of a site below it."""
        self._note_handled(event_type, fl_ctx)
        gathering, answer = self._gathering, fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        peer = fl_ctx.get_peer_context()
        site = peer.get_identity_name() if isinstance(peer, FLContext) else ""
        if gathering is not None and answer.get_header(ReservedKey.TASK_ID) == gathering.task_id:
            gathering.take(str(site), answer)

    def _perform(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        # torch and MONAI are needed from here on; what only registers the executor stays quick to import
        from harmofl.core.training import TrainingStoppedError
        from harmofl.flare.lean_monai import import_lean_monai
        from harmofl.flare.participant import Participant
        from harmofl.flare.run_owner import refuse_other_run, refuse_run_of_another
        from harmofl.tasks import is_outside

        header, site, experiment = self._admitted(task_name, shareable, fl_ctx)
        if not is_outside(experiment.task):  # that of somebody else may use any part of MONAI
            import_lean_monai()
        self.log_debug(fl_ctx, f"harmofl {harmofl.__version__}, {os.path.dirname(harmofl.__file__)}")
        pool = {name: simulated_data_root(name, fl_ctx) for name in header.pooled_sites}
        clock = TaskClock(site, lambda: abort_signal.triggered)
        named = site.own_words_in(experiment)
        participant = Participant(named, site, header.run_id, clock.should_stop, self.logger, pool=pool)
        if not site.simulated:
            refuse_other_run(participant.state, str(fl_ctx.get_job_id()), experiment)
            refuse_run_of_another(participant.state, site.name, fl_ctx)
        try:
            result = self._dispatch(participant, task_name, header, shareable)
        except TrainingStoppedError:
            clock.refuse_late()
            raise
        if result.amplitude is not None and site.amplitude_noise is not None:
            note_offer(fl_ctx, participant.amplitude_offer)
        if not site.simulated:
            scope: Mapping[str, Any] = fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES) or {}
            refuse_other_names(result.numbers, allowed_names(scope))
        self._report(task_name, header, result, fl_ctx)
        return pack_update(result)

    def _admitted(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext
    ) -> tuple[TaskHeader, SiteConfig, Experiment]:
        """What a task asks of this site, where the site's own settings and limits let it; nothing is read yet."""
        from harmofl.flare.network_size import refuse_large_network

        header = read_header(shareable)
        note_run(fl_ctx, header.run_id)
        site = site_config(fl_ctx)
        if site.settings.approval == "required" and not site.simulated:
            require_approval_of_running_job(fl_ctx)
        require_filter(fl_ctx, noise=site.amplitude_noise is not None)
        experiment = self._experiment(header, site, fl_ctx)
        header.refuse_misfit(task_name, experiment, simulated=site.simulated)
        refuse_excess(site, experiment, _count_sites(fl_ctx))
        refuse_large_network(experiment, site)
        return header, site, experiment

    @staticmethod
    def _experiment(header: TaskHeader, site: SiteConfig, fl_ctx: FLContext) -> Experiment:
        """The job's experiment, where this site may take part in it and resolves it as the server does."""
        if header.demo != site.demo:
            raise SiteError("demo_differs", _demo_difference(site.name, header.demo))
        experiment = resolve_job(fl_ctx, header.demo)
        _refuse_other_experiment(experiment, header, site.name)
        if experiment.federation.pooled_data and not site.simulated:
            raise SiteError("pooled_data", f"site {site.name} takes no part in training on pooled data")
        return experiment

    @staticmethod
    def _dispatch(participant, task_name: str, header: TaskHeader, shareable: Shareable) -> UpdateMessage:  # type: ignore[no-untyped-def]
        if task_name == AMPLITUDE_TASK:
            refuse_amplitude_task(participant.experiment)
            return participant.estimate_amplitude()
        received = unpack_model(shareable)
        begins = task_name == TRAIN_TASK and header.round_number == 0
        refuse_other_amplitude(participant.experiment, received.amplitude, first_round=begins)
        if task_name == TRAIN_TASK:
            return participant.train(header.round_number, received, header.best_round)
        return participant.evaluate(received, header.best_round)

    def _report(self, task_name: str, header: TaskHeader, result: UpdateMessage, fl_ctx: FLContext) -> None:
        """One line for whoever watches this site."""
        numbers, name = result.numbers, fl_ctx.get_identity_name()
        if task_name == TRAIN_TASK:
            scored = "received model not scored"
            if "validation" in numbers:
                score = numbers["validation"]
                scored = f"received model scores {'undefined' if score is None else f'{score:.3f}'} on validation"
            loss = numbers.get("loss")
            trained = (
                "not trained here" if loss is None else f"loss {loss:.3f} over {count_text(numbers['steps'], 'step')}"
            )
            PROGRESS.info(
                f"{name} round {header.round_number}: {scored}, {trained}, {numbers['seconds']:.0f} s",
            )
        elif task_name == AMPLITUDE_TASK and result.amplitude is not None:
            measured = result.amplitude
            images, patients = count_text(measured.images, "image"), count_text(measured.patients or 0, "patient")
            PROGRESS.info(f"{name}: amplitude of {images} of {patients} measured")

    def _explain(self, error: Exception, task_name: str, fl_ctx: FLContext) -> Shareable:
        """Turn an exception into a reply that may leave the site, and log the whole of it here."""
        from harmofl.core.training import TrainingError, TrainingStoppedError
        from harmofl.data.findings import DataRootError
        from harmofl.flare.devices import FullMemoryError, is_out_of_memory

        name = fl_ctx.get_identity_name()
        if isinstance(error, TrainingStoppedError):
            return make_reply(ReturnCode.TASK_ABORTED)
        if isinstance(error, SiteError):
            code, line = error.code, str(error)
        elif isinstance(error, DataRootError):
            # the message names folders: it stays here, the server gets the code
            code, line = "data_root", f"site {name}: its data folder cannot be used; see the site's log"
        elif isinstance(error, TrainingError | MessageError | ExperimentError):
            code, line = type(error).__name__, f"site {name}: {error}"
        elif is_out_of_memory(error):
            code = "out_of_memory"
            unsaid = f"site {name} ran out of memory; lower training.batch_size or data.height and data.width"
            line = str(error) if isinstance(error, FullMemoryError) else unsaid
        else:
            code, line = "internal_error", f"site {name} failed in {task_name} ({type(error).__name__}); see its log"
        self._log_detail(error, code == "internal_error", fl_ctx)
        self.log_error(fl_ctx, line)
        return error_reply(code, line)

    def _log_detail(self, error: Exception, unexpected: bool, fl_ctx: FLContext) -> None:
        """Log what may name files or patients where it stays at the site.

        FLARE's client kits stream error_log.txt, which takes errors, to the server: there it is a warning.
        """
        from harmofl.data.findings import DataRootError

        if not unexpected and not isinstance(error, DataRootError):
            return
        trace = "\n" + "".join(traceback.format_exception(error)) if unexpected else ""
        level = logging.ERROR if is_simulated(fl_ctx) else logging.WARNING
        FINDINGS.log(level, f"{fl_ctx.get_identity_name()}: {error}{trace}")


def _refuse_other_experiment(experiment: Experiment, header: TaskHeader, site: str) -> None:
    if experiment.hash != header.experiment_hash:
        raise SiteError(
            "experiment_differs",
            f"site {site} resolves experiment {experiment.hash}, the server {header.experiment_hash}; "
            f"both need the same job and the same harmofl version (rules here: {_rules_text()})",
        )


def _rules_text() -> str:
    return ", ".join(f"{name} {number}" for name, number in RULES.items())


def _demo_difference(site: str, server_demo: bool) -> str:
    if server_demo:
        return (
            f"the server runs the demo, but site {site} is set up with data of its own; it does not train on demo data"
        )
    return f"the server runs on real data, but site {site} found none; give it data (HARMOFL_DATA_ROOT)"


def _count_sites(fl_ctx: FLContext) -> int | None:
    """How many sites with data the server started this job at; None where FLARE does not say.

    A relay is a client of FLARE's, too, but no hospital: four of them must not make a limit of five sites hold.
    """
    meta = fl_ctx.get_prop(FLContextKey.JOB_META)
    clients = meta.get(JobMetaKey.JOB_CLIENTS) if isinstance(meta, Mapping) else None
    if not isinstance(clients, list):
        return None
    ways = [str(told.get(ClientDictKey.FQSN, "")) if isinstance(told, Mapping) else "" for told in clients]
    relays = {site for way in ways for site in way.split(".")[:-1]}
    names = [told.get(ClientDictKey.NAME) if isinstance(told, Mapping) else told for told in clients]
    leaf = [not isinstance(told, Mapping) or told.get(ClientDictKey.IS_LEAF) is not False for told in clients]
    return sum(is_leaf and name not in relays for name, is_leaf in zip(names, leaf, strict=True))
