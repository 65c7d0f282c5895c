"""A process that starts as a site's does: how it starts, and what it tells its parent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harmofl.app.job import read_job
from harmofl.app.site_process import Start, in_site_process
from harmofl.core.training import TrainingError
from harmofl.experiment import Experiment


def found_here(experiment: Experiment, start: Start) -> dict[str, object]:
    print("a library prints this")
    return {
        "experiment": experiment.hash,
        "pid": os.getpid(),
        "policy": os.environ["OMP_WAIT_POLICY"],
        "start": start,
        "loaded": [name for name in ("monai", "skimage", "harmofl.flare.executor") if name in sys.modules],
    }


def refused(experiment: Experiment, start: Start) -> None:
    raise TrainingError(f"{experiment.task} cannot be trained")


@pytest.fixture
def experiment(job: Path) -> Experiment:
    return read_job(job, []).resolve(demo=False)


def test_it_starts_as_a_site_s_process_and_answers(experiment: Experiment) -> None:
    found = in_site_process(found_here, experiment)
    assert found["experiment"] == experiment.hash and found["pid"] != os.getpid()
    assert found["policy"] == "passive"
    assert found["loaded"] == ["monai", "harmofl.flare.executor"], "MONAI as a site loads it, without scikit-image"
    start = found["start"]
    assert isinstance(start, Start)
    assert 0 < start.listens < start.ready and start.resident > 100 * 2**20


def test_what_it_raises_is_raised_here(experiment: Experiment) -> None:
    with pytest.raises(TrainingError, match="prostate cannot be trained"):
        in_site_process(refused, experiment)


def test_its_end_is_said_in_a_line(experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ChildProcessError, match=r"ended with exit code -9; was there too little memory\?"):
        in_site_process(found_here, experiment)
    python.write_text("#!/bin/sh\ncat > /dev/null\necho first >&2\necho no room >&2\nexit 3\n")
    with pytest.raises(ChildProcessError, match=r"ended with exit code 3: no room"):
        in_site_process(found_here, experiment)


def test_check_lets_waiting_threads_sleep_before_torch_is_loaded() -> None:
    script = """
import os, sys
from harmofl.app import cli
held = {}
class Check:
    def check(*_, **__):
        held.update(torch="torch" in sys.modules, policy=os.environ.get("OMP_WAIT_POLICY"))
        return 0
sys.modules["harmofl.app.check"] = Check
assert cli.main(["check", "data", "--job", "job"]) == 0
assert held == {"torch": False, "policy": "passive"}, held
"""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    subprocess.run([sys.executable, "-c", script], check=True, env=kept)
