"""report.html: one self-contained page about a run, readable offline, in print and in dark mode."""

from collections.abc import Sequence
from pathlib import Path

from harmofl.evidence.page import inline_svg, write_page
from harmofl.evidence.results import Results, RoundRecord


def write_report(results: Results, rounds: Sequence[RoundRecord], path: Path) -> None:
    """Render the page; the file is replaced as a whole."""
    write_page(
        "report.html.j2",
        path,
        results=results,
        rounds=rounds,
        validation_curve=_curve(rounds, "validation", "validation " + results.key_score),
        loss_curve=_curve(rounds, "loss", "training loss"),
        key=results.key_score,
        trained_on=sorted({site for accepted in results.sites_accepted for site in accepted}),
    )


def _curve(rounds: Sequence[RoundRecord], field: str, label: str) -> str:
    """One line a site over the rounds as inline SVG; gaps where a site has no value."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for site in sorted({site for record in rounds for site in getattr(record, field)}):
        values = [getattr(record, field).get(site) for record in rounds]
        heights = [float("nan") if value is None else value for value in values]
        axes.plot([record.round for record in rounds], heights, marker="o", markersize=3, linewidth=1.2, label=site)
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, ncols=2)
    return inline_svg(figure, field)
