"""report.html: one page on its own, complete where scores are undefined and sites were refused, names escaped."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from harmofl.evidence.paired import Comparison, Difference
from harmofl.evidence.report import Examples, SiteExamples, write_report
from harmofl.evidence.results import Results, RoundRecord
from harmofl.tasks.answers import Illustration

HOSTILE = "<script>alert(1)</script>&\"'"
NORMS = {"norm", "scaled", "outliers", "cosine", "fall"}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements, their attributes, table rows; complains about elements that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.tables, self._open = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self._open):
            row = self.tables[-1][-1]
            row[-1] = " ".join(f"{row[-1]} {data}".split())

    def row(self, first, heading="site"):
        tables = [table for table in self.tables if table[0][0] == heading]
        return next(row for table in tables for row in table if row[0] == first)


@pytest.fixture
def page(results, rounds, tmp_path):
    write_report(results, rounds, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_scores_by_site(page):
    rows = Page(page)
    assert rows.row("site")[1:5] == ["dice, mean", "95 % interval over patients", "patients", "scored"]
    assert rows.row("HEALTHY worst")[1:6] == ["0.625", "too few for an interval 0.750 0.500", "2", "2", "0.625"]
    assert rows.row("EMPTY")[1:5] == ["undefined", "–", "0", "0 (+2 undefined)"]
    assert rows.row("SILENT")[1] == "no answer to the evaluation"
    assert rows.row("mean over sites")[1] == "0.625"


def test_refused_sites_and_undefined_numbers_of_a_round(page):
    rows = Page(page)
    assert rows.row("0", "round") == ["0", "2 of 3", "0.300", "0.850", "2.2", "none"]  # loss (0.9 + 0.8) / 2
    assert rows.row("1", "round") == [
        "1",
        "1 of 3",
        "undefined",
        "–",
        "–",
        "EMPTY: entry w holds values that are not finite",
    ]


def test_outliers_and_falls_stand_beside_their_rounds_and_norms_in_a_figure(page, results, rounds, tmp_path):
    rows = Page(page)
    (notes,) = [table for table in rows.tables if table[0][-1].startswith("outliers")]
    assert notes[1:] == [["0", f"EMPTY: {rounds[0].outliers['EMPTY']}"], ["1", rounds[1].fall]]
    assert "norm of each site's difference a training step by round" in page
    assert "above 10 times (federation.norm_bound)" in " ".join(page.split())
    plain = [RoundRecord.model_validate(record.model_dump(exclude=NORMS)) for record in rounds]
    write_report(results, plain, tmp_path / "report.html")  # of a version that did not measure them
    assert "norm of each site" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_says_what_it_stands_on(page):
    text = " ".join(page.split())
    assert "synthetic data" in text
    assert "no formal guarantee" in text
    assert "Trained on 2 of 3 sites for 2 rounds" in text
    assert "0.625 at the worst site, HEALTHY" in text
    assert "site_gain after zscore, 40 images of HEALTHY" in text


def test_what_left_each_site_and_with_what_noise(results, rounds, tmp_path):
    held = results.model_dump()
    noise = {"mechanism": "analytic_gaussian", "epsilon": 1, "delta": 1e-5, "clip": 5, "patients": 40, "sigma": 0.93}
    held["sites"]["HEALTHY"] |= {"amplitude_noise": noise, "amplitude_patients": 40}
    held["sites"]["HEALTHY"]["releases"] = {"new": 2, "repeated": 1, "withheld": 3}
    held["sites"]["SILENT"]["amplitude_sent"] = False
    write_report(Results.model_validate(held), rounds, tmp_path / "report.html")
    tables = Page((tmp_path / "report.html").read_text(encoding="utf-8")).tables
    (sent,) = [table for table in tables if "numbers sent, bytes" in table[0]]
    left = {row[0]: row[2:] for row in sent}
    # megabytes of weights, bytes of the amplitude, patients behind it, noise on it, bytes of the numbers, norm of the
    # differences, the ledger
    noise, counted = "epsilon 1, delta 1e-05, 40 patients clipped at 5", "2 released, 1 sent again, 3 held back"
    assert left["HEALTHY"] == ["1.2", "132", "40", noise, "900", "0.25, 0.25", counted]
    assert left["EMPTY"] == ["1.2", "132", "–", "none", "900", "4e+29, 4e+29", "not counted"]
    assert left["SILENT"] == ["1.2", "132", "–", "–", "900", "–", "not counted"]


def test_data_findings_are_counts_by_code_and_each_site_says_what_it_computed_in(results, rounds, tmp_path):
    held = results.model_copy(deep=True)
    held.sites["EMPTY"].data_warnings = {"duplicate_image": 2, "not_finite": 1}
    held.sites["EMPTY"].precision = "bfloat16"
    write_report(held, rounds, tmp_path / "report.html")
    tables = Page((tmp_path / "report.html").read_text(encoding="utf-8")).tables
    (used,) = [table for table in tables if table[0][-2] == "used with a warning, by reason"]
    rows = {row[0]: row[1:] for row in used}
    assert rows["EMPTY"] == ["6", "2", "2", "1 geometry", "2 duplicate image, 1 not finite", "bfloat16"]
    assert rows["HEALTHY"] == ["6", "2", "2", "1 geometry", "none", "not told"]


def test_a_failed_run_says_so_first(results, rounds, tmp_path):
    write_report(results, rounds, tmp_path / "report.html", failure="1 site answered, 2 are needed")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.index("The run failed: 1 site answered") < text.index("Demo: every site")
    write_report(results, rounds, tmp_path / "report.html")
    assert "The run failed" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_comparison_stands_in_a_table_and_in_the_tiles(results, rounds, tmp_path):
    worse = Difference("HEALTHY", 0.5, 0.75, -0.25, -0.5, 0.0, "", 4, "12 images")
    over = Difference("mean over sites", 0.5, 0.75, -0.25, None, None, "too few for an interval", 1, "1 sites")
    write_report(
        results, rounds, tmp_path / "report.html", comparison=Comparison((worse,), over, without=("EMPTY", "SILENT"))
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    row = Page(text).row("HEALTHY better alone")
    assert row == ["HEALTHY better alone", "0.500", "0.750", "-0.250", "-0.500 to +0.000", "4", "12 images"]
    told = " ".join(text.split())
    assert "(95 % interval over sites: too few for an interval), higher at 0 of them." in told
    assert "Without an interval this run alone does not show that taking part pays." in told
    assert "Without a score in both runs: EMPTY, SILENT." in told
    assert "Not compared." not in told


def test_examples_are_pictures_in_the_page_with_both_outlines(results, rounds, tmp_path):
    mask = np.zeros((6, 8), bool)
    mask[1:3, 2:4] = True
    shown = Illustration(np.linspace(0, 1, 48).reshape(6, 8), 0.75, "slice 3 of 9", mask, ~mask)
    patch = Illustration(np.full((6, 8, 3), 0.5), 0.25, f"tumor, called {HOSTILE}")
    examples = Examples(
        (SiteExamples("A", (("best", shown),)), SiteExamples("B", (("worst", patch),), note="Careful.")),
        "Dice",
        "Here.",
    )
    write_report(results, rounds, tmp_path / "report.html", examples=examples)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    elements = Page(text).elements
    assert [held["src"][:22] for tag, held in elements if tag == "img"] == ["data:image/png;base64,"] * 2
    paths = [held for tag, held in elements if tag == "path" and held.get("class") in ("reference", "predicted")]
    assert [path["class"] for path in paths] == ["reference", "predicted"]
    assert "best: 0.750" in text and "Careful." in text and "No picture" not in text and HOSTILE not in text


def test_many_rounds_are_folded_away(results, rounds, tmp_path):
    many = [rounds[0].model_copy(update={"round": number}) for number in range(21)]
    for count, folded in ((20, False), (21, True)):
        write_report(results, many[:count], tmp_path / "report.html")
        assert ("rounds as a table" in (tmp_path / "report.html").read_text(encoding="utf-8")) == folded


def test_figures_take_their_colors_from_the_page(page):
    figures = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 4  # scores, validation, loss, norms
    for figure in figures:
        assert "currentColor" in figure and re.search(r"var\(--(series-0|worst)\)", figure)
        assert not re.search(r"#0[01]0[0-9a-f]{3}|#000000", figure)


def test_real_data_has_no_demo_banner(results, rounds, tmp_path):
    write_report(results.model_copy(update={"demo": False}), rounds, tmp_path / "report.html")
    assert "synthetic data" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_elsewhere(page):
    for tag, attributes in Page(page).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "image")
        for name, value in attributes.items():
            if name in ("href", "xlink:href", "src", "action", "data", "poster"):
                assert value.startswith("#")
            elif not name.startswith("xmlns"):
                assert not re.search(r"https?:|//|url\((?!#)", value or "")
    assert not re.search(r"@import|url\((?!#)", page)
    # namespaces are names, not addresses: nothing else looks like one
    others = set(re.findall(r"https?://[^\s\"'<>]+", page)) - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert others == set()


def test_equal_runs_give_equal_pages(results, rounds, tmp_path):
    pages = []
    for name in ("a.html", "b.html"):
        write_report(results, rounds, tmp_path / name)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_names_are_escaped(results, rounds, tmp_path):
    held = results.model_dump()
    held["sites"][HOSTILE] = held["sites"].pop("HEALTHY")
    held["worst_site"]["site"] = HOSTILE
    held["amplitude"]["sites"] = [HOSTILE]
    held["experiment"]["name"] = HOSTILE
    first = rounds[0].model_dump()
    for key in ("validation", "loss", "steps", "seconds"):
        first[key][HOSTILE] = first[key].pop("HEALTHY")
    first["sites_refused"] = {"B": HOSTILE}
    write_report(Results.model_validate(held), [RoundRecord.model_validate(first)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert Page(text).row(f"{HOSTILE} worst")[1] == "0.625"


@pytest.mark.filterwarnings("error")
def test_a_run_without_any_round_has_a_page(results, tmp_path):
    write_report(results.model_copy(update={"sites_accepted": [], "worst_site": None}), [], tmp_path / "report.html")
    assert "Trained on 0 of 3 sites" in " ".join((tmp_path / "report.html").read_text(encoding="utf-8").split())


def test_the_page_is_replaced_as_a_whole(results, rounds, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(AttributeError):
        write_report(results, [None], path)  # type: ignore[list-item]
    assert path.read_text(encoding="utf-8") == "old"
    assert [held.name for held in tmp_path.iterdir()] == ["report.html"]


def test_warnings_stand_above_the_scores_and_a_leaking_split_is_not_called_unseen(results, rounds, tmp_path):
    leaking = results.model_copy(deep=True)
    leaking.warnings = ["split as_published: training and test share patients"]
    leaking.experiment["data"]["split"] = "as_published"
    texts = []
    for run in (results, leaking):
        write_report(run, rounds, tmp_path / "report.html")
        texts.append((tmp_path / "report.html").read_text())
    assert "cases that no training saw" in texts[0] and "patients that training saw too" not in texts[0]
    assert "cases that no training saw" not in texts[1] and "patients that training saw too" in texts[1]
    assert texts[1].index("Split as_published") < texts[1].index("Test scores by site")
