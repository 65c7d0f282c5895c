"""HarmoFLScatterAndGather: FLARE's rounds, with the amplitude gathered and frozen and a final evaluation."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.bcast_manager import _KEY_MIN_RESPS
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.widgets.info_collector import InfoCollector

from harmofl.core.contributions import ContributionError
from harmofl.data.findings import count_text
from harmofl.evidence.results import RoundRecord
from harmofl.experiment import ExperimentError
from harmofl.flare.aggregator import AmplitudeGathering
from harmofl.flare.claims import check_amplitude, check_numbers, note_counts
from harmofl.flare.live import note_failure, tell_progress
from harmofl.flare.method_notes import amplitude_notes, method_notes
from harmofl.flare.persistor import best_weights, keep_received_if_best, save_at_the_end
from harmofl.flare.progress import PROGRESS, show_progress_on_console
from harmofl.flare.record import close_round, end_books, score_text, write_evidence
from harmofl.flare.relay_message import unpack_gathered
from harmofl.flare.round_norms import outlier_reasons, round_measure, round_warnings
from harmofl.flare.server_run import ServerRun, open_run, refuse_relays, relays_of
from harmofl.flare.site_messages import SiteMessages, guard_messages
from harmofl.flare.state import StateError
from harmofl.flare.task_header import AMPLITUDE_TASK, EVALUATE_TASK, TRAIN_TASK
from harmofl.flare.wire import (
    MessageError,
    ModelMessage,
    UpdateMessage,
    pack_model,
    payload_bytes,
    read_error,
    unpack_update,
)
from harmofl.sections import names_text, outside_text


class HarmoFLScatterAndGather(ScatterAndGather):
    """Adds to ScatterAndGather the amplitude, a count of accepted results, the best round, evaluation and resume.

    Rounds, time limits and the number of sites come from experiment.json, not from FLARE's own configuration.
    """

    run: ServerRun
    messages: SiteMessages

    def __init__(
        self,
        aggregator_id: str = "aggregator",
        persistor_id: str = "persistor",
        shareable_generator_id: str = "shareable_generator",
    ) -> None:
        """Name the components; everything else is read when the job starts."""
        super().__init__(
            min_clients=1,
            num_rounds=1,
            aggregator_id=aggregator_id,
            persistor_id=persistor_id,
            shareable_generator_id=shareable_generator_id,
            train_task_name=TRAIN_TASK,
            snapshot_every_n_rounds=0,
        )
        self._closing_lines: list[str] = []
        self._asked: list[str] = []  # who gets tasks from the server: sites, and relays in the place of theirs
        show_progress_on_console()

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Resolve the experiment, take over a checkpoint where the job names one, announce the run."""
        try:
            clients = self._engine.get_clients()
            relays = relays_of(clients)
            self.run = open_run(fl_ctx, [client.name for client in clients if client.name not in relays])
            self.run.relays = relays
            behind = frozenset[str]().union(*relays.values())
            self._asked = [client.name for client in clients if client.name not in behind]
            refuse_relays(self.run.experiment, clients)
            self.run.begin("before its first task")
            self.messages = guard_messages(self.run, fl_ctx)
            self._keep_on_without_lost_sites(fl_ctx)
            settings = self.run.experiment.federation
            if settings.minimum_sites > len(self.run.expected):
                raise ExperimentError(
                    f"federation.minimum_sites is {settings.minimum_sites}, but connected: "
                    f"{count_text(len(self.run.expected), 'site')} ({names_text(self.run.expected)})"
                )
            self._min_clients = settings.minimum_sites
            self._wait_time_after_min_received = settings.straggler_wait
            self._train_timeout = settings.round_timeout
            self._start_round = self.run.start_round
            self._num_rounds = max(0, settings.rounds - self.run.start_round)
            self.allow_empty_global_weights = not self.run.has_global_model
            self._announce()
            super().start_controller(fl_ctx)
        except (ExperimentError, StateError, ValueError, OSError) as error:
            self.system_panic(str(error), fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Gather the amplitude where it is estimated before training, run the rounds, evaluate, write the evidence."""
        if abort_signal.triggered:  # starting has failed
            return
        run = self.run
        if run.gathers_before_training and run.amplitude is None:
            self._gather_amplitude(abort_signal, fl_ctx)
        if abort_signal.triggered:
            return
        super().control_flow(abort_signal, fl_ctx)
        if not abort_signal.triggered and self._current_round == run.experiment.federation.rounds:
            self._evaluate(abort_signal, fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Close the round's books between the last answer and the aggregation."""
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.ROUND_STARTED:
            self.run.begin(f"in round {self._current_round}")
            self._min_clients = self.run.needed_sites(with_amplitude=self.run.estimates_in_first_round)
        elif event_type == AppEventType.BEFORE_AGGREGATION:
            try:
                self._before_aggregation(fl_ctx)
            except Exception as error:  # FLARE would log what an event handler raises and go on
                self.log_exception(fl_ctx, "closing the round failed")
                self.system_panic(f"round {self._current_round} could not be closed: {error}", fl_ctx)
        elif event_type == InfoCollector.EVENT_TYPE_GET_STATS and hasattr(self, "run"):
            tell_progress(self.run, fl_ctx)
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            # whose weights the sites could not go on with: FLARE itself ends a round in which one site too many failed
            reasons = outlier_reasons(self.run) if hasattr(self, "run") else ""
            told = str(fl_ctx.get_prop(FLContextKey.EVENT_DATA))
            note_failure(Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)), told + reasons)
        elif event_type == EventType.END_RUN:
            # the last lines of the run, after what the framework says while it ends the sites' processes
            end_books(getattr(self, "run", None), self._closing_lines)

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Refuse an answer that came after its task had ended."""
        self.log_warning(fl_ctx, f"{client.name}: answer to {task_name} came too late and is not used")

    def _prepare_train_task_data(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        self._expect_answer(client_task, fl_ctx)
        super()._prepare_train_task_data(client_task, fl_ctx)

    def _expect_answer(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Note which answer a site owes: one that cannot be decoded does not say itself to what it belongs."""
        self.messages.expects[client_task.client.name] = client_task.task.name, client_task.id

    def broadcast_and_wait(self, task: Task, fl_ctx: FLContext, **how: Any) -> None:
        """As FLARE does; where relays stand between, each of them must answer, as one answer is that of many sites."""
        if self.run.relays:
            how |= {"targets": self._asked, "min_responses": len(self._asked)}
            round_measure(self.run).attach(task.data)
        super().broadcast_and_wait(task=task, fl_ctx=fl_ctx, **how)

    def _process_train_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        super()._process_train_result(client_task, fl_ctx)
        if client_task.client.name in self.run.relays:
            for site in self.run.relays[client_task.client.name]:
                self.run.answered(site)
            return
        self.run.answered(client_task.client.name)
        if client_task.client.name not in self.aggregator.accepted or self._silent_beyond_need(client_task.client.name):
            _wait_for_one_more(client_task.task)

    def _silent_beyond_need(self, site: str) -> bool:
        """Whether this answer brought no amplitude while one is estimated, and one more site must bring its own."""
        if not self.run.estimates_in_first_round or self.run.amplitude is not None:
            return False
        gathered = self.aggregator.gathered_amplitude()
        silent = set(self.aggregator.accepted) - set(gathered.sites if gathered else [])
        return site in silent and len(silent) > self.run.silent_sites_to_spare

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        self._note_failure(client_name, result, fl_ctx)
        accepted: bool = super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task)
        return accepted

    def _keep_on_without_lost_sites(self, fl_ctx: FLContext) -> None:
        """FLARE ends a job as soon as fewer sites are left than it took to begin; here a round needs its minimum."""
        meta = fl_ctx.get_prop(FLContextKey.JOB_META)
        if isinstance(meta, dict):
            needed = {JobMetaKey.MIN_CLIENTS.value: self.run.experiment.federation.minimum_sites}
            fl_ctx.set_prop(FLContextKey.JOB_META, {**meta, **needed}, private=True, sticky=True)

    def _announce(self) -> None:
        run = self.run
        if run.demo:
            PROGRESS.info("DEMO: no data root is set, all sites train on synthetic data; no clinical meaning")
        start = f", resumed at round {run.start_round}" if run.start_round else ""
        PROGRESS.info(
            f"experiment {run.experiment.name} {run.experiment.hash}, method {run.experiment.method}, "
            f"{count_text(run.experiment.federation.rounds, 'round')}, sites {names_text(run.expected)}{start}",
        )
        for note in method_notes(run):
            PROGRESS.info(f"note: {note}")

    def _before_aggregation(self, fl_ctx: FLContext) -> None:
        """Check that enough sites were accepted, freeze an amplitude that came along, pick the best round."""
        run, accepted = self.run, sorted(self.aggregator.accepted)
        if len(accepted) < self._min_clients:
            missing = self.run.reasons([site for site in run.expected if site not in accepted], "no answer")
            self.system_panic(
                f"round {self._current_round}: {len(accepted)} of {len(run.expected)} sites accepted, "
                f"{self._min_clients} needed ({missing})",
                fl_ctx,
            )
            return
        gathered = self.aggregator.gathered_amplitude()
        if run.estimates_in_first_round and run.amplitude is None and not self._freeze(gathered, fl_ctx):
            return
        record = close_round(run, self._current_round, accepted)
        run.closed.append(time.monotonic())
        PROGRESS.info(
            f"round {record.round}: {len(accepted)} of {len(run.expected)} sites accepted, {_scored(run, record)}",
        )
        for line in round_warnings(record):
            PROGRESS.warning(line)
        keep_received_if_best(run, record, fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS])

    def _gather_amplitude(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        gathering = AmplitudeGathering(self.run.experiment)
        silent: set[str] = set()

        def received(site: str, update: UpdateMessage) -> bool:
            check_numbers(site, update, self.run, AMPLITUDE_TASK)
            if update.amplitude is None:
                note_counts(site, update, self.run)
                self.run.count_bytes(site, payload_bytes(update))
                self.log_warning(fl_ctx, f"{site}: sends no amplitude; it trains with the global one")
                self.run.refused[site] = "sent none"
                silent.add(site)
                return len(silent) <= self.run.silent_sites_to_spare
            gathering.check(update.amplitude)
            check_amplitude(update.amplitude, update, self.run)
            gathering.add(site, update.amplitude)
            self.run.count_bytes(site, payload_bytes(update))
            note_counts(site, update, self.run)
            return True

        needed = self.run.needed_sites(with_amplitude=True)
        self._ask(AMPLITUDE_TASK, Shareable(), abort_signal, fl_ctx, needed=needed, received=received)
        if not abort_signal.triggered:
            self._freeze(gathering, fl_ctx)

    def _freeze(self, gathering: AmplitudeGathering | None, fl_ctx: FLContext) -> bool:
        run = self.run
        sites = sorted(gathering.sites) if gathering else []
        needed = run.experiment.amplitude.minimum_sites
        if gathering is None or len(sites) < needed:
            missing = [site for site in run.expected if site not in sites]
            silent = "no answer" if run.gathers_before_training else "sent none"
            self.system_panic(
                f"the amplitude of {count_text(len(sites), 'site')} arrived, amplitude.minimum_sites is {needed} "
                f"({self.run.reasons(missing, silent)}); a site sends none of fewer training patients than "
                "amplitude.minimum_cases or its own limit, nor one that its ledger of earlier releases holds back",
                fl_ctx,
            )
            return False
        run.amplitude, run.amplitude_sites = gathering.result(), sites
        run.amplitude_patients = dict(gathering.patients)
        run.amplitude_noise = {site: said.model_dump() for site, said in gathering.noise.items()}
        PROGRESS.info(f"amplitude frozen: {count_text(run.amplitude.images, 'image')} of {names_text(sites)}")
        for note in amplitude_notes(run):
            PROGRESS.info(f"note: {note}")
        return True

    def _evaluate(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Have every site score the final and the best model on its test data, then write the evidence."""
        run = self.run
        weights = self._global_weights[ModelLearnableKey.WEIGHTS]
        answers: dict[str, UpdateMessage] = {}
        task_data = pack_model(ModelMessage(run.for_sites(weights), run.amplitude, best_weights(run)))

        def received(site: str, update: UpdateMessage) -> bool:
            check_numbers(site, update, run, EVALUATE_TASK)
            run.count_bytes(site, payload_bytes(update))
            answers[site] = update
            return True

        needed = self.run.needed_sites(with_amplitude=False)
        self._ask(EVALUATE_TASK, task_data, abort_signal, fl_ctx, needed=needed, received=received)
        if abort_signal.triggered:
            return
        validation = {site: answer.numbers.get("validation") for site, answer in answers.items()}
        save_at_the_end(weights, run, validation, self._current_round)
        failure = run.shortfall(answers)
        self._closing_lines = write_evidence(run, {site: told.numbers for site, told in answers.items()}, failure)
        if failure:  # the evidence of what was trained is kept, but the job has failed
            self.system_panic(failure, fl_ctx)
            return
        run.finish()

    def _ask(
        self,
        task_name: str,
        data: Shareable,
        abort_signal: Signal,
        fl_ctx: FLContext,
        *,
        needed: int,
        received: Callable[[str, UpdateMessage], bool],
    ) -> None:
        """Send one task to all sites and hand every readable answer to `received`, until it has taken `needed`."""
        lost: set[str] = set()

        def take(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site, result, client_task.result = client_task.client.name, client_task.result, None
            if site in self.run.relays:
                self._take_gathered(site, result, task_name, received, fl_ctx)
                return
            self.run.answered(site)
            try:
                if not self._note_failure(site, result, fl_ctx) and received(site, unpack_update(result)):
                    return
            except (ContributionError, MessageError) as error:
                self._refuse(site, task_name, str(error), fl_ctx)
            except Exception as error:  # a value that cannot even be read; FLARE would only log it, and wait on
                self._refuse(site, task_name, f"unreadable answer ({type(error).__name__})", fl_ctx)
            lost.add(site)
            if len(self.run.expected) - len(lost) >= needed:  # else nobody is left to wait for
                _wait_for_one_more(client_task.task)

        self.run.begin("while the amplitude was gathered" if task_name == AMPLITUDE_TASK else "during the evaluation")
        self.run.header(self._current_round or self._start_round).attach(data)
        task = Task(task_name, data, timeout=self._train_timeout, result_received_cb=take)
        task.before_task_sent_cb = self._expect_answer
        self.broadcast_and_wait(
            task=task,
            min_responses=needed,
            wait_time_after_min_received=self._wait_time_after_min_received,
            fl_ctx=fl_ctx,
            abort_signal=abort_signal,
        )

    def _take_gathered(
        self,
        relay: str,
        result: Shareable,
        task_name: str,
        received: Callable[[str, UpdateMessage], bool],
        fl_ctx: FLContext,
    ) -> None:
        """Hand on the answers of a relay's sites, each as if it had come by itself."""
        behind = self.run.relays[relay]
        for site in behind:
            self.run.answered(site)
        try:
            if self._note_failure(relay, result, fl_ctx):
                return
            gathered = unpack_gathered(result)
        except Exception as error:  # a value that cannot even be read
            told = str(error) if isinstance(error, ContributionError | MessageError) else type(error).__name__
            self._refuse(relay, task_name, told, fl_ctx)
            return
        self.run.refused.update({site: reason for site, reason in gathered.refused.items() if site in behind})
        for site, update in gathered.updates.items():
            try:
                if site not in behind:
                    raise MessageError(f"no site of relay {relay}")
                received(site, update)
            except (ContributionError, MessageError) as error:
                self._refuse(site, task_name, str(error), fl_ctx)
            except Exception as error:
                self._refuse(site, task_name, f"unreadable answer ({type(error).__name__})", fl_ctx)

    def _refuse(self, site: str, task_name: str, reason: str, fl_ctx: FLContext) -> None:
        self.run.refused[site] = reason
        self.log_error(fl_ctx, f"{outside_text(site)}: answer to {task_name} refused: {reason}")

    def _note_failure(self, site: str, result: Shareable, fl_ctx: FLContext) -> bool:
        """Log and keep why a site could not do its task; True where it could not."""
        if result.get_return_code() in (ReturnCode.OK, None):
            return False
        code, reason = read_error(result)
        self.run.refused[site] = f"{code}: {reason}"
        self.log_error(fl_ctx, f"{outside_text(site)} failed: {code}: {reason}")
        return True


def _wait_for_one_more(task: Task) -> None:
    """FLARE counts failed and refused answers as responses; a task still needs its minimum of good ones."""
    task.props[_KEY_MIN_RESPS] += 1


def _scored(run: ServerRun, record: RoundRecord) -> str:
    """What a round says of the model that it began with."""
    if not run.experiment.federation.validates(record.round):
        return "received model not scored"
    return f"received model scores {score_text(record.validation_mean)} on validation"
