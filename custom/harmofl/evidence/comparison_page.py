"""comparison.html, .json and .csv: the page answers which method, by how much, how sure and why."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harmofl.core.clustered import FEWEST
from harmofl.evidence import comparison_figures as figures
from harmofl.evidence.comparison import (
    COMPARISON_FILE,
    PAGE_FILE,
    TABLE_FILE,
    CellRecord,
    Comparison,
    MethodSummary,
    Spread,
    value_text,
)
from harmofl.evidence.comparison_differences import spread
from harmofl.evidence.comparison_words import VERDICTS, times_the_passes
from harmofl.evidence.gallery import Gallery, band_name, pair_distances, picture_rows, profile_plot
from harmofl.evidence.page import replace_text, write_page

COLUMNS = (
    "method",
    "seed",
    "sweep",
    "value",
    "left_out",
    "site",
    "took_part",
    "model",
    "score",
    "mean",
    "low",
    "high",
    "n",
    "patients",
)
Mark = tuple[str, bool]  # text of a table's cell, and whether it is the best of its column
MOST_ROUNDS = 10  # in a table beside a curve; of more rounds every so many are listed


def write_comparison(
    comparison: Comparison, records: Mapping[str, CellRecord], gallery: Gallery | None, folder: Path
) -> None:
    """Write the three files; each is replaced as a whole.

    Args:
        comparison: everything but the scores of single cells.
        records: the cells by name, for the CSV.
        gallery: example images, None where the page shall have none.
        folder: exists.
    """
    write_results(comparison, folder)
    replace_text(folder / TABLE_FILE, table(comparison, records))
    write_page(
        "comparison.html.j2",
        folder / PAGE_FILE,
        told=comparison,
        verdicts=VERDICTS,
        fewest=FEWEST,
        sites=[site for site in comparison.sites if any(site in row.sites for row in comparison.methods)],
        times={row.method: times_the_passes(row, comparison.methods[0]) for row in comparison.methods},
        site_rows=site_table(comparison),
        curve_rows=round_table(comparison, "curve", 0),
        drift_rows=round_table(comparison, "drift", 0),
        cosine_rows=round_table(comparison, "cosine", 0),
        local_losses={row.method: local_losses(comparison, row.method) for row in comparison.methods},
        value_text=value_text,
        steps=list(dict.fromkeys(step for row in comparison.methods for step in row.amplitude_distance)),
        figures=_figures(comparison),
        panels=figures.panels_a_row(len(comparison.landscapes)),
        gallery=gallery,
        pictures=picture_rows(gallery) if gallery else [],
        profiles=profile_plot(gallery) if gallery else "",
        pairs=pair_distances(gallery) if gallery else [],
        band_name=band_name,
    )


def write_results(comparison: Comparison, folder: Path) -> None:
    """Write comparison.json alone."""
    replace_text(folder / COMPARISON_FILE, comparison.model_dump_json(indent=1) + "\n")


def table(comparison: Comparison, records: Mapping[str, CellRecord]) -> str:
    """All scores of all cells as CSV, one line a site, model and score."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for use in comparison.uses:
        place = (use.method, use.seed, use.sweep or "", value_text(use.value) if use.sweep else "", use.left_out or "")
        for line in _score_lines(records[use.cell]):
            writer.writerow((*place, *("" if value is None else value for value in line)))
    return text.getvalue()


def site_table(comparison: Comparison) -> list[tuple[MethodSummary, list[Mark]]]:
    """By method the texts of its sites in the order of the page, with the best mean of each site marked."""
    sites = [site for site in comparison.sites if any(site in row.sites for row in comparison.methods)]
    best = {
        site: max((row.sites[site].mean or 0.0 for row in comparison.methods if site in row.sites), default=None)
        for site in sites
    }
    return [
        (
            row,
            [
                (spread_text(row.sites[site]), row.sites[site].mean == best[site])
                if site in row.sites
                else ("–", False)
                for site in sites
            ],
        )
        for row in comparison.methods
    ]


def round_table(comparison: Comparison, field: str, first: int) -> list[tuple[int, list[str]]]:
    """By round the text of each method's spread; of many rounds some, and always the last."""
    longest = max((len(getattr(row, field)) for row in comparison.methods), default=0)
    known = figures.told_rounds(comparison, field, longest)
    step = -(-len(known) // MOST_ROUNDS) or 1
    shown = [index for place, index in enumerate(known) if place % step == 0 or place == len(known) - 1]
    return [
        (
            first + index,
            [
                spread_text(getattr(row, field)[index]) if index < len(getattr(row, field)) else "–"
                for row in comparison.methods
            ],
        )
        for index in shown
    ]


def local_losses(comparison: Comparison, method: str) -> tuple[float | None, float | None]:
    """Mean over sites of the local models' loss on their own images, and on those of all sites; of one run."""
    held = comparison.landscapes.get(method)
    if held is None:
        return None, None
    models, middle = held.local.values(), len(held.offsets) // 2
    own = [model.own_images[middle] for model in models]
    elsewhere = [model.all_images for model in models]
    return spread(own).mean, spread(elsewhere).mean


def spread_text(value: Spread) -> str:
    """`0.842 ± 0.010`, or the mean alone where one seed gives no deviation."""
    if value.mean is None:
        return "undefined"
    return f"{value.mean:.3f}" + (f" ± {value.deviation:.3f}" if value.deviation is not None else "")


def _score_lines(record: CellRecord) -> Iterator[tuple[Any, ...]]:
    for site, scores in sorted(record.scores.items()):
        for model, by_name in (("best", scores.best), ("final", scores.final)):
            for name, score in sorted(by_name.items()):
                counts = score.n, score.patients
                yield site, int(site in record.seen), model, name, score.mean, score.low, score.high, *counts


def _figures(comparison: Comparison) -> dict[str, Any]:
    key = comparison.key_score
    return {
        "forest": figures.forest(comparison),
        "curve": figures.curves(comparison, "curve", f"validation {key}, mean over sites"),
        "drift": figures.curves(comparison, "drift", "client drift / mean update"),
        "sweeps": [(sweep, figures.sweep_curves(comparison, sweep)) for sweep in comparison.sweeps],
        "lines": figures.landscape_lines(comparison) if comparison.landscapes else "",
        "planes": figures.landscape_planes(comparison) if comparison.landscapes else "",
    }
