"""Model files whose arrays are of another kind: refused by name. Found by tests.benchmarks.fuzz."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.app.model_file import ModelFileError, load_model
from tests.unit.app.model_files import ModelOfTask, altered


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.to(torch.complex64),
        lambda value: value.to(torch.int32),
        lambda value: value.to_sparse(),
        lambda value: value[..., :0],
    ],
    ids=["complex", "integer", "sparse", "empty"],
)
def test_weights_of_another_kind(prostate_model: ModelOfTask, tmp_path: Path, change: Any) -> None:
    def convert(content: dict[str, Any]) -> None:
        name = next(name for name in content["model"] if name.endswith("weight"))
        content["model"] = content["model"] | {name: change(content["model"][name])}

    with pytest.raises(ModelFileError, match="its weights are not those of") as caught:
        load_model(altered(prostate_model.path, tmp_path / "odd.pt", convert))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, torch.float64])
def test_an_amplitude_of_another_kind(prostate_model: ModelOfTask, tmp_path: Path, kind: torch.dtype) -> None:
    def convert(content: dict[str, Any]) -> None:
        content["harmofl"]["amplitude"] = content["harmofl"]["amplitude"].to(kind)

    with pytest.raises(ModelFileError, match="its amplitude is no array of float32"):
        load_model(altered(prostate_model.path, tmp_path / "odd.pt", convert))


def test_a_name_of_several_lines_in_the_weights(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    def convert(content: dict[str, Any]) -> None:
        content["model"]["a\nb\x1b"] = torch.ones(1)

    with pytest.raises(ModelFileError, match="a b") as caught:
        load_model(altered(prostate_model.path, tmp_path / "odd.pt", convert))
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
