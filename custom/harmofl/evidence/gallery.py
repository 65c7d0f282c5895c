"""gallery.html: example images of every site before and after each step of the normalization, on one page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harmofl.core.drift import profile_distances
from harmofl.evidence.page import inline_svg, write_page
from harmofl.evidence.pictures import outline, png

DISPLAYED = (1, 99)  # percentiles of all sites' example pixels that become black and white
MOST_PAIRED = 8  # sites
LINES = ("-", "--", "-.", ":")  # tell sites apart where colors do not
Image = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """A state of the images: what was done last, and what it does, one phrase each."""

    title: str
    note: str


@dataclass(frozen=True, eq=False)
class Example:
    """One image in every step, (C, H, W), with the foreground of its mask (H, W) or the name of its class."""

    images: tuple[Image, ...]
    mask: NDArray[np.bool_] | None = None
    label: str = ""


@dataclass(frozen=True, eq=False)
class SiteExamples:
    """A site: what its data imitates, examples, and the mean log-amplitude profile in every step, (steps, bins)."""

    name: str
    source: str
    training_images: int
    examples: tuple[Example, ...]
    profiles: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Gallery:
    """Everything on the page.

    Attributes:
        name: the job.
        settings: phrases that say what normalizes, for the line below the title.
        is_color: channels are red, green and blue; else the middle one is shown.
        steps: states of the images, the first as the reader gives them.
        sites: one row each.
        frequencies: of the profiles, in cycles a pixel, (bins,).
    """

    name: str
    settings: tuple[str, ...]
    is_color: bool
    steps: tuple[Step, ...]
    sites: tuple[SiteExamples, ...]
    frequencies: NDArray[np.float64]


def write_gallery(gallery: Gallery, path: Path) -> None:
    """Render the page; the file is replaced as a whole."""
    windows = [_window(gallery, step) for step in range(len(gallery.steps))]
    write_page(
        "gallery.html.j2",
        path,
        gallery=gallery,
        windows=windows,
        rows=picture_rows(gallery),
        outlined=any(example.mask is not None for site in gallery.sites for example in site.examples),
        percentiles=DISPLAYED,
        profiles=profile_plot(gallery),
        spreads=[spread(gallery.sites, step) for step in range(len(gallery.steps))],
    )


def picture_rows(gallery: Gallery) -> list[tuple[SiteExamples, list[list[dict[str, Any]]]]]:
    """By site and step the pictures of the examples: a data URI, the border of the mask, size and a text."""
    windows = [_window(gallery, step) for step in range(len(gallery.steps))]
    return [
        (site, [_pictures(gallery, site, step, window) for step, window in enumerate(windows)])
        for site in gallery.sites
    ]


def spread(sites: Sequence[SiteExamples], step: int) -> float:
    """How far sites are apart: standard deviation of their profiles over sites, root mean square over the bins."""
    profiles = np.stack([site.profiles[step] for site in sites])
    return float(np.sqrt(profiles.var(axis=0).mean()))


def _window(gallery: Gallery, step: int) -> tuple[float, float]:
    """The values shown as black and white, one pair for all sites; colors as read keep 0 to 1, as in their files."""
    if gallery.is_color and step == 0:
        return 0.0, 1.0
    shown = [_shown(example.images[step], gallery.is_color) for site in gallery.sites for example in site.examples]
    low, high = np.percentile(np.concatenate([image.ravel() for image in shown]), DISPLAYED)
    return float(low), max(float(high), float(low) + 1e-6)


def _shown(image: Image, is_color: bool) -> Image:
    """(H, W, 3), or the middle channel as (H, W)."""
    return np.moveaxis(image, 0, -1) if is_color else image[len(image) // 2]


def _pictures(gallery: Gallery, site: SiteExamples, step: int, window: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {
            "source": png(_shown(example.images[step], gallery.is_color), window),
            "outline": outline(example.mask) if example.mask is not None else "",
            "height": example.images[step].shape[-2],
            "width": example.images[step].shape[-1],
            "label": example.label,
            "text": f"{site.name}, {gallery.steps[step].title}, example {number} {example.label}".rstrip(),
        }
        for number, example in enumerate(site.examples, 1)
    ]


def band_name(frequency: float) -> str:
    """A frequency in cycles a pixel as `1/8`."""
    return f"1/{1 / frequency:.3g}"


def pair_distances(gallery: Gallery) -> list[tuple[str, list[str]]]:
    """By site the distance of its profile to that of every other one, as read and after the last step.

    Empty with one site, and with so many that a table of pairs tells nothing.
    """
    if not 1 < len(gallery.sites) <= MOST_PAIRED:
        return []
    stacked = np.stack([site.profiles for site in gallery.sites])
    before, after = profile_distances(stacked[:, 0]), profile_distances(stacked[:, -1])
    changed = len(gallery.steps) > 1
    return [
        (
            site.name,
            [
                "–" if row == column else f"{before[row, column]:.2f}" + f" → {after[row, column]:.2f}" * changed
                for column in range(len(gallery.sites))
            ],
        )
        for row, site in enumerate(gallery.sites)
    ]


def profile_plot(gallery: Gallery) -> str:
    """A column a step, a line a site: the profiles, and below them their differences from the mean of the sites."""
    from matplotlib.figure import Figure

    count = len(gallery.steps)
    figure = Figure(figsize=(3.5 * count, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, count, sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2))
    for step, title in enumerate(step.title for step in gallery.steps):
        mean = np.mean([site.profiles[step] for site in gallery.sites], axis=0)
        for number, site in enumerate(gallery.sites):
            style = LINES[number % len(LINES)]
            upper[step].plot(gallery.frequencies, site.profiles[step], style, linewidth=1.2, label=site.name)
            lower[step].plot(gallery.frequencies, site.profiles[step] - mean, style, linewidth=1.2)
        upper[step].set_title(title, fontsize=9)
        lower[step].set_xlabel("cycles a pixel")
    octaves = gallery.frequencies[::2]
    lower[0].set_xscale("log", base=2)
    lower[0].set_xticks(octaves, [band_name(frequency) for frequency in octaves])
    for axes in figure.axes:
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    upper[0].set_ylabel("log amplitude")
    lower[0].set_ylabel("difference from\nthe mean of sites")
    handles, names = upper[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return inline_svg(figure, "profiles")
