"""`harmofl compare`: methods, seeds and sweeps side by side on one job, and a page that says what came out."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harmofl
from harmofl.app.cell import CellPlan
from harmofl.app.grid import Cell, Grid, Sweep, finished_record, run_cells, spoken, variations
from harmofl.app.job import Job, JobError, read_job
from harmofl.app.simulate import missing_folders, placed
from harmofl.evidence.comparison import COMPARISON_FILE, PAGE_FILE, TABLE_FILE, CellKey, CellRecord, Use
from harmofl.evidence.comparison_summary import GridResult, summarize_grid
from harmofl.experiment import Experiment, ExperimentError, parse_assignment
from harmofl.methods import method_overrides

if TYPE_CHECKING:
    from harmofl.evidence.gallery import Gallery


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    job: Path
    assignments: Sequence[str]
    methods: Sequence[str]
    seeds: Sequence[int]
    sweeps: Sequence[str]
    leave_one_site_out: bool
    data: Path | None
    demo: bool
    output: Path
    processes: int | None
    landscape: bool
    images: bool


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
    output = _usable_output(request.output, roots)
    missing = missing_folders(roots, base)
    if missing:
        for absent in reversed(missing):  # the first one is the last line
            _say(f"failed: {absent}")
        return 1
    grid = plan_grid(job, base, request, roots, output)
    for problem in grid.not_left_out.values():
        _say(f"--leave-one-site-out: {problem}, so it is not scored there")
    open_cells = [cell for cell in grid.cells if finished_record(cell.plan) is None]
    at_a_time = request.processes or _fitting(open_cells, roots)
    _say(_announcement(grid, open_cells, at_a_time, roots, output))
    threads = max(1, _cores() // max(1, at_a_time))
    ready = [replace(cell, plan=replace(cell.plan, threads=threads)) for cell in open_cells]
    try:
        failures = run_cells(ready, at_a_time, _say)
    except KeyboardInterrupt:
        done = sum(finished_record(cell.plan) is not None for cell in grid.cells)
        _say(f"stopped with {done} of {len(grid.cells)} cells finished; the same command goes on from there")
        raise
    records = {cell.name: record for cell in grid.cells if (record := finished_record(cell.plan))}
    if records:
        seconds = round(time.monotonic() - started, 1)
        result = _result(grid, records, failures, base, request.assignments, seconds=seconds)
        _write(result, _examples(job, request, roots) if request.images else None, output)
    if failures:
        named = ", ".join(cell.label for cell in grid.cells if cell.name in failures)
        _say(f"failed: {len(failures)} of {len(grid.cells)} cells: {named}; the same command tries them again")
    return 1 if failures or not records else 0


def plan_grid(job: Job, base: Experiment, request: Request, roots: Mapping[str, Path], output: Path) -> Grid:
    """Resolve every cell of the grid before any runs, so that a mistake in the last one costs no time.

    Raises:
        ExperimentError: a method, a swept key or value that cannot be used.
        JobError: sites are to be left out and no method leaves a model for them.
    """
    sweeps = [read_sweep(text) for text in request.sweeps]
    data = _fingerprint(roots)
    cells: dict[str, Cell] = {}
    uses, fixed = [], {sweep.key: tuple(_fixing(request.methods, sweep.key)) for sweep in sweeps}
    left_out = job.sites if request.leave_one_site_out else ()
    modelless = _without_model(job, base, request, demo=not roots) if left_out else {}
    for use in variations(request.methods, request.seeds, sweeps, left_out):
        if use.left_out and use.method in modelless:
            continue
        overrides = _overrides(base, use, job, request.assignments)
        changed = Job.read(job.folder, overrides)
        experiment = _resolved(changed, demo=not roots)
        key = CellKey(
            experiment_hash=experiment.hash,
            version=harmofl.__version__,
            data=data,
            sites=sorted(job.sites),
            left_out=use.left_out,
        )
        without = f"_without_{use.left_out}" if use.left_out else ""
        name = f"{use.method}_seed{use.seed}{without}_{experiment.hash[:8]}"
        explained = use.seed == request.seeds[0] and use.sweep is None and use.left_out is None
        plan = CellPlan(
            output / "cells" / name,
            job.folder,
            overrides,
            key,
            dict(roots) or None,
            threads=1,
            landscape=request.landscape and explained,
        )
        cells.setdefault(name, Cell(name, _label(use), plan, experiment))
        uses.append(use.model_copy(update={"cell": name}))
    return Grid(tuple(cells.values()), tuple(uses), fixed, modelless)


def _without_model(job: Job, base: Experiment, request: Request, *, demo: bool) -> dict[str, str]:
    """By method why there is nothing to score at a hospital that took no part."""
    from harmofl.app.model_file import kept_at_sites

    found = {}
    for use in variations(request.methods, request.seeds[:1], (), ()):
        changed = Job.read(job.folder, _overrides(base, use, job, request.assignments))
        found[use.method] = kept_at_sites(_resolved(changed, demo=demo))
    if all(found.values()):
        raise JobError(f"--leave-one-site-out: {next(iter(found.values()))}; compare one that shares all layers")
    return {method: problem for method, problem in found.items() if problem}


def read_sweep(text: str) -> Sweep:
    """Read `section.key=value,value,...`; each value is JSON where it parses as JSON.

    Raises:
        JobError: another form, or fewer than two values.
    """
    key, equals, values = text.partition("=")
    parts = tuple(parse_assignment(f"{key}={value}")[1] for value in values.split(",") if value and key)
    if not key or len(parts) < 2:
        raise JobError(f"--sweep {text}: write it as section.key=value,value, for example perturbation.alpha=0,0.05")
    if key in ("method", "seed"):
        raise JobError(f"--sweep {text}: use --{key}s")
    return Sweep(key, parts)


def _overrides(base: Experiment, use: Use, job: Job, assignments: Sequence[str]) -> dict[str, Any]:
    """What this cell changes of the job's experiment.json."""
    overrides = dict(parse_assignment(text) for text in assignments)
    overrides |= {"method": use.method, "seed": use.seed}
    if use.sweep is not None:
        overrides[use.sweep] = use.value
    if use.left_out is not None:
        others = len(job.sites) - 1
        for section in (base.federation, base.amplitude):
            name = "federation" if section is base.federation else "amplitude"
            overrides[f"{name}.minimum_sites"] = min(section.minimum_sites, others)
    return overrides


def _own_experiment(job: Job, request: Request, *, demo: bool) -> Experiment:
    """The job's experiment with its own method, and a check of what --set may not change here."""
    for key in job.assigned:
        if key in ("method", "seed"):
            raise JobError(f"--set {key}: use --{key}s")
        if all(key in method_overrides(name) for name in request.methods):
            raise JobError(f"--set {key}: every method that is compared sets it itself")
    if request.leave_one_site_out and len(job.sites) < 3:
        raise JobError("--leave-one-site-out needs at least three sites: two must be left to train")
    return _resolved(job, demo=demo)


def _resolved(job: Job, *, demo: bool) -> Experiment:
    from harmofl.tasks import resolve_experiment

    return resolve_experiment(job.settings, demo=demo)


def _fixing(methods: Sequence[str], key: str) -> list[str]:
    return [method for method in methods if key in method_overrides(method)]


def _label(use: Use) -> str:
    sweep = f", {use.sweep}={use.value}" if use.sweep else ""
    return f"{use.method} seed {use.seed}{sweep}{f', without {use.left_out}' if use.left_out else ''}"


def _fingerprint(roots: Mapping[str, Path]) -> str:
    """Changes where a file under the data roots is added, removed or written; `demo` where there are none."""
    if not roots:
        return "demo"
    digest = sha256()
    for root in sorted(set(roots.values())):
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            held = path.stat()
            digest.update(f"{path} {held.st_size} {held.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _usable_output(output: Path, roots: Mapping[str, Path]) -> Path:
    output = output.absolute()
    for root in roots.values():
        if output.resolve().is_relative_to(root.resolve()):
            raise JobError(f"-o {output}: lies in the data root {root}, which is never written to; name another")
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not (output / "cells").is_dir())):
        raise JobError(f"-o {output}: holds something else than a comparison; name a new or empty folder")
    try:
        (output / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"-o {output}: cannot be written ({error.strerror}); name another folder") from None
    return output


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
    return f"{len(grid.cells)} cells{held}, {at_a_time} at a time, {data}, results in {output}"


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
        failed={labels[name]: reason for name, reason in failures.items()},
        own_method=base.method,
        base=base,
        assignments=tuple(assignments),
        seconds=seconds,
    )


def _examples(job: Job, request: Request, roots: Mapping[str, Path]) -> "Gallery | None":
    from harmofl.app.comparison_images import example_images

    overrides = dict(parse_assignment(text) for text in request.assignments)
    try:
        return example_images(job, roots, request.methods, request.seeds[0], overrides)
    except (JobError, ExperimentError, ValueError, OSError) as error:  # the numbers do not need them
        _say(f"no example images: {error}")
        return None


def _write(result: GridResult, gallery: "Gallery | None", output: Path) -> None:
    from harmofl.evidence.comparison_page import write_comparison

    comparison = summarize_grid(result)
    write_comparison(comparison, result.records, gallery, output)
    _say(comparison.headline)
    for line in comparison.findings:
        _say(line)
    told = ", ".join(str(output / name) for name in (PAGE_FILE, COMPARISON_FILE, TABLE_FILE))
    _say(f"{spoken(result.seconds)}; wrote {told}")


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl compare: {line}\n")
    sys.stdout.flush()
