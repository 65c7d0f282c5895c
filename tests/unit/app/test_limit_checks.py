"""What preflight and bundle say about a site's limits before a job is submitted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harmofl.app.bundle import bundle
from harmofl.app.job import read_job
from harmofl.app.kit import open_kit
from harmofl.app.limit_checks import check_default_limits, check_limits, check_patients, warnings_for_careful_sites
from tests.unit.app.provisioned import set_privacy


def said(site: Path, job_folder: Path | None, *assignments: str, **limits: Any) -> list[str]:
    set_privacy(site, limits=limits)
    job = read_job(job_folder, list(assignments)) if job_folder else None
    experiment = job.resolve(demo=False) if job else None
    return [str(check) for check in check_limits(open_kit(site), job, experiment)]


def test_the_limits_in_force_are_shown(site: Path) -> None:
    (line,) = said(site, None)
    assert line.startswith("ok: limits: in force: minimum_sites 3, training_patients 5, scored_patients 2, case_scores")
    assert "regions dc and site_gain" in line and line.endswith("minimum_cases 5")


def test_fewer_sites_than_a_careful_hospital_wants_are_pointed_out(site: Path) -> None:
    _, line = said(site, None, minimum_sites=2)
    assert line.startswith("note: limits: minimum_sites is 2: the other site can subtract its own part from the mean")


def test_every_setting_of_a_job_over_a_limit_is_an_error_with_the_fix(site: Path, job: Path) -> None:
    assert [line for line in said(site, job, minimum_sites=1) if line.startswith("error")] == []
    alone = said(site, job, "federation.minimum_sites=1", "amplitude.minimum_sites=1", batch_size=2, local_epochs=1)
    errors = [line.removeprefix("error: ") for line in alone if line.startswith("error")]
    assert errors[0] == (
        "federation.minimum_sites: is 1, limits.minimum_sites is 3; raise it to 3, or ask the hospital to lower its "
        "limit"
    )
    assert [line.partition(":")[0] for line in errors] == [
        "federation.minimum_sites",
        "amplitude.minimum_sites",
        "deploy_map",
        "training.batch_size",
    ]


def test_a_job_with_a_task_of_its_own_is_held_against_the_limits_too(site: Path, job: Path) -> None:
    set_privacy(site, limits={"batch_size": 1})
    held = read_job(job, ["task=my_code.Task"])
    lines = [str(check) for check in check_limits(open_kit(site), held, None)]
    assert any(line.startswith("error: training.batch_size: is ") for line in lines)


def test_a_network_above_the_limit_is_an_error_before_the_job_is_submitted(site: Path, job: Path) -> None:
    (line,) = (line for line in said(site, job, parameters=1000) if "network" in line)
    assert re.fullmatch(
        r"error: network\.width: makes a network of \d{4,} parameters, limits\.parameters is 1000; lower it, or "
        r"ask the hospital to raise its limit",
        line,
    )
    held = read_job(job, ["network.width=512"])  # 2.0 billion parameters
    experiment = held.resolve(demo=False)
    (check,) = (check for check in check_default_limits(held, experiment) if check.subject == "network.width")
    assert check.state == "warning" and "limits.parameters is 100000000" in check.message
    assert any("network.width" in line for line in warnings_for_careful_sites(held, experiment))


def test_whoever_submits_is_warned_of_what_the_default_limits_refuse(job: Path) -> None:
    held = read_job(job, ["training.local_epochs=21", "federation.minimum_sites=3", "amplitude.minimum_sites=3"])
    lines = [str(check) for check in check_default_limits(held, held.resolve(demo=False))]
    assert [line.partition(": is")[0] for line in lines if "deploy_map" not in line] == [
        "warning: training.local_epochs"
    ]
    assert (
        "is 21, limits.local_epochs is 20 at a hospital with the default limits, which refuses the job; lower"
        in lines[-1]
    )


def test_too_few_training_patients_are_an_error(site: Path) -> None:
    set_privacy(site, limits={})
    (check,) = check_patients(open_kit(site), 4)
    assert str(check).startswith("error: data: 4 training patients, limits.training_patients is 5: this site would not")
    assert list(check_patients(open_kit(site), 5)) == []


def test_a_bundle_warns_of_what_a_careful_hospital_refuses(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"output": tmp_path / "dist", "demo": False, "preinstalled": True, "project": None}
    assert bundle(job, ["federation.minimum_sites=1", "amplitude.minimum_sites=1"], **made) == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "warning: a hospital with the default limits refuses this job: federation.minimum_sites is 1" in out
    written = json.loads((tmp_path / "dist" / job.name / "app/config/experiment.json").read_text())
    assert written["federation"]["minimum_sites"] == 1, "a warning only: the hospital decides"
