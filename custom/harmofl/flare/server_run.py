"""ServerRun: what the server knows about the run in progress, shared by its components through the FL context."""

import fcntl
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_constant import DefaultCheckpointFileName

from harmofl.data.findings import SharedFolderError
from harmofl.evidence.results import RoundRecord
from harmofl.experiment import Experiment, ExperimentError
from harmofl.flare.site import (
    SiteError,
    is_simulated,
    read_job_settings,
    resolve_job,
    server_wants_demo,
    simulated_data_root,
    state_root,
)
from harmofl.flare.state import Checkpoint, StateError, copy_atomically, write_text_atomically
from harmofl.flare.wire import AmplitudeStatistic, TaskHeader
from harmofl.tasks import place_sites

FINAL_MODEL, BEST_MODEL = DefaultCheckpointFileName.GLOBAL_MODEL, DefaultCheckpointFileName.BEST_GLOBAL_MODEL
UNFINISHED_FILE = "unfinished.txt"
JOB_ID = re.compile(r"[0-9a-fA-F][0-9a-fA-F-]{7,63}")

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
    amplitude_noise: dict[str, dict[str, Any]] = field(default_factory=dict)
    best_round: int | None = None
    best_score: float | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    bytes_sent: dict[str, dict[str, int]] = field(default_factory=dict)
    last_bytes: dict[str, int] = field(default_factory=dict)
    model_sha256: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    closed: list[float] = field(default_factory=list)
    phase: str = ""
    waiting: set[str] = field(default_factory=set)
    lock: IO[str] | None = None  # held while this job may write to the state of its run

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
        return TaskHeader(self.run_id, self.experiment.hash, self.demo, round_number)

    def needed_sites(self, *, with_amplitude: bool) -> int:
        """How many sites a task waits for: the federation's minimum, the amplitude's too until it is frozen."""
        experiment = self.experiment
        if with_amplitude and self.amplitude is None:
            return max(experiment.federation.minimum_sites, experiment.amplitude.minimum_sites)
        return experiment.federation.minimum_sites

    def reasons(self, sites: list[str], otherwise: str) -> str:
        """Why each of these sites is missing."""
        return "; ".join(f"{site}: {self.refused.get(site, otherwise)}" for site in sites)

    def begin(self, phase: str) -> None:
        """A task goes out to all sites; `phase` says when, for a line about a job that ends in it."""
        self.phase, self.waiting = phase, set(self.expected)
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
        missing = f", when {', '.join(sorted(self.waiting))} had not answered" if self.waiting else ""
        write_text_atomically(f"the job ended {self.phase}{missing}\n", self.folder / UNFINISHED_FILE)

    def count_bytes(self, site: str, sent: dict[str, int]) -> None:
        """Note the bytes of one answer, by kind, and add them to those of the whole run."""
        self.last_bytes[site] = sum(sent.values())
        held = self.bytes_sent.setdefault(site, {})
        for kind, size in sent.items():
            held[kind] = held.get(kind, 0) + size

    def record(self) -> dict[str, Any]:
        """The part that a checkpoint keeps, as plain JSON data."""
        return {
            "best_round": self.best_round,
            "best_score": self.best_score,
            "rounds": [record.model_dump() for record in self.rounds],
            "bytes_sent": self.bytes_sent,
            "numbers": self.numbers,
            "amplitude_noise": self.amplitude_noise,
        }

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Take over what a checkpoint kept.

        Raises:
            ExperimentError: the checkpoint belongs to another experiment.
        """
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
        kept = checkpoint.record
        self.best_round, self.best_score = kept["best_round"], kept["best_score"]
        self.rounds = [RoundRecord.model_validate(record) for record in kept["rounds"]]
        self.bytes_sent, self.numbers = kept["bytes_sent"], kept["numbers"]
        self.amplitude_noise = kept.get("amplitude_noise", {})

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
    folder = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
    roots = {site: simulated_data_root(site, fl_ctx) for site in expected}
    _refuse_shared_folders(experiment, {site: root for site, root in roots.items() if root is not None})
    run = ServerRun(experiment, demo, folder, sorted(expected), _store(fl_ctx))
    if run.store is not None:
        run.run_id = str(fl_ctx.get_job_id()).replace("-", "")  # so that a site finds the state of a job by its id
    if experiment.federation.resume_from:
        path = checkpoint_path(experiment.federation.resume_from, run.store)
        run.continue_from(Checkpoint.load(path))
    if run.store is not None:
        run.lock = _lock(run.store.with_name(f".{run.run_id}"))
    if experiment.federation.resume_from:
        _take_best_model(path.with_name(BEST_MODEL), run)
    fl_ctx.set_prop(_KEY, run, private=True, sticky=True)
    return run


def checkpoint_path(resume_from: str, store: Path | None) -> Path:
    """The checkpoint that a job names: a path in simulation, elsewhere the id of a job of this server.

    Raises:
        ExperimentError: a job chooses a path at a real server.
        StateError: that job left no checkpoint here.
    """
    if store is None:
        return Path(resume_from)
    if not JOB_ID.fullmatch(resume_from):
        raise ExperimentError(
            f"federation.resume_from: {resume_from!r} is no job id; outside simulation it names the job to go on from"
        )
    path = store.with_name(resume_from) / FINAL_MODEL
    if not path.is_file():
        raise StateError(
            f"job {resume_from} left no checkpoint at this server: it ended before its first round was closed, or was "
            "purged; submit it as a new job"
        )
    return path


def _lock(path: Path) -> IO[str]:
    """Hold the run for this job until its process ends, however it ends.

    Raises:
        StateError: another job of this server goes on with the run; sites keep one state for both.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise StateError(
            "the run that this job goes on with is still going in another job; abort that one first"
        ) from None
    return held


def _store(fl_ctx: FLContext) -> Path | None:
    """Where this server keeps the checkpoints of a job."""
    if is_simulated(fl_ctx):
        return None
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    try:  # inside a job FLARE gives the server the project's name; its state folder is called what jobs call it
        root = state_root("server", Path(workspace.get_root_dir()))
    except SiteError as error:
        raise StateError(str(error)) from None
    return root / "runs" / str(fl_ctx.get_job_id())


def _refuse_shared_folders(experiment: Experiment, roots: Mapping[str, Path]) -> None:
    """In simulation the server sees what the sites see; a site without a folder says so itself."""
    for site, place in place_sites(experiment, roots).items():
        if isinstance(place, SharedFolderError):
            raise ExperimentError(f"site {site} {place}")


def _take_best_model(path: Path, run: ServerRun) -> None:
    """Copy the best model of the run that is resumed into this job's folder."""
    if run.best_round is None:
        return
    if not path.is_file():
        raise StateError(f"{path}: the best model so far must lie beside the checkpoint; copy it there")
    shutil.copyfile(path, run.folder / BEST_MODEL)
    run.keep(BEST_MODEL)


def current_run(fl_ctx: FLContext) -> ServerRun:
    """The run that `open_run` shared."""
    run = fl_ctx.get_prop(_KEY)
    if not isinstance(run, ServerRun):
        raise RuntimeError("HarmoFLScatterAndGather must be the workflow of this job: no run was opened")
    return run
