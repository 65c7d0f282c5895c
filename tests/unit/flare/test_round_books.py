"""The books of a run: a line a round on disk, of which memory holds two."""

import json
from pathlib import Path
from typing import Any

import pytest

from harmofl.evidence.results import ROUNDS_FILE, RoundRecord, read_rounds
from harmofl.experiment import RULES
from harmofl.flare.round_books import RoundBooks
from harmofl.flare.server_run import ServerRun
from harmofl.flare.state import Checkpoint, StateError


def record(number: int, sites: int = 2) -> RoundRecord:
    names = [f"site-{index}" for index in range(sites)]
    numbers = {name: number + 0.5 for name in names}
    return RoundRecord(
        round=number,
        model_sha256="0" * 64,
        validation=dict(numbers),
        validation_mean=number + 0.5,
        loss=dict(numbers),
        steps=dict.fromkeys(names, 3),
        skipped_steps=dict.fromkeys(names, 0),
        seconds=dict(numbers),
        sites_accepted=names,
        sites_refused={},
        bytes_sent=dict.fromkeys(names, 100),
        server_resident_mib=1.0,
    )


def test_what_is_read_back_is_what_was_closed(tmp_path: Path) -> None:
    books = RoundBooks(tmp_path / ROUNDS_FILE, tmp_path / "store" / ROUNDS_FILE)
    closed = [record(number) for number in range(5)]
    for one in closed:
        books.append(one)
    assert list(books) == closed and books[0] == closed[0] and books[-1] == closed[4] and books[1:4] == closed[1:4]
    assert list(reversed(books)) == closed[::-1] and len(books) == 5
    assert read_rounds(tmp_path / ROUNDS_FILE) == read_rounds(tmp_path / "store" / ROUNDS_FILE) == closed
    with pytest.raises(IndexError):
        books[5]


def test_memory_holds_two_rounds_of_many(tmp_path: Path) -> None:
    books = RoundBooks(tmp_path / ROUNDS_FILE)
    for number in range(10):
        books.append(record(number))
    held = [value for value in vars(books).values() if isinstance(value, list)]
    assert sum(isinstance(one, RoundRecord) for values in held for one in values) == 2
    first = books[0]
    assert books[0] is not first, "read from the file again"


def test_a_line_that_a_killed_process_left_is_no_round(tmp_path: Path) -> None:
    books, path = RoundBooks(tmp_path / ROUNDS_FILE), tmp_path / ROUNDS_FILE
    books.append(record(0))
    with path.open("a") as file:
        file.write(record(1).model_dump_json()[:200])
    assert [one.round for one in read_rounds(path)] == [0]
    books.append(record(1))
    assert [one.round for one in read_rounds(path)] == [0, 1]


def checkpoint_of(run: ServerRun, kept: dict[str, Any], next_round: int) -> Checkpoint:
    """What a run's model file says beside the model."""
    return Checkpoint({}, {}, run.experiment.hash, run.run_id, next_round, None, 0, (), kept, rules=dict(RULES))


def resumed(run: ServerRun, folder: Path, next_round: int, books: Path | None) -> ServerRun:
    """A run that resumes from the checkpoint of `run` after so many rounds."""
    checkpoint = checkpoint_of(run, run.record(), next_round)
    again = ServerRun(run.experiment, False, folder, run.expected)
    again.continue_from(checkpoint, books)
    return again


def test_a_resumed_run_has_all_rounds_and_its_checkpoint_one(make_run, tmp_path: Path) -> None:
    run, path = make_run(), tmp_path / ROUNDS_FILE
    for number in range(3):
        run.rounds.append(record(number))
    assert len(json.loads(json.dumps(run.record()))["rounds"]) == 1
    with path.open("a") as file:
        file.write(record(3).model_dump_json() + "\n")  # closed, but its checkpoint was never written
    (tmp_path / "again").mkdir()
    again = resumed(run, tmp_path / "again", 3, path)
    assert (
        [one.round for one in again.rounds] == [0, 1, 2] == [one.round for one in read_rounds(again.folder / path.name)]
    )


@pytest.mark.parametrize("kept", [0, 1])
def test_a_checkpoint_without_its_earlier_rounds_is_refused(make_run, tmp_path: Path, kept: int) -> None:
    run, books = make_run(), tmp_path / "copied" / ROUNDS_FILE
    for number in range(3):
        run.rounds.append(record(number))
    if kept:
        RoundBooks(books).append(record(0))
    said = "has no line of round 1" if kept else "cannot be read"
    with pytest.raises(StateError, match=f"{said}.*copy {ROUNDS_FILE} of that run beside the checkpoint"):
        resumed(run, tmp_path / "again", 3, books)


def test_a_checkpoint_of_a_version_that_kept_all_rounds_needs_no_file(make_run, tmp_path: Path) -> None:
    run = make_run()
    whole = run.record() | {"rounds": [record(number).model_dump() for number in range(3)]}
    run.continue_from(checkpoint_of(run, whole, 3), tmp_path / "nowhere" / ROUNDS_FILE)
    assert [one.round for one in run.rounds] == [0, 1, 2]
