"""What --force replaces of the folder of an export, and what is left as it is."""

import json
from pathlib import Path

import pytest

from harmofl.app.export_folder import check_place, put_in_place
from harmofl.app.job import JobError
from tests.unit.app.exported import export
from tests.unit.app.model_files import ModelOfTask

PLAIN = ["README.md", "apply.py", "harmofl_data", "model.ts", "settings.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(model: ModelOfTask, output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert export(model, "torchscript", output, "--force") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_an_export_is_not_replaced_unless_asked_and_nothing_else_ever(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "ts"
    assert export(prostate_model, "torchscript", output) == 0
    assert names(output) == PLAIN
    assert export(prostate_model, "torchscript", output) == 2
    assert "exists already; name another folder, or replace an earlier export with --force" in capsys.readouterr().err
    (output / "predictions").mkdir()
    mine = {"predictions/scan_segmentation.nii.gz": b"a mask", "notes.txt": b"x", "harmofl_data/list.csv": b"y"}
    for name, content in mine.items():
        (output / name).write_bytes(content)
    (output / "README.md").write_text("old")
    assert export(prostate_model, "torchscript", output, "--force") == 0
    held = files(output)
    assert {name: held[name] for name in mine} == mine and held["README.md"].startswith(b"# ")
    assert export(prostate_model, "monai-bundle", output, "--force") == 0
    assert names(output) == ["configs", "docs", "harmofl_data", "models", "notes.txt", "predictions", "scripts"]
    held = files(output)
    assert {name: held[name] for name in mine} == mine
    assert [name for name in held if name.startswith("harmofl_data/")] == ["harmofl_data/list.csv"]


def test_a_folder_of_something_else_is_refused(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"task": "prostate", "model": "model.ts"}))
    (folder / "README.md").write_text("of a study")
    before = files(folder)
    assert "--force replaces an earlier export only, which this is not" in refused(prostate_model, folder, capsys)
    assert files(folder) == before
    for output in (tmp_path, tmp_path / "data" / "README.md"):  # a home with folders in it; a file
        assert "--force replaces an earlier export only" in refused(prostate_model, output, capsys)
    assert files(folder) == before and names(tmp_path) == ["data"]


@pytest.mark.parametrize("lacking", ["settings.json", "model.ts"])
def test_half_an_export_is_none(tmp_path: Path, lacking: str) -> None:
    settings = {"task": "nuclei", "inputs": ["images"], "own_profile": False, "classes": [], "model": "model.ts"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "model.ts").write_bytes(b"")
    check_place(tmp_path, force=True)
    (tmp_path / lacking).unlink()
    with pytest.raises(JobError, match="earlier export only"):
        check_place(tmp_path, force=True)


def test_folders_that_held_nothing_but_the_earlier_export_go_with_it(tmp_path: Path) -> None:
    old, made = tmp_path / "old", tmp_path / "made"
    for name in ("models/settings.json", "models/model.ts", "docs/README.md", "docs/mine.md", "scripts/mine/a.txt"):
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).write_text("old")
    made.mkdir()
    (made / "settings.json").write_text("new")
    put_in_place(made, old)
    assert files(old) == {"settings.json": b"new", "docs/mine.md": b"old", "scripts/mine/a.txt": b"old"}
    assert names(old) == ["docs", "scripts", "settings.json"]
