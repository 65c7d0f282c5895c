"""From cells to answers: spreads, paired differences, verdicts and the page that says them."""

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import grid, summary
from scipy.stats import t, ttest_rel

from harmofl.app.grid import Sweep
from harmofl.evidence.comparison import SiteScores, Use, read_comparison
from harmofl.evidence.comparison_page import write_comparison
from harmofl.evidence.comparison_summary import summarize_grid
from harmofl.evidence.results import ResultsError, ScoreSummary
from harmofl.experiment import resolve

SEEDS = (0, 1, 2)
FEDAVG = {0: 0.80, 1: 0.70, 2: 0.75}
GAIN = {0: 0.02, 1: 0.03, 2: 0.01}


def scores(use: Use, site: str) -> float:
    """Site B is 0.1 worse; harmofl gains a little and perturbation_only loses much, in every seed."""
    value = FEDAVG[use.seed] - 0.1 * (site == "B")
    gains = {"harmofl": GAIN[use.seed], "perturbation_only": -0.3 + 0.001 * use.seed}
    return value + gains.get(use.method, 0.0)


def test_means_spreads_and_differences(written: dict[str, Any]) -> None:
    told = summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, scores))
    fedavg, harmofl = told.methods
    assert fedavg.sites["A"].mean == pytest.approx(0.75) and fedavg.sites["A"].deviation == pytest.approx(0.05)
    assert harmofl.mean.mean == pytest.approx(0.72) and harmofl.worst_site == "B"
    assert harmofl.worst.mean == pytest.approx(0.67) and harmofl.final_model.mean == pytest.approx(0.62)
    assert fedavg.difference is None and fedavg.verdict == "reference"
    held = harmofl.difference
    assert held is not None and held.mean == pytest.approx(0.02) and held.pairs == 3
    ours, theirs = (
        [scores(Use(cell="", method=m, seed=s, sweep=None, value=None, left_out=None), "A") for s in SEEDS]
        for m in ("harmofl", "fedavg")
    )
    expected = ttest_rel(ours, theirs)
    assert held.p_value == pytest.approx(expected.pvalue)
    # the cases of a site differ by its gain and -0.02, 0 and 0.02: variance of its mean 0.0004 / 3; over two sites and
    # three seeds a sixth of that, with 2 * 3 * 2 degrees of freedom
    half = float(t.ppf(0.975, 12)) * (0.0004 / 3 / 6) ** 0.5
    assert (held.patients_low, held.patients_high) == pytest.approx((0.02 - half, 0.02 + half))
    assert [value.mean for value in fedavg.curve] == [pytest.approx(0.1), pytest.approx(0.5), None]
    assert told.headline.startswith("harmofl scores 0.720, fedavg with z-score 0.700 in dice: difference +0.020")
    assert "over 3 seeds" in told.headline


def test_verdicts_are_corrected_for_the_number_of_methods(written: dict[str, Any]) -> None:
    alone = summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, scores)).methods[1]
    told = summarize_grid(grid(written, ["fedavg", "harmofl", "perturbation_only", "amplitude_only"], SEEDS, scores))
    rows = {row.method: row for row in told.methods}
    assert rows["perturbation_only"].verdict == "worse" and rows["amplitude_only"].verdict == "same"
    assert alone.difference is not None and rows["harmofl"].difference is not None
    # gains 0.01, 0.02, 0.03: t = 0.02 / (0.01 / sqrt(3)) = 3.46, p = 0.074 at 2 degrees of freedom
    assert alone.difference.p_value == pytest.approx(0.0742, abs=1e-4) and alone.verdict == "no_evidence"
    assert rows["harmofl"].difference.p_corrected == pytest.approx(2 * 0.0742, abs=2e-4)
    assert "worse: perturbation_only -0.299" in told.findings[0]


def test_real_data_that_seeds_split_anew_is_less_sure(written: dict[str, Any]) -> None:
    demo, real = (
        summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, scores, demo=demo)) for demo in (True, False)
    )
    widths = []
    for told in (demo, real):
        held = told.methods[1].difference
        assert held is not None and held.high is not None and held.low is not None
        widths.append(held.high - held.low)
    assert widths[1] / widths[0] == pytest.approx(np.sqrt(1 + 3 * 0.3125))
    assert "Nadeau" in real.method_of_statistics and "Nadeau" not in demo.method_of_statistics


@pytest.mark.parametrize("seeds", [[0], [0, 1]])
def test_fewer_than_three_seeds_have_an_interval_over_patients_only(written: dict[str, Any], seeds: list[int]) -> None:
    told = summarize_grid(grid(written, ["fedavg", "harmofl"], seeds, scores))
    held = told.methods[1].difference
    assert held is not None and (held.low, held.high, held.p_value) == (None, None, None)
    # as above, over two sites and so many seeds
    half = float(t.ppf(0.975, 4 * len(seeds))) * (0.0004 / 3 / 2 / len(seeds)) ** 0.5
    assert held.mean is not None and held.patients_low == pytest.approx(held.mean - half)
    assert told.methods[1].verdict == "few_seeds" and "over patients" in told.headline
    assert "Student" not in told.method_of_statistics and "p values" not in told.method_of_statistics
    assert "run 3 or more" in told.method_of_statistics


def test_patients_that_seeds_share_say_no_more_than_those_of_one_seed(written: dict[str, Any]) -> None:
    told = summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, scores, demo=False))
    held = told.methods[1].difference
    half = float(t.ppf(0.975, 4)) * (0.0004 / 3 / 2) ** 0.5
    assert held is not None and (held.patients_low, held.patients_high) == pytest.approx((0.02 - half, 0.02 + half))


def test_a_share_is_compared_patient_by_patient(written: dict[str, Any]) -> None:
    """Patients of 100 images with 80, 85 and 90 right against 80, 80 and 80: 0, 5 and 10 points."""

    def of(use: Use) -> dict[str, Any]:
        right = (80, 85, 90) if use.method == "harmofl" else (80, 80, 80)
        parts = [(count, 100) for count in right]
        mean = sum(right) / 300
        held = ScoreSummary(mean=mean, low=None, high=None, n=300, undefined=0, per_case=[], by_patient=parts)
        return {"scores": {"A": SiteScores(best={"dice": held}, final={"dice": held})}}

    told = summarize_grid(grid(written, ["fedavg", "harmofl"], [0], scores, sites=["A"], of_cell=of))
    held = told.methods[1].difference
    half = float(t.ppf(0.975, 2)) * 0.05 / 3**0.5
    assert held is not None and held.mean == pytest.approx(0.05)
    assert (held.patients_low, held.patients_high) == pytest.approx((0.05 - half, 0.05 + half))


def test_another_split_has_nothing_to_pair(written: dict[str, Any]) -> None:
    def of(use: Use) -> dict[str, Any]:
        held = summary(0.7)
        if use.method == "harmofl":
            held = held.model_copy(update={"per_case": held.per_case[:2]})
        return {"scores": {"A": SiteScores(best={"dice": held}, final={"dice": held})}}

    told = summarize_grid(grid(written, ["fedavg", "harmofl"], [0], scores, sites=["A"], of_cell=of))
    held = told.methods[1].difference
    assert held is not None and (held.mean, held.patients_low) == (0.0, None)


def test_only_seeds_that_both_methods_finished_are_paired(written: dict[str, Any]) -> None:
    lost = grid(
        written, ["fedavg", "harmofl"], SEEDS, scores, missing=lambda use: use.method == "harmofl" and use.seed == 1
    )
    held = summarize_grid(lost).methods[1].difference
    assert held is not None and held.pairs == 2 and held.mean == pytest.approx((0.02 + 0.01) / 2)


def test_undefined_scores_are_not_zero(written: dict[str, Any]) -> None:
    told = summarize_grid(
        grid(written, ["fedavg", "harmofl"], SEEDS, lambda use, site: None if site == "B" else scores(use, site))
    )
    assert told.methods[0].mean.mean == pytest.approx(0.75) and told.methods[0].sites["B"].mean is None
    nothing = summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, lambda use, site: None))
    assert nothing.methods[1].verdict == "no_scores" and "undefined" in nothing.headline


def test_sweep_has_the_jobs_value_among_its_own(written: dict[str, Any]) -> None:
    def with_alpha(use: Use, site: str) -> float:
        return scores(use, site) + (float(use.value) if use.value and use.method == "harmofl" else 0.0)

    sweep = Sweep("perturbation.alpha", (0.5, 0, 0.05))
    told = summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, with_alpha, sweeps=[sweep])).sweeps[0]
    assert told.base == 0.05 and told.values == [0, 0.05, 0.5] and told.fixed == ["fedavg"]
    # 0.05 is the base setting, whose cell it is
    assert [value.mean for value in told.methods["harmofl"]] == pytest.approx([0.72, 0.72, 1.22])
    assert resolve(written).training.clip_norm is None
    clipped = summarize_grid(
        grid(written, ["fedprox"], SEEDS, scores, sweeps=[Sweep("training.clip_norm", (2.0, 0.5))])
    ).sweeps[0]
    assert clipped.base is None and clipped.values == [None, 0.5, 2.0]
    assert all(value.n == 3 for value in clipped.methods["fedprox"])
    split = summarize_grid(
        grid(written, ["fedprox"], SEEDS, scores, sweeps=[Sweep("data.fractions", ([0.6, 0.2, 0.2], [0.8, 0.1, 0.1]))])
    ).sweeps[0]
    assert split.base in split.values and [0.8, 0.1, 0.1] in split.values
    other = summarize_grid(
        grid(written, ["fedavg"], SEEDS, scores, sweeps=[Sweep("training.local_epochs", (3, 5))])
    ).sweeps[0]
    assert other.values == [1, 3, 5], "the base setting is a value of the sweep without being asked for"


def test_a_hospital_that_took_no_part(written: dict[str, Any]) -> None:
    def unseen(use: Use, site: str) -> float:
        return scores(use, site) - (0.2 if use.left_out == site else 0.0)

    told = summarize_grid(grid(written, ["fedavg", "harmofl"], SEEDS, unseen, left_out=["A", "B"]))
    fedavg, harmofl = told.left_out
    assert fedavg.sites["A"].mean == pytest.approx(0.55) and fedavg.mean.mean == pytest.approx(0.5)
    assert fedavg.taking_part.mean == pytest.approx(0.7)
    assert harmofl.difference is not None and harmofl.difference.mean == pytest.approx(0.02)
    assert any("took no part" in line for line in told.findings)


@pytest.mark.parametrize("modelless", ["harmofl", "fedavg"])
def test_a_method_without_a_model_for_others_has_no_score_there(
    written: dict[str, Any], tmp_path: Path, modelless: str
) -> None:
    result = grid(written, ["fedavg", "harmofl"], SEEDS, scores, left_out=["A", "B"], modelless=[modelless])
    told = summarize_grid(result)
    rows = {row.method: row for row in told.left_out}
    other = rows["fedavg" if modelless == "harmofl" else "harmofl"]
    assert rows[modelless].verdict == "no_model" and other.verdict in ("reference", "no_scores")
    assert rows[modelless].mean.mean is None and other.mean.mean is not None
    assert rows[modelless].taking_part.mean is not None
    assert f"{modelless} has no model for a hospital that took no part." in told.findings
    write_comparison(told, result.records, None, tmp_path)
    assert (
        "has no model for a hospital that took no part: layers stay at its sites</td>"
        in (tmp_path / "comparison.html").read_text()
    )


@pytest.mark.parametrize(
    ("gain", "passes", "said"),
    [
        (0.02, 240, "harmofl scores higher at 2.0 times the passes of fedavg (--sweep training.local_epochs=1,2 shows"),
        (0.02, 180, "harmofl scores higher at 1.5 times the passes of fedavg."),  # no whole epochs give 1.5 times
        (-0.02, 60, "fedavg scores higher at 2.0 times the passes of harmofl."),
        (0.02, 120, ""),
        (-0.02, 240, ""),
        (0.0, 240, ""),
    ],
)
def test_a_better_score_at_more_compute_is_said_to_be_one(
    written: dict[str, Any], gain: float, passes: int, said: str
) -> None:
    result = grid(
        written,
        ["fedavg", "harmofl"],
        SEEDS,
        lambda use, site: FEDAVG[use.seed] + gain * (use.method == "harmofl"),
        of_cell=lambda use: {"passes": passes if use.method == "harmofl" else 120},
    )
    lines = [line for line in summarize_grid(result).findings if "Unequal compute" in line]
    assert len(lines) == bool(said) and said in "".join(lines)


def test_passes_stand_beside_the_score(written: dict[str, Any], tmp_path: Path) -> None:
    result = grid(
        written,
        ["fedavg", "fedprox", "harmofl"],
        [0],
        scores,
        of_cell=lambda use: {"passes": 240 if use.method == "harmofl" else 120},
    )
    write_comparison(summarize_grid(result), result.records, None, tmp_path)
    page = (tmp_path / "comparison.html").read_text()
    # the first row of a method: its name, score and passes
    held = {
        method: page.split(f'<td class="words">{method}</td>')[1].split("</td>")[1] for method in ("fedprox", "harmofl")
    }
    assert held == {"fedprox": "<td>120", "harmofl": "<td>240<br><small>2.0 times</small>"}


class Page(HTMLParser):
    """Text, and everything that a page would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.fetched = "", []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        links = {key: value for key, value in attrs if key in ("src", "href", "xlink:href") and tag != "a"}
        self.fetched += [value for value in links.values() if not value.startswith(("data:", "#"))]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_answers_first_and_fetches_nothing(written: dict[str, Any], tmp_path: Path) -> None:
    result = grid(
        written,
        ["fedavg", "harmofl"],
        SEEDS,
        scores,
        sweeps=[Sweep("perturbation.alpha", (0, 0.5))],
        left_out=["A", "B"],
    )
    told = summarize_grid(result)
    write_comparison(told, result.records, None, tmp_path)
    page = Page((tmp_path / "comparison.html").read_text())
    assert not page.fetched
    body = page.words[page.words.index("which method?") :]
    assert body.index(told.headline) < body.index("Differences to fedavg") < body.index("How this was made")
    words = re.sub(r"\s+", " ", page.words)
    # harmofl at A: 0.82, 0.73 and 0.76
    for text in (
        "0.770 ± 0.046",
        "Demo:",
        "Hospitals that took no part",
        "perturbation.alpha",
        "Loss around the models",
    ):
        assert text in words
    assert page.words.count("undefined") == 2, "the last validation score of both methods is undefined"
    assert read_comparison(tmp_path / "comparison.json") == told


def test_csv_has_every_score_of_every_use(written: dict[str, Any], tmp_path: Path) -> None:
    result = grid(written, ["fedavg", "harmofl"], SEEDS, scores, left_out=["A"])
    write_comparison(summarize_grid(result), result.records, None, tmp_path)
    lines = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    # 2 methods, 3 seeds, with and without A, 2 sites, 2 models
    assert len(lines) == 2 * 3 * 2 * 2 * 2
    held = next(line for line in lines if line["left_out"] == "A" and line["site"] == "A" and line["model"] == "best")
    assert held["took_part"] == "0" and float(held["mean"]) == pytest.approx(0.8)


def test_a_broken_comparison_is_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text('{"format": 1}')
    with pytest.raises(ResultsError, match=r"comparison\.json: format"):
        read_comparison(tmp_path / "comparison.json")
    with pytest.raises(ResultsError, match="cannot be read"):
        read_comparison(tmp_path / "absent.json")
