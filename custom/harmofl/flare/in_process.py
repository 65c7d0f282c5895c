"""InProcessFederation: the rounds of a job in one process, without FLARE, for comparisons of many runs."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmofl.core.drift import Drift, client_drift
from harmofl.core.training import arrays_sha256
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.aggregator import AmplitudeGathering
from harmofl.flare.claims import check_amplitude, check_numbers, note_counts
from harmofl.flare.participant import Participant
from harmofl.flare.persistor import best_weights, keep_received_if_best, save_at_the_end
from harmofl.flare.record import close_round, mean_validation, write_evidence
from harmofl.flare.round_norms import add_difference, open_round
from harmofl.flare.server_run import ServerRun
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.task_header import AMPLITUDE_TASK, EVALUATE_TASK, TRAIN_TASK
from harmofl.flare.wire import Arrays, ModelMessage, UpdateMessage, payload_bytes


@dataclass(frozen=True)
class FinishedRun:
    """What a run knows at its end beside the files that it wrote.

    Attributes:
        final_validation: mean over sites of the validation score of the last model.
        drift: client drift by round.
        unseen: scores of the sites that took no part, in the form of a site's answer to the evaluation.
        scoring_seconds: of the evaluation after the last round.
        report_seconds: of writing results.json and report.html.
        trained_from: the weights that the last round began with, and by site what its training added to them.
    """

    final_validation: float | None
    drift: list[Drift]
    unseen: dict[str, dict[str, Any]]
    scoring_seconds: float
    report_seconds: float
    trained_from: Arrays
    differences: dict[str, Arrays]


class InProcessFederation:
    """All sites of an experiment side by side, by the code that sites and server run under FLARE.

    Participants, mean, amplitude gathering, best-round rule and evidence are those of the job; what FLARE adds, the
    transport and its rules for sites that fail, is left out: here a site that fails ends the run. Weights, best round
    and scores are held bit for bit against FLARE's runs for the settings in tests/federation/test_in_process.py.
    """

    def __init__(
        self,
        experiment: Experiment,
        sites: Iterable[str],
        folder: Path,
        data_roots: Mapping[str, Path] | None = None,
        *,
        unseen: Iterable[str] = (),
        shared_data: Path | None = None,
        threads: int | None = 1,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the run; nothing is read yet.

        Args:
            experiment: resolved as the sites' data demands.
            sites: names of the sites that train.
            folder: receives the evidence and model files in `run/`, the sites' state in `sites/`.
            data_roots: by site the root of its data; None trains on demo data.
            unseen: sites that take no part and are only evaluated.
            shared_data: where demo data and decoded images are kept for other runs too; None keeps them in `sites/`.
            threads: of torch; None leaves them as they are.
            should_stop: asked between batches.
        """
        run_folder = folder / "run"
        run_folder.mkdir(parents=True, exist_ok=True)
        self.experiment = experiment
        self.run_state = ServerRun(experiment, data_roots is None, run_folder, sorted(sites))
        self.unseen = sorted(unseen)
        self.weights: Arrays = self.run_state.initial_weights()
        pool = {site: data_roots[site] if data_roots else None for site in self.run_state.expected}
        self.participants = {
            site: Participant(
                experiment,
                SiteConfig(
                    site,
                    simulated=True,
                    data_root=data_roots[site] if data_roots else None,
                    state_root=folder / "sites" / site,
                    shared_data=shared_data,
                    workers=None if data_roots else 0,
                    threads=threads,
                    minimum_cases=1,  # as in the simulator: the job's own minimum holds
                ),
                self.run_state.run_id,
                should_stop,
                logging.getLogger(f"harmofl.{site}"),
                pool=pool if experiment.federation.pooled_data and site in pool else None,
            )
            for site in [*self.run_state.expected, *self.unseen]
        }

    def run(self) -> FinishedRun:
        """Gather the amplitude, train all rounds, evaluate, write results.json, round_metrics.jsonl and the models.

        Raises:
            SiteError: too few sites may send their amplitude; also whatever a site's training raises.
        """
        run, drift = self.run_state, []
        if run.gathers_before_training:
            self.gather_amplitude()
        differences: dict[str, Arrays] = {}
        before = self.weights
        for round_number in range(self.experiment.federation.rounds):
            before = self.weights
            differences = self.train_round(round_number)
            drift.append(client_drift(list(differences.values()), self.run_state.partition.parameters))
        trained = time.monotonic()
        answers = self._evaluate()
        task, best = self._final_task(), run.best_round
        unseen = {site: self.participants[site].evaluate(task, best).numbers for site in self.unseen}
        scored = time.monotonic()
        write_evidence(run, answers)
        seconds = (scored - trained, time.monotonic() - scored)
        return FinishedRun(mean_validation(run.final_validation), drift, unseen, *seconds, before, differences)

    def gather_amplitude(self) -> None:
        """Freeze the mean of the amplitudes that sites measure before training."""
        updates = {site: self.participants[site].estimate_amplitude() for site in self.run_state.expected}
        for site, update in updates.items():
            self._take(site, update, AMPLITUDE_TASK)
        self._freeze(updates)

    def train_round(self, round_number: int) -> dict[str, Arrays]:
        """Train one round at every site and move the global model; returns what each site's training added."""
        run = self.run_state
        run.model_sha256 = arrays_sha256(self.weights)
        received = ModelMessage(self.weights, run.amplitude)
        updates = {site: self.participants[site].train(round_number, received, run.best_round) for site in run.expected}
        mean = open_round(run, self.weights)
        for site, update in updates.items():
            self._take(site, update, TRAIN_TASK)
            if update.difference is not None:  # of pooled data one site trains
                add_difference(mean, site, update, run)
            run.numbers[site] = update.numbers
        if run.estimates_in_first_round and run.amplitude is None:
            self._freeze(updates)
        record = close_round(run, round_number, list(run.expected))
        run.closed.append(time.monotonic())
        keep_received_if_best(run, record, self.weights)
        self.weights = run.rule.next_model(self.weights, mean.mean())
        return {site: update.difference for site, update in updates.items() if update.difference is not None}

    def _take(self, site: str, update: UpdateMessage, task_name: str) -> None:
        check_numbers(site, update, self.run_state, task_name)
        note_counts(site, update, self.run_state)
        self.run_state.count_bytes(site, payload_bytes(update))

    def _freeze(self, updates: Mapping[str, UpdateMessage]) -> None:
        run, gathering = self.run_state, AmplitudeGathering(self.experiment)
        for site, update in updates.items():
            if update.amplitude is not None:
                check_amplitude(update.amplitude, update, run)
                gathering.add(site, update.amplitude)
        needed = self.experiment.amplitude.minimum_sites
        if len(gathering.sites) < needed:
            silent = ", ".join(site for site in updates if site not in gathering.sites)
            raise SiteError(
                "amplitude",
                f"the amplitude of {count_text(len(gathering.sites), 'site')} arrived, amplitude.minimum_sites is "
                f"{needed} ({silent} sent none); a site sends none of fewer training patients than "
                "amplitude.minimum_cases",
            )
        run.amplitude, run.amplitude_sites = gathering.result(), sorted(gathering.sites)
        run.amplitude_patients = dict(gathering.patients)

    def _final_task(self) -> ModelMessage:
        return ModelMessage(self.weights, self.run_state.amplitude, best_weights(self.run_state))

    def _evaluate(self) -> dict[str, dict[str, Any]]:
        """Score final and best model on the test data and settle which is best; returns the sites' numbers."""
        run = self.run_state
        task = self._final_task()
        answers = {site: self.participants[site].evaluate(task, run.best_round) for site in run.expected}
        for site, answer in answers.items():
            self._take(site, answer, EVALUATE_TASK)
        validation = {site: answer.numbers.get("validation") for site, answer in answers.items()}
        save_at_the_end(self.weights, run, validation, self.experiment.federation.rounds)
        return {site: answer.numbers for site, answer in answers.items()}
