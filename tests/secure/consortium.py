"""A server, sites and people on loopback, each with a kit of its own, provisioned from the project's project.yml."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROVISIONING = ROOT / "provisioning"
SERVER, LEAD, MEMBER, PROJECT_ADMIN = "server", "lead@ucl.org", "member@hk.org", "project_admin@consortium.org"
OTHER_LEAD = "lead@hk.org"  # of the drills alone


def free_port() -> int:
    """A port that nobody listens on; FLARE takes one for its kits before it starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition`, asked four times a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.25)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


class Consortium:
    """Kits below `folder`, and the processes that were started from them."""

    def __init__(
        self,
        folder: Path,
        sites: Sequence[str],
        *,
        port: int | None = None,
        name: str | None = None,
        more: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Provision a project with these sites, the project file's people and a server on a free port.

        `more` are participants that the project file has not.
        """
        self.folder, self.sites, self.port = folder, tuple(sites), port or free_port()
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        project = yaml.safe_load((PROVISIONING / "project.yml").read_text())
        project["name"] = name or project["name"]
        kept = [entry for entry in project["participants"] if entry["type"] != "client" or entry["name"] in sites]
        for entry in kept:
            if entry["type"] == "server":
                entry.update(fed_learn_port=self.port, admin_port=self.port)
        project["participants"] = [*kept, {"name": OTHER_LEAD, "type": "admin", "org": "hk", "role": "lead"}, *more]
        if any(entry["type"] == "relay" for entry in more):
            project["connection_security"] = "mtls"  # FLARE writes "None" into a relay's kit where it is not set
        (folder / "project.yml").write_text(yaml.safe_dump(project, sort_keys=False))
        self.run(
            "nvflare.cli",
            *("provision", "-p", str(folder / "project.yml"), "-w", str(folder / "workspace")),
            *("-c", str(PROVISIONING / "builders")),
        )
        self.kits = folder / "workspace" / project["name"] / "prod_00"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def kit(self, name: str) -> Path:
        """The startup kit of a participant."""
        return self.kits / name

    def environment(self, **changes: str) -> dict[str, str]:
        """This process's environment without the tester's own settings, and with a home of the consortium's."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HARMOFL_")}
        # python3 of the kits' scripts must be this one; modules of this folder are what a site has installed
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        modules = f"{Path(__file__).parent / 'installed'}:{kept.get('PYTHONPATH', '')}"
        own = {"PATH": path, "HOME": str(self.home), "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
        return {**kept, **own, **changes}

    def run(
        self, module: str, *arguments: str, check: bool = True, timeout: float = 120
    ) -> "subprocess.CompletedProcess[str]":
        """Run `python -m module arguments` to its end and return what it printed."""
        return self._execute([sys.executable, "-m", module, *arguments], check, timeout)

    def _execute(self, command: Sequence[str], check: bool, timeout: float) -> "subprocess.CompletedProcess[str]":
        finished = subprocess.run(
            command,
            env=self.environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or finished.returncode == 0, finished.stdout
        return finished

    def harmofl(self, *arguments: str, check: bool = True, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        """Run a harmofl command."""
        return self._execute([str(Path(sys.executable).with_name("harmofl")), *arguments], check, timeout)

    def script(self, path: Path, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        """Run a Python script as a researcher does."""
        return self._execute([sys.executable, str(path)], True, timeout)

    def start(self, *names: str, loop: bool = False, kits: Mapping[str, Path] | None = None) -> None:
        """Start participants from their kits' own script; `loop` lets FLARE start one again that dies."""
        for name in names:
            kit = (kits or {}).get(name, self.kit(name))
            with (self.folder / f"{name}.out").open("ab") as output:
                self._processes[name] = subprocess.Popen(
                    ["bash", str(kit / "startup" / "sub_start.sh"), *([] if loop else ["--once"])],
                    env=self.environment(),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def output(self, name: str) -> str:
        """What a participant's script has printed so far."""
        return (self.folder / f"{name}.out").read_text(errors="replace")

    def wait_until_registered(self, *names: str, seconds: float = 90) -> None:
        """Wait until the server says that these sites have registered."""
        log = self.kit(SERVER) / "log.txt"
        for name in names:
            wait_for(
                lambda name=name: log.is_file() and f"Client: New client {name}@" in log.read_text(),
                seconds,
                f"{name} registers",
            )

    def stop(self, *names: str) -> None:
        """End the processes of participants, those of running jobs too."""
        for name in names or tuple(self._processes):
            process = self._processes.pop(name, None)
            if process is None:
                continue
            family = _family(process.pid)
            for member in [process, *family]:  # the script first: it would start its server again
                with suppress(psutil.Error, ProcessLookupError):
                    member.send_signal(signal.SIGKILL)
            process.wait()
            psutil.wait_procs(family, timeout=10)

    def kill_server(self, job_id: str) -> None:
        """kill -9 the server and its job's process; the script that started it stays, and starts it again."""
        job = self.job_process(SERVER, job_id)
        parents = [
            member for member in _family(self._processes[SERVER].pid) if "server_train" in " ".join(member.cmdline())
        ]
        assert job is not None and len(parents) == 1
        for member in (*parents, job):
            member.kill()

    def job_process(self, name: str, job_id: str) -> psutil.Process | None:
        """The process that runs a job at a participant."""
        process = self._processes.get(name)
        for member in _family(process.pid) if process else []:
            with suppress(psutil.Error, ProcessLookupError):
                command = member.cmdline()
                if job_id in command and any("runner_process" in part or "worker_process" in part for part in command):
                    return member
        return None


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def copy_kit(kit: Path, target: Path) -> Path:
    """A copy of a kit that has not run yet."""
    shutil.copytree(kit, target, ignore=shutil.ignore_patterns("*.fl", "*.txt", "log.json"))
    return target
