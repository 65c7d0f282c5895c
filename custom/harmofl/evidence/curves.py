"""The figures of a report as inline SVG in the colors of the page, so that they follow its dark mode and print."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from harmofl.evidence.page import inline_svg, whole_rounds
from harmofl.evidence.paired import Comparison
from harmofl.evidence.results import Results, RoundRecord
from harmofl.experiment import is_scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors that stand for variables of the page; nothing else is drawn in them.
INK, SOFT, WORST = "#010203", "#010204", "#010205"
_VARIABLES = {INK: "currentColor", SOFT: "var(--line)", WORST: "var(--worst)"}
SERIES = tuple(f"#0a0b{number:02x}" for number in range(8))
_VARIABLES |= {color: f"var(--series-{number})" for number, color in enumerate(SERIES)}
LONGEST = 24  # letters of a site's name beside a row
MOST_LINES, MOST_ROWS = 24, 60  # sites that a figure shows one by one: colors and dashes that differ, and a page
_MARKERS, _LINES = "osD^vPX*", ("-", "--", ":")
_GENERATED = re.compile(r' id="[A-Za-z0-9.]+_\d+"')  # of groups, the same in every figure
_STYLE: Any = {  # matplotlib names every key in its types
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": SOFT,
    "grid.linewidth": 0.6,
}


def score_figure(results: Results) -> str:
    """A row a site: its cases, or patients, their mean and its interval, the worst site in a color of its own."""
    key, worst = results.key_score, results.worst_site.site if results.worst_site else None
    tested = ((site, result.test.get(key)) for site, result in results.sites.items())
    scored = [(site, score, score.mean) for site, score in tested if score is not None and score.mean is not None]
    if not scored:
        return ""
    count = len(scored)
    if count > MOST_ROWS:
        lowest = {site for _, site in sorted((mean, site) for site, _, mean in scored)[:MOST_ROWS]}
        scored = [row for row in scored if row[0] in lowest]
    figure, axes = _figure(0.34 * len(scored) + 0.75)
    for row, (site, score, mean) in enumerate(reversed(scored)):
        color = WORST if site == worst else SERIES[0]
        if score.low is not None and score.high is not None:
            axes.plot([score.low, score.high], [row, row], color=color, linewidth=1.6, solid_capstyle="butt")
        axes.plot(score.points, [row] * len(score.points), "|", color=INK, markersize=7, markeredgewidth=0.8)
        axes.plot([mean], [row], "o", color=color, markersize=6)
    _rows(axes, [site for site, *_ in scored])
    axes.set_xlim(-0.02, 1.02)
    shares = any(score.by_patient for _, score, _ in scored)
    each = f", each {'patient' if shares else 'case'}" if any(score.points for _, score, _ in scored) else ""
    part = f", the {MOST_ROWS} lowest of {count} sites" if count > MOST_ROWS else ""
    axes.set_xlabel(f"{key} on test cases: mean, 95 % interval over patients{each}{part}")
    return _themed(figure, "scores")


def difference_figure(comparison: Comparison) -> str:
    """A row a site: federated minus local-only with its interval."""
    if not comparison.sites:
        return ""
    figure, axes = _figure(0.34 * len(comparison.sites) + 0.75)
    axes.axvline(0, color=INK, linewidth=0.8)
    for row, difference in enumerate(reversed(comparison.sites)):
        color = WORST if difference.mean < 0 else SERIES[0]
        if difference.low is not None and difference.high is not None:
            axes.plot([difference.low, difference.high], [row, row], color=color, linewidth=1.6)
        axes.plot([difference.mean], [row], "o", color=color, markersize=6)
    _rows(axes, [difference.name for difference in comparison.sites])
    axes.set_xlabel("federated minus local-only, 95 % interval over patients")
    return _themed(figure, "differences")


def validation_figure(results: Results, rounds: Sequence[RoundRecord]) -> str:
    """Validation score of the global model by rounds trained."""
    return _curves(
        validation_points(results, rounds), "validation", f"validation {results.key_score}", "rounds trained"
    )


def validation_points(results: Results, rounds: Sequence[RoundRecord]) -> dict[str, dict[int, float | None]]:
    """By site the score of the model that each round begins with, and of the final one after the last round.

    Rounds that were not to score are no points, so that a line leads over them.
    """
    every = results.experiment["federation"].get("validate_every", 1)
    scored = [record for record in rounds if is_scored(record.round, rounds=results.rounds, every=every)]
    curves = _by_site(scored, "validation")
    final = {site: result.validation for site, result in results.sites.items() if result.validation is not None}
    for site, value in (_spread(final) if curves.keys() == _SPREAD.keys() else final).items() if rounds else ():
        curves.setdefault(site, {})[rounds[-1].round + 1] = value
    return curves


def loss_figure(rounds: Sequence[RoundRecord]) -> str:
    """Training loss of each round."""
    return _curves(_by_site(rounds, "loss"), "loss", "training loss", "round")


def norm_figure(rounds: Sequence[RoundRecord]) -> str:
    """Norm of each site's difference by training step; empty where the rounds do not tell it."""
    norms = {site: {**held} for site, held in _by_site(rounds, "norm").items() if any(held.values())}
    return _curves(norms, "norms", "norm of the difference a step", "round", logarithmic=True) if norms else ""


_SPREAD: dict[str, Callable[[list[float]], float]] = {"lowest": min, "median": median, "highest": max}


def _by_site(rounds: Sequence[RoundRecord], field: str) -> dict[str, dict[int, float | None]]:
    """A curve a site; of more sites than a figure can tell apart the lowest, the median and the highest of them."""
    curves: dict[str, dict[int, float | None]] = {}
    many = any(len(getattr(record, field)) > MOST_LINES for record in rounds)
    for record in rounds:
        held = getattr(record, field)
        for site, value in (_spread(held) if many else held).items():
            curves.setdefault(site, {})[record.round] = value
    return curves


def _spread(values: Mapping[str, float | None]) -> dict[str, float | None]:
    defined = [value for value in values.values() if value is not None]
    return {name: statistic(defined) if defined else None for name, statistic in _SPREAD.items()}


def _curves(
    curves: Mapping[str, Mapping[int, float | None]], name: str, label: str, below: str, *, logarithmic: bool = False
) -> str:
    """One line a site over the rounds; gaps where a site has no value."""
    places = sorted({place for held in curves.values() for place in held})
    figure, axes = _figure(3.1, width=5.2)
    axes.grid(axis="y")
    for number, (site, held) in enumerate(sorted(curves.items())):
        values = [held.get(place) for place in places]
        axes.plot(
            places,
            [float("nan") if value is None else value for value in values],
            color=SERIES[number % len(SERIES)],
            linestyle=_LINES[number // len(SERIES) % len(_LINES)],
            marker=_MARKERS[number % len(_MARKERS)] if len(places) <= 30 else None,
            markersize=4,
            linewidth=1.3,
            label=site,
        )
    axes.set_xlabel(below)
    axes.set_ylabel(label)
    if logarithmic:
        axes.set_yscale("log")
    if places:
        whole_rounds(axes, places[0], places[-1])
    if axes.lines:
        figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=4, labelcolor=INK)
    return _themed(figure, name)


def _figure(height: float, width: float = 7.6) -> "tuple[Figure, Axes]":
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
    axes.set_axisbelow(True)
    return figure, axes


def _rows(axes: "Axes", names: Sequence[str]) -> None:
    shown = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in names]
    axes.set_yticks(range(len(names)), [*reversed(shown)])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _themed(figure: "Figure", name: str) -> str:
    """The figure as SVG whose colors are the page's and whose groups have no ids."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        svg = _GENERATED.sub("", inline_svg(figure, name))
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)  # the tables say the same
