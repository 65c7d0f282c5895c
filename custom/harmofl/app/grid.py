"""The grid of a comparison: which cells there are, which are finished, and running the others side by side."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmofl.app.cell import FAILURE_FILE, CellPlan, run_cell
from harmofl.app.comparison_folder import CELLS
from harmofl.data.findings import count_text
from harmofl.evidence.comparison import CELL_FILE, CellRecord, Use, read_cell
from harmofl.evidence.results import ResultsError
from harmofl.experiment import Experiment, rules_problem

if TYPE_CHECKING:
    from rich.progress import Progress

POLL = 0.2  # seconds
IMPORTS = "harmofl.app.cell_imports"


@dataclass(frozen=True)
class Sweep:
    """Values of one setting, each tried with everything else as it is."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Cell:
    """A run to make; `name` is that of its folder, `label` is for a person."""

    name: str
    label: str
    plan: CellPlan
    experiment: Experiment

    @property
    def rounds(self) -> int:
        """Its share of the progress."""
        return self.experiment.federation.rounds


@dataclass(frozen=True)
class Grid:
    """The different cells of a comparison and what each is used for.

    Attributes:
        cells: every run once.
        uses: where it stands.
        fixed: methods by the swept key that they set.
        not_left_out: by method why it is not scored at hospitals that took no part.
        controls: by method the name of plain averaging on its network, where the reference has another network.
    """

    cells: tuple[Cell, ...]
    uses: tuple[Use, ...]
    fixed: Mapping[str, tuple[str, ...]]
    not_left_out: Mapping[str, str]
    controls: Mapping[str, str]


def variations(
    methods: Sequence[str], seeds: Sequence[int], sweeps: Sequence[Sweep], left_out: Sequence[str]
) -> list[Use]:
    """What the grid asks for, with no cell named yet.

    The base setting and every hospital left out for each method and seed; every value of a sweep too, one sweep at a
    time: a product of sweeps would be too many runs to make and too many to read.
    """
    asked = []
    for seed in seeds:
        for method in methods:
            places = [(None, None, None), *((None, None, site) for site in left_out)]
            places += [(sweep.key, value, None) for sweep in sweeps for value in sweep.values]  # type: ignore[misc]
            asked += [
                Use(cell="", method=method, seed=seed, sweep=key, value=value, left_out=site)
                for key, value, site in places
            ]
    return asked


def finished_record(plan: CellPlan) -> CellRecord | None:
    """The record of a cell that was finished before with an equal key, None where it has to run."""
    try:
        record = read_cell(plan.folder / CELL_FILE)
    except ResultsError:
        return None
    return record if record.key == plan.key else None


def cells_of_other_rules(output: Path) -> list[str]:
    """A line for each way in which cells of an earlier version were made otherwise: they are run again, not used."""
    found: dict[str, int] = {}
    for path in sorted((output / CELLS).glob(f"*/{CELL_FILE}")):
        try:
            problem = rules_problem(read_cell(path).key.rules)
        except ResultsError:
            continue
        if problem:
            found[problem] = found.get(problem, 0) + 1
    return [f"{count_text(count, 'cell')} here not used: {problem}" for problem, count in found.items()]


def run_cells(cells: Sequence[Cell], at_a_time: int, say: Callable[[str], None]) -> dict[str, str]:
    """Run cells side by side, each in a process of its own, with a bar that tells the time left.

    Args:
        cells: the unfinished ones.
        at_a_time: processes.
        say: takes a line about each cell that ends.

    Returns:
        By the cell's name why it failed. A failed cell stops no other one.

    Raises:
        KeyboardInterrupt: the running cells are ended; what was finished stays.
    """
    with _bar() as bar:
        return _Runner(cells, at_a_time, say, bar).run()


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=Console(file=sys.stdout),
        transient=True,
        disable=not sys.stdout.isatty(),
    )


class _Runner:
    """The processes of the cells that run now."""

    def __init__(self, cells: Sequence[Cell], at_a_time: int, say: Callable[[str], None], bar: "Progress") -> None:
        self._waiting, self._running = list(cells), dict[str, tuple[Cell, ForkServerProcess]]()
        self._at_a_time, self._say, self._bar = at_a_time, say, bar
        self._total, self._rounds = len(cells), sum(cell.rounds for cell in cells)
        self._closed, self._ended = 0, 0  # rounds of ended cells, and how many have ended
        self._started = time.monotonic()
        self._failures: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        task = self._bar.add_task("cells", total=self._rounds, left="")
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._at_a_time:
                    self._start(self._waiting.pop(0))
                for cell, process in list(self._running.values()):
                    if not process.is_alive():
                        self._end(cell, process)
                self._bar.update(task, completed=self._rounds_done(), left=self._time_left())
                time.sleep(POLL)
        finally:
            for _, process in self._running.values():
                process.terminate()
            for cell, process in self._running.values():
                process.join(10)
                process.kill()
                process.join()
                shutil.rmtree(cell.plan.folder, ignore_errors=True)
        return self._failures

    def _start(self, cell: Cell) -> None:
        _start_origin(cell.plan.threads)
        plan = replace(cell.plan, asked_at=time.monotonic())
        process = multiprocessing.get_context("forkserver").Process(target=run_cell, args=(plan,))
        process.start()
        self._running[cell.name] = (cell, process)

    def _end(self, cell: Cell, process: ForkServerProcess) -> None:
        process.join()
        del self._running[cell.name]
        self._closed, self._ended = self._closed + cell.rounds, self._ended + 1
        record = finished_record(cell.plan)
        where = f"[{self._ended}/{self._total}] {cell.label}"
        if record is None:
            self._failures[cell.name] = reason = _reason(cell, process.exitcode)
            self._say(f"{where}: failed: {reason}")
            return
        left = f", {left}" if (left := self._time_left()) else ""
        self._say(f"{where}: {record.key_score} {_score(record)}, {record.seconds:.0f} s{left}")

    def _rounds_done(self) -> int:
        return self._closed + sum(_closed_rounds(cell) for cell, _ in self._running.values())

    def _time_left(self) -> str:
        """From the pace so far, which has the start and the evaluation of the cells in it."""
        done = self._rounds_done()
        if not self._ended or done >= self._rounds:  # a cell's first rounds alone would promise too much
            return ""
        seconds = (time.monotonic() - self._started) / done * (self._rounds - done)
        return f"about {spoken(seconds)} left"


def _start_origin(threads: int) -> None:
    """Start the process that all cells are forked from, if there is none, so that they import once and not each.

    It has nothing but modules in it: a cell starts from the same state as a process of its own would.
    """
    # libraries read this when they are loaded; torch's own number of threads is set by the run
    held = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # a terminal sends Ctrl-C to the cells too: they leave it to this process, which ends them
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.set_forkserver_preload([IMPORTS])
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
        if held is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = held


def spoken(seconds: float) -> str:
    """A duration for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _closed_rounds(cell: Cell) -> int:
    try:
        return cell.plan.progress_file.read_bytes().count(b"\n")
    except OSError:
        return 0


def _reason(cell: Cell, code: int | None) -> str:
    try:
        return f"{(cell.plan.folder / FAILURE_FILE).read_text(encoding='utf-8')} (log: {cell.plan.folder / 'log.txt'})"
    except OSError:
        killed = f"ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        memory = "; was there too little memory? lower --processes" if code == -9 else ""
        return f"its process {killed}{memory}"


def _score(record: CellRecord) -> str:
    """Mean over the sites that count: those that trained, or the one that was left out."""
    sites = [record.key.left_out] if record.key.left_out else record.seen
    means = [score.mean for site in sites if (score := record.scores[site].best.get(record.key_score))]
    defined = [mean for mean in means if mean is not None]
    return f"{sum(defined) / len(defined):.3f}" if defined else "undefined"
