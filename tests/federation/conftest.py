"""Real runs of FLARE's simulator on small jobs made from the job folders of the project."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harmofl.evidence.results import Results, RoundRecord, read_results, read_rounds
from harmofl.experiment import set_key

ROOT = Path(__file__).resolve().parents[2]
PROSTATE = "harmofl_prostate"

# Small enough for a run of two sites in about 15 s: what is tested is the federation, not the learning.
TINY: Mapping[str, Any] = {
    "federation.rounds": 2,
    "federation.straggler_wait": 0,
    "network.width": 4,
    "training.local_epochs": 1,
    "training.batch_size": 16,
}


@dataclass(frozen=True)
class Run:
    """A finished simulator run."""

    code: int
    output: str
    workspace: Path

    @property
    def server(self) -> Path:
        return self.workspace / "server" / "simulate_job" / "app_server"

    @property
    def results(self) -> Results:
        return read_results(self.server / "results.json")

    @property
    def rounds(self) -> list[RoundRecord]:
        return read_rounds(self.server / "round_metrics.jsonl")


RunJob = Callable[..., Run]


def make_job(
    folder: Path,
    sites: Sequence[str],
    overrides: Mapping[str, Any],
    *,
    executor: str | None = None,
    controller: str | None = None,
    demo: bool = True,
    original: str = PROSTATE,
) -> Path:
    """Copy a job of the project, with fewer sites and other settings (in its demo section where it runs the demo)."""
    job = folder / "job"
    shutil.copytree(ROOT / "jobs" / original, job)
    meta = json.loads((job / "meta.json").read_text())
    meta["deploy_map"] = {"app": ["server", *sites]}
    meta["min_clients"] = len(sites)
    (job / "meta.json").write_text(json.dumps(meta))
    path = job / "app" / "config" / "experiment.json"
    settings = json.loads(path.read_text())
    settings["federation"]["minimum_sites"] = len(sites)
    settings["amplitude"]["minimum_sites"] = len(sites)
    if original == PROSTATE:
        settings["demo"]["data"]["cases"] = 8
    for key, value in {**TINY, **overrides}.items():
        if demo and not key.startswith("demo."):
            settings["demo"]["overrides"][key] = value
        else:
            set_key(settings, key, value)
    path.write_text(json.dumps(settings))
    for name, path_of_class in (("config_fed_client", executor), ("config_fed_server", controller)):
        if path_of_class:
            component = job / "app" / "config" / f"{name}.json"
            config = json.loads(component.read_text())
            (config["executors"][0]["executor"] if executor else config["workflows"][0])["path"] = path_of_class
            component.write_text(json.dumps(config))
    return job


def simulate(job: Path, folder: Path, threads: int, environment: Mapping[str, str], timeout: float = 300) -> Run:
    """Run `nvflare simulator` with a home of its own and no data root but the one given."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HARMOFL_")}
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "nvflare.cli",
            "simulator",
            str(job),
            "-w",
            str(folder / "workspace"),
            "-t",
            str(threads),
        ],
        cwd=folder,
        env={**kept, "HOME": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(finished.returncode, finished.stdout, folder / "workspace")


@pytest.fixture
def run_job(tmp_path: Path) -> RunJob:
    """Make a small job and run it; every run of a test has its own folder by `name`."""

    def run(
        sites: Sequence[str] = ("BIDMC", "HK"),
        overrides: Mapping[str, Any] | None = None,
        *,
        executor: str | None = None,
        controller: str | None = None,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        code: str | None = None,
        demo: bool = True,
        original: str = PROSTATE,
        name: str = "run",
    ) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        job = make_job(
            folder, sites, overrides or {}, executor=executor, controller=controller, demo=demo, original=original
        )
        if code is not None:
            (job / "app" / "custom" / "drill.py").write_text(code)
        return simulate(job, folder, threads or len(sites), environment or {})

    return run
