"""ServerRun: what the server knows about the run in progress, shared by its components through the FL context."""

import itertools
import math
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from harmofl.core.exchange import BeyondFloat16Error, from_exchange_types, to_exchange_types
from harmofl.core.norm_rule import SentDifference
from harmofl.core.partition import Partition, partition_of, select
from harmofl.core.server_rules import ServerRule
from harmofl.core.training import state_arrays
from harmofl.data.findings import SharedFolderError, count_text
from harmofl.evidence.results import ROUNDS_FILE, ResultsError, RoundRecord, iterate_rounds
from harmofl.experiment import Experiment, ExperimentError, rules_problem
from harmofl.flare.round_books import RoundBooks
from harmofl.flare.run_owner import owner_of_resumed, submitter_of, write_owner
from harmofl.flare.server_store import BEST_MODEL, checkpoint_path, lock_run, store_of
from harmofl.flare.site import (
    is_simulated,
    read_job_settings,
    resolve_job,
    server_wants_demo,
    simulated_data_root,
)
from harmofl.flare.state import Checkpoint, StateError, copy_atomically, write_text_atomically
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.tracking import Tracking, open_tracking
from harmofl.flare.wire import AmplitudeStatistic
from harmofl.sections import names_text
from harmofl.tasks import place_sites, untrained_network

UNFINISHED_FILE = "unfinished.txt"

_KEY = "harmofl.run"


@dataclass
class ServerRun:
    """Everything about a run that is neither the weights nor FLARE's.

    `folder` is the job's own, which FLARE archives and removes when the job ends; `store` is the server's, keeps the
    checkpoint beyond that and is None in simulation.
    """

    experiment: Experiment
    demo: bool
    folder: Path
    expected: list[str]
    store: Path | None = None
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_round: int = 0
    amplitude: AmplitudeStatistic | None = None
    amplitude_sites: list[str] = field(default_factory=list)
    amplitude_patients: dict[str, int] = field(default_factory=dict)
    amplitude_noise: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_round: int | None = None
    best_score: float | None = None
    best_scores: dict[str, float] = field(default_factory=dict)  # by site
    final_validation: dict[str, float | None] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)  # by site, of its last accepted round
    first_counts: dict[str, dict[str, int]] = field(default_factory=dict)  # by site, what it said at first in this run
    bytes_sent: dict[str, dict[str, int]] = field(default_factory=dict)
    last_bytes: dict[str, int] = field(default_factory=dict)
    model_sha256: str = ""
    sent: dict[str, SentDifference] = field(default_factory=dict)  # of the round in progress
    relay_cosine: dict[str, float] = field(default_factory=dict)  # of sites behind a relay, to its other sites
    relays: dict[str, frozenset[str]] = field(default_factory=dict)  # that sum, and the sites behind each
    refused: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    task_begun: float = field(default_factory=lambda: time.monotonic())  # noqa: PLW0108 - read when called
    closed: list[float] = field(default_factory=list)
    phase: str = ""
    waiting: set[str] = field(default_factory=set)
    lock: IO[str] | None = None  # held while this job may write to the state of its run
    tracking: Tracking | None = None
    rounds: RoundBooks = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = RoundBooks(*(place / ROUNDS_FILE for place in (self.folder, self.store) if place is not None))

    @property
    def estimates_in_first_round(self) -> bool:
        """True where sites send their amplitude with their first weights."""
        settings = self.experiment.amplitude
        return settings.region != "off" and settings.estimation != "before_training"

    @property
    def gathers_before_training(self) -> bool:
        """True where a task of its own gathers the amplitude before the first round."""
        settings = self.experiment.amplitude
        return settings.region != "off" and settings.estimation == "before_training"

    def header(self, round_number: int) -> TaskHeader:
        """What every task of this run carries."""
        pooled = tuple(self.expected) if self.experiment.federation.pooled_data else ()
        return TaskHeader(
            run_id=self.run_id,
            experiment_hash=self.experiment.hash,
            demo=self.demo,
            round_number=round_number,
            best_round=self.best_round,
            pooled_sites=pooled,
        )

    @cached_property
    def partition(self) -> Partition:
        """Which entries of the network travel."""
        return partition_of(untrained_network(self.experiment), self.experiment.federation.local_layers)

    @cached_property
    def rule(self) -> ServerRule:
        """How differences become the next model; holds what must last from round to round."""
        federation, training = self.experiment.federation, self.experiment.training
        return ServerRule(federation, training, self.partition.parameters, self.partition.variances)

    def initial_weights(self) -> dict[str, np.ndarray]:
        """The entries that travel, as the seed gives them."""
        return select(state_arrays(untrained_network(self.experiment)), self.partition.shared)

    def for_sites(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A model in the types in which it goes down to all sites (`harmofl.core.exchange`).

        Raises:
            ValueError: an entry lies beyond float16; names it.
        """
        exchange = self.experiment.federation.exchange
        try:
            return to_exchange_types(weights, exchange, self.partition.statistics)
        except BeyondFloat16Error as error:
            raise ValueError(
                f"the global model is not sent: {error}; set federation.exchange to float32, or lower "
                "training.learning_rate or federation.server_learning_rate"
            ) from None

    def as_received(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The numbers that all sites receive of a model, in float32: what they train from, score, hash and keep.

        Raises:
            ValueError: see `for_sites`.
        """
        return from_exchange_types(self.for_sites(weights))

    def whole_model(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A model that loads: what sites keep to themselves has its initial values in it; empty where all is kept."""
        if self.experiment.federation.local_layers != "norm":
            return dict(weights)
        return {**state_arrays(untrained_network(self.experiment)), **weights}

    @property
    def has_global_model(self) -> bool:
        """False where every site trains a model of its own and no weights travel."""
        return self.experiment.federation.local_layers != "all"

    def trains(self, site: str) -> bool:
        """Whether a site trains: all do, but for a run on pooled data, where the first one does on the data of all."""
        return not self.experiment.federation.pooled_data or site == self.expected[0]

    def needed_sites(self, *, with_amplitude: bool) -> int:
        """How many sites a task waits for: the federation's minimum, the amplitude's too until it is frozen."""
        experiment = self.experiment
        if experiment.federation.pooled_data:
            return len(self.expected)
        if with_amplitude and self.amplitude is None:
            return max(experiment.federation.minimum_sites, experiment.amplitude.minimum_sites)
        return experiment.federation.minimum_sites

    @property
    def silent_sites_to_spare(self) -> int:
        """How many of the sites that a task waits for may send no amplitude, so that enough others send theirs."""
        return self.needed_sites(with_amplitude=True) - self.experiment.amplitude.minimum_sites

    def reasons(self, sites: list[str], otherwise: str) -> str:
        """Why each of these sites is missing."""
        return names_text([f"{site}: {self.refused.get(site, otherwise)}" for site in sites], "; ")

    def begin(self, phase: str) -> None:
        """A task goes out to all sites; `phase` says when, for a line about a job that ends in it."""
        self.phase, self.waiting, self.task_begun = phase, set(self.expected), time.monotonic()
        self.refused.clear()
        self._note_waiting()

    def answered(self, site: str) -> None:
        """A site has answered the task in progress, well or badly."""
        self.waiting.discard(site)
        self._note_waiting()

    def finish(self) -> None:
        """The job has done all it was asked to do."""
        (self.folder / UNFINISHED_FILE).unlink(missing_ok=True)

    def _note_waiting(self) -> None:
        """Say where the job is in a file that a hard end leaves behind, be it of this process or of one at a site."""
        # in the order of `expected`: sorting all of many sites after every answer would take longer than the answer
        names = names_text([site for site in self.expected if site in self.waiting])
        missing = f", when {names} had not answered" if self.waiting else ""
        write_text_atomically(f"the job ended {self.phase}{missing}\n", self.folder / UNFINISHED_FILE)

    def shortfall(self, answers: Collection[str]) -> str:
        """Why these sites are too few for an evaluation; empty where they suffice."""
        needed = self.needed_sites(with_amplitude=False)
        if len(answers) >= needed:
            return ""
        missing = self.reasons([site for site in self.expected if site not in answers], "no answer")
        return f"evaluation: answers of {count_text(len(answers), 'site')}, {needed} needed ({missing})"

    def count_bytes(self, site: str, sent: dict[str, int]) -> None:
        """Note the bytes of one answer, by kind, and add them to those of the whole run."""
        self.last_bytes[site] = sum(sent.values())
        held = self.bytes_sent.setdefault(site, {})
        for kind, size in sent.items():
            held[kind] = held.get(kind, 0) + size

    def validation_of(self, round_number: int) -> dict[str, float]:
        """By site, where it is defined, the validation score of the model that came out of a round.

        The next round's answers hold it, and after the last round those to the evaluation.
        """
        is_last = round_number == self.experiment.federation.rounds - 1
        told: Mapping[str, float | None] = self.final_validation if is_last else {}
        told = next((record.validation for record in reversed(self.rounds) if record.round == round_number + 1), told)
        return {site: score for site, score in told.items() if score is not None and math.isfinite(score)}

    def record(self) -> dict[str, Any]:
        """The part that a checkpoint keeps, as plain JSON data; of the rounds the last one alone."""
        return {
            "best_round": self.best_round,
            "best_score": self.best_score,
            "best_scores": self.best_scores,
            "rounds": [record.model_dump() for record in self.rounds[-1:]],
            "bytes_sent": self.bytes_sent,
            "numbers": self.numbers,
            "first_counts": self.first_counts,
            "amplitude_patients": self.amplitude_patients,
            "amplitude_noise": self.amplitude_noise,
        }

    def continue_from(self, checkpoint: Checkpoint, books: Path | None = None) -> None:
        """Take over what a checkpoint kept.

        Args:
            checkpoint: with the record of its last round.
            books: has the records of the rounds before that one; None to go on without them.

        Raises:
            ExperimentError: the checkpoint belongs to another experiment, or was made by other rules.
            StateError: its record cannot be used.
        """
        if problem := rules_problem(checkpoint.rules):
            raise ExperimentError(
                f"federation.resume_from: the checkpoint was {problem}; start a new run, or use the harmofl "
                "version that made it"
            )
        if checkpoint.experiment_hash != self.experiment.hash:
            raise ExperimentError(
                f"federation.resume_from: the checkpoint was made by experiment {checkpoint.experiment_hash} "
                f"({checkpoint.experiment.get('name')}), this job resolves {self.experiment.hash}; use equal settings"
            )
        self.run_id = checkpoint.run_id
        self.start_round = checkpoint.next_round
        if checkpoint.amplitude is not None:
            self.amplitude = AmplitudeStatistic(checkpoint.amplitude.numpy(), checkpoint.amplitude_images)
            self.amplitude_sites = list(checkpoint.amplitude_sites)
        try:
            self._take_over(checkpoint.record, books)
        except (KeyError, TypeError, ValueError):
            raise StateError(
                "the record of the checkpoint that federation.resume_from names has another form; copy it again from a "
                "backup"
            ) from None
        if checkpoint.server_moments:
            self.rule.moments = checkpoint.server_moments

    def _take_over(self, kept: Mapping[str, Any], books: Path | None) -> None:
        self.best_round, self.best_score = kept["best_round"], kept["best_score"]
        held = [RoundRecord.model_validate(record) for record in kept["rounds"]]
        missing = held[0].round if held and books is not None else 0  # a checkpoint of an earlier version has them all
        self.rounds.replace(itertools.chain(_rounds_before(missing, books) if missing and books else (), held))
        self.best_scores = _best_scores(kept, self)
        self.bytes_sent, self.numbers = kept["bytes_sent"], kept["numbers"]
        self.first_counts = kept.get("first_counts", {})
        self.amplitude_patients = kept.get("amplitude_patients", {})
        self.amplitude_noise = kept.get("amplitude_noise", {})
        self.header(self.start_round)  # what it cannot send to a site it cannot go on with

    def keep(self, name: str) -> None:
        """Copy a model file of this job into the server's store, as a whole or not at all."""
        if self.store is None:
            return
        copy_atomically(self.folder / name, self.store / name)


def open_run(fl_ctx: FLContext, expected: list[str]) -> ServerRun:
    """Resolve the experiment once, take over a checkpoint where the job names one, share it through the context.

    Raises:
        ExperimentError, StateError: one line for the operator.
    """
    settings = read_job_settings(fl_ctx)
    demo = server_wants_demo(settings, fl_ctx)
    experiment = resolve_job(fl_ctx, demo)
    if experiment.federation.pooled_data and not is_simulated(fl_ctx):
        raise ExperimentError(
            f"federation.pooled_data (method {experiment.method}): the data of all sites in one place, which only a "
            "simulated run may have; choose another method"
        )
    folder = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
    roots = {site: simulated_data_root(site, fl_ctx) for site in expected}
    _refuse_shared_folders(experiment, {site: root for site, root in roots.items() if root is not None})
    run = ServerRun(experiment, demo, folder, sorted(expected), store_of(fl_ctx))
    if run.store is not None:
        run.run_id = str(fl_ctx.get_job_id()).replace("-", "")  # so that a site finds the state of a job by its id
    resumed = experiment.federation.resume_from
    path = checkpoint_path(resumed, run.store) if resumed else None
    if run.store is not None:
        owner = owner_of_resumed(str(resumed), path.parent, fl_ctx) if path is not None else submitter_of(fl_ctx)[0]
        write_owner(owner, run.store)
    if path is not None:
        run.run_id = Checkpoint.load(path).run_id
    if run.store is not None:
        run.lock = lock_run(run.store.with_name(f".{run.run_id}"))
    if path is not None:  # read again: until the lock was held another job could write it
        run.continue_from(Checkpoint.load(path), path.with_name(ROUNDS_FILE))
        _take_best_model(path.with_name(BEST_MODEL), run)
    run.tracking = open_tracking(experiment, run_id=run.run_id, sites=run.expected, folder=folder, fl_ctx=fl_ctx)
    if run.tracking is not None:
        for record in run.rounds:  # of the job that this one resumes
            run.tracking.write(record)
    fl_ctx.set_prop(_KEY, run, private=True, sticky=True)
    return run


def refuse_relays(experiment: Experiment, clients: Collection[Client]) -> None:
    """Refuse to hold the contributions of all sites where some come through FLARE's relays or other sites.

    A relay stands in a site's cell name, `relay.site`; a site above others in its site name, or in that it is no leaf.

    Raises:
        ExperimentError: names the sites.
    """
    if experiment.federation.aggregation == "mean":
        return
    behind = sorted(
        client.name
        for client in clients
        if "." in f"{client.get_fqcn() or ''}{client.get_fqsn() or ''}" or client.get_is_leaf() is False
    )
    if behind:
        raise ExperimentError(
            f"federation.aggregation '{experiment.federation.aggregation}' holds the differences of all sites, which a "
            f"federation with relays is too large for ({', '.join(behind)}: behind or above others); set it to 'mean'"
        )


def relays_of(clients: Collection[Client]) -> dict[str, frozenset[str]]:
    """By site that stands above others, and so sums, the sites directly below it; FLARE's site names say which.

    Raises:
        ExperimentError: a relay stands below another one, or is not connected.
    """
    ways = {client.name: str(client.get_fqsn() or client.name).split(".") for client in clients}
    below: dict[str, set[str]] = {}
    for site, way in ways.items():
        if len(way) > 2:
            raise ExperimentError(f"site {site} stands below {'.'.join(way[:-1])}: only one level of relays can sum")
        if len(way) == 2:
            below.setdefault(way[0], set()).add(site)
    if missing := sorted(below.keys() - ways.keys()):
        raise ExperimentError(f"{names_text(missing)}: the relay of other sites is not connected; start it")
    return {relay: frozenset(sites) for relay, sites in below.items()}


def _rounds_before(end: int, books: Path) -> Iterator[RoundRecord]:
    """The records of the rounds 0 to `end` - 1 that lie beside the checkpoint of round `end`.

    Raises:
        StateError: one of them is not there.
    """
    fix = f"copy {ROUNDS_FILE} of that run beside the checkpoint"
    expected = 0
    try:
        for record in itertools.islice(iterate_rounds(books), end):
            if record.round != expected:
                break
            expected += 1
            yield record
    except ResultsError as error:
        raise StateError(f"federation.resume_from: {error}; {fix}") from None
    if expected < end:
        raise StateError(f"federation.resume_from: {books} has no line of round {expected}; {fix}")


def _best_scores(kept: Mapping[str, Any], run: ServerRun) -> dict[str, float]:
    """By site the score of the best model of a run's record; one of an earlier version has it in its rounds alone."""
    if "best_scores" in kept or run.best_round is None:
        return dict(kept.get("best_scores", {}))
    return run.validation_of(run.best_round)


def _refuse_shared_folders(experiment: Experiment, roots: Mapping[str, Path]) -> None:
    """In simulation the server sees what the sites see; a site without a folder says so itself."""
    for site, place in place_sites(experiment, roots).items():
        if isinstance(place, SharedFolderError):
            raise ExperimentError(f"site {site} {place}")


def _take_best_model(path: Path, run: ServerRun) -> None:
    """Copy the best model of the run that is resumed into this job's folder.

    It may be of a later round than the checkpoint says, where the server ended between the two: its own word counts.
    """
    if run.best_round is None or not run.has_global_model:
        return
    if not path.is_file():
        raise StateError(f"{path}: the best model so far must lie beside the checkpoint; copy it there")
    stored = Checkpoint.load(path)  # a damaged one would end the job only after its last round
    if stored.next_round - 1 != run.best_round:
        run.best_round, run.best_score = stored.record["best_round"], stored.record["best_score"]
        run.best_scores = _best_scores(stored.record, run)
    shutil.copyfile(path, run.folder / BEST_MODEL)
    run.keep(BEST_MODEL)


def current_run(fl_ctx: FLContext) -> ServerRun:
    """The run that `open_run` shared."""
    run = fl_ctx.get_prop(_KEY)
    if not isinstance(run, ServerRun):
        raise RuntimeError("HarmoFLScatterAndGather must be the workflow of this job: no run was opened")
    return run
