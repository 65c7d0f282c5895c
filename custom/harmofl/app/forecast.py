"""What a round of many sites will take, from its parts as they are measured on this machine."""

import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.app.costs import Pace, measure_pace, training_bytes
from harmofl.app.processor_time import CLOCKS, Clocks, Spent, spent
from harmofl.app.site_process import Start, in_site_process
from harmofl.core.exchange import to_exchange_types
from harmofl.core.partition import partition_of, select
from harmofl.core.server_rules import ServerRule
from harmofl.core.spectra import statistic_shape
from harmofl.core.training import arrays_sha256, state_arrays
from harmofl.experiment import Experiment
from harmofl.flare.local_model import LocalModel
from harmofl.flare.site import simulated_threads
from harmofl.flare.state import SiteState
from harmofl.flare.wire import (
    AmplitudeStatistic,
    Arrays,
    ModelMessage,
    UpdateMessage,
    in_exchange_type,
    pack_model,
    pack_update,
    unpack_model,
    unpack_update,
)
from harmofl.tasks import load_task, untrained_network

Result = TypeVar("Result")

REPEATS = 3  # of what takes milliseconds; the least counts, which other processes have disturbed the least
# Of the server: global model and the next one, task as given and as sent, answer as received and as arrays, mean, and
# sums in 8 bytes a value.
MODELS_AT_SERVER = 9
# What a server's process has loaded when its first round closes, FLARE's transports and the parts of MONAI included.
_SERVER = """
import os
import nvflare.fuel.f3.drivers as drivers
from nvflare.fuel.f3.communicator import driver_mgr
driver_mgr.search_folder(os.path.dirname(drivers.__file__), drivers.__package__)
import nvflare.private.fed.app.simulator.simulator_runner, harmofl.flare.controller, harmofl.flare.persistor
import matplotlib.figure, torch.utils.tensorboard
from harmofl.core.networks import build_network
build_network("unet", 3, (0.5, 0.5), width=4, norm="instance", seed=0)
import psutil
print(psutil.Process().memory_info().rss)
"""
# FLARE 2.9's simulator sleeps 1 s before every task and takes 0.1 s to end one process and start the next, which looks
# for the server every 0.1 s and sleeps 0.5 s before it asks for a task. The log of a run has 2.1 s from one process to
# the next, the look below included, and 0.6 s from there to the task.
SIMULATOR_WAITS = 1.7
# It looks whether the process listens once a second, at first when it has just started it.
SIMULATOR_LOOKS = 1.0
_ADDED = 1e-3  # what training changes a weight by; the times do not depend on it


@dataclass(frozen=True)
class Parts:
    """Seconds on a machine that does nothing else, and bytes, of what a round consists of.

    Attributes:
        pace: of training and prediction, by image.
        simulated_pace: the same with as many threads as a site has in the simulator.
        listens: of a process of a site, as the simulator starts one for every task, until it may be talked to.
        start: of such a process until it has imported all that a task needs.
        task: of a site beside training and validation: network, hashes, difference, state file.
        pack_task, unpack_task: of the model as a message of FLARE.
        pack_answer, unpack_answer: of a site's difference.
        add: one answer, checked and added to the mean.
        close: from the mean to the next task's weights.
        down, up: bytes of a message in each direction.
        model: bytes of the entries that travel.
        process, server_process: bytes of a process that has imported what a site or the server needs.
        training: bytes of training a batch beside that.
    """

    pace: Pace
    simulated_pace: Pace
    listens: float
    start: float
    task: float
    pack_task: float
    unpack_task: float
    pack_answer: float
    unpack_answer: float
    add: float
    close: float
    down: int
    up: int
    model: int
    process: int
    server_process: int
    training: int

    @property
    def share(self) -> float:
        """Of a core, what one thread got of it while all this was measured."""
        return self.simulated_pace.share

    @property
    def as_busy(self) -> "Parts":
        """The parts while this machine is as busy as it was when they were measured."""
        slower = {name: getattr(self, name) / self.share for name in _SECONDS}
        return replace(self, pace=self.pace.as_busy, simulated_pace=self.simulated_pace.as_busy, **slower)


_SECONDS = (
    "listens",
    "start",
    "task",
    "pack_task",
    "unpack_task",
    "pack_answer",
    "unpack_answer",
    "add",
    "close",
)


@dataclass(frozen=True)
class Forecast:
    """Seconds of a round's stretches where every site has a machine like this one, and bytes of memory.

    Attributes:
        down: until the last site has its task.
        training: of a site, with validation.
        site: what a site does beside that.
        up: until the last answer is in the mean; answers are taken one after the other.
        server: what the server does before and after.
        process: what FLARE's simulator spends on a process, which it starts for every site's task.
        simulated: the whole round in FLARE's simulator on this machine, sites one after the other.
        site_memory, server_memory: bytes of a process.
    """

    down: float
    training: float
    site: float
    up: float
    server: float
    process: float
    simulated: float
    site_memory: int
    server_memory: int

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.down + self.training + self.site + self.up + self.server


def measure_parts(experiment: Experiment) -> Parts:
    """Measure every part on this machine, in a process of its own; takes some seconds and writes nothing that stays.

    Raises:
        ExperimentError: the network cannot be built.
        TrainingError: a step cannot be made.
        ChildProcessError: the process ended by itself.
    """
    return replace(in_site_process(parts_here, experiment), server_process=_server_process())


def parts_here(experiment: Experiment, start: Start, clocks: Clocks = CLOCKS) -> Parts:
    """Measure every part in this process, but for a server's memory.

    Args:
        experiment: whose round it is.
        start: how this process started.
        clocks: that tell the seconds.

    Raises:
        ExperimentError, TrainingError: see `measure_parts`.
    """
    common_decomposers.register()
    with _threads(simulated_threads()):
        simulated_pace = measure_pace(experiment, clocks)
    alike = torch.get_num_threads() == simulated_threads()
    network = untrained_network(experiment)
    partition = partition_of(network, experiment.federation.local_layers)
    weights = select(state_arrays(network), partition.shared)
    rule = ServerRule(experiment.federation, experiment.training, partition.parameters)
    answer = _answer(weights, experiment, partition.statistics)
    task = _task(weights, experiment, partition.statistics)
    return Parts(
        pace=simulated_pace if alike else measure_pace(experiment, clocks),
        simulated_pace=simulated_pace,
        listens=start.listens,
        start=start.ready,
        task=_task_seconds(experiment, task.weights, simulated_pace.share, clocks),
        model=sum(value.nbytes for value in weights.values()),
        process=start.resident,
        server_process=0,
        training=training_bytes(experiment),
        **_exchange(weights, task, answer, rule, clocks),
    )


def _exchange(
    weights: Arrays, task: ModelMessage, answer: UpdateMessage, rule: ServerRule, clocks: Clocks
) -> dict[str, Any]:
    """The parts of `Parts` that a task and its answer take between site and server, and the server for the mean."""

    def timed(work: Callable[[], Result], repeats: int = REPEATS) -> tuple[Result, float]:
        done = [spent(work, clocks) for _ in range(repeats)]
        return done[-1][0], min(taken.idle for _, taken in done)

    down, pack_task = timed(lambda: fobs.dumps(pack_model(task)))
    _, unpack_task = timed(lambda: unpack_model(fobs.loads(down)))
    up, pack_answer = timed(lambda: fobs.dumps(pack_update(answer)))
    received, unpack_answer = timed(lambda: unpack_update(fobs.loads(up)).difference or {})
    mean = rule.open_round(weights)
    mean.add(received, 1, 1)  # the first one makes the sums
    _, add = timed(lambda: mean.add(received, 1, 1), REPEATS - 1)
    _, close = timed(lambda: arrays_sha256(rule.next_model(weights, mean.mean())))
    return {
        "pack_task": pack_task,
        "unpack_task": unpack_task,
        "pack_answer": pack_answer,
        "unpack_answer": unpack_answer,
        "add": add,
        "close": close,
        "down": len(down),
        "up": len(up),
    }


def forecast(
    parts: Parts,
    experiment: Experiment,
    *,
    sites: int,
    images: int,
    validation: int,
    server_rate: float,
    site_rate: float,
) -> Forecast:
    """Put the parts together.

    Args:
        parts: as measured.
        experiment: what they were measured of.
        sites: that take part, each with a machine like this one.
        images: training images of a site.
        validation: its validation images.
        server_rate: bytes a second of the server's line, in each direction.
        site_rate: of a site's line.
    """
    passes = images * experiment.training.local_epochs

    def training(pace: Pace) -> float:
        return passes * pace.training + _validated(experiment, validation) * pace.prediction

    site = parts.unpack_task + parts.task + parts.pack_answer
    taken = parts.unpack_answer + parts.add
    holds = experiment.federation.aggregation != "mean"
    close = parts.close * sites / REPEATS if holds else parts.close  # measured of as many answers as repeats
    server = close + parts.pack_task
    # a site's process starts while the server is still closing the round before
    waits = SIMULATOR_WAITS + SIMULATOR_LOOKS * max(1, math.ceil(parts.listens / SIMULATOR_LOOKS))
    process = waits + parts.start - parts.listens + parts.simulated_pace.first
    return Forecast(
        down=max(parts.down / site_rate, sites * parts.down / server_rate),
        training=training(parts.pace),
        site=site,
        up=max(parts.up / site_rate + taken, sites * max(parts.up / server_rate, taken)),
        server=server,
        process=process,
        simulated=sites * (process + training(parts.simulated_pace) + site + taken) + max(0.0, server - waits),
        site_memory=parts.process + parts.training,
        server_memory=parts.server_process + MODELS_AT_SERVER * parts.model + (sites * parts.up if holds else 0),
    )


def _validated(experiment: Experiment, images: int) -> float:
    """How many validation images a site scores in a round on average."""
    return images * experiment.federation.share_validated


def _answer(weights: Arrays, experiment: Experiment, statistics: frozenset[str]) -> UpdateMessage:
    difference = {
        name: np.full_like(value, _ADDED) if value.dtype.kind == "f" else np.ones_like(value)
        for name, value in weights.items()
    }
    numbers = {"steps": 1, "images": 1, "loss": 1.0, "received_sha256": arrays_sha256(weights)}
    return UpdateMessage(in_exchange_type(difference, experiment.federation.exchange, statistics), None, numbers)


def _task(weights: Arrays, experiment: Experiment, statistics: frozenset[str]) -> ModelMessage:
    return ModelMessage(to_exchange_types(weights, experiment.federation.exchange, statistics), _amplitude(experiment))


def _amplitude(experiment: Experiment) -> AmplitudeStatistic | None:
    settings, data = experiment.amplitude, experiment.data
    if settings.region == "off":
        return None
    channels = load_task(experiment).in_channels
    shape = statistic_shape(settings.region, channels, data.height, data.width, settings.low_fraction)
    return AmplitudeStatistic(np.ones(shape, np.float32), 1)


def _task_seconds(experiment: Experiment, received: Arrays, share: float, clocks: Clocks) -> float:
    """What `Participant.train` does beside training and scoring, with a state file of the size that it writes.

    Args:
        experiment: whose task it is.
        received: the entries that travel, as they come down.
        share: of a core that this process gets.
        clocks: that tell the seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        state = SiteState(Path(folder), "plan")
        local = LocalModel(experiment, state, logging.getLogger(__name__))
        moments = 2 if experiment.training.optimizer == "adam" else 1

        def task() -> None:
            network = local.before_round(received, 0)
            before = local.shared(network)
            arrays_sha256(before)
            local.change(before, network)
            held: dict[str, Any] = {str(count): dict(network.state_dict()) for count in range(moments)}
            state.save_round(0, held | local.remembered(network))
            state.load_round(0)

        return min(_with_disk(spent(task, clocks)[1], share) for _ in range(REPEATS))


def _with_disk(taken: Spent, share: float) -> float:
    """Seconds of work that also waits for the disk, which lasts what neither the work nor other programs explain."""
    return taken.idle + max(0.0, taken.wall - taken.idle / share)


@cache
def _server_process() -> int:
    """Bytes of a new process that has imported what the server needs."""
    done = subprocess.run([sys.executable, "-c", _SERVER], check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-1])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
