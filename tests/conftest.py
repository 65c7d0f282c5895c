"""Fixtures shared by all suites."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def realdata() -> Path:
    """The folder of real public images; tests that need it skip where it is missing."""
    folder = Path(os.environ.get("HARMOFL_REALDATA", ROOT.parent / "shared" / "realdata"))
    if not folder.is_dir():
        pytest.skip(f"no real images: HARMOFL_REALDATA names no folder ({folder})")
    return folder
