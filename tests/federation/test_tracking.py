"""Curves of real runs: the event files say what the server's books say, a job has its own, sites have none."""

from typing import Any

import pytest

from harmofl.flare.tracking import ALL_SITES, SCALARS, TENSORBOARD_FOLDER
from tests.federation.conftest import Run, RunJob

SITES = ("BIDMC", "HK")


def points(run: Run) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """By site and name what TensorBoard shows."""
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for folder in sorted((run.server / TENSORBOARD_FOLDER).iterdir()):
        held = reader.EventAccumulator(str(folder)).Reload()
        for name in held.Tags()["scalars"]:
            found[folder.name, name] = [(event.step, pytest.approx(event.value)) for event in held.Scalars(name)]
    return found


@pytest.mark.slow
def test_the_event_files_hold_what_the_rounds_hold(run_job: RunJob) -> None:
    pytest.importorskip("tensorboard")
    run = run_job(SITES)
    assert run.code == 0 and "ERROR" not in run.output, run.output
    expected: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for record in run.rounds:
        for name in SCALARS:
            for site, value in getattr(record, name).items():
                expected.setdefault((site, name), []).append((record.round, value))
        assert record.validation_mean is not None
        expected.setdefault((ALL_SITES, "validation_mean"), []).append((record.round, record.validation_mean))
    assert points(run) == expected
    assert [path.parents[2].name for path in run.workspace.rglob("events.out.tfevents*")] == ["app_server"] * 3


@pytest.mark.slow
def test_mlflow_by_one_setting(run_job: RunJob) -> None:
    client: Any = pytest.importorskip("mlflow.tracking.client")
    run = run_job(SITES, {"federation.tracking": "mlflow"})
    assert run.code == 0, run.output
    held = client.MlflowClient(f"sqlite:///{run.server / 'mlflow.db'}")
    place = held.get_experiment_by_name(run.results.experiment["name"]).experiment_id
    (found,) = held.search_runs([place])
    assert found.info.status == "FINISHED" and found.data.tags["run_id"] == run.results.run_id
    assert found.data.metrics["validation_mean"] == pytest.approx(run.rounds[-1].validation_mean)
    assert not (run.server / TENSORBOARD_FOLDER).exists()
