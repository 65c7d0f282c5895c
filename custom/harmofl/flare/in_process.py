"""InProcessFederation: the rounds of a job in one process, without FLARE, for comparisons of many runs."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harmofl.core.drift import Drift, DriftOfRound
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
from harmofl.flare.state import save_atomically
from harmofl.flare.task_header import AMPLITUDE_TASK, EVALUATE_TASK, TRAIN_TASK
from harmofl.flare.wire import Arrays, ModelMessage, UpdateMessage, payload_bytes
from harmofl.sections import names_text


@dataclass(frozen=True)
class FinishedRun:
    """What a run knows at its end beside the files that it wrote.

    Attributes:
        final_validation: mean over sites of the validation score of the last model.
        drift: client drift by round.
        unseen: scores of the sites that took no part, in the form of a site's answer to the evaluation.
        trained_from: the weights that the last round began with at the sites.
        differences: by site what its training added to them, read from disk.
        scoring_seconds: of the evaluation after the last round.
        report_seconds: of writing results.json and report.html.
    """

    final_validation: float | None
    drift: list[Drift]
    unseen: dict[str, dict[str, Any]]
    scoring_seconds: float
    report_seconds: float
    trained_from: Arrays
    differences: Mapping[str, Arrays]


class OpenSites(Mapping[str, Participant]):
    """Participants by site, built when they are asked for; memory holds those that were asked for last.

    All that a site needs for its next task is in its state on disk, so that one that is built again goes on; what it
    costs is to open its data.
    """

    MOST = 16

    def __init__(self, sites: Iterable[str], open_site: Callable[[str], Participant]) -> None:
        """Nothing is built yet."""
        self._sites, self._open_site = tuple(dict.fromkeys(sites)), open_site
        self._open: dict[str, Participant] = {}

    def __getitem__(self, site: str) -> Participant:
        if site not in self._sites:
            raise KeyError(site)
        participant = self._open.pop(site, None) or self._open_site(site)
        self._open[site] = participant
        for oldest in list(self._open)[: -self.MOST]:
            del self._open[oldest]
        return participant

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


class StoredDifferences(Mapping[str, Arrays]):
    """By site what its training of the last round added to each entry of the model: on disk, read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, in which every site has a folder of its own."""
        self._folder = folder
        self._sites: list[str] = []

    def keep(self, site: str, difference: Arrays) -> None:
        """Write a site's difference."""
        tensors = {name: torch.as_tensor(np.asarray(value)) for name, value in difference.items()}
        save_atomically(tensors, self._path(site))
        self._sites.append(site)

    def __getitem__(self, site: str) -> Arrays:
        if site not in self._sites:
            raise KeyError(site)
        held = torch.load(self._path(site), map_location="cpu", weights_only=True)
        return {name: value.numpy() for name, value in held.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def _path(self, site: str) -> Path:
        return self._folder / site / "last_difference.pt"


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
        roots = {site: data_roots[site] if data_roots else None for site in (*self.run_state.expected, *self.unseen)}
        pool = {site: roots[site] for site in self.run_state.expected} if experiment.federation.pooled_data else {}

        def open_site(site: str) -> Participant:
            config = SiteConfig(
                site,
                simulated=True,
                data_root=roots[site],
                state_root=folder / "sites" / site,
                shared_data=shared_data,
                workers=None if data_roots else 0,
                threads=threads,
                minimum_cases=1,  # as in the simulator: the job's own minimum holds
            )
            logger = logging.getLogger(f"harmofl.{site}")
            run_id, others = self.run_state.run_id, pool if site in pool else None
            return Participant(experiment, config, run_id, should_stop, logger, pool=others)

        self.participants: Mapping[str, Participant] = OpenSites(roots, open_site)
        self.differences = StoredDifferences(folder / "sites")

    @property
    def received_weights(self) -> Arrays:
        """The present model as the sites receive it, in float32; `weights` is the server's own."""
        return self.run_state.as_received(self.weights)

    def run(self) -> FinishedRun:
        """Gather the amplitude, train all rounds, evaluate, write results.json, round_metrics.jsonl and the models.

        Raises:
            SiteError: too few sites may send their amplitude; also whatever a site's training raises.
        """
        run, drift = self.run_state, []
        if run.gathers_before_training:
            self.gather_amplitude()
        before, rounds = self.weights, self.experiment.federation.rounds
        for round_number in range(rounds):
            before = self.received_weights
            drift.append(self.train_round(round_number, keep=round_number == rounds - 1))
        trained = time.monotonic()
        answers = self._evaluate()
        task, best = self._final_task(), run.best_round
        unseen = {site: self.participants[site].evaluate(task, best).numbers for site in self.unseen}
        scored = time.monotonic()
        write_evidence(run, answers)
        seconds = (scored - trained, time.monotonic() - scored)
        return FinishedRun(mean_validation(run.final_validation), drift, unseen, *seconds, before, self.differences)

    def gather_amplitude(self) -> None:
        """Freeze the mean of the amplitudes that sites measure before training."""
        gathering = AmplitudeGathering(self.experiment)
        for site in self.run_state.expected:
            update = self.participants[site].estimate_amplitude()
            self._take(site, update, AMPLITUDE_TASK)
            self._gather(gathering, site, update)
        self._freeze(gathering)

    def train_round(self, round_number: int, *, keep: bool = False) -> Drift:
        """Train one round at every site and move the global model; of a site's answer only its numbers stay in memory.

        Args:
            round_number: from 0 on.
            keep: whether `differences` shall hold what each site's training added.

        Returns:
            How far the sites pulled the round apart.
        """
        run = self.run_state
        weights = self.received_weights
        run.model_sha256 = arrays_sha256(weights)
        received = ModelMessage(run.for_sites(self.weights), run.amplitude)
        estimates = run.estimates_in_first_round and run.amplitude is None
        gathering = AmplitudeGathering(self.experiment) if estimates else None
        mean, drift = open_round(run, weights), DriftOfRound(run.partition.parameters)
        for site in run.expected:
            update = self.participants[site].train(round_number, received, run.best_round)
            self._take(site, update, TRAIN_TASK)
            if update.difference is not None:  # of pooled data one site trains
                add_difference(mean, site, update, run)
                drift.add(update.difference)
                if keep:
                    self.differences.keep(site, update.difference)
            run.numbers[site] = update.numbers
            if gathering is not None:
                self._gather(gathering, site, update)
        if gathering is not None:
            self._freeze(gathering)
        record = close_round(run, round_number, list(run.expected))
        run.closed.append(time.monotonic())
        keep_received_if_best(run, record, self.weights)
        self.weights = run.rule.next_model(self.weights, mean.mean())
        return drift.drift()

    def _take(self, site: str, update: UpdateMessage, task_name: str) -> None:
        check_numbers(site, update, self.run_state, task_name)
        note_counts(site, update, self.run_state)
        self.run_state.count_bytes(site, payload_bytes(update))

    def _gather(self, gathering: AmplitudeGathering, site: str, update: UpdateMessage) -> None:
        if update.amplitude is not None:
            check_amplitude(update.amplitude, update, self.run_state)
            gathering.add(site, update.amplitude)

    def _freeze(self, gathering: AmplitudeGathering) -> None:
        run, needed = self.run_state, self.experiment.amplitude.minimum_sites
        if len(gathering.sites) < needed:
            silent = names_text([site for site in run.expected if site not in gathering.sites])
            raise SiteError(
                "amplitude",
                f"the amplitude of {count_text(len(gathering.sites), 'site')} arrived, amplitude.minimum_sites is "
                f"{needed} ({silent} sent none); a site sends none of fewer training patients than "
                "amplitude.minimum_cases",
            )
        run.amplitude, run.amplitude_sites = gathering.result(), sorted(gathering.sites)
        run.amplitude_patients = dict(gathering.patients)

    def _final_task(self) -> ModelMessage:
        run = self.run_state
        return ModelMessage(run.for_sites(self.weights), run.amplitude, best_weights(run))

    def _evaluate(self) -> dict[str, dict[str, Any]]:
        """Score final and best model on the test data and settle which is best; returns the sites' numbers."""
        run = self.run_state
        task = self._final_task()
        numbers: dict[str, dict[str, Any]] = {}
        for site in run.expected:
            answer = self.participants[site].evaluate(task, run.best_round)
            self._take(site, answer, EVALUATE_TASK)
            numbers[site] = answer.numbers
        validation = {site: told.get("validation") for site, told in numbers.items()}
        save_at_the_end(self.weights, run, validation, self.experiment.federation.rounds)
        return numbers
