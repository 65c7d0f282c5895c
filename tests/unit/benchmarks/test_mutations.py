"""The mutation benchmark knows the tests of every file that it changes. Its own packages need not be installed."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "tests" / "benchmarks" / "mutations.py"


def constants() -> dict[str, object]:
    """Names that the module assigns a literal to."""
    assigned = {}
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict | ast.Tuple):
            assigned[target.id] = ast.literal_eval(node.value)
    return assigned


def test_every_file_of_the_folders_has_tests_that_exist() -> None:
    named, package = constants(), ROOT / "custom" / "harmofl"
    tests, folders = named["TESTS"], named["WHOLE_FOLDERS"]
    assert isinstance(tests, dict) and isinstance(folders, tuple)
    wanted = {f"{folder}/{path.name}" for folder in folders for path in (package / folder).glob("*.py")}
    assert {name for name in wanted if (package / name).stat().st_size > 100} <= set(tests)
    assert not [path for paths in tests.values() for path in paths if not (ROOT / "tests" / path).exists()]
