"""Fixtures shared by all suites."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_WORKERS = 4  # a worker holds about 1 GB, and tests start processes of their own


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Share the whole suite out among workers; a part of it, or slow tests, run in this process as they are typed."""
    whole = config.args_source is config.ArgsSource.TESTPATHS and "not slow" in config.option.markexpr
    return min(MOST_WORKERS, os.cpu_count() or 1) if whole else 0


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker one thread: several pools of threads on the same cores wait for each other."""
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder of real public images; tests that need it skip where it is missing."""
    folder = Path(os.environ.get("HARMOFL_REALDATA", ROOT.parent / "shared" / "realdata"))
    if not folder.is_dir():
        pytest.skip(f"no real images: HARMOFL_REALDATA names no folder ({folder})")
    return folder
