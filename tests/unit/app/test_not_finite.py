"""A model whose output is not finite is named by every command, and never taken for background."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harmofl.app import apply_exported
from harmofl.app.apply_exported import Exported, apply_all
from harmofl.app.cli import main
from tests.unit.app.model_files import ModelOfTask, altered

TASKS = ["prostate", "nuclei", "camelyon17"]


def overflowing(content: dict[str, Any]) -> None:
    """Fill the last layer with numbers that are finite and whose sums are not."""
    last = [name for name in content["model"] if name.endswith("weight")][-1]
    content["model"][last].fill_(3e38)


@pytest.fixture(params=TASKS)
def model(request: pytest.FixtureRequest) -> ModelOfTask:
    found: ModelOfTask = request.getfixturevalue(f"{request.param}_model")
    return found


def test_predict_names_image_and_model(model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, image = altered(model.path, tmp_path / "broken.pt", overflowing), model.images[0]
    assert main(["predict", "--model", str(path), str(image), "-o", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    assert f"error: {image.name}: broken.pt cannot be applied: the model's output is not finite for" in told
    assert "0 of 1 image predicted" in told
    assert list((tmp_path / "out").iterdir()) == []


def test_evaluate_scores_nothing(model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = altered(model.path, tmp_path / "broken.pt", overflowing)
    assert main(["evaluate", "--model", str(path), str(model.folder), "-o", str(tmp_path / "out")]) == 2
    told = "".join(capsys.readouterr())
    assert "broken.pt: nothing is scored: the model's output is not finite for" in told and "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_an_exported_model_writes_no_mask(
    model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_exported, "_reading", lambda name: import_module(f"harmofl.data.{name}"))
    exported, size = object.__new__(Exported), model.experiment.data
    exported.settings = {"task": model.experiment.task, "height": size.height, "width": size.width, "batch": 4}
    exported.settings |= {"inputs": ["images"], "upper_percentile": None, "classes": ["normal", "tumor"]}
    shape = (2,) if model.experiment.task == "camelyon17" else (2, size.height, size.width)
    logits = np.zeros(shape, np.float32)
    logits[1, ...] = np.nan  # of one class alone
    exported.run = lambda inputs: np.stack([logits] * len(inputs))
    assert apply_all(exported, model.images[:1], tmp_path) == 1
    assert capsys.readouterr().out.startswith(f"error: {model.images[0].name}: the model's output is not finite; ")
    assert list(tmp_path.iterdir()) == []
