"""An exported model run as its page says, and what harmofl predict answers to the same images."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from PIL import Image

from harmofl.app.cli import main
from tests.unit.app.model_files import ModelOfTask


def export(model: ModelOfTask | Path, form: str, output: Path, *more: str) -> int:
    path = model if isinstance(model, Path) else model.path
    return main(["export", "--model", str(path), "--format", form, "-o", str(output), *more])


def predicted(model: ModelOfTask, images: list[Path], output: Path, *more: str) -> dict[str, Any]:
    """What harmofl predict writes, by name of the file."""
    assert main(["predict", "--model", str(model.path), *map(str, images), "-o", str(output), *more]) == 0
    return contents(output)


def contents(folder: Path) -> dict[str, Any]:
    def content(path: Path) -> Any:
        if path.suffix == ".gz":
            return np.asarray(nibabel.load(path).dataobj)
        return np.asarray(Image.open(path)) if path.suffix == ".png" else path.read_text()

    return {path.name: content(path) for path in sorted(folder.iterdir())}


def run_alone(folder: Path, images: list[Path], output: Path, *, code: int = 0) -> str:
    """apply.py as its page says, in a process that cannot import this package."""
    absent = folder.with_name(f"{folder.name}-without-harmofl")
    absent.mkdir(exist_ok=True)
    (absent / "harmofl.py").write_text("raise ImportError('harmofl is not there')")
    command = [sys.executable, str(folder / "apply.py"), *map(str, images), "-o", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(absent)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert finished.returncode == code, finished.stderr
    return finished.stdout


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Masks of one name are equal but for rounding at a border."""
    assert found.keys() == expected.keys()
    for name, mask in expected.items():
        assert np.mean(found[name] != mask) < 1e-3
