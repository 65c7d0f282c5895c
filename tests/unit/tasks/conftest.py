"""The experiments of the project's jobs, with changes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harmofl.experiment import Experiment, set_key
from harmofl.tasks import resolve_experiment

JOBS = Path(__file__).resolve().parents[3] / "jobs"
Resolve = Callable[..., Experiment]


@pytest.fixture(scope="session")
def resolve_job() -> Resolve:
    """Resolve experiment.json of a job of the project; `changes` are set by dotted key beforehand."""

    def resolve(job: str, changes: Mapping[str, Any] | None = None, *, demo: bool = False) -> Experiment:
        settings = json.loads((JOBS / job / "app" / "config" / "experiment.json").read_text())
        for key, value in (changes or {}).items():
            set_key(settings, key, value)
        return resolve_experiment(settings, demo=demo)

    return resolve
