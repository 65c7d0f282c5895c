"""The comparison's page in headless Chromium: offline, nothing wider than the page, readable in light, dark and print.

It also takes the picture that README shows, of a real comparison:
HARMOFL_WRITE_DOCS=1 HARMOFL_COMPARISON=FOLDER pytest tests/unit/evidence/test_comparison_in_a_browser.py
"""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import grid

from harmofl.app.grid import Sweep
from harmofl.evidence.comparison import DriftRecord, Landscape, LocalCurves, Use
from harmofl.evidence.comparison_page import write_comparison
from harmofl.evidence.comparison_summary import summarize_grid
from harmofl.evidence.gallery import Example, Gallery, SiteExamples, Step
from tests.browser import Chromium, assert_readable, keep_for_docs, open_chromium

SITES = ("BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL")
CONTROL = "fedavg with batch norm"
METHODS = ("fedavg", "fedprox", "fednova", "fedadam", "fedbn", CONTROL, "harmofl")
GAINS = {"fedprox": 0.004, "fednova": -0.002, "fedadam": -0.09, "fedbn": -0.02, "harmofl": 0.031}
ROUNDS = 12
PAPER = 718  # pixels: the width of A4 between margins of 1 cm
SHOWN = (1100, 1560)  # of the picture in docs/


@pytest.fixture
def browser(tmp_path: Path) -> Chromium:
    return open_chromium(tmp_path)


def moved(use: Use, site: str) -> float:
    """A little of its own for every use and site, always the same."""
    return float(np.random.default_rng([use.seed, *map(ord, use.method + site)]).normal(0, 0.006))


def score(use: Use, site: str) -> float:
    value = 0.80 + 0.03 * SITES.index(site) / 5 + 0.02 * use.seed + GAINS.get(use.method, 0.0) + moved(use, site)
    if use.value is not None and use.method == "harmofl":
        value -= 0.1 * float(use.value)
    return value - (0.12 if use.left_out == site else 0.0)


def cell(use: Use) -> dict[str, Any]:
    """Curves, drift and a loss around the models as of a run; only the first seed has the latter."""
    end = 0.8 + GAINS.get(use.method, 0.0)
    offsets = [float(offset) for offset in np.linspace(-0.5, 0.5, 9)]
    steep = 2.0 if use.method == "harmofl" else 3.0
    rises = [[0.1 + steep * (row**2 + column**2) for column in offsets] for row in offsets]
    landscape = Landscape(
        offsets=offsets,
        surface=rises,  # type: ignore[arg-type]
        local={
            site: LocalCurves(
                own_images=[0.08 + (steep + 0.1 * place) * (offset - 0.04) ** 2 for offset in offsets],
                all_images=0.1,
            )
            for place, site in enumerate(SITES)
        },  # fmt: skip
        sharpness=steep / 16,
        sharpness_at=0.25,
        images=8,
    )
    return {
        "validation": [end * (1 - np.exp(-number / 3)) + moved(use, str(number)) for number in range(ROUNDS + 1)],
        "drift": [
            DriftRecord(dispersion=2.0, relative=1.2 + 0.05 * number + abs(moved(use, "drift")), cosine=0.4)
            for number in range(ROUNDS)
        ],
        "amplitude_distance": {
            "as read": 0.52,
            "after the intensity step": 0.41,
            "as trained on": 0.22 if use.method == "harmofl" else 0.41,
        },
        "landscape": landscape if use.seed == 0 and not use.sweep and not use.left_out else None,
        "passes": 2 * 1440 if use.method == "harmofl" else 1440,
    }


def example_images() -> Gallery:
    mask = np.zeros((64, 64), bool)
    mask[22:44, 18:46] = True
    steps = (
        Step("as read", "from the files"),
        Step("z-score", "mean 0, deviation 1"),
        Step("amplitude step", "a gain"),
    )
    sites = []
    for place, site in enumerate(SITES):
        image = np.random.default_rng(place).random((3, 64, 64)).astype(np.float32) + mask
        profiles = np.stack([np.linspace(8, 2, 11) + 0.2 * place * part for part in (1.0, 0.8, 0.2)])
        sites.append(
            SiteExamples(site, "ge_3t_endorectal: 0.2 mm blur", 40, (Example((image,) * 3, mask=mask),), profiles)
        )
    return Gallery("harmofl_prostate", ("preset robust",), False, steps, tuple(sites), 2.0 ** (np.arange(11) / 2 - 6))


@pytest.fixture
def full_page(written: dict[str, Any], tmp_path: Path) -> Path:
    """A page with every part, six methods, a control and six sites, of cells without a run."""
    result = grid(
        written | {"name": "harmofl_prostate"},
        METHODS,
        (0, 1, 2),
        score,
        sweeps=[Sweep("perturbation.alpha", (0, 0.5))],
        left_out=SITES,
        modelless=["fedbn"],
        controls={"fedbn": CONTROL},
        missing=lambda use: use.method == "fednova" and use.seed == 2 and use.sweep is not None,
        sites=SITES,
        of_cell=cell,
    )
    result.failed["fednova seed 2, perturbation.alpha=0.5"] = "lower training.learning_rate (log: cells/x/log.txt)"
    write_comparison(summarize_grid(result), result.records, example_images(), tmp_path)
    return tmp_path / "comparison.html"


def test_the_page_is_readable_everywhere(browser: Chromium, full_page: Path) -> None:
    assert_readable(browser, full_page)
    for width in (1100, 400):
        told = browser.measure(full_page, width)
        assert (told["scroll"], told["wide"], told["loaded"]) == (width, [], [])


def test_the_answer_is_on_the_first_screen(browser: Chromium, full_page: Path) -> None:
    """Which method, by how much, how sure and at what cost, before anything has to be scrolled."""
    text = full_page.read_text(encoding="utf-8")
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text[text.index("<body>") :]))
    first = words[: words.index("Differences to fedavg")]
    assert re.search(r"harmofl scores 0\.\d{3}, fedavg with z-score 0\.\d{3} in dice: difference \+0\.0[23]\d", first)
    assert "95 % interval" in first and "over 3 seeds: better" in first
    assert "harmofl scores higher at 2.0 times the passes of fedavg" in first
    assert "fedbn has no model for a hospital that took no part" in first


@pytest.mark.parametrize("heading", ["Differences to fedavg", "Why: what the methods change"])
def test_what_answers_the_question_needs_no_scrolling(browser: Chromium, full_page: Path, heading: str) -> None:
    """The table below the heading fits into a window of 1100 pixels as it is: the verdicts and the reasons."""
    before, found, after = full_page.read_text(encoding="utf-8").partition(f"<h2>{heading}</h2>")
    assert found
    fixed = full_page.with_name("fixed.html")
    fixed.write_text(before + found + after.replace('class="scroll"', 'class="fixed"', 1), encoding="utf-8")
    assert browser.measure(fixed, 1100)["wide"] == []


def test_on_paper_no_table_is_cut_off(browser: Chromium, full_page: Path) -> None:
    """The rules for print, laid out at the width of paper, where nothing can be scrolled."""
    text = full_page.read_text(encoding="utf-8")
    assert "@media print" in text
    printed = full_page.with_name("printed.html")
    text = text.replace("@media print", "@media all").replace('class="scroll"', 'class="printed"')
    printed.write_text(text, encoding="utf-8")
    told = browser.measure(printed, PAPER)
    assert (told["scroll"], told["wide"]) == (PAPER, [])


def test_the_picture_of_a_real_comparison(browser: Chromium, tmp_path: Path) -> None:
    folder = os.environ.get("HARMOFL_COMPARISON")
    if not folder:
        pytest.skip("HARMOFL_COMPARISON names no folder that harmofl compare has written")
    page = Path(folder) / "comparison.html"
    assert_readable(browser, page)
    browser.picture(page, tmp_path / "comparison.png", *SHOWN)
    keep_for_docs(tmp_path / "comparison.png", "comparison.png")
