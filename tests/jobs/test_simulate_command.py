"""harmofl simulate with FLARE's real simulator: two sites, one round."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harmofl.evidence.results import read_results
from tests.small_job import write_site, write_small_job

RUN = "import sys; from harmofl.app.cli import main; sys.exit(main(sys.argv[1:]))"
RESULTS = Path("simulator_workspace/server/simulate_job/app_server/results.json")
FAILING = """
from harmofl.flare.executor import HarmoFLExecutor


class FailingExecutor(HarmoFLExecutor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        if task_name == "{task}":
            raise ValueError("as this test wants it")
        return super().execute(task_name, shareable, fl_ctx, abort_signal)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_small_job(tmp_path / "small_job")


def start(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HARMOFL_")}
    environment |= {"HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, "simulate", "small_job", "--threads", "2", *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def simulate(tmp_path: Path, *arguments: str) -> tuple[int, list[str]]:
    out, err = (process := start(tmp_path, *arguments)).communicate(timeout=150)
    assert err == ""
    return process.returncode, out.splitlines()


def leave_one_site(job: Path, executor: str, code: str = "") -> None:
    """Give HK an app of its own with another executor."""
    for path in sorted((job / "app").rglob("*")):
        copy = job / "app_hk" / path.relative_to(job / "app")
        copy.mkdir(parents=True) if path.is_dir() else copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            copy.write_bytes(path.read_bytes())
    config = job / "app_hk/config/config_fed_client.json"
    config.write_text(config.read_text().replace("harmofl.flare.executor.HarmoFLExecutor", executor))
    (job / "app_hk/custom/failing.py").write_text(code)
    meta = json.loads((job / "meta.json").read_text())
    meta["deploy_map"] = {"app": ["server", "BIDMC"], "app_hk": ["HK"]}
    (job / "meta.json").write_text(json.dumps(meta))


def test_a_demo_run_succeeds_and_applies_what_was_set(tmp_path: Path, job: Path) -> None:
    before = (job / "app/config/experiment.json").read_bytes()
    code, lines = simulate(tmp_path, "--demo", "--set", "seed=3")
    assert code == 0, lines
    assert lines[0] == (
        f"harmofl simulate: 2 sites, 2 at a time, demo data, workspace {tmp_path / 'simulator_workspace'}"
    )
    assert lines[-1].startswith("harmofl simulate: all 2 sites took part to the end")
    results = read_results(tmp_path / RESULTS)
    assert (results.demo, results.seed, results.sites_expected) == (True, 3, ["BIDMC", "HK"])
    assert (job / "app/config/experiment.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) in (
        ["simulator_workspace", "small_job"],
        ["home", "simulator_workspace", "small_job"],
    )


def test_a_site_without_cases_is_named_in_the_last_line(tmp_path: Path, job: Path) -> None:
    write_site(tmp_path / "data/BIDMC")
    (tmp_path / "data/HK").mkdir()
    code, lines = simulate(tmp_path, "--data", "data")  # relative: sites run in other folders
    assert code == 1
    assert lines[-1].startswith("harmofl simulate: failed: site HK: no_data: ")
    assert not (tmp_path / RESULTS).exists()
    assert not list((tmp_path / "data/HK").iterdir())


@pytest.mark.slow
def test_a_site_that_fails_in_a_task_is_named_in_the_last_line(tmp_path: Path, job: Path) -> None:
    leave_one_site(job, "failing.FailingExecutor", FAILING.format(task="train"))
    code, lines = simulate(tmp_path)
    assert code == 1
    assert lines[-1].startswith("harmofl simulate: failed: site HK: ")


@pytest.mark.slow
def test_a_site_that_fails_when_it_is_built_is_named_in_the_last_line(tmp_path: Path, job: Path) -> None:
    leave_one_site(job, "harmofl.flare.executor.Misspelt")
    code, lines = simulate(tmp_path)
    assert code == 1
    assert lines[-1].startswith("harmofl simulate: failed: site HK: ") and "Misspelt" in lines[-1]


@pytest.mark.slow
def test_a_site_killed_from_outside_is_named_in_the_last_line(tmp_path: Path, job: Path) -> None:
    process = start(tmp_path, "--set", "federation.rounds=50")
    log = tmp_path / "simulator_workspace/HK/log.txt"
    deadline = time.monotonic() + 100
    while not (log.exists() and "round 0" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.2)
    for child in psutil.Process(process.pid).children(recursive=True):
        arguments = child.cmdline()
        if "--client" in arguments and "HK" in arguments:
            child.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert out.splitlines()[-1].startswith("harmofl simulate: failed: site HK: its process ended")


@pytest.mark.slow
def test_a3_an_executor_that_raises_when_it_is_built_is_told_with_its_reason(tmp_path: Path, job: Path) -> None:
    code = (
        "from harmofl.flare.executor import HarmoFLExecutor\n\n\nclass Broken(HarmoFLExecutor):\n"
        "    def __init__(self):\n        raise RuntimeError('as this test wants it')\n"
    )
    leave_one_site(job, "failing.Broken", code)
    exit_code, lines = simulate(tmp_path)
    assert exit_code == 1
    assert lines[-1].startswith("harmofl simulate: failed: site HK: ") and "as this test wants it" in lines[-1]
