#!/usr/bin/env python3
"""Rehearse the production path on one machine: server, every hospital with its kit, mutual TLS, a lead who submits.

    python poc/run.py --demo                                   synthetic data, the settings of the job's demo
    python poc/run.py --data /data jobs/harmofl_nuclei         a folder a site below /data, full settings

Everything is below one folder, the home folder of FLARE's commands included; whatever happens, all processes are
stopped. Exit code 0 where the job completed with every site in every round, else 1, 2 for a mistake in the command or
the job.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROVISIONING = ROOT / "provisioning"
sys.path[:0] = [str(Path(__file__).resolve().parent), str(PROVISIONING / "site")]

from commands import Commands, RehearsalError, processes_of  # noqa: E402
from prepare_kit import KitError, Names, prepare_kit, read_limits  # noqa: E402

from harmofl.app.flare_refusals import refuse_job, refuse_job_name, refuse_path  # noqa: E402
from harmofl.app.job import Job, JobError, read_job  # noqa: E402
from harmofl.app.simulate import missing_folders  # noqa: E402
from harmofl.experiment import ExperimentError, resolve  # noqa: E402
from harmofl.flare.site_settings import LimitSettings  # noqa: E402
from harmofl.tasks import is_outside, place_sites  # noqa: E402

MARK = "poc_workspace.txt"  # a folder that holds it may be replaced
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPING = 60.0  # seconds for FLARE's own stop, then 15 for what it told to end


class Rehearsal:
    """One run below `folder`."""

    def __init__(
        self, folder: Path, job: Job, port: int, *, limits: Sequence[str], names: Mapping[str, Names], lead: str | None
    ) -> None:
        """Empty the folder and lay out what FLARE needs.

        Args:
            folder: of the rehearsal.
            job: that is submitted.
            port: of the server.
            limits: of all sites, where the defaults do not hold.
            names: by site, how it names its data where the job's rules do not fit.
            lead: who submits; None where the project has one.
        """
        self.folder, self.job, self.port, self.limits = folder, job.folder, port, limits
        self.project = yaml.safe_load((PROVISIONING / "project.yml").read_text(encoding="utf-8"))
        self.sites, self.names = job.sites, names
        self.started = False
        _add_sites(self.project, self.sites)
        self.kits = folder / "poc" / self.project["name"] / "prod_00"
        self.lead = self.kits / _lead_of(self.project, lead)
        if folder.exists():
            shutil.rmtree(folder)
        (folder / "poc").mkdir(parents=True)
        self.commands = Commands(folder, _environment(len(self.sites)))
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
        self.started = True
        self._flare("poc", "start", "--timeout", "120")
        bundle, results = self.folder / "dist" / self.job.name, self.folder / "results"
        job_id = self._submit(bundle)
        say(f"submitted by {self.lead.name} as job {job_id}")
        self._harmofl("watch", str(self.lead), job_id, "-o", str(results))
        self._judge(results / job_id / "workspace" / "app_server")

    def stop(self) -> None:
        """Stop server and sites, by FLARE's command where it started them, and then whoever is left."""
        say("stopping")
        if self.started:
            try:
                self._flare("poc", "stop", patience=STOPPING)
            except RehearsalError as error:
                say(str(error))
            psutil.wait_procs(processes_of(self.folder), timeout=15)
        self.commands.end_all()

    def _submit(self, bundle: Path) -> str:
        """Submit as the lead and return the job's id.

        Raises:
            RehearsalError: FLARE gave none.
        """
        answer = self._flare("job", "submit", "-j", str(bundle), "--startup-kit", str(self.lead), as_json=True)
        try:
            return str(json.loads(answer[answer.index("{") :])["data"]["job_id"])
        except (ValueError, KeyError, TypeError):
            raise RehearsalError(f"nvflare job submit gave no job id: {' '.join(answer.split())[-300:]}") from None

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
        if self.limits:
            say(f"limits of every site, for this rehearsal only: {', '.join(self.limits)}")
        for site in self.sites:
            root = roots / site if data is None else roots
            names = self.names.get(site)
            prepare_kit(self.kits / site, data_root=root, limits=self.limits, names=names, force=True)

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

    def _flare(
        self, group: str, command: str, *arguments: str, as_json: bool = False, patience: float | None = None
    ) -> str:
        form = ["--format", "json"] if as_json else []
        words = [sys.executable, "-m", "nvflare.cli", *form, group, command, *arguments]
        return self.commands.run(words, f"nvflare {group} {command}", quiet=True, patience=patience)

    def _harmofl(self, command: str, *arguments: str) -> str:
        words = [str(Path(sys.executable).with_name("harmofl")), command, *arguments]
        return self.commands.run(words, f"harmofl {command}", quiet=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and say how long it took."""
    options = _parser().parse_args(argv)
    started = time.monotonic()
    os.umask(0o077)  # private keys, the authority's among them, are written by FLARE as the umask lets it
    try:
        job = read_job(options.job, options.assignments, demo=options.demo)
        refuse_job_name(job.folder.name)
        refuse_job(job.folder)
        _check_data(options.data, job)
        port = _usable_port(options.port)
        limits, names = _limits(options.limits, job), _site_names(options.data, job)
        rehearsal = Rehearsal(
            _usable_folder(options.workspace), job, port, limits=limits, names=names, lead=options.lead
        )
    except (RehearsalError, KitError, JobError, ExperimentError) as error:
        sys.stderr.write(f"poc: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"poc: --workspace {options.workspace}: cannot be used ({error.strerror})\n")
        return 2
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    failure = _failure(rehearsal, options)
    rehearsal.stop()
    say(
        f"{'failed: ' + failure if failure else 'completed, every site in every round'}"
        f" ({time.monotonic() - started:.0f} s)"
    )
    return int(failure is not None)


def _failure(rehearsal: Rehearsal, options: argparse.Namespace) -> str | None:
    """Run and tell why it failed; from the end of it on nothing interrupts the stopping."""
    try:
        try:
            rehearsal.run(options.data.absolute() if options.data else None, options.assignments)
        finally:
            _ignore_signals()
    except KeyboardInterrupt:
        return "interrupted"
    except (RehearsalError, KitError, OSError, KeyError, ValueError) as error:
        return str(error)
    return None


def _interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # the second one would interrupt the stopping
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
    parser.add_argument("--lead", metavar="NAME", help="who submits, where project.yml has several leads")
    parser.add_argument("--port", type=int, metavar="N", help="of the server (default: a free one)")
    parser.add_argument(
        "--workspace",
        type=Path,
        default=Path("poc_workspace"),
        metavar="DIR",
        help="receives everything, replaced by every run (default: ./poc_workspace)",
    )
    parser.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit of every site in this rehearsal, for example training_patients=1; may be repeated",
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


def _lead_of(project: dict[str, Any], asked: str | None) -> str:
    """The lead who submits: the only one of the project, or the one that was named."""
    leads = [str(who["name"]) for who in project["participants"] if who.get("role") == "lead"]
    if asked is None and len(leads) == 1:
        return leads[0]
    if asked in leads:
        return asked
    known = f"its leads are {', '.join(leads)}; name one with --lead" if leads else "it has no lead; add one"
    raise RehearsalError(f"provisioning/project.yml: {'several could submit' if asked is None else asked}: {known}")


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
    refuse_path(folder, "--workspace", "name another folder with --workspace", of_kit=True)
    if folder.exists() and not (folder / MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise RehearsalError(f"--workspace {folder}: is there and no workspace of this script; name another folder")
    if processes_of(folder):
        raise RehearsalError(f"--workspace {folder}: another rehearsal is running there; name another folder")
    return folder


def _check_data(data: Path | None, job: Job) -> None:
    """Refuse a data root that lacks a site of the job, and settings that no run would take."""
    if data is not None and not data.is_dir():
        raise RehearsalError(f"--data {data}: is not a folder; name the one that holds a folder for each site")
    if is_outside(str(job.settings.get("task"))):  # its code runs at the sites only
        return
    experiment = job.resolve(demo=False)
    missing = missing_folders(dict.fromkeys(job.sites, data.absolute()), experiment) if data is not None else []
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise RehearsalError(f"--data {data}: {missing[0]}{more}")


def _limits(given: Sequence[str], job: Job) -> list[str]:
    """The sites' limits as asked for; fewer sites than a hospital wants are let pass where the job has so few."""
    read_limits(given)
    settings = resolve(job.settings)
    fewest = min(len(job.sites), settings.federation.minimum_sites, settings.amplitude.minimum_sites)
    return [f"minimum_sites={fewest}", *given] if fewest < LimitSettings().minimum_sites else list(given)


def _site_names(data: Path | None, job: Job) -> dict[str, Names]:
    """What each site says of its own data, where folders have other names or hold the rows of several centers.

    At hospitals a job does not say it: here one person holds the data of all sites and says it for them.
    """
    if is_outside(str(job.settings.get("task"))):
        return {}
    experiment = job.resolve(demo=False)
    root = None if data is None else data.absolute()
    # of a demo each site has a folder of its own
    places = {} if root is None else place_sites(experiment, dict.fromkeys(job.sites, root))
    names = {}
    for site in job.sites:
        place = places.get(site)
        folder = place.name if isinstance(place, Path) and place.parent == root and place.name != site else None
        centers = experiment.reader.get("centers", {}).get(site)
        names[site] = Names(folder=folder, centers=tuple(centers) if centers else None)
    return {site: said for site, said in names.items() if said != Names()}


def _add_sites(project: dict[str, Any], sites: Sequence[str]) -> None:
    known = {who["name"] for who in project["participants"] if who["type"] == "client"}
    project["participants"] += [
        {"name": site, "type": "client", "org": "hospital"} for site in sites if site not in known
    ]


def _environment(sites: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HARMOFL_")}
    # the kits' scripts call python3; all sites share this machine's cores; the builder is found by PYTHONPATH
    threads = str(max(1, (os.cpu_count() or 2) // (sites + 1)))
    own = {
        "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
        "PYTHONPATH": f"{PROVISIONING / 'builders'}:{kept.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": kept.get("OMP_NUM_THREADS", threads),
    }
    return {**kept, **own}


if __name__ == "__main__":
    sys.exit(main())
