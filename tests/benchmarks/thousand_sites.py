"""60, 200 and 1,000 sites beside 6, in one process each: what a site and round cost, what the process holds.

About three minutes on one core: sites train a small model on three small cases, which all of them share.
"""

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.core.training import arrays_sha256
from harmofl.experiment import Experiment
from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.persistor import save_model_file
from harmofl.flare.record import close_round
from harmofl.flare.server_run import _KEY, ServerRun
from harmofl.flare.server_store import FINAL_MODEL
from harmofl.flare.wire import UpdateMessage, pack_update
from harmofl.tasks import resolve_experiment
from tests.benchmarks.federation import SMALL, changes
from tests.benchmarks.rows import Row
from tests.small_job import write_site

MIB = 2**20
FEW, MANY = 6, (60, 200, 1000)
WARM, PAIRS = 2, 3  # rounds that load code and fill pools of memory, and rounds that are timed
LONG = 40  # rounds of the run whose books grow


def measure() -> list[Row]:
    return [*_rows("in-process federation", _trained), *_rows("server's part of a round", _served), _books()]


def _rows(what: str, work: Callable[[int], tuple[float, float]]) -> Iterator[Row]:
    for sites in MANY:
        seconds, memory = _in_a_process(work, sites)
        yield Row(f"{what}, processor time of a site and round, {sites:,} sites", f"with {FEW}", seconds, 1.2)
        yield Row(f"{what}, memory of the process, {sites:,} sites", f"with {FEW}", memory, 1.05)


def _in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _trained(sites: int) -> tuple[float, float]:
    """One round of many sites against rounds of few before and after it, and resident memory."""
    logging.disable(logging.WARNING)
    with _federation(FEW) as few, _federation(sites) as many:
        for number in range(WARM):
            few.train_round(number)
        before, held = _timed(lambda: few.train_round(WARM)) / FEW, _resident()
        spent = _timed(lambda: many.train_round(0)) / sites
        after = _timed(lambda: few.train_round(WARM + 1)) / FEW
        return spent / statistics.mean((before, after)), _resident() / held


@contextmanager
def _federation(sites: int) -> Iterator[InProcessFederation]:
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), _names(sites)
        write_site(folder / "data")
        yield InProcessFederation(_experiment(), names, folder, dict.fromkeys(names, folder / "data"))


def _served(sites: int) -> tuple[float, float]:
    """Rounds of the server with answers as they come off the wire, many and few sites in turns."""
    logging.disable(logging.WARNING)
    common_decomposers.register()
    with _server(FEW) as few, _server(sites) as many:
        few.round(0)
        held, pairs = _resident(), []
        many.round(0)
        for number in range(1, 1 + PAIRS):
            repeats = max(1, sites // FEW // 10)  # a round of few is too short for the clock
            spent = _timed(lambda number=number: many.round(number)) / sites
            first = 1 + (number - 1) * repeats
            base = _timed(lambda first=first, last=first + repeats: [few.round(one) for one in range(first, last)])
            pairs.append(spent / (base / repeats / FEW))
        return statistics.median(pairs), _resident() / held


def _books() -> Row:
    """How the time to close a round of 1,000 sites grows with the rounds before it."""
    return Row(
        f"closing a round of {MANY[-1]:,} sites, round {LONG}", "round 2", _in_a_process(_closing, MANY[-1]), 1.2
    )


def _closing(sites: int) -> float:
    logging.disable(logging.WARNING)
    common_decomposers.register()
    spent = []
    with _server(sites) as server:
        server.round(0)
        for number in range(1, LONG + 1):
            spent.append(_timed(lambda number=number: server.close(number)))
    return statistics.median(spent[-10:]) / statistics.median(spent[:10])


class Server:
    """Aggregator and books of a run whose sites answer alike; nothing is trained."""

    def __init__(self, folder: Path, sites: int) -> None:
        self.run = ServerRun(_experiment(), False, folder, _names(sites), run_id="benchmark")
        self.aggregator, weights = HarmoFLAggregator(), self.run.initial_weights()
        self.run.model_sha256 = arrays_sha256(weights)
        numbers = {"cases": {"training": 1, "validation": 1, "test": 1}, "images": 4, "steps": 1, "skipped_steps": 0}
        numbers |= {"loss": 0.5, "validation": 0.5, "seconds": 0.0, "received_sha256": self.run.model_sha256}
        self._answers = [
            fobs.dumps(pack_update(UpdateMessage(difference, None, numbers))) for difference in changes(weights, FEW)
        ]
        self._weights = weights
        self.context: FLContext = FLContextManager(None, "server", "job", {}, {}).new_context()
        self._set(_KEY, self.run)
        self._set(AppConstants.GLOBAL_MODEL, make_model_learnable(weights, {}))

    def round(self, number: int) -> None:
        """All that the server does with the answers of a round, up to the model file."""
        self._set(AppConstants.CURRENT_ROUND, number)
        self.run.begin(f"in round {number}")
        for index, site in enumerate(self.run.expected):
            answer: Shareable = fobs.loads(self._answers[index % FEW])
            answer.add_cookie(AppConstants.CONTRIBUTION_ROUND, number)
            answer.set_peer_props({ReservedKey.IDENTITY_NAME: site})
            if not self.aggregator.accept(answer, self.context):
                raise RuntimeError(f"the answer of {site} was refused: {self.run.refused[site]}")
            self.run.answered(site)
        self.close(number)
        self.aggregator.aggregate(self.context)
        self.aggregator.reset(self.context)

    def close(self, number: int) -> None:
        """The round's record and the model file."""
        close_round(self.run, number, list(self.run.expected))
        save_model_file(self._weights, self.run, number + 1, self.run.folder / FINAL_MODEL)

    def _set(self, key: str, value: Any) -> None:
        self.context.set_prop(key, value, private=True, sticky=True)


@contextmanager
def _server(sites: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as name:
        yield Server(Path(name), sites)


def _experiment() -> Experiment:
    return resolve_experiment(SMALL | {"method": "fedavg", "federation": {"rounds": 500, "minimum_sites": 1}})


def _names(sites: int) -> list[str]:
    return [f"site-{index:04d}" for index in range(sites)]


def _timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _resident() -> float:
    return float(psutil.Process().memory_info().rss) / MIB
