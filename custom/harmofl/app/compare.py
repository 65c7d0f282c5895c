"""`harmofl compare`: methods, seeds and sweeps side by side on one job, and a page that says what came out."""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harmofl.app.comparison_folder import SHARED, hold_folder, usable_output
from harmofl.app.grid import Cell, Grid, cells_of_other_rules, finished_record, run_cells, spoken
from harmofl.app.grid_plan import Request, plan_grid, resolved
from harmofl.app.job import Job, JobError, read_job
from harmofl.app.simulate import missing_folders, placed
from harmofl.data.findings import count_text
from harmofl.evidence.comparison import COMPARISON_FILE, PAGE_FILE, TABLE_FILE, CellRecord
from harmofl.evidence.comparison_summary import GridResult, summarize_grid
from harmofl.evidence.time_spent import Part, added_up, share_beside, spent_line
from harmofl.experiment import Experiment, ExperimentError, parse_assignment
from harmofl.methods import method_overrides

if TYPE_CHECKING:
    from harmofl.evidence.gallery import Gallery


def compare(request: Request) -> int:
    """Run what is not finished yet of a grid and write comparison.json, .csv and .html.

    Returns:
        0, or 1 where a cell failed (named; the others are compared without it).

    Raises:
        JobError, ExperimentError: a mistake in the command or the job.
    """
    started = time.monotonic()
    job, roots = placed(read_job(request.job, request.assignments), request.data, request.demo)
    job.admit_task(own_code=True)
    base = _own_experiment(job, request, demo=not roots)
    output = usable_output(request.output, roots)
    missing = missing_folders(roots, base)
    if missing:
        for absent in reversed(missing):  # the first one is the last line
            _say(f"failed: {absent}")
        return 1
    grid = plan_grid(job, base, request, roots, output)
    with hold_folder(output, base.name):
        ready = _ready_cells(grid, request.processes, roots, output)
        planned = time.monotonic()
        try:
            failures = _run(ready, grid)
            records = {cell.name: record for cell in grid.cells if (record := finished_record(cell.plan))}
            ended = time.monotonic()
            gallery = _examples(job, request, roots, output / SHARED) if request.images and records else None
        finally:
            shutil.rmtree(output / SHARED, ignore_errors=True)
        if records:
            spent: dict[Part, float] = {"planning": planned - started, "pictures": time.monotonic() - ended}
            seconds = round(time.monotonic() - started, 1)
            _write(_result(grid, records, failures, base, request.assignments, seconds=seconds), gallery, spent, output)
    if failures:
        named = ", ".join(cell.label for cell in grid.cells if cell.name in failures)
        _say(
            f"failed: {len(failures)} of {count_text(len(grid.cells), 'cell')}: {named}; the same command "
            f"tries them again"
        )
    return 1 if failures or not records else 0


def _ready_cells(grid: Grid, processes: int | None, roots: Mapping[str, Path], output: Path) -> tuple[list[Cell], int]:
    """The cells that are not finished, and how many of them to run at a time; says what is to come."""
    for line in cells_of_other_rules(output):
        _say(line)
    for problem in grid.not_left_out.values():
        _say(f"--leave-one-site-out: {problem}, so it is not scored there")
    open_cells = [cell for cell in grid.cells if finished_record(cell.plan) is None]
    at_a_time = processes or _fitting(open_cells, roots)
    _say(_announcement(grid, open_cells, at_a_time, roots, output))
    threads = max(1, _cores() // max(1, at_a_time))
    return [replace(cell, plan=replace(cell.plan, threads=threads)) for cell in open_cells], at_a_time


def _run(ready: tuple[list[Cell], int], grid: Grid) -> dict[str, str]:
    """Run these cells, so many at a time; returns by the cell's name why it failed."""
    try:
        return run_cells(*ready, _say)
    except KeyboardInterrupt:
        done = sum(finished_record(cell.plan) is not None for cell in grid.cells)
        _say(
            f"stopped with {done} of {count_text(len(grid.cells), 'cell')} finished; run the same command again "
            "for the rest"
        )
        raise


def _own_experiment(job: Job, request: Request, *, demo: bool) -> Experiment:
    """The job's experiment with its own method, and a check of what --set may not change here."""
    for key in job.assigned:
        if key in ("method", "seed"):
            raise JobError(f"--set {key}: use --{key}s")
        if all(key in method_overrides(name) for name in request.methods):
            raise JobError(f"--set {key}: every method that is compared sets it itself")
    if request.leave_one_site_out and len(job.sites) < 3:
        raise JobError("--leave-one-site-out needs at least three sites: two must be left to train")
    return resolved(job, demo=demo)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _fitting(cells: Sequence[Cell], roots: Mapping[str, Path]) -> int:
    most = min(len(cells), _cores())
    if most < 2:
        return 1
    from harmofl.app.cell_memory import fitting_cells

    if roots:
        _say("reading the data of all sites, to see how many runs fit into memory")
    return min(most, fitting_cells(cells, roots))


def _announcement(
    grid: Grid, open_cells: Sequence[Cell], at_a_time: int, roots: Mapping[str, Path], output: Path
) -> str:
    finished = len(grid.cells) - len(open_cells)
    held = f", {finished} of them finished before" if finished else ""
    data = f"data in {', '.join(sorted({str(root) for root in roots.values()}))}" if roots else "demo data"
    return f"{count_text(len(grid.cells), 'cell')}{held}, {at_a_time} at a time, {data}, results in {output}"


def _result(
    grid: Grid,
    records: Mapping[str, CellRecord],
    failures: Mapping[str, str],
    base: Experiment,
    assignments: Sequence[str],
    *,
    seconds: float,
) -> GridResult:
    labels = {cell.name: cell.label for cell in grid.cells}
    return GridResult(
        uses=grid.uses,
        records=records,
        fixed=grid.fixed,
        controls=grid.controls,
        failed={labels[name]: reason for name, reason in failures.items()},
        own_method=base.method,
        base=base,
        assignments=tuple(assignments),
        seconds=seconds,
    )


def _examples(job: Job, request: Request, roots: Mapping[str, Path], shared: Path) -> "Gallery | None":
    from harmofl.app.comparison_images import example_images

    overrides = dict(parse_assignment(text) for text in request.assignments)
    try:
        return example_images(job, roots, request.methods, request.seeds[0], overrides, shared=shared)
    except (JobError, ExperimentError, ValueError, OSError) as error:  # the numbers do not need them
        _say(f"no example images: {error}")
        return None


def _write(result: GridResult, gallery: "Gallery | None", spent: Mapping[Part, float], output: Path) -> None:
    """Write all files and say what came out; `spent` are the command's own seconds so far."""
    from harmofl.evidence.comparison_page import write_comparison, write_results

    started = time.monotonic()
    comparison = summarize_grid(result)
    write_comparison(comparison, result.records, gallery, output)
    of_runs = [record.spent for record in result.records.values()]
    told: dict[str, Any] = {"spent": added_up([*of_runs, spent, {"page": time.monotonic() - started}])}
    told["share_beside"] = share_beside(told["spent"])
    write_results(comparison.model_copy(update=told), output)
    _say(comparison.headline)
    for line in comparison.findings:
        _say(line)
    _say(spent_line(told["spent"]))
    written = ", ".join(str(output / name) for name in (PAGE_FILE, COMPARISON_FILE, TABLE_FILE))
    _say(f"{spoken(result.seconds)}; wrote {written}")


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl compare: {line}\n")
    sys.stdout.flush()
