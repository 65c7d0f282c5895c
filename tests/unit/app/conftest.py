"""A small job and two small sites."""

from pathlib import Path

import pytest

from tests.small_job import SITES, write_site, write_small_job


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_small_job(tmp_path / "small_job")


@pytest.fixture(scope="session")
def sites_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of three cases each; read only."""
    root = tmp_path_factory.mktemp("data")
    for site in SITES:
        write_site(root / site)
    return root


@pytest.fixture(autouse=True)
def _no_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HARMOFL_DATA_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
