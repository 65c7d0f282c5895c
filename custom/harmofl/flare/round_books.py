"""RoundBooks: the records of a run's closed rounds, which lie in round_metrics.jsonl and not in memory."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from harmofl.evidence.results import RoundRecord

_NEWEST = 2  # what a round's end asks for: the record of the round before, and its own


class RoundBooks(Sequence[RoundRecord]):
    """A record for every closed round, one line of JSON each; memory holds the two newest and where lines end.

    A record has ten numbers a site: those of 1,000 sites and 500 rounds are half a gigabyte as objects. Each line is
    added to the end of the file, so that closing a round costs the same in round 500 as in round 0; what was written of
    a line when a process was killed has no line end, and `read_rounds` leaves it out.
    """

    def __init__(self, path: Path, *copies: Path) -> None:
        """Begin without any; the files are made with the first record.

        Args:
            path: of the run's file.
            copies: files that get the same lines.
        """
        self._path, self._copies = path, copies
        self._ends = [0]
        self._newest: list[RoundRecord] = []

    def append(self, record: RoundRecord) -> None:
        """Add the record of a round that has closed."""
        line = (record.model_dump_json() + "\n").encode()
        for path in (*self._copies, self._path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
                # what is behind the last whole line was being written when something went wrong
                file.truncate(self._ends[-1])
                file.seek(self._ends[-1])
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._ends.append(self._ends[-1] + len(line))
        self._newest = [*self._newest, record][-_NEWEST:]

    def replace(self, records: Iterable[RoundRecord]) -> None:
        """Hold these records and no others, as a run that is resumed does."""
        self._ends, self._newest = [0], []
        for record in records:
            self.append(record)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> RoundRecord: ...

    @overload
    def __getitem__(self, place: slice) -> list[RoundRecord]: ...

    def __getitem__(self, place: int | slice) -> RoundRecord | list[RoundRecord]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        index = range(len(self))[place]
        from_end = len(self) - index
        return self._newest[-from_end] if from_end <= len(self._newest) else self._read(index)

    def __iter__(self) -> Iterator[RoundRecord]:
        return map(self._read, range(len(self)))

    def _read(self, index: int) -> RoundRecord:
        with self._path.open("rb") as file:
            file.seek(self._ends[index])
            return RoundRecord.model_validate_json(file.read(self._ends[index + 1] - self._ends[index]))
