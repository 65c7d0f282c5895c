"""A bundle without the package that made it, and jobs that a bundle must not be made of. A1, A34, A35."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harmofl.app.cli import main
from tests.unit.app.provisioned import Packed

# Runs where no harmofl is installed: every finder and folder that leads to the checkout is taken away first.
IMPORTS_ALL = """
import importlib.util, json, sys
from pathlib import Path
app = Path(sys.argv[1])
sys.path[:] = [str(app / "custom")] + [
    path for path in sys.path if Path(path or ".").is_dir() and not (Path(path) / "harmofl").exists()
]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
def paths(node):
    if isinstance(node, dict):
        yield from [node["path"]] if isinstance(node.get("path"), str) else []
        node = list(node.values())
    for part in node if isinstance(node, list) else []:
        yield from paths(part)
named = [path for side in ("server", "client") for path in
         paths(json.loads((app / "config" / f"config_fed_{side}.json").read_text()))]
assert any(path.startswith("harmofl.") for path in named)
for path in named:
    module, _, kind = path.rpartition(".")
    getattr(importlib.import_module(module), kind)
import harmofl.flare.participant, harmofl.evidence.report, harmofl.tasks
outside = [name for name, module in sys.modules.items() if name.split(".")[0] == "harmofl"
           and not Path(module.__file__).is_relative_to(app)]
assert not outside, outside
"""


def test_a1_a_bundle_brings_all_that_server_and_sites_import(packed: Packed, tmp_path: Path) -> None:
    """From the root folder, without PYTHONPATH and without an installed package: one app for server and sites."""
    app = packed() / "app"
    script = tmp_path / "imports.py"
    script.write_text(IMPORTS_ALL)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, str(script), str(app)], cwd="/", env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads((app.parent / "meta.json").read_text())["deploy_map"].keys() == {"app"}


def refused(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bundle", str(job), "-o", str(tmp_path / "dist")]) == 2
    assert not list((tmp_path / "dist").glob("*"))
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_a35_an_app_of_the_deploy_map_that_is_no_folder(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = json.loads((job / "meta.json").read_text())
    (job / "meta.json").write_text(json.dumps(meta | {"deploy_map": {"app": ["server", "BIDMC"], "app_hk": ["HK"]}}))
    message = refused(job, tmp_path, capsys)
    assert f"{job / 'app_hk'}" in message and "cannot be read" in message


def test_a34_a_job_with_homomorphic_encryption_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE's filters need tenseal, which the package does not ask for: its absence is named before submission."""
    monkeypatch.setitem(sys.modules, "tenseal", None)
    path = job / "app/config/config_fed_client.json"
    config = json.loads(path.read_text())
    encryptor = {"path": "nvflare.app_opt.he.model_encryptor.HEModelEncryptor", "args": {}}
    config["task_result_filters"] = [{"tasks": ["train"], "filters": [encryptor]}]
    path.write_text(json.dumps(config))
    message = refused(job, tmp_path, capsys)
    assert "HEModelEncryptor cannot be imported" in message and "tenseal" in message


@pytest.mark.parametrize("arguments", [5, None, True, ["rounds"], "rounds"])
def test_arguments_that_are_no_object(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: object
) -> None:
    path = job / "app/config/config_fed_client.json"
    config = json.loads(path.read_text())
    config["executors"][0]["executor"]["args"] = arguments
    path.write_text(json.dumps(config))
    assert "HarmoFLExecutor: args must be an object" in refused(job, tmp_path, capsys)


@pytest.mark.parametrize("name", [".x.Y", "..", "a\nb.C", "\x1b[2J.C", "math.pi", "x" * 5000])
def test_names_of_classes_that_are_none(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = job / "app/config/config_fed_client.json"
    config = json.loads(path.read_text())
    config["executors"][0]["executor"]["path"] = name
    path.write_text(json.dumps(config))
    message = refused(job, tmp_path, capsys)
    assert "cannot be imported" in message and "\x1b" not in message
