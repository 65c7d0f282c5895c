"""FedBN's control, differences without spread, and what a comparison's page has beside its pictures."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import grid
from scipy.stats import ttest_rel

from harmofl.evidence.comparison import CellKey, Use
from harmofl.evidence.comparison_page import write_comparison
from harmofl.evidence.comparison_summary import summarize_grid
from harmofl.evidence.gallery import Example, Gallery, SiteExamples, Step
from harmofl.experiment import resolve

SEEDS = (0, 1, 2)
FEDAVG = {0: 0.80, 1: 0.70, 2: 0.75}
FEDBN = {0: 0.202, 1: 0.203, 2: 0.201}
CONTROL = "fedavg with batch norm"


def with_control(use: Use, site: str) -> float:
    """FedBN's gain over the reference is its network's: 0.2 of it comes with plain averaging on that network."""
    own = {"fedbn": FEDBN[use.seed], CONTROL: 0.21}
    return FEDAVG[use.seed] - 0.1 * (site == "B") + own.get(use.method, 0.0)


def words_of(folder: Path) -> str:
    page = (folder / "comparison.html").read_text()
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[page.index("<body>") :]))


def test_fedbn_is_held_against_plain_averaging_on_its_own_network(written: dict[str, Any], tmp_path: Path) -> None:
    plain = resolve(written)
    other = plain.model_copy(update={"network": plain.network.model_copy(update={"norm": "batch"})})
    result = grid(
        written,
        ["fedavg", "fedbn", CONTROL],
        SEEDS,
        with_control,
        left_out=["A", "B"],
        modelless=["fedbn", CONTROL],
        controls={"fedbn": CONTROL},
        of_cell=lambda use: {"experiment": other} if use.method != "fedavg" else {},
    )
    told = summarize_grid(result)
    _, fedbn, control = told.methods
    assert fedbn.control is not None and control.control is None
    # 0.002, 0.003, 0.001 less 0.01
    assert fedbn.control.difference.mean == pytest.approx(-0.008)
    assert fedbn.control.difference.p_value == pytest.approx(
        ttest_rel([0.202, 0.203, 0.201], [0.21, 0.21, 0.21]).pvalue
    )
    assert fedbn.difference is not None and fedbn.verdict == "better"
    assert fedbn.control.verdict == "worse", "p 0.0051 times 1, the largest of the two"
    assert told.headline.startswith("fedbn scores"), "the control is beside it, however well it scores"
    line = next(line for line in told.findings if line.startswith("fedbn also has another network"))
    assert f"network.norm=batch; against {CONTROL}, which has it too: difference -0.008" in line
    assert not any(line.startswith(CONTROL) for line in told.findings)
    assert [row.method for row in told.left_out] == ["fedavg", "fedbn"]
    write_comparison(told, result.records, None, tmp_path)
    page = words_of(tmp_path)
    assert f"fedbn minus {CONTROL}" in page


def test_seeds_with_one_and_the_same_difference_are_not_sure(written: dict[str, Any]) -> None:
    told = summarize_grid(
        grid(
            written,
            ["fedavg", "harmofl"],
            [0, 1, 2],
            lambda use, _: FEDAVG[use.seed] + 0.02 * (use.method == "harmofl"),
        )
    )
    held = told.methods[1].difference
    assert held is not None and (held.low, held.p_value, held.p_corrected) == (None, None, None)
    assert told.methods[1].verdict == "no_spread" and "no spread over the seeds" in told.headline


def test_pictures_have_their_numbers_beside_them(written: dict[str, Any], tmp_path: Path) -> None:
    image = np.zeros((3, 8, 8), np.float32)
    sites = tuple(
        SiteExamples(name, "a scanner", 7, (Example((image,)),), np.array([[level, 2.5, 1.5]]))
        for name, level in (("A", 7.25), ("B", 8.25))
    )
    gallery = Gallery("job", (), False, (Step("as read", "files"),), sites, np.array([0.125, 0.25, 0.5]))
    result = grid(written, ["fedavg", "harmofl"], [0], with_control)
    write_comparison(summarize_grid(result), result.records, gallery, tmp_path)
    rows = (tmp_path / "comparison.html").read_text().split("<tr>")
    assert sum(row.startswith("<td>A</td><td>7.25</td><td>2.50</td><td>1.50</td>") for row in rows) == 1
    assert sum(row.startswith("<td>A</td><td>–</td><td>0.58</td>") for row in rows) == 1, "1 over the root of 3"
    # local models: 0.1 on own images in the middle, 0.35 on all sites'
    assert sum("<td>0.100</td><td>0.350</td>" in row for row in "".join(rows).split("</tr>")) == 2


def test_the_page_says_what_it_was_made_from(written: dict[str, Any], tmp_path: Path) -> None:
    for demo, said in ((True, "synthetic, made anew from the seed"), (False, "fingerprint 0123abcd")):
        key = CellKey(experiment_hash="f", version="0", data="demo" if demo else "0123abcd", sites=["A"], left_out=None)
        result = grid(written, ["fedavg"], [0], with_control, demo=demo, key=key)
        write_comparison(summarize_grid(result), result.records, None, tmp_path)
        words = words_of(tmp_path)
        assert said in words and f"hash {resolve(written).hash}" in words
