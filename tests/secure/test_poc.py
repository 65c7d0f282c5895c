"""The rehearsal on one machine: it tells the truth by its exit code and leaves nothing behind that runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.federation.conftest import make_job
from tests.secure.conftest import Drill
from tests.secure.consortium import ROOT, wait_for

SITES = ["BIDMC", "HK"]


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """The script in a folder of its own, without the tester's settings; the user's home must stay as it is."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HARMOFL_")}
    home = folder / "users_home"
    home.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "poc" / "run.py"), *arguments],
        cwd=folder,
        env={**kept, "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(folder: Path, *arguments: str) -> tuple[int, str]:
    process = start(folder, *arguments)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def still_running(folder: Path) -> list[psutil.Process]:
    """Processes that were started from something below a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder / "poc_workspace") in part for part in process.info["cmdline"] or [])
    ]


@pytest.mark.slow
def test_the_whole_path_on_one_machine(tmp_path: Path, drill: Drill) -> None:
    """`python poc/run.py --demo` on two sites: provisions, starts, submits, follows, downloads, stops; exit code 0."""
    job = make_job(tmp_path, SITES, {"demo.data.cases": 8})
    code, output = finish(tmp_path, "--demo", str(job), "--set", "federation.rounds=1")
    assert code == 0, output
    assert "round 0: 2 of 2 sites accepted" in output and "DEMO: synthetic data" in output
    report = Path(next(line for line in output.splitlines() if "report: " in line).split("report: ")[1])
    assert report.is_file() and not still_running(tmp_path)
    assert not list((tmp_path / "users_home").iterdir()), "the user's own registry of kits stays as it is"
    drill.saw(output.splitlines()[-1])


@pytest.mark.slow
def test_an_interrupted_rehearsal_stops_everything(tmp_path: Path, drill: Drill) -> None:
    """`python poc/run.py` is terminated while its job runs: server and sites are stopped, exit code 1."""
    job = make_job(tmp_path, SITES, {"demo.data.cases": 8, "training.local_epochs": 2000})
    process = start(tmp_path, "--demo", str(job))
    assert process.stdout is not None
    for line in process.stdout:
        if "is running" in line:
            break
    wait_for(lambda: len(still_running(tmp_path)) >= 5, 60, "server, sites and their job processes run")
    process.send_signal(signal.SIGTERM)
    interrupted = time.monotonic()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and not still_running(tmp_path)
    drill.saw(f"{output.splitlines()[-1]}; nothing runs {time.monotonic() - interrupted:.0f} s later")


def test_an_occupied_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = finish(tmp_path, "--demo", "--port", str(port))
    assert code == 2 and f"port {port} cannot be used" in output and f"pid {os.getpid()}" in output
    assert not (tmp_path / "poc_workspace").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    code, output = finish(tmp_path, "--demo", "--workspace", "mine")
    assert code == 2 and "no workspace of this script" in output
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_a_job_that_is_none_is_named(tmp_path: Path) -> None:
    code, output = finish(tmp_path, "--demo", str(tmp_path))
    assert code == 2 and "no job folder" in output
