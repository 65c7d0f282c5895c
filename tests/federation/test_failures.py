"""Sites that fail: the run goes on or ends as stated, and says who and why."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from harmofl.data.synthetic import write_prostate_site
from tests.federation.conftest import RunJob, make_job, simulate
from tests.federation.drills import CONTROLLERS, EXECUTORS
from tests.federation.test_invariants import saved_weights

ONE_IS_ENOUGH = {"federation.minimum_sites": 1, "amplitude.minimum_sites": 1, "federation.straggler_wait": 120}


def test_a_failing_site_fails_a_job_that_needs_it(run_job: RunJob) -> None:
    run = run_job(executor="drill.Raises", code=EXECUTORS)
    assert run.code != 0
    assert "HK failed: internal_error" in run.output
    assert not (run.server / "results.json").exists()


def test_a13_nan_from_one_site(run_job: RunJob) -> None:
    run = run_job(overrides=ONE_IS_ENOUGH, executor="drill.SendsNaN", code=EXECUTORS)
    assert run.code == 0, run.output
    assert run.results.sites_accepted == [["BIDMC"], ["BIDMC"]]
    assert "not finite" in run.rounds[0].sites_refused["HK"]
    assert all(np.isfinite(value).all() for value in saved_weights(run).values())


@pytest.mark.slow
def test_a_type_that_the_wire_does_not_know_is_refused_at_once(run_job: RunJob) -> None:
    # the time limit of a round stays at its day: a run that waits for it does not end within the test's
    run = run_job(overrides=ONE_IS_ENOUGH, executor="drill.SendsAnUnknownType", code=EXECUTORS)
    assert run.code == 0, run.output
    assert run.results.sites_accepted == [["BIDMC"], ["BIDMC"]]
    refused = run.rounds[0].sites_refused["HK"]
    assert refused.startswith("MessageError: site HK: the answer cannot be sent: DXO.data.")
    assert refused.endswith("is of type pathlib.PosixPath") and "Jane_Doe" not in run.output


def test_a11_too_few_accepted_results_fail_the_job_and_save_no_model(run_job: RunJob) -> None:
    run = run_job(executor="drill.SendsNaN", code=EXECUTORS)
    assert run.code != 0
    assert "round 0: 1 of 2 sites accepted, 2 needed (HK: entry" in run.output
    assert not (run.server / "FL_global_model.pt").exists()


@pytest.mark.slow
def test_a_model_beyond_float16_fails_the_job_by_entry_before_it_is_sent(run_job: RunJob) -> None:
    run = run_job(overrides={"federation.exchange": "float16", "federation.server_learning_rate": 1e9})
    assert run.code != 0
    assert "round 0: the global model is not sent: " in run.output and "Traceback" not in run.output
    assert "float16 ends at 65504; set federation.exchange to float32, or lower training.learning_rate" in run.output
    assert len(run.rounds) == 1 and not (run.server / "FL_global_model.pt").exists(), "round 1 was not begun"


@pytest.mark.slow
def test_books_that_cannot_be_written_fail_the_job(run_job: RunJob) -> None:
    run = run_job(controller="drill.CannotWriteItsBooks", code=CONTROLLERS)
    assert run.code != 0
    assert "round 0 could not be closed" in run.output
    assert not (run.server / "results.json").exists()


@pytest.mark.slow
def test_c12_a_late_site_trains_with_the_frozen_amplitude(run_job: RunJob) -> None:
    run = run_job(overrides=ONE_IS_ENOUGH, executor="drill.JoinsLate", code=EXECUTORS)
    assert run.code == 0, run.output
    results = run.results
    assert results.amplitude is not None and results.amplitude.sites == ["BIDMC"]
    assert results.sites_accepted == [["BIDMC"], ["BIDMC", "HK"]]
    assert not results.sites["HK"].amplitude_sent and results.sites["HK"].bytes_sent["amplitude"] == 0


@pytest.mark.slow
def test_too_few_amplitudes_fail_the_job_by_name(run_job: RunJob) -> None:
    run = run_job(overrides={"amplitude.minimum_cases": 100})
    assert run.code != 0
    assert "the amplitude of 0 sites arrived, amplitude.minimum_sites is 2" in run.output
    assert "BIDMC: sent none; HK: sent none" in run.output
    assert "amplitude not sent" in run.output


@pytest.mark.slow
def test_a_site_that_cannot_evaluate_fails_the_job_but_not_the_evidence(run_job: RunJob) -> None:
    run = run_job(executor="drill.FailsInEvaluation", code=EXECUTORS)
    assert run.code != 0
    assert "evaluation: answers of 1 site, 2 needed (HK: internal_error" in run.output
    assert run.results.sites_without_test == ["HK"] and "no test score from HK" in run.results.warnings
    assert run.results.sites["BIDMC"].test["dice"].n > 0
    assert (run.server / "report.html").is_file()


@pytest.mark.slow
def test_the_amplitude_waits_for_its_own_minimum_of_sites(run_job: RunJob) -> None:
    overrides = {"federation.minimum_sites": 1, "federation.straggler_wait": 0, "federation.rounds": 1}
    run = run_job(overrides=overrides, executor="drill.SlowToMeasure", code=EXECUTORS)
    assert run.code == 0, run.output
    assert run.results.amplitude is not None and run.results.amplitude.sites == ["BIDMC", "HK"]


def test_two_sites_that_would_read_one_folder_are_refused(run_job: RunJob, tmp_path: Path) -> None:
    write_prostate_site(tmp_path / "own", "ge_3t_endorectal", 8, 0)
    run = run_job(environment={"HARMOFL_DATA_ROOT": str(tmp_path / "own")}, demo=False)
    assert run.code != 0
    assert "site HK would read" in run.output


def test_a_site_that_resolves_another_experiment_refuses(tmp_path) -> None:
    job = make_job(tmp_path, ["BIDMC", "HK"], {})
    meta = json.loads((job / "meta.json").read_text())
    meta["deploy_map"] = {"app": ["server", "BIDMC"], "other": ["HK"]}
    (job / "meta.json").write_text(json.dumps(meta))
    other = job / "other"
    (job / "app").rename(job / "app_copy")
    for name in ("app", "other"):
        shutil.copytree(job / "app_copy", job / name)
    shutil.rmtree(job / "app_copy")
    path = other / "config" / "experiment.json"
    settings = json.loads(path.read_text())
    settings["perturbation"]["alpha"] = 0.5
    path.write_text(json.dumps(settings))
    run = simulate(job, tmp_path, 2, {})
    assert run.code != 0
    assert "HK failed: experiment_differs: site HK resolves experiment" in run.output
