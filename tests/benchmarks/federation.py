"""The federation's share of a round: averaging, bytes, memory, number of sites, and what `harmofl plan` says of it."""

import copy
import gc
import itertools
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from nvflare.fuel.utils import fobs

from harmofl.app.forecast import Forecast, Parts, forecast, measure_parts
from harmofl.app.job import read_job
from harmofl.core.aggregation import StreamingMean
from harmofl.core.exchange import to_exchange_types
from harmofl.core.networks import build_network
from harmofl.core.spectra import statistic_shape
from harmofl.core.training import state_arrays
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import Experiment, set_key
from harmofl.flare.wire import (
    AmplitudeStatistic,
    Arrays,
    ModelMessage,
    UpdateMessage,
    in_exchange_type,
    pack_model,
    pack_update,
)
from harmofl.tasks import load_task, resolve_experiment
from tests.benchmarks.rows import Row, ratio
from tests.benchmarks.served_rounds import ServedRounds
from tests.benchmarks.wire_bytes import Link, open_link
from tests.federation.conftest import make_job, simulate
from tests.small_job import write_site

MIB = 2**20
APART = "the larger by the smaller"
NETWORKS = {"unet": "instance", "densenet121": "batch"}
FEW, MANY, MOST = 6, 60, 1000  # sites
ROUNDS, SETTLED = 40, 10  # rounds for the slope of memory, and those before it
PLANNED_SITES = ["site-0", "site-1"]
PLANNED_ROUNDS = 4
PLANNED: dict[str, Any] = {
    "method": "perturbation_only",
    "data.height": 64,
    "data.width": 64,
    "network.width": 16,
    "training.local_epochs": 3,
    "federation.tracking": "none",
}
SMALL: dict[str, Any] = {
    "name": "benchmark",
    "task": "prostate",
    "method": "perturbation_only",
    "data": {"height": 64, "width": 64},
    "network": {"name": "unet", "width": 4},
    "amplitude": {"minimum_sites": 1, "minimum_cases": 1},
    "training": {"optimizer": "adam", "learning_rate": 1e-3, "batch_size": 8},
    "federation": {"rounds": 1, "minimum_sites": 1},
}


def measure() -> list[Row]:
    """All rows; about two minutes on two cores."""
    return [*aggregation(), *aggregator_memory(), *wire(), *slope(), *number_of_sites(), *planned()]


def model_of(network: str) -> Arrays:
    """The initial model of a job's size."""
    return state_arrays(build_network(network, 3, (0.5, 0.5), width=32, norm=NETWORKS[network], seed=0))


def changes(model: Mapping[str, np.ndarray], count: int) -> list[Arrays]:
    """Differences as training makes them, of two float32 models."""
    generator = np.random.default_rng(0)

    def change(value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f":
            return np.ones_like(value)
        added = (1e-3 * generator.standard_normal(value.shape)).astype(np.float32)
        return np.asarray((value + added) - value)

    return [{name: change(value) for name, value in model.items()} for _ in range(count)]


def aggregation() -> Iterator[Row]:
    """One answer into the mean, by equal weights and by samples."""
    for network in NETWORKS:
        model = model_of(network)
        sent = changes(model, FEW)
        for kind, weights in (("equal weights", [1] * FEW), ("weights by samples", [311, 57, 402, 123, 250, 77])):
            mean, turn, other = StreamingMean(model), itertools.count(), itertools.count()
            sums = {name: np.zeros(value.shape) for name, value in model.items() if value.dtype.kind == "f"}

            def add(mean: Any = mean, turn: Any = turn, weights: Any = weights, sent: Any = sent) -> None:
                index = next(turn) % FEW
                mean.add(sent[index], weights[index])

            def limit(sums: Any = sums, turn: Any = other, sent: Any = sent) -> None:
                contribution = sent[next(turn) % FEW]
                for name, total in sums.items():
                    np.add(total, contribution[name], out=total)
                for name in sums:
                    contribution[name].max()

            found = ratio(add, limit, seconds=6.0)
            what = f"aggregation of {network} on the common grid, finite check included, {kind}"
            yield Row(what, "float64 in-place add plus one read pass", found.median, 1.5, found.noise)


def aggregator_memory() -> Iterator[Row]:
    """Resident memory from 6 to 1,000 contributions, in a process of its own."""
    for kind in ("equal weights", "weights by samples"):
        before, after = _in_a_process(_held_by_aggregation, kind == "weights by samples")
        yield Row(f"aggregation memory, {MOST} contributions, {kind}", f"of {FEW}", after / before, 1.01)


def _held_by_aggregation(by_samples: bool) -> list[float]:
    model = model_of("unet")
    sent, generator = changes(model, FEW), np.random.default_rng(0)
    mean, held = StreamingMean(model), []
    for count in range(1, MOST + 1):
        mean.add(sent[count % FEW], int(generator.integers(50, 500)) if by_samples else 1)
        if count in (FEW, MOST):
            held.append(_resident())
    return held


def wire() -> Iterator[Row]:
    """Bytes that FLARE's transport writes, after the freeze."""
    with open_link() as link:
        for network, size in (("unet", 384), ("densenet121", 96)):
            model = model_of(network)
            weight = sum(value.nbytes for value in model.values())
            for region in ("site_gain", "full"):
                values = np.zeros(statistic_shape(region, 3, size, size, 0.1), np.float32)
                down = link.down(pack_model(ModelMessage(model, AmplitudeStatistic(values, 1000))))
                yield Row(f"bytes down a round, {network}, region {region}", "the model", down / weight, 1.03)
            change = changes(model, 1)[0]
            up = link.up(pack_update(UpdateMessage(change, None, {"steps": 100})))
            yield Row(f"bytes up a round, {network}", "the model", up / weight, 1.01)
            told = len(fobs.dumps(pack_update(UpdateMessage(change, None, {"steps": 100}))))  # as harmofl plan counts
            yield Row(f"forecast of the bytes up, {network}", APART, max(up / told, told / up), 1.25)
            yield from _rounded(link, network, model, change)


def _rounded(link: Link, network: str, model: Arrays, change: Arrays) -> Iterator[Row]:
    """Bytes of the model and of a difference alone, with those entries as float16 that travel so."""
    statistics = frozenset(name for name in model if name.endswith(("running_mean", "running_var")))
    sent = to_exchange_types(model, "float16", statistics)
    down, of_float32 = (link.down(pack_model(ModelMessage(weights))) for weights in (sent, model))
    yield Row(f"bytes down a round, {network}, exchange float16", "those of float32", down / of_float32, 0.51)
    sent = in_exchange_type(change, "float16", statistics)
    up, of_float32 = (link.up(pack_update(UpdateMessage(held, None, {"steps": 100}))) for held in (sent, change))
    yield Row(f"bytes up a round, {network}, exchange float16", "those of float32", up / of_float32, 0.51)


def slope() -> Iterator[Row]:
    """Memory of server and sites in one process, round by round."""
    yield Row(f"memory slope over {ROUNDS} rounds, server and 2 sites", "MiB a round", _in_a_process(_slope), 1.0)


def _slope() -> float:
    with _small_federation(2) as rounds:
        held = []
        for number in range(ROUNDS):
            rounds.round(number)
            held.append(_resident())
    settled = held[SETTLED:]
    return float(np.polyfit(np.arange(len(settled)), settled, 1)[0])


def number_of_sites() -> Iterator[Row]:
    """Time of a site and round with few and with many sites, in turns, and what the server holds."""
    seconds, memory = _in_a_process(_by_number)
    yield Row(f"processor time of a site and round, {MANY} sites in one process", f"with {FEW} sites", seconds, 1.2)
    yield Row(f"memory of that process, {MANY} sites", f"with {FEW} sites", memory, 1.05)


def _by_number() -> tuple[float, float]:
    with _small_federation(FEW) as few, _small_federation(MANY) as many:
        for number in range(3):
            few.round(number)  # decodes, loads code, fills pools of memory
        before = _resident()
        many.round(0)
        pairs = []
        for number in (1, 2):
            many_seconds = _seconds(many, number) / MANY
            pairs.append(many_seconds / (_seconds(few, number + 2) / FEW))  # after the three above
        return statistics.median(pairs), _resident() / before


def _seconds(rounds: ServedRounds, number: int) -> float:
    started = time.process_time()
    rounds.round(number)
    return time.process_time() - started


def planned() -> Iterator[Row]:
    """The forecast of `harmofl plan` against FLARE's simulator, one site at a time, on an idle and a busy machine."""
    with tempfile.TemporaryDirectory() as folder:
        experiment, plan = _planned_job(Path(folder))
        idle, idle_run = plan(measure_parts(experiment)), _simulated(Path(folder))
        with spinning():
            parts, busy_run = measure_parts(experiment), _simulated(Path(folder))
    busy, of_idle = plan(parts.as_busy), plan(parts)
    seconds = "forecast of a round's seconds against FLARE's simulator"
    for what, told, found in (
        (seconds, idle.simulated, idle_run.seconds),
        (f"{seconds}, on a busy machine", busy.simulated, busy_run.seconds),
        (f"{seconds}, of an idle machine while it is busy", of_idle.simulated, idle_run.seconds),
        ("forecast of the server's memory against FLARE's simulator", idle.server_memory / MIB, idle_run.server_mib),
    ):
        yield Row(what, APART, max(told / found, found / told), 1.25)


class _SimulatedRun(NamedTuple):
    """Seconds of a round, and what the server held at the end of the last one."""

    seconds: float
    server_mib: float


def _planned_job(folder: Path) -> tuple[Experiment, Callable[[Parts], Forecast]]:
    """A job in `folder`, and the forecast of a round of it from measured parts."""
    for site in PLANNED_SITES:
        write_prostate_site(folder / "data" / site, "siemens_3t_surface", cases=12, seed=0, matrix=64, slices=8)
    changes = PLANNED | {"data.simulated_root": str(folder / "data"), "federation.rounds": PLANNED_ROUNDS}
    experiment = read_job(make_job(folder, PLANNED_SITES, changes, demo=False), []).resolve(demo=False)
    site = PLANNED_SITES[0]
    held = load_task(experiment).open_site(folder / "data" / site, site, experiment, folder / "cache")
    return experiment, partial(
        forecast,
        experiment=experiment,
        sites=len(PLANNED_SITES),
        images=len(held.training),
        validation=8 * held.cases["validation"],
        server_rate=np.inf,
        site_rate=np.inf,
    )


def _simulated(folder: Path) -> _SimulatedRun:
    """Run the job of `folder`; the time from round to round leaves out start, first decoding, scores and report."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        done = simulate(folder / "job", Path(place), 1, {}, timeout=900)
        if done.code:
            raise RuntimeError(done.output[-2000:])
        server_mib = done.rounds[-1].server_resident_mib
    closed = [
        datetime.fromisoformat(time) for time in re.findall(r"^(\S+ [\d:]+),\d+ .* - round \d+: ", done.output, re.M)
    ]
    return _SimulatedRun((closed[-1] - closed[0]).total_seconds() / (len(closed) - 1), server_mib)


@contextmanager
def spinning() -> Iterator[None]:
    """On each core a process that never waits."""
    cores = sorted(os.sched_getaffinity(0))
    spin = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [subprocess.Popen([sys.executable, "-c", spin, str(core)]) for core in cores]
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def _small_federation(sites: int, changed: Mapping[str, Any] | None = None) -> Iterator[ServedRounds]:
    settings = copy.deepcopy(SMALL)
    for key, value in (changed or {}).items():
        set_key(settings, key, value)
    with tempfile.TemporaryDirectory() as folder:
        data = write_site(Path(folder) / "data", cases=3)
        names = [f"site-{index}" for index in range(sites)]
        yield ServedRounds(resolve_experiment(settings), data, Path(folder) / "run", names)


def _in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a new process, whose memory nothing else has grown."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _resident() -> float:
    """MiB of this process."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / MIB
