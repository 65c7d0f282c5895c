"""The job as README states it: no option, six demo sites, FLARE's single thread, a model that has learned."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from harmofl.app.cli import main
from harmofl.tasks import resolve_experiment
from tests.benchmarks.federation_in_memory import scores_by_round
from tests.browser import assert_readable, keep_for_docs, open_chromium
from tests.federation.conftest import ROOT, Run, simulate

SITES = ["BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"]
JOB = ROOT / "jobs" / "harmofl_prostate"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = simulate(JOB, tmp_path_factory.mktemp("demo"), 1, {}, timeout=1500)
    assert run.code == 0, run.output
    return run


@pytest.mark.slow
def test_the_first_lines_say_that_this_is_a_demo(demo: Run) -> None:
    first = [line for line in demo.output.splitlines() if " - INFO - " in line][0]
    assert "DEMO" in first and "synthetic" in first


@pytest.mark.slow
def test_each_site_and_round_has_one_line_and_the_end_is_a_table_with_paths(demo: Run) -> None:
    rounds = demo.results.rounds
    for site in SITES:
        for number in range(rounds):
            assert len(re.findall(rf"- {site} round {number}: ", demo.output)) == 1
    end = demo.output.splitlines()[-14:]
    table = "\n".join(end)
    for site in SITES:
        assert re.search(rf"{site} +0\.\d{{3}}", table), table
    for name in ("results.json", "report.html", "best_FL_global_model.pt", "FL_global_model.pt"):
        assert any(line.endswith(f"app_server/{name}") for line in end), table
    assert "ERROR" not in demo.output and "Traceback" not in demo.output


@pytest.mark.slow
def test_the_model_has_learned(demo: Run, tmp_path: Path) -> None:
    results = demo.results
    assert results.demo and results.method == "harmofl"
    assert results.sites_expected == SITES and set(map(tuple, results.sites_accepted)) == {tuple(SITES)}
    trained = results.mean_over_sites["dice"]
    assert trained is not None and trained >= 0.75
    experiment = resolve_experiment(json.loads((JOB / "app" / "config" / "experiment.json").read_text()), demo=True)
    assert experiment.hash == results.experiment_hash
    unmoved = experiment.model_copy(update={"federation": experiment.federation.model_copy(update={"rounds": 0})})
    (scores,) = scores_by_round(unmoved, SITES, tmp_path)
    untrained = np.mean(list(scores.values()))
    assert trained >= untrained + 0.3


@pytest.mark.slow
def test_the_best_model_is_self_contained(demo: Run) -> None:
    content = torch.load(demo.server / "best_FL_global_model.pt", weights_only=True)
    notes = content["harmofl"]
    assert notes["amplitude_frozen"] and notes["amplitude_sites"] == SITES
    # 3 channels, 11 half-octave bins for images of 64 pixels
    assert notes["amplitude"].shape == (3, 11)
    assert json.loads(notes["experiment"])["name"] == "harmofl_prostate"
    assert all(torch.isfinite(value).all() for value in content["model"].values())


@pytest.mark.slow
def test_its_report_with_pictures_is_readable(demo: Run, tmp_path: Path) -> None:
    """Also takes the picture that README shows: HARMOFL_WRITE_DOCS=1 pytest -m slow tests/jobs/test_demo.py."""
    browser, page = open_chromium(tmp_path), tmp_path / "report.html"
    assert main(["report", str(demo.workspace), "--demo", "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Careful:" not in text, "the pictures' scores are not those of the run"
    assert text.count('<img src="data:image/png') == 3 * len(SITES)  # best, median and worst of four test cases a site
    assert_readable(browser, page)
    browser.picture(page, tmp_path / "report.png", 1100, 1560)
    keep_for_docs(tmp_path / "report.png", "report.png")
