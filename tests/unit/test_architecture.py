"""The floors of the package: which imports which, and how large and how named its parts may be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import harmofl

PACKAGE = Path(harmofl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

EXPERIMENT = {"experiment", "files", "methods", "patient_names", "sections"}

# What each floor may import of the package besides itself: only what lies below it.
BELOW = {
    "methods": set(),
    "sections": set(),
    "files": set(),
    "patient_names": set(),
    "experiment": EXPERIMENT - {"experiment"},
    "job_folder": EXPERIMENT,
    "core": EXPERIMENT,
    "data": EXPERIMENT,
    "tasks": {"core", "data"} | EXPERIMENT,
    "evidence": {"tasks", "core", "data"} | EXPERIMENT,
    "flare": {"evidence", "tasks", "core", "data", "job_folder"} | EXPERIMENT,
    "app": {"flare", "evidence", "tasks", "core", "data", "job_folder"} | EXPERIMENT,
}

FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "common", "base", "manager"}
FILE_MODULES = {"os", "io", "pathlib", "shutil", "tempfile", "glob", "pickle", "nibabel", "builtins"}
FILE_CALLS = {"open", "load", "save", "savez", "loadtxt", "savetxt", "fromfile", "tofile", "memmap"}


def floor_of(module: str) -> str:
    return module.split("/", maxsplit=1)[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every module that is imported, also inside functions and for type checking, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or "", node.lineno
            # from harmofl import core
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def words(name: str) -> set[str]:
    """Words of snake_case and CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_every_module_stands_on_a_floor():
    assert {floor_of(module) for module in TREES} == set(BELOW) | {"__init__"}


@pytest.mark.parametrize("module", TREES)
def test_imports_go_down(module):
    floor = floor_of(module)
    names = {(name.split(".")[1], line) for name, line in imported(TREES[module]) if name.startswith("harmofl.")}
    own = {part.stem for part in PACKAGE.iterdir()} & {name for name, _ in names}
    wrong = {(name, line) for name, line in names if name in own and name not in BELOW.get(floor, set()) | {floor}}
    assert not wrong


@pytest.mark.parametrize("floor", ["core", "data", "tasks", "evidence", "experiment", "methods", "job_folder"])
def test_only_flare_and_app_import_nvflare(floor):
    modules = {module: tree for module, tree in TREES.items() if floor_of(module) == floor}
    assert modules
    assert not [module for module, tree in modules.items() for name, _ in imported(tree) if name.startswith("nvflare")]


@pytest.mark.parametrize("module", [module for module in TREES if floor_of(module) == "core"])
def test_core_opens_no_file(module):
    tree = TREES[module]
    assert not {name for name, _ in imported(tree) if name.split(".")[0] in FILE_MODULES}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {
        call.func.id if isinstance(call.func, ast.Name) else call.func.attr
        for call in calls
        if isinstance(call.func, ast.Name | ast.Attribute)
    }
    assert not names & FILE_CALLS


def test_no_file_is_longer_than_500_lines():
    tests = Path(__file__).parents[1].rglob("*.py")
    lengths = {path.as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in [*FILES, *tests]}
    assert not {path: length for path, length in lengths.items() if length > 500}


def length_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring: it documents, it need not be followed."""
    first = function.body[0]
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return length
    assert first.end_lineno is not None
    return length - (first.end_lineno - first.lineno + 1)


@pytest.mark.parametrize("module", TREES)
def test_no_function_is_longer_than_40_lines(module):
    lengths = {function.name: length_without_docstring(function) for function in functions(TREES[module])}
    assert not {name: length for name, length in lengths.items() if length > 40}


@pytest.mark.parametrize("module", TREES)
def test_names_say_what_they_are_for(module):
    tree = TREES[module]
    defined = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    held = {name for name in [*module.removesuffix(".py").split("/"), *defined] if words(name) & FORBIDDEN_NAMES}
    assert not held


def public(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Public classes, functions and methods; not those inside functions."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield within + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{node.name}.")


@pytest.mark.parametrize("module", TREES)
def test_the_public_surface_is_documented(module):
    tree = TREES[module]
    assert ast.get_docstring(tree)
    assert not [name for name, node in public(tree.body) if not ast.get_docstring(node)]


def test_nothing_in_the_package_is_unused():
    """Every module is imported by another one, named in a job, or an entry point."""
    root = PACKAGE.parents[1]
    entry_points = (root / "pyproject.toml").read_text(encoding="utf-8")
    named = [*(root / "jobs").rglob("*.json"), root / "poc" / "README.md"]  # the recipe is for Python users
    jobs = "".join(path.read_text(encoding="utf-8") for path in named)
    elsewhere = {name for module, tree in TREES.items() for name, _ in imported(tree)}
    # tasks are found by name, see harmofl.tasks.load_task
    modules = {
        f"harmofl.{module.removesuffix('.py').replace('/', '.')}" for module in TREES if "__init__" not in module
    }
    unused = {
        name
        for name in modules
        if name not in elsewhere and name not in jobs and name not in entry_points and ".tasks." not in name
    }
    assert unused == set()
