"""report.html: one self-contained page about a run, readable offline, in print and in dark mode."""

import io
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from harmofl.evidence.results import Results, RoundRecord


def write_report(results: Results, rounds: Sequence[RoundRecord], path: Path) -> None:
    """Render the page; the file is replaced as a whole."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files(__package__) / "report.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        results=results,
        rounds=rounds,
        validation_curve=_curve(rounds, "validation", "validation " + results.key_score),
        loss_curve=_curve(rounds, "loss", "training loss"),
        key=results.key_score,
        trained_on=sorted({site for accepted in results.sites_accepted for site in accepted}),
    )
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def _curve(rounds: Sequence[RoundRecord], field: str, label: str) -> str:
    """One line a site over the rounds as inline SVG; gaps where a site has no value."""
    from matplotlib import rc_context
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
    buffer = io.StringIO()
    # no date and no random ids: two runs with equal numbers give equal pages
    with rc_context({"svg.hashsalt": field}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
