"""What a round of many sites will take, from its parts as they are measured on this machine."""

import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.app.costs import Pace, measure_pace, training_bytes
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
# Of the server: global model, task as sent, answer as received and as arrays, mean, and sums in 8 bytes a value.
MODELS_AT_SERVER = 7
# What FLARE's simulator starts for every task of a site, with what the executor imports there; and a server's process.
_SITE = """
import nvflare.private.fed.app.simulator.simulator_worker, harmofl.flare.executor, harmofl.flare.participant
from harmofl.flare.lean_monai import import_lean_monai
import_lean_monai()
"""
_SERVER = """
import nvflare.private.fed.app.simulator.simulator_runner, harmofl.flare.controller, harmofl.flare.persistor
import matplotlib.figure, monai.networks.nets, torch.utils.tensorboard
"""
_HELD = """
import psutil
print(psutil.Process().memory_info().rss)
"""
# FLARE 2.9's simulator waits 1 s before every task, looks once a second whether its process listens (half of it on
# average), and each process sleeps 2 s before it ends.
SIMULATOR_WAITS = 3.5
_ADDED = 1e-3  # what training changes a weight by; the times do not depend on it


@dataclass(frozen=True)
class Parts:
    """Seconds and bytes of what a round consists of.

    Attributes:
        pace: of training and prediction, by image.
        simulated_pace: the same with as many threads as a site has in the simulator.
        start: of a process of a site, as the simulator starts one for every task.
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


@dataclass(frozen=True)
class Forecast:
    """Seconds of a round's stretches where every site has a machine like this one, and bytes of memory.

    Attributes:
        down: until the last site has its task.
        training: of a site, with validation.
        site: what a site does beside that.
        up: until the last answer is in the mean; answers are taken one after the other.
        server: what the server does before and after.
        simulated: the whole round in FLARE's simulator on this machine, sites one after the other.
    """

    down: float
    training: float
    site: float
    up: float
    server: float
    simulated: float
    site_memory: int
    server_memory: int

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.down + self.training + self.site + self.up + self.server


def measure_parts(experiment: Experiment) -> Parts:
    """Measure every part on this machine; takes some seconds and writes nothing that stays.

    Raises:
        ExperimentError: the network cannot be built.
    """
    common_decomposers.register()
    process, start = _process(_SITE)
    pace = measure_pace(experiment)
    with _threads(simulated_threads()):
        simulated_pace = measure_pace(experiment)
    network = untrained_network(experiment)
    partition = partition_of(network, experiment.federation.local_layers)
    weights = select(state_arrays(network), partition.shared)
    answer = _answer(weights, experiment, partition.statistics)
    down, pack_task = _timed(lambda: fobs.dumps(pack_model(_task(weights, experiment, partition.statistics))))
    _, unpack_task = _timed(lambda: unpack_model(fobs.loads(down)))
    up, pack_answer = _timed(lambda: fobs.dumps(pack_update(answer)))
    received, unpack_answer = _timed(lambda: unpack_update(fobs.loads(up)).difference or {})
    rule = ServerRule(experiment.federation, experiment.training, partition.parameters)
    mean = rule.open_round(weights)
    mean.add(received, 1, 1)  # the first one makes the sums
    _, add = _timed(lambda: mean.add(received, 1, 1), REPEATS - 1)
    _, close = _timed(lambda: arrays_sha256(rule.next_model(weights, mean.mean())))
    return Parts(
        pace=pace,
        simulated_pace=simulated_pace,
        start=start,
        task=_task_seconds(experiment, _task(weights, experiment, partition.statistics).weights),
        pack_task=pack_task,
        unpack_task=unpack_task,
        pack_answer=pack_answer,
        unpack_answer=unpack_answer,
        add=add,
        close=close,
        down=len(down),
        up=len(up),
        model=sum(value.nbytes for value in weights.values()),
        process=process,
        server_process=_process(_SERVER)[0],
        training=training_bytes(experiment),
    )


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
        return passes * pace.training + validation * experiment.federation.share_validated * pace.prediction

    site = parts.unpack_task + parts.task + parts.pack_answer
    taken = parts.unpack_answer + parts.add
    holds = experiment.federation.aggregation != "mean"
    close = parts.close * sites / REPEATS if holds else parts.close  # measured of as many answers as repeats
    server = close + parts.pack_task
    return Forecast(
        down=max(parts.down / site_rate, sites * parts.down / server_rate),
        training=training(parts.pace),
        site=site,
        up=max(parts.up / site_rate + taken, sites * max(parts.up / server_rate, taken)),
        server=server,
        simulated=sites * (SIMULATOR_WAITS + parts.start + training(parts.simulated_pace) + site + taken) + server,
        site_memory=parts.process + parts.training,
        server_memory=parts.server_process + MODELS_AT_SERVER * parts.model + (sites * parts.up if holds else 0),
    )


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


def _task_seconds(experiment: Experiment, received: Arrays) -> float:
    """What `Participant.train` does beside training and scoring, with a state file of the size that it writes."""
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

        return _timed(task)[1]


@cache
def _process(imports: str) -> tuple[int, float]:
    """Bytes of a new process that has imported something, and seconds until then."""
    command = [sys.executable, "-c", imports + _HELD]
    done, seconds = _timed(lambda: subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True), repeats=1)
    return int(done.stdout.split()[-1]), seconds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(work: Callable[[], Result], repeats: int = REPEATS) -> tuple[Result, float]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return result, min(seconds)
