"""The index of a site's patches in the layout of Camelyon17-WILDS v1.0: rows of metadata.csv in compact columns."""

import codecs
import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harmofl.data.file_kinds import kind_of_file
from harmofl.data.findings import DataRootError, Finding, count_text

METADATA = "metadata.csv"
NAMES = ("patient", "slide")
NUMBERS = ("node", "x_coord", "y_coord", "tumor", "center", "split")
TUMOR, CENTER = NUMBERS.index("tumor"), NUMBERS.index("center")
PLACE = 3  # node, x and y, with the patient, tell a patch
BLOCK = 8192  # rows parsed at a time
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
UTF_16 = "the text is UTF-16; save it as UTF-8"
LARGEST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PatchIndex:
    """The rows of some centers in ``metadata.csv``, 30 bytes each; a path is put together when asked for.

    Attributes:
        folder: holds ``metadata.csv`` and ``patches/``.
        patients: names of the patients, as in the folder names.
        slides: (patient, slide) of each slide.
        patient: (N,) position in `patients`.
        slide: (N,) position in `slides`.
        node: (N,) lymph node of the patient.
        x: (N,) column of the patch in its slide.
        y: (N,) row of the patch in its slide.
        tumor: (N,) 1 if the central 32 x 32 pixels hold tumor, else 0.
        center: (N,) hospital, counted from 0 as in the file.
        split: (N,) the file's own split, for printing only.
        findings: about the file.
    """

    folder: Path
    patients: tuple[str, ...]
    slides: tuple[tuple[str, str], ...]
    patient: NDArray[np.int32]
    slide: NDArray[np.int32]
    node: NDArray[np.int32]
    x: NDArray[np.int32]
    y: NDArray[np.int32]
    tumor: NDArray[np.int8]
    center: NDArray[np.int32]
    split: NDArray[np.int32]
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        """Return the number of patches."""
        return len(self.tumor)

    def name(self, row: int) -> str:
        """Return the path of a patch below the folder."""
        of_node = f"patient_{self.patients[self.patient[row]]}_node_{self.node[row]}"
        return f"patches/{of_node}/patch_{of_node}_x_{self.x[row]}_y_{self.y[row]}.png"

    def counts(self) -> dict[tuple[int, int, int], int]:
        """Return the number of patches by (center, label, the file's own split), in order."""
        found = Counter(zip(self.center.tolist(), self.tumor.tolist(), self.split.tolist(), strict=True))
        return dict(sorted(found.items()))


def read_index(folder: Path, centers: Sequence[int]) -> PatchIndex:
    """Read the rows of some centers from ``metadata.csv``; no image is touched.

    Columns are found by name, others are passed over. A patient of digits alone is padded to three, which a
    spreadsheet takes away. A patch that is listed twice counts once.

    Args:
        folder: holds ``metadata.csv`` and ``patches/``, of one site or of all.
        centers: values of the column ``center`` that make up the site; none where the file holds one center only.

    Raises:
        DataRootError: if the file is missing or a column, if a row cannot be parsed, if a patch is listed with both
            labels, if a center has no row, or if none is named and the file holds several; the line and the fix are
            named.
    """
    table = _read_table(folder, centers or None)
    if not table.centers:
        raise DataRootError(f"{METADATA} has no row behind its first line; copy it again from its source")
    if not centers and len(table.centers) > 1:
        present = ", ".join(map(str, sorted(table.centers)))
        raise DataRootError(
            f"{METADATA} has rows of the centers {present}; say which are this site's: centers in local/privacy.json, "
            f'for example "centers": [{min(table.centers)}]'
        )
    absent = sorted(set(centers) - table.centers)
    if absent:
        present = ", ".join(map(str, sorted(table.centers)))
        message = f"{METADATA} has no row of center {', '.join(map(str, absent))} (it has {present}, counted from 0)"
        raise DataRootError(f"{message}; correct the site's center in the experiment or the data root")
    return table.index(folder)


def centers_of(folder: Path) -> list[int]:
    """Centers with a row in ``metadata.csv``.

    Raises:
        DataRootError: as `read_index`.
    """
    return sorted(_read_table(folder, ()).centers)


def _read_table(folder: Path, centers: Sequence[int] | None) -> "_Table":
    """The rows of some centers, None for all."""
    kind = kind_of_file(folder / METADATA)
    if kind not in ("", "a text"):
        raise DataRootError(f"{folder / METADATA} is {kind}, no text; export the table as CSV with commas")
    try:
        with (folder / METADATA).open(encoding="utf-8-sig", newline="") as stream:
            return _Table(csv.reader(stream), centers)
    except OSError as error:
        message = f"{folder / METADATA} cannot be read ({error.strerror}); put the index of the patches there"
        raise DataRootError(message) from error
    except (UnicodeDecodeError, csv.Error) as error:
        with (folder / METADATA).open("rb") as stream:
            if stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataRootError(f"{folder / METADATA}: {UTF_16}") from error
        message = f"{folder / METADATA} is no UTF-8 text of comma-separated columns ({error}); export it again"
        raise DataRootError(message) from error


def _refuse_other_form(header: list[str]) -> None:
    """Say by its first line what a table is instead of one of columns separated by commas."""
    line = ",".join(header)
    if line.casefold().startswith("sep="):
        raise DataRootError(f"{METADATA}, line 1: is 'sep=', a note to spreadsheets; delete this line")
    if "\0" in line:
        raise DataRootError(f"{METADATA}: {UTF_16}")
    for mark, name in SEPARATORS.items():
        if mark in line and {word.strip(' "') for word in line.split(mark)} & {*NAMES, *NUMBERS}:
            raise DataRootError(f"{METADATA}, line 1: columns are separated by {name}; export it with commas")


class _Table:
    """Parsed rows of the wanted centers, in blocks: 455,954 rows as lists of text would take gigabytes."""

    def __init__(self, rows: Iterator[list[str]], centers: Sequence[int] | None) -> None:
        header = [name.strip() for name in next(rows, [])]
        _refuse_other_form(header)
        if not header:
            raise DataRootError(f"{METADATA} is empty; copy it again from its source")
        absent = [name for name in (*NAMES, *NUMBERS) if name not in header]
        if absent:
            message = f"{METADATA}, line 1: no column {', '.join(absent)}"
            raise DataRootError(f"{message}; the columns of Camelyon17-WILDS are {', '.join((*NAMES, *NUMBERS))}")
        self.centers: set[int] = set()
        self._width, self._wanted = len(header), None if centers is None else np.unique(centers)
        self._pick = itemgetter(*(header.index(name) for name in (*NAMES, *NUMBERS)))
        self._pairs: dict[tuple[str, str], int] = {}  # patient and slide as spelled
        self._blocks = [np.empty((1 + len(NUMBERS), 0), np.int32)]
        line = 2
        while block := list(islice(rows, BLOCK)):
            self._add([row for row in block if row], block, line)
            line += len(block)

    def _add(self, rows: list[list[str]], block: list[list[str]], line: int) -> None:
        try:
            if not rows:
                return
            if any(len(row) != self._width for row in rows):
                raise ValueError
            patients, slides, *texts = zip(*map(self._pick, rows), strict=True)
            numbers = np.array([list(map(int, column)) for column in texts], np.int64)
            in_range = numbers.min() >= -LARGEST and numbers.max() <= LARGEST
            if not in_range or not np.isin(numbers[TUMOR], (0, 1)).all():
                raise ValueError
            wanted = np.ones(len(rows), bool) if self._wanted is None else np.isin(numbers[CENTER], self._wanted)
            pairs = list(compress(zip(patients, slides, strict=True), wanted))
            for pair in dict.fromkeys(pairs):
                _patient(pair[0])
                self._pairs.setdefault(pair, len(self._pairs))
        except (ValueError, OverflowError) as error:
            raise self._explained(block, line) from error
        self.centers.update(np.unique(numbers[CENTER]).tolist())
        coded = np.fromiter(map(self._pairs.__getitem__, pairs), np.int32, len(pairs))
        self._blocks.append(np.concatenate([coded[np.newaxis], numbers[:, wanted].astype(np.int32)]))

    def _explained(self, block: list[list[str]], line: int) -> DataRootError:
        """Find the first row that could not be parsed; only a broken file comes here."""
        for number, row in enumerate(block, line):
            problem = self._problem(row) if row else ""
            if problem:
                return DataRootError(f"{METADATA}, line {number}: {problem}; correct the line or export the file again")
        raise AssertionError("every rule of a block is a rule of a row")

    def _problem(self, row: list[str]) -> str:
        if len(row) != self._width:
            comma = " (a comma inside a number counts as one more)" if len(row) > self._width else ""
            return f"{count_text(len(row), 'column')} instead of {self._width}{comma}"
        patient, _, *texts = self._pick(row)
        for name, text in zip(NUMBERS, texts, strict=True):
            try:
                fits = abs(int(text)) <= LARGEST and (name != "tumor" or int(text) in (0, 1))
            except ValueError:
                fits = False
            if not fits:
                return f"{name} is {text[:40]!r}, not {'0 or 1' if name == 'tumor' else 'an integer'}"
        try:
            _patient(patient)
        except ValueError as error:
            return str(error)
        return ""

    def index(self, folder: Path) -> PatchIndex:
        """Return the rows as an index, each patch once.

        Raises:
            DataRootError: if a patch is listed with both labels.
        """
        coded, *numbers = np.concatenate(self._blocks, axis=1)
        pairs = [(_patient(name), slide.strip()) for name, slide in self._pairs]
        slides, patients = tuple(dict.fromkeys(pairs)), tuple(dict.fromkeys(name for name, _ in pairs))
        slide = np.array([slides.index(pair) for pair in pairs], np.int32)[coded]
        patient = np.array([patients.index(name) for name, _ in pairs], np.int32)[coded]
        kept, findings = _each_once(np.stack([patient, *numbers[:PLACE]]), numbers[TUMOR])
        node, x, y, tumor, center, split = (column[kept] for column in numbers)
        labels = tumor.astype(np.int8)
        names = (patients, slides, patient[kept], slide[kept])
        return PatchIndex(folder, *names, node, x, y, labels, center, split, findings)


def _patient(text: str) -> str:
    name = text.strip()
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"patient is {text[:40]!r}, not a name of letters and digits")
    return name.zfill(3) if name.isdigit() else name


def _each_once(places: NDArray[np.int32], tumor: NDArray[np.int32]) -> tuple[NDArray[np.bool_], tuple[Finding, ...]]:
    """Say which rows are the first of their patch; places are patient, node, x and y."""
    order = np.lexsort(places)  # stable: the first in the file stays the first
    ordered = places[:, order]
    again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).all(axis=0)) + 1
    kept = np.ones(len(order), np.bool_)
    kept[order[again]] = False
    if not len(again):
        return kept, ()
    _, node, x, y = ordered[:, again[0]]
    place = f"node {node}, x {x}, y {y}"
    if (tumor[order[again]] != tumor[order[again - 1]]).any():
        message = f"{METADATA}: a patch is listed as tumor and as normal (first repeated patch: {place})"
        raise DataRootError(f"{message}; keep one row for each patch")
    message = f"{count_text(len(again), 'row')} more of a patch than one (first: {place}), each patch counts once"
    return kept, (Finding("warning", "duplicate_patch", METADATA, message, "keep one row for each patch"),)
