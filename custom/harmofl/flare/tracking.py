"""Curves of a run for TensorBoard or MLflow, written by the server from its own books.

Sites send nothing for this. What FLARE offers is a receiver of events that sites fire, and a site may fire any event
with any name in it. Here the server hands the receiver the numbers of each closed round itself, and the receiver
listens to no event, so that no name but those in `SCALARS` gets into the curves.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo

from harmofl.evidence.results import RoundRecord
from harmofl.experiment import Experiment, ExperimentError
from harmofl.sections import names_text, outside_text

SCALARS = ("validation", "loss", "seconds", "bytes_sent", "norm")  # of each site; `validation_mean` of all
MOST_CURVES = 50  # sites with a curve of their own: TensorBoard has a thread and an open file for each
ALL_SITES = "server"  # no site has FLARE's name of the server
TENSORBOARD_FOLDER, MLFLOW_FILE = "tb_events", "mlflow.db"
MLFLOW_URI_VARIABLE = "MLFLOW_TRACKING_URI"  # MLflow's own
_LOGGER = logging.getLogger(__name__)


class Sink(Protocol):
    """Where curves go."""

    def put(self, origin: str, name: str, value: float, step: int) -> None:
        """Add a point."""

    def flush(self) -> None:
        """Let whoever looks see all points."""

    def end(self, finished: bool) -> None:
        """No point will follow."""


class Tracking:
    """The curves of one run. Whatever goes wrong here costs the curves, never the run."""

    def __init__(self, sink: Sink) -> None:
        """Write to one sink."""
        self._sink: Sink | None = sink

    def write(self, record: RoundRecord) -> None:
        """Add the numbers of a closed round, which is the step."""
        sink = self._sink
        if sink is None:
            return
        try:
            for origin, name, value in points(record):
                sink.put(origin, name, value, record.round)
            sink.flush()
        except Exception as error:
            self._sink = None
            _LOGGER.warning(
                f"tracking ends with round {record.round}: {type(error).__name__}: {outside_text(str(error))}"
            )

    def end(self, finished: bool) -> None:
        """Close the files."""
        sink, self._sink = self._sink, None
        try:
            if sink is not None:
                sink.end(finished)
        except Exception as error:
            _LOGGER.warning(f"tracking could not be closed: {type(error).__name__}: {outside_text(str(error))}")


def points(record: RoundRecord) -> Iterator[tuple[str, str, float]]:
    """Origin, name and value of everything that is tracked of a round; undefined numbers leave a gap.

    Of more than 50 sites it is the lowest, the median and the highest number of all.
    """
    for name in SCALARS:
        held = {site: float(value) for site, value in getattr(record, name).items() if value is not None}
        if len(record.sites_accepted) > MOST_CURVES:
            held = _spread(list(held.values()))
        for origin, value in held.items():
            yield origin, name, value
    if record.validation_mean is not None:
        yield ALL_SITES, "validation_mean", record.validation_mean


def _spread(values: list[float]) -> dict[str, float]:
    return {"lowest": min(values), "median": median(values), "highest": max(values)} if values else {}


def open_tracking(
    experiment: Experiment, *, run_id: str, sites: list[str], folder: Path, fl_ctx: FLContext
) -> Tracking | None:
    """What `federation.tracking` asks for; None for `none`, and where TensorBoard is not installed.

    Raises:
        ExperimentError: MLflow is asked for and not installed, or cannot be reached.
    """
    wanted = experiment.federation.tracking
    if wanted == "mlflow":
        try:
            return Tracking(MlflowSink(experiment, run_id, sites, folder))
        except ImportError as error:
            raise ExperimentError(
                f"federation.tracking: 'mlflow' is not installed at the server ({error.name} is missing); "
                "pip install 'harmofl[mlflow]' there, or set federation.tracking to 'tensorboard' or 'none'"
            ) from None
        except Exception as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ExperimentError(f"federation.tracking: MLflow at the server cannot be used ({line})") from None
    if wanted == "tensorboard":
        try:
            return Tracking(TensorBoardSink(folder, fl_ctx))
        except ImportError:
            _LOGGER.warning("tracking: tensorboard is not installed at the server, so no curves are written for it")
    return None


class TensorBoardSink:
    """FLARE's receiver for TensorBoard: a folder a job, in it a run a site, in its folder beside the results."""

    def __init__(self, folder: Path, fl_ctx: FLContext) -> None:
        """Import it here: only the server of a run that asks for it pays."""
        from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver

        self._context = fl_ctx
        self._receiver = TBAnalyticsReceiver(tb_folder=f"{folder.name}/{TENSORBOARD_FOLDER}", events=[])
        self._receiver.initialize(fl_ctx)

    def put(self, origin: str, name: str, value: float, step: int) -> None:
        """Hand the receiver a point as if the site had sent it."""
        dxo = create_analytic_dxo(name, value, AnalyticsDataType.SCALAR, global_step=step)
        self._receiver.save(self._context, dxo.to_shareable(), origin)

    def flush(self) -> None:
        """Write the event files."""
        for writer in self._receiver.writers_table.values():
            writer.flush()

    def end(self, finished: bool) -> None:
        """Close the event files."""
        self._receiver.finalize(self._context)


class MlflowSink:
    """One MLflow run a job, with the settings as parameters and `<name>/<site>` as metrics.

    FLARE's receiver would make a run of every site. The address is the server's own MLFLOW_TRACKING_URI, never the
    job's choice; without it a database beside the results.
    """

    def __init__(self, experiment: Experiment, run_id: str, sites: list[str], folder: Path) -> None:
        """Open the run."""
        from mlflow.tracking.client import MlflowClient

        address = os.environ.get(MLFLOW_URI_VARIABLE) or f"sqlite:///{(folder / MLFLOW_FILE).absolute()}"
        self._client = MlflowClient(address)
        known = self._client.get_experiment_by_name(experiment.name)
        place = known.experiment_id if known else self._client.create_experiment(experiment.name)
        tags = {"run_id": run_id, "experiment_hash": experiment.hash, "sites": names_text(sites)}
        self._run: str = self._client.create_run(place, run_name=run_id, tags=tags).info.run_id
        self._points: list[tuple[str, float, int]] = []
        for key, value in _flat(experiment.model_dump(mode="json", exclude={"demo": True, "data": {"simulated_root"}})):
            self._client.log_param(self._run, key, value)

    def put(self, origin: str, name: str, value: float, step: int) -> None:
        """Keep a point until the round is whole."""
        self._points.append((name if origin == ALL_SITES else f"{name}/{origin}", value, step))

    def flush(self) -> None:
        """Send the points of a round in one request."""
        import time

        from mlflow.entities import Metric

        now, held = int(time.time() * 1000), self._points
        self._points = []
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value, step in held])

    def end(self, finished: bool) -> None:
        """Say how the job ended."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Settings as `section.key` and text, without the checkpoint's path."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif key != "resume_from":
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value)
