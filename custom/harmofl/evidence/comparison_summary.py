"""From finished cells to a comparison: tables over seeds, paired differences, curves and sweeps."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from harmofl.core.paired import paired_difference
from harmofl.evidence.comparison import (
    CellRecord,
    Comparison,
    Control,
    Difference,
    Landscape,
    LeftOut,
    MethodSummary,
    Use,
    Verdict,
)
from harmofl.evidence.comparison_differences import (
    by_round,
    corrected,
    defined,
    difference_of,
    equal,
    mean_score,
    recorded,
    site_score,
    spread,
    unseen_score,
    verdict_of,
)
from harmofl.evidence.comparison_sweeps import sweeps_of
from harmofl.evidence.comparison_words import findings, headline, statistics_sentence
from harmofl.experiment import Experiment

_PACKAGES = ("harmofl", "torch", "monai", "numpy", "scipy")


@dataclass(frozen=True)
class GridResult:
    """What a grid left: the cells by name, what they are used for, what failed; `own_method` is the job's.

    `controls` names for a method the row of plain averaging on its network.
    """

    uses: Sequence[Use]
    records: Mapping[str, CellRecord]
    fixed: Mapping[str, Sequence[str]]
    controls: Mapping[str, str]
    failed: dict[str, str]
    own_method: str
    base: Experiment
    assignments: Sequence[str]
    seconds: float

    def cells(self, method: str, **place: Any) -> dict[int, CellRecord]:
        """The finished cells of a method by seed; the base setting where no sweep or left-out site is named."""
        wanted = {"sweep": None, "value": None, "left_out": None} | place
        return {
            use.seed: self.records[use.cell]
            for use in self.uses
            if use.method == method
            and use.cell in self.records
            and all(getattr(use, key) == value for key, value in wanted.items())
        }


def summarize_grid(grid: GridResult) -> Comparison:
    """Everything that comparison.json holds."""
    methods = list(dict.fromkeys(use.method for use in grid.uses))
    reference = methods[0]
    base = {method: grid.cells(method) for method in methods}
    some = next(iter(grid.records.values()))
    told = Comparison(
        format=2,
        name=grid.base.name,
        task=grid.base.task,
        demo=some.demo,
        headline="",
        findings=[],
        method_of_statistics="",
        key_score=some.key_score,
        score_note=some.score_note,
        reference=reference,
        seeds=list(dict.fromkeys(use.seed for use in grid.uses)),
        sites=sorted({site for record in grid.records.values() for site in record.scores}),
        rounds=some.experiment["federation"]["rounds"],
        assignments=list(grid.assignments),
        methods=_methods(base, grid.controls),
        sweeps=sweeps_of(grid, methods),
        left_out=_left_out(grid, [method for method in methods if method not in grid.controls.values()]),
        landscapes=_landscapes(base),
        uses=[use for use in grid.uses if use.cell in grid.records],
        failed=grid.failed,
        experiment=some.experiment,
        experiment_hash=grid.base.hash,
        data=sorted({record.key.data for record in grid.records.values()}),
        versions={**{name: _version(name) for name in _PACKAGES}, "python": platform.python_version()},
        seconds=grid.seconds,
    )
    overlap = 0.0 if some.demo else some.test_over_training
    return told.model_copy(
        update={
            "headline": headline(told, grid.own_method),
            "findings": findings(told, grid.own_method),
            "method_of_statistics": statistics_sentence(told, overlap),
        }
    )


def _landscapes(base: Mapping[str, Mapping[int, CellRecord]]) -> dict[str, Landscape]:
    """The first one of each method that has one."""
    found = {method: [cell.landscape for cell in cells.values() if cell.landscape] for method, cells in base.items()}
    return {method: held[0] for method, held in found.items() if held}


def _methods(cells: Mapping[str, Mapping[int, CellRecord]], controls: Mapping[str, str]) -> list[MethodSummary]:
    """A row a method, the first one being the reference."""
    reference = next(iter(cells))
    rows = [_method(method, held, cells[reference], reference) for method, held in cells.items()]
    return _with_verdicts([_with_control(row, cells, controls) for row in rows], cells)


def _method(
    method: str, cells: Mapping[int, CellRecord], reference: Mapping[int, CellRecord], reference_name: str
) -> MethodSummary:
    records = list(cells.values())
    sites = sorted({site for record in records for site in record.seen})
    by_site = {site: spread(site_score(record, site) for record in records) for site in sites}
    lowest = {site: held.mean for site, held in by_site.items() if held.mean is not None}
    compared = method != reference_name
    steps = list(dict.fromkeys(step for record in records for step in record.amplitude_distance))
    return MethodSummary(
        method=method,
        settings=_changed(records, list(reference.values())) if compared else {},
        sites=by_site,
        mean=spread(mean_score(record) for record in records),
        over_sites=spread(held.mean for held in by_site.values()),
        worst=spread(
            min(defined(site_score(record, site) for site in record.seen), default=None) for record in records
        ),
        worst_site=min(lowest, key=lambda site: (lowest[site], site)) if lowest else None,
        final_model=spread(mean_score(record, final=True) for record in records),
        difference=difference_of(cells, reference, mean_score, by_patient=True) if compared else None,
        site_differences={
            site: difference_of(cells, reference, lambda record, site=site: site_score(record, site))  # type: ignore[misc]
            for site in (sites if compared else ())
        },
        verdict="no_scores",
        curve=by_round([record.validation for record in records]),
        drift=by_round([[drift.relative for drift in record.drift] for record in records]),
        cosine=by_round([[drift.cosine for drift in record.drift] for record in records]),
        amplitude_distance={step: spread(record.amplitude_distance.get(step) for record in records) for step in steps},
        sharpness=spread(record.landscape.sharpness for record in records if record.landscape),
        passes=spread(float(record.passes) for record in records),
        seconds=spread(record.seconds for record in records),
        control=None,
    )


def _changed(records: Sequence[CellRecord], reference: Sequence[CellRecord]) -> dict[str, Any]:
    """The settings in which a method's experiments differ from the reference's, by `section.key`."""
    if not records or not reference:
        return {}
    own, theirs = records[0].experiment, reference[0].experiment
    return {
        f"{section}.{key}": value
        for section, held in own.items()
        if isinstance(held, dict) and section != "demo"
        for key, value in held.items()
        if value != theirs.get(section, {}).get(key)
    }


def _with_control(
    row: MethodSummary, cells: Mapping[str, Mapping[int, CellRecord]], controls: Mapping[str, str]
) -> MethodSummary:
    """A method that needs another network, beside plain averaging on that network where that was run."""
    name = controls.get(row.method)
    if name is None or not cells.get(name):
        return row
    difference = difference_of(cells[row.method], cells[name], mean_score, by_patient=True)
    return row.model_copy(update={"control": Control(name=name, difference=difference, verdict="no_scores")})


def _with_verdicts(rows: list[MethodSummary], cells: Mapping[str, Mapping[int, CellRecord]]) -> list[MethodSummary]:
    """P values corrected for all differences that are judged, and what follows from them."""
    controls = [row.control.difference if row.control else None for row in rows]
    held = corrected([*(row.difference for row in rows), *controls])
    judged = []
    for row, difference, own in zip(rows, held[: len(rows)], held[len(rows) :], strict=True):
        changes: dict[str, Any] = {
            "difference": difference,
            "verdict": _verdict(difference, cells[row.method], cells[rows[0].method]),
        }
        if row.control and own:
            verdict = _verdict(own, cells[row.method], cells[row.control.name])
            changes["control"] = row.control.model_copy(update={"difference": own, "verdict": verdict})
        judged.append(row.model_copy(update=changes))
    return judged


def _verdict(difference: Difference | None, one: Mapping[int, CellRecord], other: Mapping[int, CellRecord]) -> Verdict:
    same = difference is not None and difference.mean == 0 and equal(one, other)
    return "same" if same else verdict_of(difference)


def _left_out(grid: GridResult, methods: Sequence[str]) -> list[LeftOut]:
    """Scores on sites that took no part; a seed's mean is over the sites that were left out in it."""
    sites = list(dict.fromkeys(use.left_out for use in grid.uses if use.left_out))
    if not sites:
        return []
    by_method = {method: {site: grid.cells(method, left_out=site) for site in sites} for method in methods}
    means = {method: _unseen_means(held) for method, held in by_method.items()}
    rows = [
        LeftOut(
            method=method,
            sites={
                site: spread(unseen_score(cell) for cell in cells.values()) for site, cells in by_method[method].items()
            },
            mean=spread(means[method].values()),
            taking_part=spread(mean_score(cell) for cell in grid.cells(method).values()),
            difference=_unseen_difference(means[method], means[methods[0]], grid) if method != methods[0] else None,
            verdict="reference",
        )
        for method in methods
    ]
    differences = corrected([row.difference for row in rows])
    scored = {use.method for use in grid.uses if use.left_out}
    return [
        row.model_copy(update={"difference": held, "verdict": verdict_of(held) if row.method in scored else "no_model"})
        for row, held in zip(rows, differences, strict=True)
    ]


def _unseen_difference(one: Mapping[int, float], other: Mapping[int, float], grid: GridResult) -> Difference:
    seeds = [seed for seed in one if seed in other]
    overlap = max((cell.test_over_training for cell in grid.records.values() if not cell.demo), default=0.0)
    return recorded(paired_difference([one[seed] for seed in seeds], [other[seed] for seed in seeds], overlap), None)


def _unseen_means(by_site: Mapping[str, Mapping[int, CellRecord]]) -> dict[int, float]:
    """Mean over all left-out sites by seed; a seed that lacks one of them is left out, since sites differ much."""
    seeds = {seed for cells in by_site.values() for seed in cells}
    means = {}
    for seed in sorted(seeds):
        scores = defined(unseen_score(cells[seed]) for cells in by_site.values() if seed in cells)
        if len(scores) == len(by_site):
            means[seed] = sum(scores) / len(scores)
    return means


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
