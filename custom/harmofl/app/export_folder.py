"""The folder of an export: the code that goes into it, and what of an earlier one may be replaced."""

import re
import shutil
from pathlib import Path
from typing import Any

import harmofl.data
from harmofl.app import apply_exported
from harmofl.app.job import JobError
from harmofl.sections import parse_json

SETTINGS = "settings.json"
READING = "harmofl_data"
READERS = {"prostate": ("pairs", "nifti_masks"), "nuclei": ("rasters",), "camelyon17": ("rasters",)}
IMPORT = re.compile(rf"from {re.escape(harmofl.data.__name__)}\.(\w+) import")
MODELS = ("model.ts", "model.onnx")
# Nothing else is ever replaced or removed.
_CODE = ("apply.py", f"{READING}/*.py")
OWN = (
    *("README.md", SETTINGS, *MODELS, *_CODE),
    *("configs/inference.json", "configs/metadata.json", "docs/README.md", "docs/license.txt"),
    *(f"models/{name}" for name in (SETTINGS, "model.pt", "model.ts")),
    *(f"scripts/{name}" for name in ("__init__.py", *_CODE)),
)


def write_code(task: str, folder: Path) -> None:
    """Copy apply.py, and the files of the package that read images of a task, which it needs beside it."""
    shutil.copyfile(apply_exported.__file__, folder / "apply.py")
    (folder / READING).mkdir()
    (folder / READING / "__init__.py").write_text('"""The readers of harmofl.data."""\n', encoding="utf-8")
    waiting, source = list(READERS[task]), Path(harmofl.data.__file__).parent
    while waiting:
        target = folder / READING / f"{waiting.pop()}.py"
        if not target.exists():
            text = (source / target.name).read_text(encoding="utf-8")
            waiting += IMPORT.findall(text)
            target.write_text(IMPORT.sub(r"from .\1 import", text), encoding="utf-8")


def check_place(output: Path, *, force: bool) -> None:
    """Refuse a place that is taken.

    Raises:
        JobError: something is there, and it is no earlier export or `force` was not said.
    """
    if not output.exists() and not output.is_symlink():
        return
    if not force:
        raise JobError(f"-o {output}: exists already; name another folder, or replace an earlier export with --force")
    if not _is_export(output):
        raise JobError(f"-o {output}: --force replaces an earlier export only, which this is not; name another folder")


def put_in_place(made: Path, output: Path) -> None:
    """Move an export to its folder; of what lies there, only files of the earlier export are replaced or removed."""
    if not output.exists():
        made.rename(output)
        return
    before = _own_files(output)
    for path in sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file()):
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).replace(output / path)
        before.discard(path)
    for path in before:
        (output / path).unlink()
    for folder in sorted({output / parent for path in before for parent in path.parents}, reverse=True):
        if folder != output and not any(folder.iterdir()):
            folder.rmdir()


def _own_files(output: Path) -> set[Path]:
    return {path.relative_to(output) for pattern in OWN for path in output.glob(pattern) if not path.is_dir()}


def _is_export(folder: Path) -> bool:
    for place in (folder, folder / "models"):
        settings = _json(place / SETTINGS)
        if isinstance(settings, dict) and settings.keys() >= {"task", "inputs", "own_profile", "classes", "model"}:
            model = settings["model"]
            return settings["task"] in READERS and model in MODELS and (place / model).is_file()
    return False


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
