"""Only names that are known beforehand leave a site, and every name that our tasks use is known."""

import ast
from pathlib import Path
from typing import Any

import pytest

import harmofl
from harmofl.flare.allowed_names import REASONS, SCORES, allowed_names, refuse_other_names
from harmofl.flare.local_amplitude import BLANK_IMAGE
from harmofl.flare.site import SiteError
from harmofl.flare.wire import MessageError

PACKAGE = Path(harmofl.__file__).parent


def codes_in(path: Path) -> set[str]:
    """Codes written out where a module makes findings: the argument `code` of `refusal` and of `Finding`."""
    found = set()
    for call in ast.walk(ast.parse(path.read_text())):
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        position = {"refusal": 0, "Finding": 1}.get(name)
        if position is not None and len(call.args) > position:  # type: ignore[attr-defined]
            argument = call.args[position]  # type: ignore[attr-defined]
            found |= {argument.value} if isinstance(argument, ast.Constant) else set()
    return found


def test_every_code_of_the_package_is_known() -> None:
    modules = [path for folder in ("data", "tasks", "flare") for path in PACKAGE.glob(f"{folder}/*.py")]
    codes = set().union(*(codes_in(path) for path in modules))
    assert len(codes) > 60 and codes <= REASONS
    # images that only training decodes are counted where their amplitude is measured, and are no finding
    assert codes | {BLANK_IMAGE} == REASONS, "a name that nothing uses any more"


@pytest.mark.parametrize(
    "numbers",
    [
        {"skipped": {"patient_jane_doe_19570312": 1}},
        {"warnings": {"jane_doe": 2}},
        {"test": {"final": {"dice": [0.5], "mrn_0012345": [1.0]}}},
        {"pooled": {"best": {"case07": (0.5, 0.4, 0.6, 3)}}},
    ],
)
def test_a_name_that_may_be_a_patients_does_not_leave(numbers: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as caught:
        refuse_other_names(numbers, allowed_names({}))
    assert not any(word in str(caught.value) for word in ("jane", "mrn", "case07"))


def test_names_of_the_package_and_of_the_hospital_leave() -> None:
    numbers = {"skipped": {"damaged_file": 2}, "test": {"final": {"dice": [0.5]}}, "pooled": {"best": {"auroc": (1,)}}}
    refuse_other_names(numbers, allowed_names({}))
    refuse_other_names({"test": {"final": {"area_error": [0.5]}}}, allowed_names({"allowed_names": ["area_error"]}))
    assert not SCORES & REASONS


@pytest.mark.parametrize("given", ["dice", {"dice": 1}, [1], None])
def test_a_list_that_is_none_is_said(given: Any) -> None:
    with pytest.raises(SiteError) as caught:
        allowed_names({"allowed_names": given})
    assert caught.value.code == "allowed_names"
