"""Which cells a comparison needs: every one resolved before any runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import harmofl
from harmofl.app.cell import CellPlan
from harmofl.app.comparison_folder import CELLS, SHARED
from harmofl.app.grid import Cell, Grid, Sweep, variations
from harmofl.app.job import Job, JobError
from harmofl.evidence.comparison import CellKey, Use, distinct, value_text
from harmofl.experiment import RULES, Experiment, parse_assignment
from harmofl.methods import method_overrides
from harmofl.sections import parse_json

FEDBN = "fedbn"


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


def plan_grid(job: Job, base: Experiment, request: Request, roots: Mapping[str, Path], output: Path) -> Grid:
    """Resolve every cell of the grid before any runs, so that a mistake in the last one costs no time.

    Raises:
        ExperimentError: a method, a swept key or value that cannot be used.
        JobError: a sweep that changes no method; sites are to be left out and no method leaves a model for them.
    """
    fixed = {sweep.key: tuple(_fixing(request.methods, sweep.key)) for sweep in _sweeps(request)}
    left_out = job.sites if request.leave_one_site_out else ()
    modelless = _without_model(job, base, request, demo=not roots) if left_out else {}
    norm = _control_norm(job, base, request, demo=not roots)
    data = _fingerprint(roots)
    cells: dict[str, Cell] = {}
    uses = []
    for use, overrides in _asked(job, base, request, left_out, norm):
        if use.left_out and use.method in modelless:
            continue
        experiment = resolved(Job.read(job.folder, overrides), demo=not roots)
        key = CellKey(
            experiment_hash=experiment.hash,
            version=harmofl.__version__,
            data=data,
            sites=sorted(job.sites),
            left_out=use.left_out,
            rules=dict(RULES),
        )
        without = f"_without_{use.left_out}" if use.left_out else ""
        name = f"{experiment.method}_seed{use.seed}{without}_{experiment.hash[:8]}"
        explained = use.seed == request.seeds[0] and use.sweep is None and use.left_out is None
        plan = CellPlan(
            output / CELLS / name,
            job.folder,
            overrides,
            key,
            dict(roots) or None,
            threads=1,
            landscape=request.landscape and explained and use.method in request.methods,
            shared_data=output / SHARED,
        )
        cells.setdefault(name, Cell(name, _label(use), plan, experiment))
        uses.append(use.model_copy(update={"cell": name}))
    controls = {FEDBN: control_name(norm)} if norm else {}
    return Grid(tuple(cells.values()), tuple(uses), fixed, modelless, controls)


def control_name(norm: str) -> str:
    """What the page calls FedBN's control."""
    return f"fedavg with {norm} norm"


def _control_norm(job: Job, base: Experiment, request: Request, *, demo: bool) -> str | None:
    """The norm layer of FedBN where the reference has another one: then their difference is of both together."""
    if FEDBN not in request.methods:
        return None
    norms = []
    for method in (FEDBN, request.methods[0]):
        use = next(iter(variations([method], request.seeds[:1], (), ())))
        changed = Job.read(job.folder, _overrides(base, use, job, request.assignments))
        norms.append(resolved(changed, demo=demo).network.norm)
    return norms[0] if norms[0] != norms[1] else None


def _asked(
    job: Job, base: Experiment, request: Request, left_out: Sequence[str], norm: str | None
) -> Iterator[tuple[Use, dict[str, Any]]]:
    """Every use of the grid with what it changes of the job; FedBN's control stands behind FedBN."""
    for use in variations(request.methods, request.seeds, _sweeps(request), left_out):
        yield use, _overrides(base, use, job, request.assignments)
        if norm and use.method == FEDBN and use.sweep is None and use.left_out is None:
            plain = use.model_copy(update={"method": "fedavg"})
            overrides = _overrides(base, plain, job, request.assignments) | {"network.norm": norm}
            yield use.model_copy(update={"method": control_name(norm)}), overrides


def _without_model(job: Job, base: Experiment, request: Request, *, demo: bool) -> dict[str, str]:
    """By method why there is nothing to score at a hospital that took no part."""
    from harmofl.app.model_file import kept_at_sites

    found = {}
    for use in variations(request.methods, request.seeds[:1], (), ()):
        changed = Job.read(job.folder, _overrides(base, use, job, request.assignments))
        found[use.method] = kept_at_sites(resolved(changed, demo=demo))
    if all(found.values()):
        raise JobError(f"--leave-one-site-out: {next(iter(found.values()))}; compare one that shares all layers")
    return {method: problem for method, problem in found.items() if problem}


def _sweeps(request: Request) -> list[Sweep]:
    sweeps = [read_sweep(text) for text in request.sweeps]
    for sweep in sweeps:
        if len(_fixing(request.methods, sweep.key)) == len(request.methods):
            raise JobError(f"--sweep {sweep.key}: every method that is compared sets it itself")
    return sweeps


def read_sweep(text: str) -> Sweep:
    """Read `section.key=value,value,...`; the values are a JSON list without brackets, or else split at commas.

    Raises:
        JobError: another form, or fewer than two different values.
    """
    key, _, values = text.partition("=")
    try:
        parts = parse_json(f"[{values}]")
    except json.JSONDecodeError:  # names such as off,dc; each value is JSON where it parses as JSON
        parts = [parse_assignment(f"value={value}")[1] for value in values.split(",") if value]
    parts = distinct(parts)
    if not key or len(parts) < 2:
        raise JobError(
            f"--sweep {text}: write it as section.key=value,value with two different values or more, for example "
            "perturbation.alpha=0,0.05"
        )
    if key in ("method", "seed"):
        raise JobError(f"--sweep {text}: use --{key}s")
    return Sweep(key, tuple(parts))


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


def resolved(job: Job, *, demo: bool) -> Experiment:
    """The experiment of a job, as its task takes it."""
    from harmofl.tasks import resolve_experiment

    return resolve_experiment(job.settings, demo=demo)


def _fixing(methods: Sequence[str], key: str) -> list[str]:
    return [method for method in methods if key in method_overrides(method)]


def _label(use: Use) -> str:
    sweep = f", {use.sweep}={value_text(use.value)}" if use.sweep else ""
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
