"""Checkpoints whose parts are of another type: refused by key, never used. Found by tests.benchmarks.fuzz."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.flare.state import Checkpoint, StateError

ODD: dict[str, Any] = {
    "nothing": None,
    "number": 5,
    "below zero": -1,
    "text": "x",
    "list": [1],
    "table": {"a": 1},
    "tensor": torch.zeros(2),
    "flag": True,
}
# what is no other type there: any text is a hash or a run id, None is an amplitude that was not frozen
ALLOWED = {
    "experiment_hash": {"text"},
    "run_id": {"text"},
    "next_round": {"number"},
    "amplitude": {"nothing", "tensor"},
    "amplitude_images": {"number"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Checkpoint(
        model={"w": torch.ones(2)},
        experiment={"name": "small"},
        experiment_hash="0" * 16,
        run_id="a1",
        next_round=1,
        amplitude=torch.ones(3),
        amplitude_images=4,
        amplitude_sites=("A",),
        record={},
        server_moments={"mean": {"w": torch.zeros(2)}},
        server_weights={"w": torch.zeros(2)},
    ).save(tmp_path / "model.pt")
    return tmp_path / "model.pt"


KEYS = (
    *("model", "experiment", "experiment_hash", "run_id", "next_round", "amplitude", "amplitude_images"),
    *("amplitude_sites", "record", "server_moments", "server_weights"),
)


@pytest.mark.parametrize("key", KEYS)
def test_a_part_of_another_type_is_refused_by_its_key(path: Path, key: str) -> None:
    whole = torch.load(path, weights_only=True)
    for name, value in ODD.items():
        content = {"model": whole["model"], "harmofl": dict(whole["harmofl"])}
        (content if key == "model" else content["harmofl"])[key] = value
        torch.save(content, path)
        if name in ALLOWED.get(key, set()):
            Checkpoint.load(path)
            continue
        with pytest.raises(StateError, match=f"^model.pt: {key}.* has another form") as caught:
            Checkpoint.load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_an_experiment_that_is_no_json_object_is_refused(path: Path, text: str) -> None:
    content = torch.load(path, weights_only=True)
    content["harmofl"]["experiment"] = text
    torch.save(content, path)
    with pytest.raises(StateError, match="model.pt: experiment of the checkpoint has another form"):
        Checkpoint.load(path)


@pytest.mark.parametrize("mark", [torch.ones(3), True, "1", None, 2])
def test_a_mark_of_another_format_is_refused(path: Path, mark: Any) -> None:
    content = torch.load(path, weights_only=True)
    content["harmofl"]["format"] = mark
    torch.save(content, path)
    with pytest.raises(StateError, match="not a HarmoFL checkpoint of format 1"):
        Checkpoint.load(path)


@pytest.mark.parametrize("key", ["experiment", "record"])
@pytest.mark.parametrize("depth", [150, 100_000])  # beyond what is read, and beyond what Python's parser can
def test_a_note_that_is_nested_too_deeply_is_refused(path: Path, key: str, depth: int) -> None:
    content = torch.load(path, weights_only=True)
    content["harmofl"][key] = '{"a":' * depth + "1" + "}" * depth
    torch.save(content, path)
    with pytest.raises(StateError, match=f"{key} of the checkpoint has another form"):
        Checkpoint.load(path)
