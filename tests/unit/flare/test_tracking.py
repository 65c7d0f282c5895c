"""Curves: what is in the files that TensorBoard and MLflow read, and that nothing else gets in."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext, FLContextManager

from harmofl.core.norm_rule import SentDifference
from harmofl.experiment import ExperimentError, resolve, set_key
from harmofl.flare.record import close_round, end_books
from harmofl.flare.tracking import ALL_SITES, SCALARS, TENSORBOARD_FOLDER, Tracking, open_tracking, points


@pytest.fixture
def context(tmp_path: Path) -> FLContext:
    """A context whose job's run folder is the parent of the app's."""
    workspace = SimpleNamespace(get_run_dir=lambda job_id: str(tmp_path))
    return FLContextManager(SimpleNamespace(get_workspace=lambda: workspace), "server", "job", {}, {}).new_context()


@pytest.fixture
def tracked(make_run, numbers, context, tmp_path):
    """A run of sites A and B that is tracked; C's validation is undefined."""

    def make(to: str):
        run = make_run({"federation.tracking": to})
        run.folder = tmp_path / "app_server"
        run.folder.mkdir()
        run.tracking = open_tracking(
            run.experiment, run_id=run.run_id, sites=run.expected, folder=run.folder, fl_ctx=context
        )
        for site in run.expected:
            run.numbers[site] = dict(numbers)
            run.count_bytes(site, {"weights": 100, "amplitude": 8})
            run.sent[site] = SentDifference(0.5, 1.0, "", np.ones(4))
        run.numbers["C"]["validation"] = None
        return run

    return make


def scalars(folder: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Every point of every run below a TensorBoard folder, as TensorBoard reads it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        held = accumulator.EventAccumulator(str(run)).Reload()
        for tag in held.Tags()["scalars"]:
            found[run.name, tag] = [(event.step, event.value) for event in held.Scalars(tag)]
    return found


def test_tensorboard_gets_a_run_a_site_with_the_listed_names_only(tracked):
    pytest.importorskip("tensorboard")
    run = tracked("tensorboard")
    close_round(run, 0, ["A", "B", "C"])
    close_round(run, 1, ["A", "B"])
    end_books(run, ["done"])
    found = scalars(run.folder / TENSORBOARD_FOLDER)
    names = {(site, name) for site in "ABC" for name in SCALARS} | {(ALL_SITES, "validation_mean")}
    assert set(found) == names - {("C", "validation")}
    assert found["A", "validation"] == [(0, 0.25), (1, 0.25)]
    assert found["C", "loss"] == [(0, 0.5)]
    assert found["B", "bytes_sent"] == [(0, 108.0), (1, 108.0)]
    assert found[ALL_SITES, "validation_mean"] == [(0, 0.25), (1, 0.25)]


def test_points_are_there_while_the_run_goes_on(tracked):
    pytest.importorskip("tensorboard")
    run = tracked("tensorboard")
    close_round(run, 0, ["A", "B"])
    assert scalars(run.folder / TENSORBOARD_FOLDER)["A", "loss"] == [(0, 0.5)]


def test_no_event_of_a_site_gets_into_the_curves(tracked, context):
    """FLARE's receiver takes every name that a site sends; ours listens to none."""
    pytest.importorskip("tensorboard")
    receiver = tracked("tensorboard").tracking._sink._receiver
    assert receiver.events == []
    for event in ("analytix_log_stats", "fed.analytix_log_stats", EventType.START_RUN):
        receiver.handle_event(event, context)
    assert receiver.writers_table == {}


def test_a_sink_that_fails_costs_the_curves_and_not_the_run(tracked, caplog):
    class Broken:
        puts = 0

        def put(self, *point):
            self.puts += 1
            raise OSError("No space left on device")

        def end(self, finished):
            raise AssertionError("it was given up")

    run = tracked("none")
    broken = Broken()
    run.tracking = Tracking(broken)
    close_round(run, 0, ["A"])
    close_round(run, 1, ["A"])
    end_books(run, [])
    assert broken.puts == 1 and len(run.rounds) == 2
    (line,) = [record.getMessage() for record in caplog.records if "tracking" in record.getMessage()]
    assert line == "tracking ends with round 0: OSError: No space left on device"


def test_none_and_a_missing_tensorboard_track_nothing(tracked, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nvflare.app_opt.tracking.tb.tb_receiver", None)
    assert tracked("tensorboard").tracking is None
    assert "tensorboard is not installed at the server" in caplog.text


def test_nothing_is_imported_for_none(tracked):
    assert tracked("none").tracking is None


def test_sites_and_the_server_import_no_tracker_until_one_is_asked_for():
    code = """
import sys
import harmofl.flare.controller, harmofl.flare.executor, harmofl.flare.participant
loaded = {name.split(".")[0] for name in sys.modules} & {"tensorboard", "mlflow"}
assert not loaded and "nvflare.app_opt.tracking.tb.tb_receiver" not in sys.modules, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_mlflow_is_one_line_before_the_run(tracked, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        ExperimentError, match=r"federation.tracking: 'mlflow' is not installed .*pip install 'harmofl\["
    ):
        tracked("mlflow")


@pytest.mark.parametrize("closing", [["done"], []])
def test_mlflow_gets_one_run_a_job_with_names_by_site(tracked, monkeypatch, closing):
    client_of = pytest.importorskip("mlflow.tracking.client").MlflowClient
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = tracked("mlflow")
    close_round(run, 0, ["A", "B", "C"])
    close_round(run, 1, ["A"])
    end_books(run, closing)
    client = client_of(f"sqlite:///{run.folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(run.experiment.name)
    (held,) = client.search_runs([experiment.experiment_id])
    assert held.info.status == ("FINISHED" if closing else "FAILED")
    names = {f"{name}/{site}" for name in SCALARS for site in "ABC"} | {"validation_mean"}
    assert set(held.data.metrics) == names - {"validation/C"}
    history = client.get_metric_history(held.info.run_id, "validation/A")
    assert [(point.step, point.value) for point in history] == [(0, 0.25), (1, 0.25)]
    assert held.data.tags["run_id"] == run.run_id and held.data.tags["experiment_hash"] == run.experiment.hash
    assert held.data.params["training.learning_rate"] == "0.05"
    assert not {key for key in held.data.params if "root" in key or "resume" in key}


def test_a_name_that_a_site_makes_up_is_no_point(tracked):
    run = tracked("none")
    record = close_round(run, 0, ["A"])
    assert {name for _, name, _ in points(record)} == {*SCALARS, "validation_mean"}


def test_where_curves_go_does_not_change_the_experiment(written):
    hashes = set()
    for to in ("tensorboard", "mlflow", "none"):
        set_key(written, "federation.tracking", to)
        hashes.add(resolve(written).hash)
    assert len(hashes) == 1
