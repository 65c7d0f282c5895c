"""report.html: one self-contained page about a run, readable offline, in print and in dark mode."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.core.clustered import FEWEST
from harmofl.evidence.curves import difference_figure, loss_figure, norm_figure, score_figure, validation_figure
from harmofl.evidence.definitions import definition
from harmofl.evidence.page import write_page
from harmofl.evidence.paired import Comparison
from harmofl.evidence.pictures import outline, png
from harmofl.evidence.results import Results, RoundRecord
from harmofl.tasks.answers import Illustration

FEW = 10  # test patients below which the page says that an interval stands on few


@dataclass(frozen=True)
class SiteExamples:
    """Titled pictures of a site, best first, and what a reader must know about them.

    `left_out` says to whoever writes the page why it has none; it may name folders and is not on the page.
    """

    site: str
    pictures: tuple[tuple[str, Illustration], ...]
    note: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class Examples:
    """Pictures of the sites whose data lies where the page is written, what their scores are, where they come from."""

    sites: tuple[SiteExamples, ...]
    score: str
    source: str


def write_report(
    results: Results,
    rounds: Sequence[RoundRecord],
    path: Path,
    *,
    failure: str = "",
    comparison: Comparison | None = None,
    examples: Examples | None = None,
) -> None:
    """Render the page; the file is replaced as a whole.

    Args:
        results: of the run.
        rounds: of the run.
        path: the page.
        failure: why the run failed, empty where it did not.
        comparison: with the same sites on their own.
        examples: pictures of scored cases.
    """
    key = results.key_score
    counts = [result.test[key].patients for result in results.sites.values() if key in result.test]
    write_page(
        "report.html.j2",
        path,
        results=results,
        rounds=rounds,
        failure=failure,
        key=key,
        definitions={name: definition(name) for name in [key, *(n for n in results.mean_over_sites if n != key)]},
        trained_on=sorted({site for accepted in results.sites_accepted for site in accepted}),
        whole_rounds=sum(set(accepted) >= set(results.sites_expected) for accepted in results.sites_accepted),
        fewest=min(counts) if counts and min(counts) < FEW else None,
        fewest_for_interval=FEWEST,
        score_figure=score_figure(results),
        validation_curve=validation_figure(results, rounds),
        loss_curve=loss_figure(rounds),
        norm_curve=norm_figure(rounds),
        norms=_norm_ranges(results, rounds),
        comparison=comparison,
        difference_figure=difference_figure(comparison) if comparison else "",
        examples=examples,
        pictures=_pictures(examples) if examples else [],
        settings=list(_flat(results.experiment)),
    )


def _norm_ranges(results: Results, rounds: Sequence[RoundRecord]) -> dict[str, str]:
    """By site the median and largest norm of its differences by training step; a dash where there is none."""
    norms: dict[str, list[float]] = {site: [] for site in results.sites}
    for record in rounds:
        for site in record.norm.keys() & norms.keys():
            norms[site].append(record.norm[site])
    return {site: f"{np.median(held):.2g}, {max(held):.2g}" if held else "–" for site, held in norms.items()}


def _pictures(examples: Examples) -> list[tuple[SiteExamples, list[dict[str, Any]]]]:
    return [(site, [_picture(site.site, *titled) for titled in site.pictures]) for site in examples.sites]


def _picture(site: str, title: str, shown: Illustration) -> dict[str, Any]:
    gray = shown.image.ndim == 2
    low, high = np.percentile(shown.image, (1, 99)) if gray else (0.0, 1.0)
    return {
        "source": png(shown.image, (float(low), max(float(high), float(low) + 1e-6))),
        "height": shown.image.shape[0],
        "width": shown.image.shape[1],
        "reference": "" if shown.reference is None else outline(shown.reference),
        "predicted": "" if shown.predicted is None else outline(shown.predicted),
        "title": title,
        "score": shown.score,
        "note": shown.note,
        "text": f"{site}, {title}, score {shown.score:.3f}, {shown.note}",
    }


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", "not set" if value is None else str(value)
