"""What a site computes for each task: amplitude statistic, one round of training, evaluation."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.device_kinds import precision_in_effect
from harmofl.core.kept_memory import kept_memory
from harmofl.core.layout import placed
from harmofl.core.parallel import ALONE, ProcessGroup
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import (
    NotFiniteError,
    RoundResult,
    TrainingStoppedError,
    arrays_sha256,
    batches,
    predict,
    seed_of,
)
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.devices import (
    check_several,
    described,
    full_memory,
    is_out_of_memory,
    main_device,
    make_deterministic,
)
from harmofl.flare.image_cache import image_cache
from harmofl.flare.local_amplitude import BLANK_IMAGE, RELEASES, LocalAmplitude, build_normalization
from harmofl.flare.local_model import LocalModel
from harmofl.flare.local_processes import Assignment, shared_round
from harmofl.flare.pooled_data import pooled
from harmofl.flare.progress import FINDINGS, SiteLogger, log_findings
from harmofl.flare.released_scores import released_scores, released_validation
from harmofl.flare.releases import Offer
from harmofl.flare.round_start import RoundStart, failed_to_compile, round_optimizer, round_settings
from harmofl.flare.rule_memory import keep_rules, refuse_other_rules
from harmofl.flare.shared_data import data_folder, demo_folder
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_limits import limits_in_force, refuse_few_patients
from harmofl.flare.split_memory import changed_split, open_with_kept_split
from harmofl.flare.state import SiteState
from harmofl.flare.wire import AmplitudeStatistic, Arrays, MessageError, ModelMessage, UpdateMessage
from harmofl.tasks import Evaluation, SiteData, load_task, untrained_network

MOST_WORKERS = 4  # decoding patches keeps up with a GPU then


class Participant:
    """One site in one run. Nothing it needs for the next task is kept in memory alone."""

    def __init__(
        self,
        experiment: Experiment,
        site: SiteConfig,
        run_id: str,
        should_stop: Callable[[], bool],
        logger: Logger,
        *,
        pool: Mapping[str, Path | None] | None = None,
    ) -> None:
        """Bind a resolved experiment to a site; nothing is read yet.

        Args:
            experiment: as the server resolved it.
            site: this site's own settings.
            run_id: issued by the server.
            should_stop: asked between batches.
            logger: this site's.
            pool: in a run on pooled data the data root of every site by name, None for demo data; the first trains.

        Raises:
            SiteError: this site's state of the run was made by other rules, see `harmofl.experiment.RULES`.
        """
        self._experiment, self._pool = experiment, dict(pool or {})
        self._site, self._run_id = site, run_id
        self._state = SiteState(site.state_root / "state", run_id)
        refuse_other_rules(self._state)
        self._should_stop = should_stop
        self._logger = SiteLogger(logger, site.name)
        self._task = load_task(experiment)
        self._local = LocalModel(experiment, self._state, self._logger)
        if site.threads:
            torch.set_num_threads(site.threads)

    @property
    def experiment(self) -> Experiment:
        """The experiment of the run."""
        return self._experiment

    @cached_property
    def data(self) -> SiteData:
        """This site's data, read once a process; findings are logged here and leave the site as counts only."""
        keep_rules(self._state)
        if self._pool and self._trains:
            data = pooled(self._site.name, {name: self._open(name, root) for name, root in self._pool.items()})
        else:
            data = self._open(self._site.name, self._site.data_root)
        self._log_findings(data)
        if not data.cases.get("training"):
            raise SiteError("no_data", f"site {self._site.name} has no case to train on; run harmofl check at the site")
        items, patients = len(data.training), len(data.training_patients)
        if items != patients:
            raise SiteError(
                "patients",
                f"task {self._experiment.task} names {count_text(patients, 'patient')} of {count_text(items, 'item')}",
            )
        if changed := changed_split(self._state, data):
            FINDINGS.warning(f"{self._site.name}: {changed}")
            data.findings.append(changed)
        return data

    @property
    def state(self) -> SiteState:
        """What this site remembers of the run."""
        return self._state

    @property
    def _trains(self) -> bool:
        return not self._pool or self._site.name == min(self._pool)

    def _open(self, name: str, root: Path | None) -> SiteData:
        experiment = self._experiment
        if root is None and not self._site.simulated:
            raise SiteError("no_data_root", f"site {self._site.name} makes no demo data: it is not simulated")
        with data_folder(self._site, name) as folder:
            if root is None:
                cases = demo_folder(folder, name, experiment)
                self._task.write_demo(cases, name, experiment)
            else:
                cases = self._task.locate(root, name, experiment)
            cache = image_cache(folder / "cache", experiment)

            def read() -> SiteData:
                return self._task.open_site(cases, name, experiment, cache)

            return read() if self._site.simulated else open_with_kept_split(self._site, experiment, self._run_id, read)

    def _log_findings(self, data: SiteData) -> None:
        """Log what was found once a run, not in every task."""
        if self._state.load_once("findings") is None:
            log_findings(self._site.name, data.findings)
            self._state.save_with_round("findings", {"count": len(data.findings)})

    def _log_late_findings(self) -> None:
        """Log what came up while training or scoring decoded files."""
        for finding in self.data.late_findings():
            FINDINGS.warning(f"{self._site.name}: {finding}")

    @cached_property
    def _amplitude(self) -> LocalAmplitude:
        def images(dataset: "Dataset[Any]") -> Iterator[Tensor]:
            for batch, _ in batches(dataset, self._experiment.training.batch_size, None, self._workers, self.device):
                self._stop_if_asked()
                yield batch

        return LocalAmplitude(
            self._experiment,
            self._task.in_channels,
            site=self._site,
            state=self._state,
            data=self.data,
            images=images,
            logger=self._logger,
        )

    @cached_property
    def device(self) -> torch.device:
        """The first device that this site's settings name, or the GPU where there is one."""
        device = main_device(self._site)
        self._logger.info(f"computes on {described(device)}")
        return device

    def estimate_amplitude(self) -> UpdateMessage:
        """The mean of the training images' amplitude statistics, as far as it may leave (`before_training`)."""
        refuse_few_patients(self._site, self.data.patient_count)
        measured = self._amplitude.before_training()
        return UpdateMessage(amplitude=measured, numbers=self._counts())

    @property
    def amplitude_offer(self) -> Offer | None:
        """What the site's filter holds against the ledger before it adds noise; None where it adds none."""
        return self._amplitude.offer

    def train(self, round_number: int, received: ModelMessage, best_round: int | None = None) -> UpdateMessage:
        """Score the received model on validation data, if it is due, train it, answer with the difference.

        Args:
            round_number: of this round.
            received: the entries that travel, and the amplitude once it is frozen.
            best_round: the best one so far, whose local layers are kept.
        """
        keep_rules(self._state)
        started = time.monotonic()
        weights_leave = self._experiment.federation.local_layers != "all"
        refuse_few_patients(self._site, self.data.patient_count, weights_leave=weights_leave)
        make_deterministic(self.device)
        network = self._placed(self._local.before_round(received.weights, round_number))
        normalization = self._normalization(received.amplitude)
        validation: dict[str, Any] = {}  # not scored, which is no undefined score
        if self._experiment.federation.validates(round_number):
            validation = self._validation(self._evaluate(network, normalization, "validation", "received"))
            if self._local.begins_anew:
                validation["validation"] = None
        before = self._local.shared(network)
        numbers = self._counts() | validation | {"received_sha256": arrays_sha256(before)}
        if not self._trains:
            return UpdateMessage(numbers=numbers | {"seconds": round(time.monotonic() - started, 2)})
        optimizer = self._optimizer(network, round_number)
        seed = seed_of(self._experiment.seed, self._site.name, round_number)
        start = RoundStart(network, normalization, optimizer, self._local.previous(round_number), seed)
        with self._group(start) as (group, should_stop):
            result = self._fit(start, should_stop, group)
        self._log_late_findings()
        difference = self._local.change(before, network)
        statistic = None if received.amplitude is not None else self._amplitude.of_first_round(normalization)
        # not before: a job that fails until it has trained leaves the state as it was
        self._local.keep_best(best_round)
        kept = self._local.remembered(network)
        self._state.save_round(round_number, {"optimizer": optimizer.state_dict(), **kept})
        numbers |= self._releases() | {
            "steps": result.steps,
            "skipped_steps": result.skipped_steps,
            "images": result.images,
            "loss": result.loss,
            "seconds": round(time.monotonic() - started, 2),
        }
        return UpdateMessage(difference, statistic, numbers)

    def take_part(self, packed: bytes, group: ProcessGroup) -> None:
        """Train this process's part of a round that another process of this site began; the result is that one's.

        Args:
            packed: what that process packed of its `RoundStart`.
            group: of both.
        """
        make_deterministic(self.device)
        network = self._placed(untrained_network(self._experiment))
        normalization = build_normalization(self._experiment, self._task.in_channels).to(self.device)
        start = RoundStart.unpacked(packed, network, normalization, round_optimizer(self._experiment, network))
        self._fit(start, self._should_stop, group)

    def evaluate(self, received: ModelMessage, best_round: int | None = None) -> UpdateMessage:
        """Score the final and the best model on the test data, which no other task touches.

        Args:
            received: both models, and the amplitude.
            best_round: the round whose local layers belong to the best model.
        """
        normalization = self._normalization(received.amplitude)
        network = self._placed(self._local.last(received.weights))
        final_validation = self._evaluate(network, normalization, "validation", "final")
        scored = {"final": self._evaluate(network, normalization, "test", "final")}
        if received.best_weights is not None:
            network = self._placed(self._local.best(received.best_weights, best_round))
            scored["best"] = self._evaluate(network, normalization, "test", "best")
        self._log_late_findings()
        tested = released_scores(scored, self._site.limits)
        told = self._validation(final_validation)
        if not_sent := tested.pop("not_sent", {}) | told.pop("not_sent", {}):
            told["not_sent"] = not_sent
        return UpdateMessage(numbers=self._counts() | told | tested)

    def _validation(self, evaluation: Evaluation) -> dict[str, Any]:
        return released_validation(evaluation, self._task.key_score, self._site.limits)

    def network(self, weights: Arrays) -> nn.Module:
        """This site's network with float32 weights that no message brought, on its device."""
        return self._placed(self._local.of_weights(weights))

    def normalization(self, amplitude: AmplitudeStatistic | None) -> AmplitudeNormalization:
        """The intensity and amplitude step in front of this site's network, on its device."""
        return self._normalization(amplitude)

    def _placed(self, network: nn.Module) -> nn.Module:
        return placed(network, self.device, self._site.compile)

    def _normalization(self, amplitude: AmplitudeStatistic | None) -> AmplitudeNormalization:
        normalization = build_normalization(self._experiment, self._task.in_channels).to(self.device)
        if amplitude is None:
            return normalization
        try:
            normalization.freeze(torch.as_tensor(amplitude.values), amplitude.images)
        except ValueError as error:
            raise MessageError(f"the amplitude received cannot be used: {error}") from None
        if self._experiment.amplitude.region == "site_gain":
            normalization.set_own(self._amplitude.own_profile())
        return normalization

    def _optimizer(self, network: nn.Module, round_number: int) -> WeightPerturbation:
        """The optimizer of a round, with the moments of the one before where they are kept."""
        optimizer = round_optimizer(self._experiment, network)
        if self._experiment.training.keep_moments and round_number > 0:
            self._restore(optimizer, round_number)
        return optimizer

    def _restore(self, optimizer: WeightPerturbation, round_number: int) -> None:
        held = self._state.load_round(round_number - 1)
        if held is None:
            self._logger.warning(f"round {round_number}: no state of round {round_number - 1}; moments start anew")
            return
        optimizer.load_state_dict(held["optimizer"])

    @cached_property
    def _workers(self) -> int:
        """Loader processes: the site's, else some where a task decodes images when asked for them; kept as it is."""
        if self._site.workers is not None:
            return self._site.workers
        return min(MOST_WORKERS, torch.get_num_threads()) if self._task.decodes_on_access else 0

    def _evaluate(
        self,
        network: nn.Module,
        normalization: AmplitudeNormalization,
        split: Literal["validation", "test"],
        which: str,
    ) -> Evaluation:
        """Score a split; `which` names the model in what is said where it cannot be scored.

        Raises:
            NotFiniteError: the model's output is not finite.
        """
        settings, cases = self._experiment.training, {"validation": self.data.validation, "test": self.data.test}

        def logits(images: Tensor) -> Tensor:
            self._stop_if_asked()
            return predict(network, normalization, images, settings.batch_size, settings.precision)

        try:
            with kept_memory(self.device):
                return self._task.evaluate(logits, cases[split], workers=self._workers)
        except NotFiniteError as error:
            fix = "lower training.learning_rate or federation.server_learning_rate"
            raise NotFiniteError(f"the {which} model cannot be scored on {split} data: {error}; {fix}") from None

    def _group(self, start: RoundStart) -> AbstractContextManager[tuple[ProcessGroup, Callable[[], bool]]]:
        """The processes that share a round, and what to ask between its batches."""
        if len(self._site.devices) == 1:
            return nullcontext((ALONE, self._should_stop))
        check_several(self._site, start.network)
        self._logger.info(
            f"trains in {count_text(len(self._site.devices), 'process', 'processes')}: {', '.join(self._site.devices)}"
        )
        site = replace(self._site, workers=self._workers)  # chosen by the threads of one process
        assignment = Assignment(self._experiment, site, self._run_id, self._pool, self._task, start.packed())
        return shared_round(assignment, self._should_stop)

    def _fit(self, start: RoundStart, should_stop: Callable[[], bool], group: ProcessGroup) -> RoundResult:
        how = round_settings(self._experiment, self._workers, self._site.compile)
        try:
            return start.fit(
                self._experiment, how, self._task.loss(), self.data.training, should_stop=should_stop, group=group
            )
        except Exception as error:
            if how.compile and (refused := failed_to_compile(error, self._site)):
                raise refused from None
            if is_out_of_memory(error):
                raise full_memory(self._site, self._experiment) from None
            raise

    def _counts(self) -> dict[str, Any]:
        data, blank = self.data, self._amplitude.blank_images
        warned = data.warned | ({BLANK_IMAGE: blank} if blank else {})
        precision = precision_in_effect(self.device, self._experiment.training.precision)
        counts = {
            "cases": data.cases,
            "skipped": data.skipped(),
            "warnings": warned,
            "demo": self._site.demo,
            "precision": precision,
        }
        in_force = limits_in_force(self._site)
        return counts | self._releases() | ({"limits": in_force} if in_force else {})

    def _releases(self) -> dict[str, Any]:
        """How many amplitudes have left this site, as far as this run knows; nothing where there is no ledger."""
        held = self._state.load_once(RELEASES)
        return {} if held is None else {RELEASES: held}

    def _stop_if_asked(self) -> None:
        if self._should_stop():
            raise TrainingStoppedError("stopped between two batches")
