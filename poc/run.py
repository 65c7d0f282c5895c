#!/usr/bin/env python3
"""Rehearse the production path on one machine: server, every hospital with its kit, mutual TLS, a lead who submits.

    python poc/run.py --demo                                   synthetic data, the settings of the job's demo
    python poc/run.py --data /data jobs/harmofl_nuclei         a folder a site below /data, full settings

Everything is below one folder, the home folder of FLARE's commands included; whatever happens, all processes are
stopped. Exit code 0 where the job completed with every site in every round, else 1, 2 for a mistake in the command.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROVISIONING = ROOT / "provisioning"
sys.path.insert(0, str(PROVISIONING / "site"))

from prepare_kit import KitError, prepare_kit  # noqa: E402

MARK = "poc_workspace.txt"  # a folder that holds it may be replaced


class RehearsalError(Exception):
    """Why the rehearsal cannot go on, in one line."""


class Rehearsal:
    """One run below `folder`."""

    def __init__(self, folder: Path, job: Path, port: int) -> None:
        """Empty the folder and lay out what FLARE needs."""
        self.folder, self.job, self.port = folder, job, port
        self.project = yaml.safe_load((PROVISIONING / "project.yml").read_text(encoding="utf-8"))
        self.sites = _sites_of(job, self.project)
        self.kits = folder / "poc" / self.project["name"] / "prod_00"
        self.lead = self.kits / next(who["name"] for who in self.project["participants"] if who.get("role") == "lead")
        if folder.exists():
            shutil.rmtree(folder)
        for name in ("home", "poc"):
            (folder / name).mkdir(parents=True)
        (folder / MARK).write_text("made by poc/run.py, replaced by its next run\n", encoding="utf-8")

    def run(self, data: Path | None, assignments: Sequence[str]) -> None:
        """Provision, set up, start, submit, follow, download.

        Raises:
            RehearsalError: a step failed.
        """
        self._prepare(data)
        settings = [part for assignment in assignments for part in ("--set", assignment)]
        demo = ["--demo"] if data is None else []
        self._harmofl("bundle", str(self.job), "-o", str(self.folder / "dist"), *demo, *settings)
        say("starting the server and every site")
        self._flare("poc", "start", "--timeout", "120")
        bundle, results = self.folder / "dist" / self.job.name, self.folder / "results"
        answer = self._flare("--format", "json", "job", "submit", "-j", str(bundle), "--startup-kit", str(self.lead))
        job_id = json.loads(answer[answer.index("{") :])["data"]["job_id"]
        say(f"submitted by {self.lead.name} as job {job_id}")
        self._harmofl("watch", str(self.lead), job_id, "-o", str(results))
        self._judge(results / job_id / "workspace" / "app_server")

    def stop(self) -> None:
        """Stop server and sites, by FLARE's command and then whoever is left."""
        if not self.kits.is_dir():
            return
        say("stopping")
        try:
            self._flare("poc", "stop")
        except (RehearsalError, subprocess.TimeoutExpired) as error:
            say(f"nvflare poc stop: {error}")
        left = _processes_of(self.kits)
        _, left = psutil.wait_procs(left, timeout=15)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)

    def _prepare(self, data: Path | None) -> None:
        for entry in self.project["participants"]:
            if entry["type"] == "server":
                entry.update(fed_learn_port=self.port, admin_port=self.port)
        taken = [who for who in self.project["participants"] if who["type"] != "client" or who["name"] in self.sites]
        project = self.folder / "project.yml"
        project.write_text(yaml.safe_dump({**self.project, "participants": taken}, sort_keys=False), encoding="utf-8")
        self._flare("poc", "config", "-pw", str(self.folder / "poc"))
        self._flare("poc", "prepare", "-i", str(project), "--force")
        say(f"provisioned server (port {self.port}) and {', '.join(self.sites)}")
        if data is None:
            say("DEMO: synthetic data for every site; no clinical meaning")
            self._harmofl("demo-data", str(self.job), "-o", str(self.folder / "data"))
        roots = data or self.folder / "data"
        server = next(who["name"] for who in self.project["participants"] if who["type"] == "server")
        prepare_kit(self.kits / server, force=True)
        for site in self.sites:
            prepare_kit(self.kits / site, data_root=roots / site if data is None else roots, force=True)

    def _judge(self, run: Path) -> None:
        """Print the scores and where the report is.

        Raises:
            RehearsalError: a site was missing in a round.
        """
        results = json.loads((run / "results.json").read_text(encoding="utf-8"))
        key = results["key_score"]
        for site, result in results["sites"].items():
            mean = result["test"].get(key, {}).get("mean")
            say(f"  {site:<12} test {key} {'undefined' if mean is None else f'{mean:.3f}'}")
        gaps = {
            site for accepted in results["sites_accepted"] for site in results["sites_expected"] if site not in accepted
        }
        if gaps:
            raise RehearsalError(f"{', '.join(sorted(gaps))} did not take part in every round; the report says why")

    def _flare(self, *arguments: str) -> str:
        return self._execute([sys.executable, "-m", "nvflare.cli", *arguments], quiet=True)

    def _harmofl(self, *arguments: str) -> str:
        return self._execute([str(Path(sys.executable).with_name("harmofl")), *arguments], quiet=False)

    def _execute(self, command: Sequence[str], *, quiet: bool) -> str:
        """Run a command to its end; what it prints is shown unless it is one of FLARE's and succeeds."""
        lines = []
        with subprocess.Popen(
            command,
            env=self._environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if not quiet:
                    sys.stdout.write(line)
                    sys.stdout.flush()
        if process.returncode:
            if quiet:
                sys.stdout.write("".join(lines[-15:]))
            raise RehearsalError(f"{' '.join(Path(command[0]).name.split())} {' '.join(command[1:4])} failed")
        return "".join(lines)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HARMOFL_")}
        # the kits' scripts call python3; all sites share this machine's cores; the builder is found by PYTHONPATH
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        threads = str(max(1, (os.cpu_count() or 2) // (len(self.sites) + 1)))
        own = {
            "HOME": str(self.folder / "home"),
            "PATH": path,
            "PYTHONPATH": f"{PROVISIONING / 'builders'}:{kept.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", threads),
        }
        return {**kept, **own}


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and say how long it took."""
    options = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        port = _usable_port(options.port)
        rehearsal = Rehearsal(_usable_folder(options.workspace), _job_folder(options.job), port)
    except RehearsalError as error:
        sys.stderr.write(f"poc: {error}\n")
        return 2
    held = [signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        rehearsal.run(options.data.absolute() if options.data else None, options.assignments)
        failure = None
    except (RehearsalError, KitError, OSError, KeyError, ValueError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        failure = "interrupted"
    finally:
        rehearsal.stop()
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), held, strict=True):
            signal.signal(number, handler)
    say(
        f"{'failed: ' + failure if failure else 'completed, every site in every round'}"
        f" ({time.monotonic() - started:.0f} s)"
    )
    return int(failure is not None)


def say(line: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(f"poc: {line}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python poc/run.py", description="Rehearse the production path on one machine."
    )
    parser.add_argument("job", type=Path, nargs="?", default=ROOT / "jobs" / "harmofl_prostate", metavar="JOB")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--demo", action="store_true", help="synthetic data at the settings of the job's demo")
    data.add_argument("--data", type=Path, metavar="ROOT", help="folder of the sites' folders, at the job's settings")
    parser.add_argument("--port", type=int, metavar="N", help="of the server (default: a free one)")
    parser.add_argument(
        "--workspace",
        type=Path,
        default=Path("poc_workspace"),
        metavar="DIR",
        help="receives everything, replaced by every run (default: ./poc_workspace)",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of experiment.json; may be repeated",
    )
    return parser


def _usable_port(asked: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", asked or 0))
        except (OSError, OverflowError) as error:
            raise RehearsalError(
                f"port {asked} cannot be used{_holder(asked)} ({error}); name another with --port"
            ) from None
        return int(probe.getsockname()[1])


def _holder(port: int | None) -> str:
    """Which process listens on a port, where this user may know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f": {psutil.Process(connection.pid).name()} (pid {connection.pid}) listens there"
    except psutil.Error:
        pass
    return ""


def _usable_folder(folder: Path) -> Path:
    folder = folder.absolute()
    if folder.exists() and not (folder / MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise RehearsalError(f"--workspace {folder}: is there and no workspace of this script; name another folder")
    if _processes_of(folder):
        raise RehearsalError(f"--workspace {folder}: another rehearsal is running there; name another folder")
    return folder


def _job_folder(job: Path) -> Path:
    if not (job / "meta.json").is_file():
        raise RehearsalError(f"{job}: no job folder; name one such as jobs/harmofl_prostate")
    return job.resolve()


def _sites_of(job: Path, project: dict) -> list[str]:
    deploy_map = json.loads((job / "meta.json").read_text(encoding="utf-8"))["deploy_map"]
    known = {who["name"] for who in project["participants"] if who["type"] == "client"}
    sites = [name for names in deploy_map.values() for name in names if name != "server"]
    project["participants"] += [
        {"name": site, "type": "client", "org": "hospital"} for site in sites if site not in known
    ]
    return sites


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Processes whose command line names something below a folder, without this one."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(part.startswith(f"{folder}/") for part in command):
            found.append(process)
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
