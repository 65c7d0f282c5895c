"""The figures of a comparison's page, as inline SVG; every one has its numbers in a table beside it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harmofl.evidence.comparison import Comparison, Landscape, MethodSummary, Spread, Sweep, value_text
from harmofl.evidence.page import inline_svg, whole_rounds
from harmofl.experiment import is_scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito, of middle lightness so that they hold when a dark page inverts them; markers and dashes tell
# lines apart where there are no colors
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#B5548A", "#A87900", "#6A63B0")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")
HEIGHT_SHOWN = 0.5  # loss above that of the model, for the landscape: beyond it the model is lost


def forest(comparison: Comparison) -> str:
    """Each method's difference to the reference with its interval; empty where nothing is compared."""
    rows = [row for row in comparison.methods if row.difference is not None and row.difference.mean is not None]
    if not rows:
        return ""
    figure, axes = _figure(6.4, 0.9 + 0.36 * len(rows))
    axes.axvline(0, color="#777", linewidth=1)
    for place, row in enumerate(rows):
        held = row.difference
        assert held is not None and held.mean is not None
        color = _color(comparison, row.method)
        if held.low is not None and held.high is not None:
            axes.plot([held.low, held.high], [place, place], color=color, linewidth=2.2, solid_capstyle="butt")
        if held.patients_low is not None and held.patients_high is not None:
            axes.plot(
                [held.patients_low, held.patients_high], [place + 0.24] * 2, color=color, linewidth=1, linestyle=":"
            )
        axes.plot(held.mean, place, marker=_marker(comparison, row.method), color=color, markersize=6)
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{comparison.key_score}, difference to {comparison.reference}")
    axes.xaxis.grid(visible=True, color="#8884", linewidth=0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return inline_svg(figure, "forest")


def curves(comparison: Comparison, field: str, label: str, first: int = 0) -> str:
    """One line a method over rounds with a band of one standard deviation over seeds.

    Args:
        comparison: holds the curves.
        field: of MethodSummary.
        label: of the vertical axis.
        first: round of the first value.
    """
    figure, axes = _figure(6.4, 3.4)
    for row in comparison.methods:
        values = getattr(row, field)
        known = told_rounds(comparison, field, len(values))
        _line(axes, [first + index for index in known], [values[index] for index in known], comparison, row)
    axes.set_xlabel("rounds trained" if field == "curve" else "round")
    axes.set_ylabel(label)
    whole_rounds(axes, first, first + max((len(getattr(row, field)) for row in comparison.methods), default=1) - 1)
    _legend(axes)
    return inline_svg(figure, field)


def told_rounds(comparison: Comparison, field: str, length: int) -> list[int]:
    """Which rounds of a curve of MethodSummary have a value to show: of the validation score those that were scored."""
    settings = comparison.experiment["federation"]
    every = settings.get("validate_every", 1) if field == "curve" else 1
    return [index for index in range(length) if is_scored(index, rounds=settings["rounds"], every=every)]


def sweep_curves(comparison: Comparison, sweep: Sweep) -> str:
    """Mean over sites for each value, by method; methods that fix the setting are a level line."""
    figure, axes = _figure(6.4, 3.4)
    places = list(range(len(sweep.values)))
    for row in comparison.methods:
        _line(axes, places, sweep.methods[row.method], comparison, row)
    axes.set_xticks(places, [value_text(value) for value in sweep.values])
    axes.set_xlabel(f"{sweep.key} (the job has {value_text(sweep.base)})")
    axes.set_ylabel(f"test {comparison.key_score}, mean over sites")
    _legend(axes)
    return inline_svg(figure, sweep.key)


def landscape_lines(comparison: Comparison) -> str:
    """A panel a method: rise of the loss along a direction around the global model and around each local one."""
    figure, panels = _panels(comparison, 2.5)
    heights: list[float] = []
    for axes, (method, held) in zip(panels, comparison.landscapes.items(), strict=False):
        middle = len(held.offsets) // 2
        lines = [_rise(local.own_images, middle) for local in held.local.values()]
        for own in lines:
            axes.plot(held.offsets, own, color=_color(comparison, method), linewidth=0.8, alpha=0.55)
        column = [row[middle] for row in held.surface]
        lines.append(_rise(column, middle))
        axes.plot(held.offsets, lines[-1], color=_color(comparison, method), linewidth=2.4)
        axes.set_title(method, fontsize=9)
        heights += [value for line in lines for value in line if np.isfinite(value)]
        axes.set_xlabel("distance / filter length", fontsize=8)
    top = min(HEIGHT_SHOWN, max(heights, default=HEIGHT_SHOWN) * 1.05)
    panels[0].set_ylim(max(-top / 5, min(heights, default=0.0)) - top / 25, top)
    panels[0].set_ylabel("rise of the loss")
    return inline_svg(figure, "landscape_lines")


def landscape_planes(comparison: Comparison) -> str:
    """A panel a method: lines of equal rise of the loss of the global model on a plane, the same levels for all."""
    figure, panels = _panels(comparison, 2.9)
    levels = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    for axes, (method, held) in zip(panels, comparison.landscapes.items(), strict=False):
        surface = np.array(_surface(held), dtype=np.float64)
        widths = list(np.linspace(0.6, 1.8, len(levels)))
        color = _color(comparison, method)
        drawn = axes.contour(held.offsets, held.offsets, surface, levels=levels, colors=color, linewidths=widths)
        axes.clabel(drawn, fontsize=7, fmt="%g")
        axes.plot(0, 0, marker="+", color="#000", markersize=7)
        axes.set_title(method, fontsize=9)
        axes.set_box_aspect(1)
    return inline_svg(figure, "landscape_planes")


def _surface(landscape: Landscape) -> list[list[float]]:
    middle = len(landscape.offsets) // 2
    center = landscape.surface[middle][middle]
    return [
        [float("nan") if value is None or center is None else value - center for value in row]
        for row in landscape.surface
    ]


def _rise(values: Sequence[float | None], middle: int) -> list[float]:
    center = values[middle]
    return [float("nan") if value is None or center is None else value - center for value in values]


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def panels_a_row(count: int) -> int:
    """Up to four, in rows of about equal length."""
    return -(-count // max(1, -(-count // 4)))


def _panels(comparison: Comparison, height: float) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    count = len(comparison.landscapes)
    columns = panels_a_row(count)
    rows = -(-count // columns)
    figure = Figure(figsize=(2.5 * columns, height * rows), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.ravel())
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, labelbottom=True)  # also above another row, or above nothing
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels


def _line(
    axes: "Axes", places: Sequence[int], values: Sequence[Spread], comparison: Comparison, row: MethodSummary
) -> None:
    means = np.array([np.nan if value.mean is None else value.mean for value in values])
    deviations = np.array([value.deviation or 0.0 for value in values])
    number = [held.method for held in comparison.methods].index(row.method)
    color = _color(comparison, row.method)
    axes.plot(
        places,
        means,
        color=color,
        marker=_marker(comparison, row.method),
        markersize=4,
        linewidth=1.5,
        linestyle=DASHES[number % len(DASHES)],
        label=row.method,
    )
    axes.fill_between(places, means - deviations, means + deviations, color=color, alpha=0.12, linewidth=0)


def _legend(axes: "Axes") -> None:
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _color(comparison: Comparison, method: str) -> str:
    return COLORS[[row.method for row in comparison.methods].index(method) % len(COLORS)]


def _marker(comparison: Comparison, method: str) -> str:
    return MARKERS[[row.method for row in comparison.methods].index(method) % len(MARKERS)]
