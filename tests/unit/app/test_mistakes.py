"""No command ends in a traceback on a user's mistake: missing, empty, unreadable and foreign arguments of each one.

Commands and their arguments are taken from the parsers, so that a new one is held too.
"""

import argparse
import importlib.util
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from harmofl.app import cli
from harmofl.app.job import read_job
from tests.small_job import SITES, write_site, write_small_job
from tests.unit.app.finished_run import write_run
from tests.unit.app.model_files import ModelOfTask
from tests.unit.app.provisioned import LEAD, Provisioning
from tests.wilds import row, write_index

ROOT = Path(__file__).resolve().parents[3]
Seen = pytest.CaptureFixture[str]
Tell = Callable[..., list[str]]


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command of harmofl with its parser."""
    (choices,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(choices.choices)


def poc() -> ModuleType:
    """poc/run.py as a module."""
    if "poc_run" not in sys.modules:
        spec = importlib.util.spec_from_file_location("poc_run", ROOT / "poc" / "run.py")
        assert spec is not None and spec.loader is not None
        sys.modules["poc_run"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["poc_run"]


PARSERS = {**commands(), "poc": poc()._parser()}
PATHS = [
    (command, action.dest)
    for command, parser in PARSERS.items()
    for action in parser._actions
    if action.type is Path or action.metavar == "JOB"  # `plan --model` takes the name of a network too
]
TEXTS = [
    (command, action.dest)
    for command, parser in PARSERS.items()
    for action in parser._actions
    if action.nargs != 0 and (command, action.dest) not in PATHS
]
OUTPUTS = {"output", "workspace"}
# right values of what else a command cannot do without
RIGHT = {"job_id": "0f605ead-1111-2222-3333-444455556666", "methods": "fedavg", "format": "torchscript"}
RIGHT |= {"sites": "3", "bandwidth": "100Mbit"}
# which good thing an argument takes where it has not the name of its own
KINDS = {
    ("watch", "kit"): "lead",
    ("plan", "model"): "job",
    ("evaluate", "data"): "site",
    ("predict", "images"): "image",
}


# good things that an argument takes, where there are several
ALIKE = {"data_root": {"data_root", "site"}, "data": {"data_root", "site"}, "profile_of": {"data_root", "site"}}
ALIKE |= {"kit": {"kit", "lead"}, "local_only": set(), "images": {"image"}}


def picture() -> bytes:
    held = io.BytesIO()
    Image.new("L", (8, 8)).save(held, "PNG")
    return held.getvalue()


FILES = {
    "empty_file": b"",
    "notes.txt": b"Case00 again?\n",
    "list.json": b"[1, 2]",
    "binary.bin": bytes(range(256)) * 8,
    "picture.png": picture(),
}
EDITED = ("meta.json", "app/config/experiment.json", "app/config/config_fed_server.json")


@pytest.fixture(scope="module")
def good(
    tmp_path_factory: pytest.TempPathFactory, kits: Provisioning, sites_root: Path, prostate_model: ModelOfTask
) -> dict[str, Path]:
    """One of each kind of thing that commands take; read only."""
    folder = tmp_path_factory.mktemp("good")
    job = write_small_job(folder / "small_job")
    return {
        "job": job,
        "data_root": sites_root,
        "site": sites_root / SITES[0],
        "kit": kits.folder / SITES[1],
        "lead": kits.folder / LEAD,
        "model": prostate_model.path,
        "image": prostate_model.images[0],
        "run": write_run(folder / "run", job),
    }


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What somebody names by mistake; read only."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "empty_folder").mkdir()
    (folder / "dangling").symlink_to(folder / "nowhere")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "of_a_folder").mkdir()
    (folder / "of_a_folder" / "thesis.txt").write_text("precious")
    return {"missing": folder / "nowhere", **{path.name: path for path in sorted(folder.iterdir())}}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: Seen) -> Tell:
    """What is wrong with how a command line ends that holds a mistake; what it would run is not run."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("the command was taken, and began its work")

    monkeypatch.setattr(os, "umask", lambda mask: 0)
    for place in ("harmofl.app.simulate._run", "harmofl.app.compare.run_cells", "harmofl.app.plan.measure_parts"):
        monkeypatch.setattr(place, started)
    monkeypatch.setattr(poc().Rehearsal, "run", started)

    def tell(command: str, arguments: list[str], *names: str) -> list[str]:
        capsys.readouterr()
        try:
            code = poc().main(arguments) if command == "poc" else cli.main([command, *arguments])
        except SystemExit as end:  # of argparse
            code = end.code
        except BaseException:
            return [f"{command} {arguments}: {traceback.format_exc()}"]
        out, err = capsys.readouterr()
        problems = []
        if code not in (1, 2):
            problems.append(f"ends with {code}")
        usage = err.startswith("usage: ")
        if "Traceback" in out + err:
            problems.append("shows a traceback")
        if code == 2 and not usage and (err.count("\n") != 1 or not err.startswith(("harmofl ", "poc: "))):
            problems.append("is not one line")
        if not usage and not any(name in out + err for name in names):
            problems.append(f"names none of {names}")
        return [f"{command} {arguments}: {', '.join(problems)}\n{out}{err}"] if problems else []

    return tell


def line(command: str, wrong: str, value: str, good: dict[str, Path], output: Path) -> list[str]:
    """A command line that is right but for one argument."""
    words: list[str] = ["--demo"] if command == "poc" and wrong != "data" else []
    for action in PARSERS[command]._actions:
        if action.dest == wrong:
            words += [action.option_strings[-1], value] if action.option_strings else [value]
        elif action.required:
            right = str(output) if action.dest in OUTPUTS else RIGHT.get(action.dest)
            right = right or str(good[KINDS.get((command, action.dest), action.dest)])
            words += [action.option_strings[-1], right] if action.option_strings else [right]
    if (command, wrong) == ("report", "site"):
        words += ["--data", str(good["data_root"])]
    return words


def mistakes(command: str, dest: str, good: dict[str, Path], foreign: dict[str, Path]) -> Iterator[Path]:
    """What may be named in place of the right thing."""
    if dest in OUTPUTS:  # a new or empty folder is right
        yield from (path for path in foreign.values() if path.is_file())
        return
    kind = KINDS.get((command, dest), dest)
    right = ALIKE.get(kind, {kind})
    yield from (*foreign.values(), *(path for name, path in good.items() if name not in right))


@pytest.mark.parametrize("argument", PATHS, ids="-".join)
def test_a_path_to_something_else(
    argument: tuple[str, str], good: dict[str, Path], foreign: dict[str, Path], tmp_path: Path, told: Tell
) -> None:
    command, dest = argument
    problems = []
    for number, path in enumerate(mistakes(command, dest, good, foreign)):
        option = next(action for action in PARSERS[command]._actions if action.dest == dest).option_strings[-1:]
        words = line(command, dest, str(path), good, tmp_path / f"out{number}")
        problems += told(command, words, path.name, path.resolve().name, *option)
    assert not problems, "\n".join(problems)


def spoiled(text: str) -> dict[str, bytes]:
    """A JSON file that somebody has changed, in many ways."""
    held = json.loads(text)
    values = (None, 7, -1, "seven", [7], {"a": [1]})
    changed = {f"{key} {value}": json.dumps(held | {key: value}).encode() for key in held for value in values}
    return {**changed, **FILES, "half": text[: len(text) // 2].encode(), "null": b"null", "number": b"3"}


# changes that leave a job as good as it was, or another good one
HARMLESS = {"name None", "name seven", "resource_spec None", "mandatory_clients None", "seed 7", "demo None"}


@pytest.mark.parametrize("name", EDITED)
def test_a_spoiled_job_is_not_bundled(name: str, good: dict[str, Path], tmp_path: Path, told: Tell) -> None:
    problems = []
    for number, (kind, content) in enumerate(spoiled((good["job"] / name).read_text()).items()):
        if kind in HARMLESS or kind.startswith("format_version"):
            continue
        job = Path(shutil.copytree(good["job"], tmp_path / f"job{number}"))
        (job / name).write_bytes(content)
        words = [str(job), "-o", str(tmp_path / f"out{number}")]
        problems += [f"{kind}: {line}" for line in told("bundle", words, Path(name).name)]
    assert not problems, "\n".join(problems)


OF_JOBS = [(command, dest) for command, dest in PATHS if KINDS.get((command, dest), dest) == "job"]


@pytest.mark.parametrize(("command", "dest"), OF_JOBS)
def test_a_job_with_a_spoiled_file(command: str, dest: str, good: dict[str, Path], tmp_path: Path, told: Tell) -> None:
    problems = []
    for name in EDITED[:2]:
        for kind, content in FILES.items():
            job = Path(shutil.copytree(good["job"], tmp_path / f"{Path(name).stem}_{kind}"))
            (job / name).write_bytes(content)
            words = line(command, dest, str(job), good, tmp_path / f"out_{kind}")
            problems += told(command, words, Path(name).name)
    assert not problems, "\n".join(problems)


# of each command: texts that are no value of any argument
NONSENSE = ("", "{", "../..", "a=b=c", "\u00fc b", "[1", "x" * 300, "0", "-5", "nan")
# arguments for which some of these are right
TAKEN = {("compare", "seeds"): {"0"}, ("poc", "port"): {"0"}, ("evaluate", "site"): {"0", "nan", "x" * 300}}


@pytest.mark.parametrize(("command", "dest"), TEXTS)
def test_a_text_that_means_nothing(command: str, dest: str, good: dict[str, Path], tmp_path: Path, told: Tell) -> None:
    problems = []
    for number, text in enumerate(NONSENSE):
        if text not in TAKEN.get((command, dest), ()):
            option = next(action for action in PARSERS[command]._actions if action.dest == dest).option_strings[-1:]
            words = line(command, dest, text, good, tmp_path / f"out{number}")
            problems += told(command, words, text, repr(text), f"{text.split('=')[0]}: unknown setting", *option)
    assert not problems, "\n".join(problems)


def test_nothing_that_was_named_has_changed(good: dict[str, Path], foreign: dict[str, Path]) -> None:
    assert (foreign["of_a_folder"] / "thesis.txt").read_text() == "precious"
    for name, content in FILES.items():
        assert foreign[name].read_bytes() == content
    assert not list(foreign["empty_folder"].iterdir()) and not foreign["missing"].exists()


def test_a_rehearsal_says_for_each_site_how_its_data_is_named(tmp_path: Path) -> None:
    """Aliases and centers of a job name nothing at a site; who rehearses holds the data of all and says it for them."""
    rehearsal = poc()
    for name in ("ISBI", "BMC", "HK"):
        write_site(tmp_path / name)
    job = read_job(ROOT / "jobs" / "harmofl_prostate", [])
    names = rehearsal._site_names(tmp_path, job)
    assert names == {"RUNMC": rehearsal.Names(folder="ISBI")}
    job = read_job(ROOT / "jobs" / "harmofl_camelyon17", [])
    write_index(tmp_path, *(row(number, center=number) for number in range(5)))
    names = rehearsal._site_names(tmp_path, job)
    assert names == {f"hospital{number + 1}": rehearsal.Names(centers=(number,)) for number in range(5)}
    # the synthetic data of a site has rows of all its centers, too
    assert rehearsal._site_names(None, job) == names
    assert rehearsal._site_names(None, read_job(ROOT / "jobs" / "harmofl_prostate", [])) == {}
