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

sys.path.insert(0, str(ROOT / "poc"))

from commands import Commands, RehearsalError, processes_of  # noqa: E402
from run import _lead_of as lead_of  # noqa: E402

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
    code, output = finish(tmp_path, "--demo", str(job), "--set", "federation.rounds=1", "--limit", "scored_patients=1")
    assert code == 0, output
    assert "limits of every site, for this rehearsal only: minimum_sites=2, scored_patients=1" in output
    assert "round 0: 2 of 2 sites accepted" in output and "DEMO: synthetic data" in output
    report = Path(next(line for line in output.splitlines() if "report: " in line).split("report: ")[1])
    assert report.is_file() and not still_running(tmp_path)
    assert not list((tmp_path / "users_home").iterdir()), "the user's own registry of kits stays as it is"
    drill.saw(output.splitlines()[-1])


@pytest.mark.slow
def test_an_interrupted_rehearsal_stops_everything(tmp_path: Path, drill: Drill) -> None:
    """`python poc/run.py` is terminated while its job runs: server and sites are stopped, exit code 1."""
    job = make_job(tmp_path, SITES, {"demo.data.cases": 8, "training.local_epochs": 2000})
    process = start(tmp_path, "--demo", str(job), "--limit", "local_epochs=2000", "--limit", "scored_patients=1")
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


@pytest.mark.slow
def test_interrupts_while_the_data_is_made_leave_nothing(tmp_path: Path) -> None:
    """Terminated in the middle of `harmofl demo-data`, and again while it stops: no traceback, no orphan."""
    job = make_job(tmp_path, SITES, {"demo.data.cases": 3000})
    process = start(tmp_path, "--demo", str(job))
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if "DEMO: synthetic data" in line:
            break
    wait_for(lambda: any("demo-data" in one.info["cmdline"] for one in still_running(tmp_path)), 30, "data is made")
    (state,) = (tmp_path / "poc_workspace").rglob("cert.json")
    assert state.stat().st_mode & 0o077 == 0, "it holds the key of the authority"
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.3)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert output.splitlines()[-1].startswith("poc: failed: interrupted")
    assert "poc stop" not in output and not still_running(tmp_path), "no server was started"


@pytest.mark.slow
def test_an_interrupt_while_kits_are_made_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "--demo", str(make_job(tmp_path, SITES, {})))
    wait_for(lambda: still_running(tmp_path), 60, "FLARE provisions")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in output, output
    assert "provisioned" not in output and not still_running(tmp_path)


def test_a_step_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Commands(tmp_path, dict(os.environ))
    with pytest.raises(RehearsalError, match=r"^nvflare poc start failed$"):
        commands.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], "nvflare poc start", quiet=True)
    assert capsys.readouterr().out == "why\n"


def test_a_step_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    commands, before = Commands(tmp_path, dict(os.environ)), processes_of(tmp_path)
    code = "import subprocess; subprocess.run(['sleep', '300'])"
    with pytest.raises(RehearsalError, match=r"^nvflare poc stop did not end within 1 s$"):
        commands.run([sys.executable, "-c", code], "nvflare poc stop", quiet=True, patience=1.0)
    assert not set(processes_of(tmp_path)) - set(before)


def test_what_a_command_left_running_is_ended(tmp_path: Path) -> None:
    commands, before = Commands(tmp_path, dict(os.environ)), processes_of(tmp_path)
    code = (
        "import subprocess as s; s.Popen(['sleep', '300'], stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True)"
    )
    commands.run([sys.executable, "-c", code], "nvflare poc start", quiet=True)
    left = [process for process in processes_of(tmp_path) if process not in before]
    assert [process.name() for process in left] == ["sleep"]
    commands.end_all()
    assert not processes_of(tmp_path)


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
    assert code == 2 and "name a job folder" in output


@pytest.mark.parametrize("meta", ["{", "{}", '{"deploy_map": []}'])
def test_a_job_that_cannot_be_read_is_one_line(tmp_path: Path, meta: str) -> None:
    job = make_job(tmp_path, SITES, {})
    (job / "meta.json").write_text(meta)
    refused(tmp_path, "meta.json", "--demo", str(job))


def test_a_setting_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    refused(tmp_path, "--set", "--demo", str(make_job(tmp_path, SITES, {})), "--set", "federation.rounds")


def test_data_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    refused(tmp_path, "--data nowhere: is not a folder", "--data", "nowhere")


@pytest.mark.parametrize("name", ["my poc", "poc#1"])
def test_a_workspace_that_flare_cannot_use_is_one_line(tmp_path: Path, name: str) -> None:
    refused(tmp_path, f"--workspace {tmp_path / name}: FLARE cannot", "--demo", "--workspace", name)
    assert not (tmp_path / name).exists()


def test_a_job_by_a_name_that_flare_refuses_is_one_line(tmp_path: Path) -> None:
    job = make_job(tmp_path, SITES, {})
    refused(tmp_path, "FLARE refuses the name", "--demo", str(job.rename(tmp_path / "my job")))


def refused(folder: Path, part: str, *arguments: str) -> None:
    """Exit code 2 and one line before anything was made."""
    code, output = finish(folder, *arguments)
    assert code == 2 and part in output and output.count("\n") == 1, output
    assert not (folder / "poc_workspace").exists()


def test_one_of_several_leads_is_named() -> None:
    two = {"participants": [{"name": name, "role": "lead"} for name in ("a@a.org", "b@b.org")] + [{"name": "server"}]}
    with pytest.raises(
        RehearsalError, match=r"several could submit: its leads are a@a.org, b@b.org; name one with --le"
    ):
        lead_of(two, None)
    with pytest.raises(RehearsalError, match=r"c@c.org: its leads are a@a.org, b@b.org"):
        lead_of(two, "c@c.org")
    with pytest.raises(RehearsalError, match="it has no lead; add one"):
        lead_of({"participants": [{"name": "server"}]}, None)
    assert lead_of(two, "b@b.org") == "b@b.org"
    assert lead_of({"participants": two["participants"][1:]}, None) == "b@b.org"
