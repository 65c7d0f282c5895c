"""A copy of the prostate job that two sites finish in seconds."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harmofl.data.synthetic import write_prostate_site

JOB = Path(__file__).resolve().parents[1] / "jobs" / "harmofl_prostate"
SITES = ("BIDMC", "HK")
SMALL: dict[str, Any] = {
    "data.height": 64,
    "data.width": 64,
    "network.width": 4,
    "training.batch_size": 8,
    "training.local_epochs": 1,
    "federation.rounds": 1,
    "federation.minimum_sites": 2,
    "federation.round_timeout": 120,
    "amplitude.minimum_sites": 2,
    "amplitude.minimum_cases": 1,
}


def write_small_job(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Copy the job to `folder` for two sites, its full settings and its demo both as small as can be."""
    shutil.copytree(JOB, folder)
    path = folder / "app" / "config" / "experiment.json"
    settings = json.loads(path.read_text())
    for key, value in {**SMALL, **(changes or {})}.items():
        section, _, last = key.rpartition(".")
        place = settings[section] if section else settings
        place[last] = value
    settings["demo"]["data"] |= {"cases": 3, "matrix": 64, "slices": 4}
    settings["demo"]["overrides"] = {"federation.rounds": 1}
    path.write_text(json.dumps(settings))
    meta = json.loads((folder / "meta.json").read_text())
    meta |= {"deploy_map": {"app": ["server", *SITES]}, "min_clients": 2}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def write_site(folder: Path, scanner: str = "siemens_3t_surface", cases: int = 3) -> Path:
    """Write a few synthetic cases of 4 slices of 64 x 64 pixels."""
    write_prostate_site(folder, scanner, cases=cases, seed=0, matrix=64, slices=4)
    return folder
