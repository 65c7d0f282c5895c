"""The sweeps of a comparison: one setting at a time, with everything else as in the job."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harmofl.evidence.comparison import CellRecord, Sweep, distinct
from harmofl.evidence.comparison_differences import mean_score, spread

if TYPE_CHECKING:
    from harmofl.evidence.comparison_summary import GridResult


def sweeps_of(grid: "GridResult", methods: Sequence[str]) -> list[Sweep]:
    """Mean over sites for every value of each swept setting, the job's own and the methods' own among them."""
    sweeps, controls = [], set(grid.controls.values())
    for key in dict.fromkeys(use.sweep for use in grid.uses if use.sweep):
        fixed = list(grid.fixed.get(key, ()))
        base = value_at(grid.base.model_dump(mode="json"), key)
        own = {
            method: _own_value(grid, method, key) for method in methods if grid.cells(method) and method not in controls
        }
        given = [use.value for use in grid.uses if use.sweep == key]
        values = _in_order([base, *(value for method, value in own.items() if method not in fixed), *given])
        held = {
            method: [
                spread(mean_score(record) for record in _at_value(grid, method, key, value, own.get(method)).values())
                for value in values
            ]
            for method in methods
        }
        sweeps.append(Sweep(key=key, values=values, base=base, methods=held, fixed=fixed))
    return sweeps


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Every value once, numbers by size; null, where a setting is off, comes before them."""
    kept = distinct(values)
    if all(value is None or isinstance(value, int | float) for value in kept):
        kept.sort(key=lambda value: (value is not None, value or 0))
    return kept


def _own_value(grid: "GridResult", method: str, key: str) -> Any:
    """What a method has for a setting without the sweep."""
    return next((value_at(cell.experiment, key) for cell in grid.cells(method).values()), None)


def _at_value(grid: "GridResult", method: str, key: str, value: Any, own: Any) -> dict[int, CellRecord]:
    if method in grid.fixed.get(key, ()) or value == own:
        return grid.cells(method)
    return grid.cells(method, sweep=key, value=value)


def value_at(settings: Any, dotted: str) -> Any:
    """The value of `section.key` in resolved settings, None where there is none."""
    for part in dotted.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings
