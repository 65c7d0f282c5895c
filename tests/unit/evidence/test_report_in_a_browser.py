"""The report in headless Chromium: offline, nothing wider than the page, readable in light and dark."""

from pathlib import Path

import numpy as np
import pytest

from harmofl.evidence.paired import Comparison, Difference
from harmofl.evidence.report import Examples, SiteExamples, write_report
from harmofl.tasks.answers import Illustration
from tests.browser import Chromium, assert_readable, console_lines, open_chromium

LONG = "a_site_whose_name_is_as_long_as_names_of_hospitals_can_be"


@pytest.fixture
def browser(tmp_path: Path) -> Chromium:
    return open_chromium(tmp_path)


@pytest.fixture
def full_page(results, rounds, tmp_path: Path) -> Path:
    """A page with every part: failure, long names, a comparison, pictures."""
    held = results.model_copy(deep=True)
    held.sites[LONG] = held.sites["HEALTHY"].model_copy(update={"data_warnings": {"implausible_spacing": 12}})
    held.warnings = ["no test score from EMPTY, SILENT", f"careful with {LONG}"]
    differences = (
        Difference(LONG, 0.6, 0.7, -0.1, -0.3, 0.1, "", 5, "5 cases"),
        Difference("B", 0.8, 0.7, 0.1, 0.0, 0.2, "", 5, "5 cases"),
    )
    over = Difference("mean over sites", 0.7, 0.7, 0.0, -0.9, 0.9, "", 2, "2 sites")
    mask = np.zeros((64, 64), bool)
    mask[20:40, 20:40] = True
    shown = Illustration(np.random.default_rng(0).random((64, 64)), 0.75, "slice 3 of 9", mask, np.roll(mask, 4))
    pictures = (SiteExamples(LONG, (("best", shown), ("median", shown), ("worst", shown)), note="Careful."),)
    path = tmp_path / "report.html"
    write_report(
        held,
        [record.model_copy(update={"round": number}) for number, record in enumerate(rounds * 12)],
        path,
        failure=f"evaluation: 1 sites answered, 2 are needed ({LONG}: internal_error: site {LONG} failed in evaluate)",
        comparison=Comparison(differences, over, ("EMPTY",)),
        examples=Examples(pictures, "Dice of the whole case", "Pictures."),
    )
    return path


def test_the_page_is_readable_everywhere(browser: Chromium, full_page: Path) -> None:
    assert_readable(browser, full_page)
    strokes = browser.measure(full_page, 1280, dark=True)["strokes"]
    assert len({color for _, color in strokes}) >= 4  # ink, grid, worst, series


def test_the_ruler_sees_what_it_is_for(browser: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><html><head><style>body { color: #777; background: #888; }</style></head>"
        '<body><p>gray on gray</p><div style="width: 2000px">wide</div><img src="missing.png"></body></html>'
    )
    told = browser.measure(page, 420)
    assert told["contrast"][0] < 2 and "DIV wide" in told["wide"]
    assert told["loaded"] == ["missing.png"]
    page.write_text("<script>console.error('spoken')</script>")
    assert "spoken" in "".join(console_lines(browser.picture(page, tmp_path / "bad.png", 300, 200)))


def test_the_pages_policy_lets_nothing_in(browser: Chromium, full_page: Path, tmp_path: Path) -> None:
    """Even a page that someone has put an address into loads nothing."""
    text = full_page.read_text(encoding="utf-8").replace("</body>", '<img src="file:///missing.png"></body>')
    full_page.write_text(text, encoding="utf-8")
    log = browser.picture(full_page, tmp_path / "page.png", 1280, 900)
    assert "Content Security Policy" in "".join(console_lines(log))
