"""The run's books: a record a round, and results.json with best and worst, undefined scores null."""

import hashlib
import json
import math

import pytest

from harmofl.evidence.results import read_results, read_rounds
from harmofl.flare.record import close_round, mean_validation, write_evidence
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.wire import AmplitudeStatistic

TEST = {"A": [0.9, 0.7], "B": [0.5, 0.6, math.nan], "C": [0.4]}
WORSE = {"A": [0.1, 0.3], "B": [0.2, 0.2, math.nan], "C": [0.0]}


def evaluation(site, numbers, best=True):
    scores = {"final": {"dice": WORSE[site], "published_dice": WORSE[site]}}
    if best:
        scores["best"] = {"dice": TEST[site], "published_dice": WORSE[site]}
    return {"cases": numbers["cases"], "skipped": {"geometry": 1}, "validation": 0.4, "test": scores}


@pytest.fixture
def run(make_run, numbers):
    """A run of three rounds whose best is round 1; site C fell out of the last one."""
    run = make_run()
    run.model_sha256 = "f" * 64
    for site in run.expected:
        run.numbers[site] = dict(numbers)
        run.count_bytes(site, {"weights": 100, "amplitude": 8})
    close_round(run, 0, ["A", "B", "C"])
    close_round(run, 1, ["C", "A", "B"])
    run.refused["C"] = "entry w holds values that are not finite"
    close_round(run, 2, ["A", "B"])
    run.best_round, run.best_score, run.best_scores = 1, 0.25, {"A": 0.25, "B": 0.25}
    for name in (BEST_MODEL, FINAL_MODEL):
        (run.folder / name).write_bytes(name.encode())
    return run


def written_results(run, answers):
    lines = write_evidence(run, answers)
    return read_results(run.folder / "results.json"), lines


def test_a_round_is_recorded(run, numbers):
    records = read_rounds(run.folder / "round_metrics.jsonl")
    assert [record.round for record in records] == [0, 1, 2]
    last = records[2]
    assert last == run.rounds[2]
    assert last.sites_accepted == ["A", "B"]
    assert last.sites_refused == {"C": "entry w holds values that are not finite"}
    assert last.validation == {"A": 0.25, "B": 0.25}
    assert (last.validation_mean, last.loss["A"], last.steps["B"], last.seconds["A"]) == (0.25, 0.5, 10, 0.5)
    assert last.bytes_sent["A"] == 108
    assert last.model_sha256 == "f" * 64
    assert last.server_resident_mib > 0


@pytest.mark.parametrize(("best", "warned"), [(0.2, True), (0.25, True), (0.3, False), (None, False)])
def test_a_best_model_no_better_than_the_untrained_one_is_announced(run, numbers, best, warned):
    # the untrained model scored 0.25 everywhere
    run.best_score, run.best_scores = best, {} if best is None else {"A": best, "B": best}
    _, lines = written_results(run, {site: evaluation(site, numbers) for site in run.expected})
    assert (
        any("WARNING: no model scores better on validation than the untrained one" in line for line in lines) == warned
    )


def test_undefined_and_infinite_numbers_of_a_site_are_null(run, numbers):
    run.numbers["A"] = numbers | {"validation": None, "loss": math.inf}
    run.numbers["B"] = numbers | {"validation": math.nan, "loss": math.nan}
    record = close_round(run, 3, ["A", "B"])
    assert record.validation == {"A": None, "B": None}
    assert record.validation_mean is None
    assert record.loss == {"A": None, "B": None}
    line = (run.folder / "round_metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["validation"] == {"A": None, "B": None}


@pytest.mark.parametrize(
    ("scores", "mean"),
    [
        ({"A": 0.5, "B": 0.7}, 0.6),
        ({"A": 0.5, "B": None}, 0.5),
        ({"A": 0.5, "B": math.nan, "C": math.inf}, 0.5),
        ({"A": None}, None),
        ({}, None),
    ],
)
def test_the_mean_validation_leaves_out_what_is_undefined(scores, mean):
    assert mean_validation(scores) == (None if mean is None else pytest.approx(mean))


def test_results_hold_the_best_and_the_final_model(run, numbers):
    results, _ = written_results(run, {site: evaluation(site, numbers) for site in run.expected})
    assert (results.best_round, results.rounds, results.method, results.demo) == (1, 3, "harmofl", False)
    assert results.best_reason == (
        "highest mean validation dice over sites: 0.250 at 2 of 3 sites (untrained model: 0.250); two models are "
        "compared at the sites that scored both"
    )
    assert results.best_sites == ["A", "B"]
    # A: (0.9 + 0.7) / 2, B: (0.5 + 0.6) / 2 with one undefined, C: 0.4
    assert {site: result.test["dice"].mean for site, result in results.sites.items()} == {
        "A": pytest.approx(0.8),
        "B": pytest.approx(0.55),
        "C": pytest.approx(0.4),
    }
    assert results.mean_over_sites["dice"] == pytest.approx((0.8 + 0.55 + 0.4) / 3)
    assert results.mean_over_sites_final_model["dice"] == pytest.approx((0.2 + 0.2 + 0.0) / 3)
    assert results.sites["A"].test_final_model["dice"].mean == pytest.approx(0.2)
    assert results.worst_site is not None
    assert (results.worst_site.site, results.worst_site.mean) == ("C", pytest.approx(0.4))
    assert results.experiment_hash == run.experiment.hash
    assert results.sites_expected == ["A", "B", "C"]
    assert results.sites_accepted == [["A", "B", "C"], ["C", "A", "B"], ["A", "B"]]
    assert results.sites["C"].rounds_accepted == 2
    assert results.sites["A"].bytes_sent == {"weights": 100, "amplitude": 8}
    assert results.sites["A"].cases_used == {"training": 5, "validation": 2, "test": 2}
    assert results.sites["A"].cases_skipped == {"geometry": 1}


def test_an_undefined_case_is_null_and_has_no_part_in_mean_and_number(run, numbers):
    results, _ = written_results(run, {site: evaluation(site, numbers) for site in run.expected})
    score = results.sites["B"].test["dice"]
    assert score.per_case == [0.5, 0.6, None]
    assert (score.n, score.undefined) == (2, 1)
    assert json.loads((run.folder / "results.json").read_text())["sites"]["B"]["test"]["dice"]["per_case"][2] is None


def test_when_the_final_model_is_the_best_one_it_is_scored_once(run, numbers):
    run.best_round = 2  # of rounds 0, 1 and 2
    results, _ = written_results(run, {site: evaluation(site, numbers, best=False) for site in run.expected})
    assert results.sites["A"].test == results.sites["A"].test_final_model
    assert results.mean_over_sites == results.mean_over_sites_final_model


def test_an_older_best_model_does_not_stand_in_for_a_final_one_that_is_better(run, numbers):
    # the best model that was sent for evaluation lost to the final one, which was validated last
    run.best_round = 2
    results, _ = written_results(run, {site: evaluation(site, numbers) for site in run.expected})
    assert results.sites["A"].test["dice"].mean == pytest.approx(0.2)


def test_a_site_that_did_not_answer_stays_in_the_results(run, numbers):
    results, lines = written_results(run, {"A": evaluation("A", numbers)})
    assert results.sites["B"].test == {}
    assert results.sites["B"].cases_used == numbers["cases"]  # as told in training
    assert results.sites_without_test == ["B", "C"]
    assert results.mean_over_sites["dice"] == pytest.approx(0.8)
    assert any("B" in line and "undefined" in line for line in lines)


def test_too_few_answers_are_a_failure_that_the_report_says_first(run, numbers):
    run.refused["B"] = "internal_error: site B failed in evaluate"
    answers = {"A": evaluation("A", numbers)}
    failure = run.shortfall(answers)
    # two sites are needed
    assert failure == (
        "evaluation: answers of 1 site, 2 needed (B: internal_error: site B failed in evaluate; "
        "C: entry w holds values that are not finite)"
    )
    assert run.shortfall({"A": {}, "B": {}}) == ""
    write_evidence(run, answers, failure)
    assert f"The run failed: {failure}." in (run.folder / "report.html").read_text()


def test_warnings_about_data_are_counts_by_code(run, numbers):
    answers = {"A": evaluation("A", numbers) | {"warnings": {"duplicate_image": 2}}, "B": evaluation("B", numbers)}
    results, _ = written_results(run, answers)
    assert [results.sites[site].data_warnings for site in "AB"] == [{"duplicate_image": 2}, {}]


def test_a_site_that_tells_some_of_its_limits_does_not_end_the_report(run, numbers):
    told = {"A": {"limits": {"rounds": 5}}, "B": {"limits": {"case_scores": False}}, "C": {}}
    written_results(run, {site: evaluation(site, numbers) | more for site, more in told.items()})
    page = (run.folder / "report.html").read_text()
    assert "<dd>rounds 5</dd>" in page and "<dd>case_scores false</dd>" in page
    assert "scores of single cases where" in page


def test_nobody_answered(run):
    results, lines = written_results(run, {})
    assert results.worst_site is None
    assert results.mean_over_sites == {}
    assert results.sites_without_test == ["A", "B", "C"]
    assert any("mean" in line and "undefined" in line for line in lines)


def test_a_site_whose_cases_are_all_undefined_is_no_worst_site(run, numbers):
    answers = {site: evaluation(site, numbers) for site in run.expected}
    answers["C"]["test"]["best"]["dice"] = [math.nan]
    results, _ = written_results(run, answers)
    assert results.sites["C"].test["dice"].mean is None
    assert results.worst_site is not None
    assert results.worst_site.site == "B"
    assert results.sites_without_test == ["C"]
    assert results.mean_over_sites["dice"] == pytest.approx((0.8 + 0.55) / 2)


def test_of_two_equally_bad_sites_the_first_by_name_is_the_worst(run, numbers):
    answers = {site: evaluation(site, numbers) for site in ("C", "B", "A")}
    for site in ("B", "C"):
        answers[site]["test"]["best"]["dice"] = [0.3]
    results, _ = written_results(run, answers)
    assert results.worst_site is not None
    assert results.worst_site.site == "B"


def test_without_any_best_round_the_last_one_is_named(run, numbers):
    run.best_round, run.best_score, run.best_scores = None, None, {}
    results, _ = written_results(run, {"A": evaluation("A", numbers, best=False)})
    assert (results.best_round, results.best_sites) == (2, [])
    assert results.best_reason.startswith(
        "no model has a validation dice, so the last one counts (untrained model: 0.250)"
    )


def test_hashes_and_versions(run, numbers):
    results, _ = written_results(run, {"A": evaluation("A", numbers)})
    assert results.model_sha256 == {
        name: hashlib.sha256(name.encode()).hexdigest() for name in (BEST_MODEL, FINAL_MODEL)
    }
    assert {"harmofl", "nvflare", "torch", "monai", "numpy", "python"} <= set(results.versions)
    assert "unknown" not in results.versions.values()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_amplitude_and_who_sent_it(run, numbers, frozen):
    if frozen:
        run.amplitude, run.amplitude_sites = AmplitudeStatistic(numbers, 40), ["A", "B"]
    results, _ = written_results(run, {"A": evaluation("A", numbers)})
    if frozen:
        assert results.amplitude is not None
        assert (results.amplitude.sites, results.amplitude.images) == (["A", "B"], 40)
    else:
        assert results.amplitude is None
    assert [results.sites[site].amplitude_sent for site in "ABC"] == [frozen, frozen, False]


def test_noise_is_recorded_for_sites_whose_amplitude_is_in_the_mean(run, numbers):
    noise = {"mechanism": "analytic_gaussian", "epsilon": 1, "delta": 1e-5, "clip": 5, "patients": 6, "sigma": 6.2}
    run.amplitude, run.amplitude_sites = AmplitudeStatistic(numbers, 40), ["A", "B"]
    run.amplitude_noise = {"A": noise, "C": noise}
    run.amplitude_patients = {"A": 6, "B": 7, "C": 6}
    results, _ = written_results(run, {"A": evaluation("A", numbers)})
    assert results.sites["A"].amplitude_noise is not None and results.sites["A"].amplitude_noise.model_dump() == noise
    assert [results.sites[site].amplitude_noise for site in "BC"] == [None, None]
    assert [results.sites[site].amplitude_patients for site in "ABC"] == [6, 7, None]
    assert results.privacy.startswith("the amplitude of 1 of the 2 sites that sent one is (epsilon, delta)")


def test_what_the_ledgers_counted_is_recorded_by_site(run, numbers):
    counts = {"new": 2, "repeated": 1, "withheld": 0}
    results, _ = written_results(run, {"A": evaluation("A", numbers) | {"releases": counts}})
    assert results.sites["A"].releases == counts and results.sites["B"].releases == {}


def test_what_each_site_computed_in_is_recorded(run, numbers):
    told = {
        "A": evaluation("A", numbers) | {"precision": "tf32"},
        "B": evaluation("B", numbers) | {"precision": "float32"},
    }
    results, _ = written_results(run, told)
    assert [results.sites[site].precision for site in "ABC"] == ["tf32", "float32", None]


def test_the_screen_shows_every_site_and_where_the_files_are(run, numbers):
    _, lines = written_results(run, {site: evaluation(site, numbers) for site in run.expected})
    shown = "\n".join(lines)
    assert "by site: mean, 95 % interval over patients, patients tested" in shown
    assert "A            0.800  0.900 0.700 (too few for an interval) 2" in shown
    assert "C            0.400" in shown
    assert "worst        0.400  C" in shown
    for name in ("results.json", "report.html", BEST_MODEL, FINAL_MODEL):
        assert str(run.folder / name) in shown
    assert (run.folder / "report.html").is_file()


def test_patients_are_the_units_of_what_a_site_sends(run, numbers):
    sent = evaluation("A", numbers)
    sent["test"]["best"]["dice"] = [0.65, 0.75, 0.7, 0.9, 0.9, 0.9]
    sent["test"]["best"]["published_dice"] = [0.5] * 6
    sent["patients"] = {"best": [0, 0, 1, 1, 2, 2]}
    told = {"value": 0.75, "low": math.nan, "high": math.nan, "n": 8, "patients": 2, "no_interval": "too_few"}
    sent["pooled"] = {"best": {"accuracy": told | {"by_patient": [[2, 4], [4, 4]]}}}
    results, lines = written_results(run, {"A": sent})
    held = read_results(run.folder / "results.json").sites["A"].test
    # patients with the means 0.7, 0.8 and 0.9: bounds by hand in tests/unit/core/test_scores.py
    assert (held["dice"].low, held["dice"].high) == (
        pytest.approx(0.458523, abs=1e-6),
        pytest.approx(0.949735, abs=1e-6),
    )
    assert (held["dice"].patients, held["dice"].n, held["dice"].patient_of_case) == (3, 6, [0, 0, 1, 1, 2, 2])
    assert held["published_dice"].no_interval == "no_spread"
    assert (held["accuracy"].low, held["accuracy"].no_interval) == (None, "too_few")
    assert held["accuracy"].by_patient == [(2, 4), (4, 4)] and held["accuracy"].points == [0.5, 1.0]
    assert any(line == "  A            0.800  [0.459, 0.950]   3" for line in lines)


def test_the_record_survives_a_checkpoint(run):
    kept = json.loads(json.dumps(run.record()))
    assert kept["best_round"] == 1
    assert [record["round"] for record in kept["rounds"]] == [2]
    assert kept["bytes_sent"]["A"] == {"weights": 100, "amplitude": 8}


def test_what_a_reader_must_know_is_in_the_results(run, numbers):
    run.experiment = run.experiment.model_copy(
        update={"data": run.experiment.data.model_copy(update={"split": "as_published"})}
    )
    results, lines = written_results(run, {"A": evaluation("A", numbers), "B": evaluation("B", numbers)})
    assert [warning.split(":")[0].split(" from ")[0] for warning in results.warnings] == [
        "split as_published",
        "no model scores better on validation than the untrained one (0.250 against 0.250); more rounds or another "
        "training.learning_rate may help",
        "no test score",
    ]
    assert [line for line in lines if line.startswith("WARNING")] == [f"WARNING: {text}" for text in results.warnings]


def summary(mean):
    return {
        "mean": mean,
        "low": None,
        "high": None,
        "no_interval": "too_few",
        "cases": 2,
        "undefined": 0,
        "patients": 2,
    }


def test_scores_that_a_site_keeps_or_summarizes_stand_so_in_the_evidence(run, numbers):
    """A sends means, B nothing of its two test patients and no validation score, C each case: 0.4."""
    answers = {site: evaluation(site, numbers) for site in run.expected}
    limits = {"minimum_sites": 3, "case_scores": False, "regions": ["dc", "site_gain"]}
    means = {"final": {"dice": summary(0.2)}, "best": {"dice": summary(0.8)}}
    answers["A"] |= {"summaries": means, "test": {}, "limits": limits}
    few = {"validation": ["dice"], "final": ["dice"], "best": ["dice"]}
    answers["B"] |= {"not_sent": few, "test": {}, "validation": None}
    results, lines = written_results(run, answers)
    assert (results.sites["A"].test["dice"].mean, results.sites["A"].test["dice"].per_case) == (0.8, [])
    assert (results.sites["A"].test["dice"].n, results.sites["A"].limits) == (2, limits)
    assert results.sites["B"].test == {} and results.sites["B"].not_sent == few
    assert results.worst_site.site == "C" and results.sites_without_test == ["B"]
    assert results.mean_over_sites["dice"] == pytest.approx(0.6)  # (0.8 + 0.4) / 2
    assert any(line.split() == ["B", "not", "sent:", "too", "few", "patients"] for line in lines)
    assert "test dice of B not sent: too few patients" in results.warnings
    assert "validation dice of B not sent: too few patients" in results.warnings
    page = (run.folder / "report.html").read_text()
    assert "not sent: too few patients</td>" in page and "Limits in force at each site" in page
    assert "regions dc and site_gain" in page and "case_scores false" in page


def test_no_score_at_all_does_not_fail_the_books(run, numbers):
    few = {"validation": ["dice"], "final": ["dice"], "best": ["dice"]}
    answers = {site: evaluation(site, numbers) | {"test": {}, "not_sent": few} for site in run.expected}
    results, _ = written_results(run, answers)
    assert results.worst_site is None and results.sites_without_test == ["A", "B", "C"]
    assert "dice" not in results.mean_over_sites
