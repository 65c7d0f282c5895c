"""A small job, two small sites, the startup kits of a project, and preflight's lines."""

from pathlib import Path

import pytest

from harmofl.app.bundle import bundle
from harmofl.app.preflight import preflight
from tests.small_job import SITES, write_site, write_small_job
from tests.unit.app.model_files import ModelOfTask, model_of_task
from tests.unit.app.provisioned import Lines, Packed, Provisioning, closed_port, provision, set_privacy


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


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioning:
    """Kits as provisioning writes them; read only."""
    return provision(tmp_path_factory.mktemp("kits"))


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Provisioning:
    """Another project whose root carries the same name; read only."""
    return provision(tmp_path_factory.mktemp("others"))


@pytest.fixture
def site(kits: Provisioning, tmp_path: Path) -> Path:
    """The kit of a site that has said nothing yet and whose server is not there."""
    return kits.copy("HK", tmp_path / "HK", port=closed_port())


@pytest.fixture
def server(kits: Provisioning, tmp_path: Path) -> Path:
    """The kit of a server that does not run."""
    return kits.copy("server", tmp_path / "server", port=closed_port())


@pytest.fixture
def data(site: Path, sites_root: Path) -> None:
    """Let the site say where its three cases are."""
    set_privacy(site, data_root=str(sites_root / "HK"))


@pytest.fixture
def packed(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Packed:
    """Bundle the small job."""

    def pack(*, preinstalled: bool = False) -> Path:
        bundle(job, [], output=tmp_path / "dist", demo=False, preinstalled=preinstalled, project=None)
        capsys.readouterr()
        return tmp_path / "dist" / job.name

    return pack


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    """The lines that preflight prints of one kind, without those of the server, which is not there."""

    def run(kit: Path, job: Path | None = None, *assignments: str, state: str = "error") -> list[str]:
        code = preflight(kit, job, assignments)
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{state}: ")]
        if state == "error":
            assert code == int(bool(shown))
        return [line for line in shown if "port closed" not in line]

    return run


@pytest.fixture(scope="session")
def prostate_model(tmp_path_factory: pytest.TempPathFactory) -> ModelOfTask:
    """A model that segments its own site's five volumes; read only."""
    return model_of_task("prostate", "BIDMC", tmp_path_factory.mktemp("prostate"), epochs=12)


@pytest.fixture(scope="session")
def nuclei_model(tmp_path_factory: pytest.TempPathFactory) -> ModelOfTask:
    return model_of_task("nuclei", "breast", tmp_path_factory.mktemp("nuclei"), epochs=3)


@pytest.fixture(scope="session")
def camelyon17_model(tmp_path_factory: pytest.TempPathFactory) -> ModelOfTask:
    return model_of_task("camelyon17", "hospital1", tmp_path_factory.mktemp("camelyon17"), epochs=1)
