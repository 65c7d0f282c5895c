"""The schema of results.json and round_metrics.jsonl: round trip, unknown keys and infinite numbers refused."""

import json
import math

import pytest
from pydantic import ValidationError

from harmofl.evidence.results import (
    NoiseStatement,
    Results,
    ResultsError,
    RoundRecord,
    ScoreSummary,
    privacy_sentence,
    read_results,
    read_rounds,
)

NOISE = NoiseStatement(mechanism="analytic_gaussian", epsilon=1, delta=1e-5, clip=5, patients=40, sigma=0.93)


def test_results_come_back(results, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(results.model_dump_json(indent=2), encoding="utf-8")
    assert read_results(path) == results


def test_results_hold_every_documented_key(results):
    # the keys that the project's first issue asks for
    documented = {
        "experiment", "method", "demo", "rounds", "best_round", "sites", "mean_over_sites", "worst_site",
        "sites_expected", "sites_accepted", "versions", "model_sha256",
    }  # fmt: skip
    held = json.loads(results.model_dump_json())
    assert documented <= set(held)
    assert {"cases_used", "cases_skipped", "test", "bytes_sent"} <= set(held["sites"]["HEALTHY"])
    assert {"mean", "low", "high", "n", "per_case"} <= set(held["sites"]["HEALTHY"]["test"]["dice"])


def test_rounds_come_back(rounds, tmp_path):
    path = tmp_path / "round_metrics.jsonl"
    path.write_text("".join(record.model_dump_json() + "\n" for record in rounds), encoding="utf-8")
    assert read_rounds(path) == rounds


@pytest.mark.parametrize("place", [(), ("sites", "HEALTHY"), ("sites", "HEALTHY", "test", "dice"), ("worst_site",)])
def test_unknown_keys_are_refused_by_name(results, tmp_path, place):
    held = json.loads(results.model_dump_json())
    inner = held
    for key in place:
        inner = inner[key]
    inner["patient"] = "x"
    path = tmp_path / "results.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(ResultsError, match=r"results\.json: .*patient: Extra inputs") as caught:
        read_results(path)
    assert "\n" not in str(caught.value)


LATER = {"best_sites", "rules"}  # keys that results of an earlier version lack


@pytest.mark.parametrize("key", [key for key in Results.model_fields if key not in LATER])
def test_every_key_of_the_results_is_needed(results, tmp_path, key):
    held = json.loads(results.model_dump_json())
    del held[key]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(ResultsError, match=f"{key}: Field required"):
        read_results(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_are_finite_or_null(bad):
    given = {"mean": 0.5, "low": None, "high": None, "n": 1, "undefined": 0, "per_case": [0.5]}
    with pytest.raises(ValidationError):
        ScoreSummary.model_validate(given | {"mean": bad})
    with pytest.raises(ValidationError):
        ScoreSummary.model_validate(given | {"per_case": [bad]})
    assert ScoreSummary.model_validate(given | {"mean": None, "per_case": [None]}).mean is None


def test_a_missing_results_file_is_named(tmp_path):
    with pytest.raises(ResultsError, match="results.json: cannot be read .*did the run finish"):
        read_results(tmp_path / "results.json")


@pytest.mark.parametrize("other", [0, 1, 3, "2"])
def test_results_of_another_format_are_refused_in_one_line(results, tmp_path, other):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(json.loads(results.model_dump_json()) | {"format": other, "new": 1}), encoding="utf-8")
    with pytest.raises(
        ResultsError, match=f"results.json: is of format {other}, this harmofl reads 2; use the version"
    ):
        read_results(path)


def test_results_from_before_the_sites_of_the_best_round_were_named_can_be_read(results, tmp_path):
    held = json.loads(results.model_dump_json())
    for key in LATER:
        del held[key]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    assert read_results(path).best_sites == []


def test_results_from_before_data_warnings_were_counted_can_be_read(results, tmp_path):
    held = json.loads(results.model_dump_json())
    for site in held["sites"].values():
        del site["data_warnings"]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    assert read_results(path) == results


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_results_file_of_another_form_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_damaged_line_of_the_rounds_is_named(rounds, tmp_path):
    path = tmp_path / "round_metrics.jsonl"
    whole = rounds[0].model_dump_json()
    path.write_text(f"{whole}\n{whole[:-30]}\n", encoding="utf-8")
    with pytest.raises(ResultsError, match="line 2"):
        read_rounds(path)
    with pytest.raises(ResultsError, match="cannot be read"):
        read_rounds(tmp_path / "other.jsonl")


def test_an_unknown_key_of_a_round_is_refused(rounds):
    with pytest.raises(ValidationError):
        RoundRecord.model_validate(rounds[0].model_dump() | {"extra": 1})


def test_without_noise_nothing_is_guaranteed():
    assert privacy_sentence(["A"], {}).startswith("no formal guarantee: no noise is added; weight differences and")
    assert privacy_sentence(["B"], {"A": NOISE}) == privacy_sentence(["B"], {}), "none of it is in the global amplitude"
    assert privacy_sentence([], {"A": NOISE}).endswith("weight differences leave a site"), "no amplitude did"


def test_with_noise_the_sentence_says_for_whom_and_what_it_leaves_out():
    other = NOISE.model_copy(update={"epsilon": 0.25})
    said = privacy_sentence(["A", "B", "C", "D"], {"A": NOISE, "B": NOISE, "D": other})
    assert said.startswith("the amplitude of 3 of the 4 sites that sent one is (epsilon, delta)-differentially private")
    assert "per patient by clipping and the analytic Gaussian mechanism, one release a run" in said
    assert "(epsilon 1, delta 1e-05: A, B; epsilon 0.25, delta 1e-05: D)" in said
    assert said.endswith("weight differences carry no noise, so the run as a whole has no formal guarantee")
