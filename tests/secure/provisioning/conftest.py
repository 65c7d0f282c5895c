"""The consortium of provisioning/project.yml, provisioned once, and copies of its kits."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography import x509
from nvflare.lighter.constants import ProvFileName
from nvflare.lighter.utils import load_crt, verify_folder_signature

ROOT = Path(__file__).resolve().parents[3]
PROVISIONING = ROOT / "provisioning"
SITES = ["BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"]
PEOPLE = ["project_admin@consortium.org", "lead@ucl.org", "org_admin@bidmc.org", "member@hk.org"]
EVERYBODY = ["server", *SITES, *PEOPLE]


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KIT_SCRIPT = module_of(PROVISIONING / "site" / "prepare_kit.py")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def flare(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """FLARE's command, with a registry of its own."""
    return subprocess.run(
        [sys.executable, "-m", "nvflare.cli", *arguments],
        env={**os.environ, "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def provision(home: Path) -> subprocess.CompletedProcess[str]:
    where = ["-p", str(PROVISIONING / "project.yml"), "-w", str(home / "workspace")]
    return flare(home, "provision", *where, "-c", str(PROVISIONING / "builders"), "--force")


@pytest.fixture(scope="package")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The provisioned project: prod_00 and state."""
    home = tmp_path_factory.mktemp("consortium")
    run = provision(home)
    assert run.returncode == 0, run.stdout + run.stderr
    return home / "workspace" / "harmofl_prostate"


@pytest.fixture
def kit(project: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A fresh copy of a participant's kit."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(project / "prod_00" / name, tmp_path / "kits" / name))

    return copy


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    return folder


def certificate_of(kit: Path) -> x509.Certificate:
    name = "server.crt" if (kit / "startup" / "server.crt").exists() else "client.crt"
    certificate: x509.Certificate = load_crt(str(kit / "startup" / name))
    return certificate


def is_signed(kit: Path) -> bool:
    """What `python -m nvflare.tool.verify_startup_kits` asks."""
    startup = kit / "startup"
    root = str(startup / "rootCA.pem")
    return bool(
        verify_folder_signature(str(startup), root, single_signer=True, signature_file=ProvFileName.SIGNATURE_JSON)
    )


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def storage_of(server: Path) -> tuple[Path, Path]:
    resources = read(server / "local" / "resources.json")
    jobs = next(part for part in resources["components"] if part["id"] == "job_manager")
    return Path(jobs["args"]["uri_root"]), Path(resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"])
