"""The fuzzer finds what is planted, says what it stands on, and makes the same inputs again."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from harmofl.data.findings import CaseError, refusal
from tests.benchmarks import fuzz
from tests.benchmarks import fuzz_mutations as change
from tests.benchmarks.fuzz_targets import TARGETS, Target, open_target

CHEAP = [name for name in TARGETS if name not in ("volumes", "models")]  # these import MONAI
SEEDS: dict[Callable, bytes] = {
    change.of_text: b'<a x="1.5"/>',
    change.of_json: json.dumps({"a": [1, {"b": None}], "c": "x"}).encode(),
    change.of_bytes: bytes(range(64)),
}


@pytest.mark.parametrize("name", CHEAP)
def test_seeds_are_accepted_and_changes_are_not_all_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    target = open_target(name, tmp_path / "held")
    outcomes = []
    for suffix, content in target.seeds:
        path = tmp_path / f"current{suffix}"
        path.write_bytes(content)
        outcomes.append(fuzz.outcome_of(target, path)[0])
    assert "accepted" in outcomes and set(outcomes) <= {"accepted", "refused"}


@pytest.mark.parametrize("mutation", SEEDS, ids=lambda mutation: mutation.__name__)
def test_an_input_depends_on_its_number_alone(mutation: change.Mutation) -> None:
    content = SEEDS[mutation]
    made = [mutation(Random(f"0/{number}"), content) for number in range(50)]
    assert made == [mutation(Random(f"0/{number}"), content) for number in range(50)]
    assert len(set(made)) > 25 and content not in made[:1]


def test_files_keep_their_form_often_enough_to_get_past_the_first_look() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("a", b"x" * 100)
        file.writestr("b", b"y" * 100)
    # a damaged archive; a method of compression that zipfile does not know is its own type of error
    zipfile_errors = (zipfile.BadZipFile, RuntimeError, OSError, ValueError)
    whole = 0
    for number in range(100):
        try:
            with zipfile.ZipFile(io.BytesIO(change.of_zip(Random(number), packed.getvalue()))) as file:
                whole += file.testzip() is None
        except zipfile_errors:
            continue
    assert whole > 60


def raising(error: Exception | None) -> Target:
    def read(path: Path) -> None:
        if error is not None:
            raise error

    return Target([(".txt", b"seed")], {".txt": change.of_text}, read, (CaseError,))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "accepted"),
        (refusal("code", "a.txt", "is odd", "fix it"), "refused"),
        (ValueError("not of the project"), "crash"),
        (MemoryError(), "crash"),
        (AssertionError("what was read is no image"), "crash"),
    ],
)
def test_only_the_projects_own_refusal_is_one(tmp_path: Path, error: Exception | None, outcome: str) -> None:
    assert fuzz.outcome_of(raising(error), tmp_path / "current.txt")[0] == outcome


def test_a_refusal_of_several_lines_is_a_crash(tmp_path: Path) -> None:
    error = CaseError(refusal("code", "a.txt", "is odd", "fix it").finding)
    error.args = ("is odd\nand goes on",)
    assert fuzz.outcome_of(raising(error), tmp_path / "current.txt")[0] == "crash"


@pytest.mark.slow
def test_the_command_counts_and_ends_with_0_where_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["fuzz", "--minutes", "0.05", "--only", "outlines", "-o", str(tmp_path / "finds")]
    monkeypatch.setattr("sys.argv", command)
    assert fuzz.main() == 0
    row = capsys.readouterr().out.splitlines()[-1]
    inputs, refused, accepted, crashes, hangs = (int(cell) for cell in row.split("|")[2:7])
    assert row.startswith("| outlines |") and inputs == refused + accepted > 20 and crashes == hangs == 0
    assert not (tmp_path / "finds").exists()
