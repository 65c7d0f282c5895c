"""What the jobs share and where they differ."""

import json
from pathlib import Path

import pytest

from harmofl.app.job import read_job
from harmofl.tasks import TASKS

JOBS = sorted(path.parent for path in (Path(__file__).resolve().parents[2] / "jobs").glob("*/meta.json"))


def test_there_is_a_job_for_every_task() -> None:
    assert [job.name for job in JOBS] == sorted(f"harmofl_{task}" for task in TASKS)


@pytest.mark.parametrize("name", ["app/config/config_fed_server.json", "app/config/config_fed_client.json"])
def test_all_jobs_have_the_same_components(name: str) -> None:
    first, *others = (json.loads((job / name).read_text()) for job in JOBS)
    assert all(other == first for other in others)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_is_five_files_without_code(job: Path) -> None:
    files = {path.relative_to(job).as_posix() for path in job.rglob("*") if path.is_file()}
    config = {f"app/config/{name}.json" for name in ("config_fed_server", "config_fed_client", "experiment")}
    assert files == {"meta.json", "app/custom/README.md", *config}


@pytest.mark.parametrize("preset", ["robust", "as_described", "as_published"])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_preset_runs_in_the_demo(job: Path, preset: str) -> None:
    norm = ["network.norm=batch"] if "camelyon17" in job.name else []
    experiment = read_job(job, [f"amplitude.preset={preset}", *norm]).resolve(demo=True)
    assert experiment.training.batch_size >= experiment.amplitude.minimum_cases


@pytest.mark.parametrize("demo", [False, True])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_resolves_with_and_without_its_demo_and_needs_all_its_sites(job: Path, demo: bool) -> None:
    read = read_job(job, [])
    experiment = read.resolve(demo=demo)
    meta = json.loads((job / "meta.json").read_text())
    assert experiment.name == meta["name"] == job.name
    assert meta["min_clients"] == experiment.federation.minimum_sites == len(read.sites)
    assert experiment.amplitude.region != "off" and experiment.perturbation.alpha > 0
