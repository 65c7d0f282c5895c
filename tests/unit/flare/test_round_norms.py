"""Norms and outliers of a run: what a site claims, what the record keeps, what is said when a score falls."""

import re

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from toy_answers import aggregate, difference, refused

from harmofl.core.norm_rule import SentDifference
from harmofl.core.server_rules import ServerRule
from harmofl.evidence.results import read_rounds
from harmofl.experiment import ExperimentError, resolve
from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.controller import HarmoFLScatterAndGather
from harmofl.flare.live import FAILURE_FILE, progress
from harmofl.flare.method_notes import method_notes
from harmofl.flare.persistor import save_at_the_end
from harmofl.flare.record import close_round, write_evidence
from harmofl.flare.round_norms import outlier_reasons, round_warnings
from harmofl.flare.server_run import refuse_relays
from harmofl.flare.server_store import FINAL_MODEL
from harmofl.flare.state import Checkpoint
from harmofl.flare.tracking import points

# 40 images in batches of 4 are 10 steps; the toy's difference of v has 7 values of v
NORM = 7**0.5 / 10
RUNNING = {"method": "fedavg"}


def with_toy_parameters(run):
    """Tell the rule which entries of the toy model gradients move: the experiment's network is another."""
    run.rule = ServerRule(run.experiment.federation, run.experiment.training, frozenset({"w", "scale"}))
    return run


@pytest.fixture
def federation(opened, answer, make_context):
    """Rounds of sites by the values of their differences: (run, play); `play` returns the mean of `w`."""
    _, run, context = opened(RUNNING)
    with_toy_parameters(run)

    def play(values, **told):
        aggregator = HarmoFLAggregator()
        for site, value in values.items():
            assert aggregator.accept(answer(site, difference(value), **told), context), run.refused
        mean = aggregate(aggregator, context)["w"].flat[0]
        close_round(run, len(run.rounds), sorted(values))
        return mean

    return run, play


def test_the_record_of_a_round_holds_norms_outliers_and_directions(federation):
    run, play = federation
    play({"A": 0.1, "B": 0.1, "C": 0.2})
    # the median of the round before is that of 0.1; 30 is 300 times that, and gets its length
    mean = play({"A": 0.1, "B": 0.3, "C": -30.0})
    assert mean == pytest.approx((0.1 + 0.3 - 0.1) / 3, rel=1e-5)
    first, second = read_rounds(run.folder / "round_metrics.jsonl")
    assert first.norm == pytest.approx({"A": 0.1 * NORM, "B": 0.1 * NORM, "C": 0.2 * NORM}, rel=1e-5)
    assert first.outliers == first.scaled == {} and first.fall == ""
    assert second.norm["C"] == pytest.approx(30 * NORM, rel=1e-5)
    assert second.scaled == {"C": pytest.approx(1 / 300, rel=1e-5)}
    assert list(second.outliers) == ["C"] and "is 300 times the median" in second.outliers["C"]
    # all the toy's differences are parallel: A has cosines 1 and -1
    assert second.cosine == {"A": 0.0, "B": 0.0, "C": -1.0}
    assert ("C", "norm", second.norm["C"]) in list(points(second))
    assert round_warnings(second) == [f"round 1: C is an outlier: {second.outliers['C']}"]
    assert outlier_reasons(run) == f"; outliers of round 1: C: {second.outliers['C']}"
    told = progress(run)["closed"][1]
    assert told["norms"] == [second.norm["A"], second.norm["C"]] and told["warnings"] == round_warnings(second)


def test_a_norm_that_was_scaled_does_not_widen_the_next_limit(federation):
    run, play = federation
    play({"A": 0.1, "B": 0.1, "C": 0.1})
    play({"A": -1e30, "B": -1e30, "C": 0.1})  # two of three: the median of what was sent is theirs
    assert run.rounds[1].norm["A"] > 1e29 and run.rounds[1].scaled["A"] < 1e-29
    # what was added has the length of 0.1; with what was sent there would be no limit but the norm of the model
    assert play({"A": 0.1, "B": 0.1, "C": -1e30}) == pytest.approx(0.1 / 3, rel=1e-5)


def test_steps_that_a_site_claims_do_not_lift_its_limit(opened, answer, make_context):
    _, run, context = opened(RUNNING)
    with_toy_parameters(run)

    def play(**images):
        aggregator = HarmoFLAggregator()
        for site, of in images.items():
            cases = {"training": max(5, of // 1000), "validation": 2, "test": 2}
            sent = answer(site, difference(0.1 if of == 40 else -30.0), images=of, cases=cases)
            assert aggregator.accept(sent, context), run.refused
        close_round(run, len(run.rounds), sorted(images))
        return aggregate(aggregator, context)["w"].flat[0]

    play(A=40, B=40)
    # 300 times a usual difference; 5000 images of 5 cases are 1250 steps instead of 10, of which 10 * 10 count: the
    # limit is 10 * 10 usual ones, and beyond it the length is that of 100 usual steps, 10 usual differences
    assert play(A=40, B=40, C=5000) == pytest.approx((0.1 + 0.1 - 10 * 0.1) / 3, rel=1e-5)
    assert list(run.rounds[1].outliers) == ["C"] and run.rounds[1].norm["C"] == pytest.approx(30 * NORM / 10, rel=1e-5)


def test_steps_that_no_machine_takes_are_refused(opened, answer):
    aggregator, run, context = opened(RUNNING)
    cases = {"training": 10_000_000, "validation": 2, "test": 2}
    assert not aggregator.accept(answer("A", difference(1e9), images=10**10, cases=cases), context)
    assert run.refused["A"].startswith("steps: 2500000000, the task went out 0.")


def test_without_a_bound_it_is_named_in_log_and_record(opened, answer, caplog):
    aggregator, run, context = opened(RUNNING | {"federation.norm_bound": None})
    with_toy_parameters(run)
    for site, value in {"A": 0.1, "B": 0.1, "C": 1e9}.items():
        assert aggregator.accept(answer(site, difference(value)), context)
    assert "C is an outlier in round 4: norm 2.65e+08 a step is above" in caplog.text
    record = close_round(run, 4, ["A", "B", "C"])
    assert list(record.outliers) == ["C"] and record.scaled == {}


def test_without_a_bound_what_does_not_fit_into_the_sum_is_refused_by_site_and_entry(opened, answer, caplog):
    aggregator, run, context = opened(RUNNING | {"federation.norm_bound": None})
    with_toy_parameters(run)
    assert aggregator.accept(answer("A", difference(0.1)), context)
    before = aggregate(aggregator, context)
    assert not aggregator.accept(answer("C", difference(1e30)), context)
    assert re.match(r"entry \w+ is 1e\+30 with its weight, above .*; set federation.norm_bound", run.refused["C"])
    assert "C: contribution refused: entry" in caplog.text
    after = aggregate(aggregator, context)
    assert all(np.array_equal(after[name], value) for name, value in before.items()), "the others are not harmed"


@pytest.mark.parametrize(("images", "epochs", "steps"), [(12, 1, 3), (13, 1, 4), (24, 2, 6), (26, 2, 8)])
def test_claimed_steps_are_those_that_the_images_make(opened, answer, images, epochs, steps):
    aggregator, run, context = opened(RUNNING | {"training.local_epochs": epochs})
    with_toy_parameters(run)
    for claimed in (10**6, steps + 1, steps - 1):
        assert not aggregator.accept(answer("A", difference(0.1), steps=claimed, images=images), context)
        assert run.refused.pop("A").startswith("steps: ")
    assert aggregator.accept(answer("A", difference(0.1), steps=steps, images=images), context)
    assert run.sent["A"].norm == pytest.approx(0.1 * 7**0.5 / steps, rel=1e-5)


def test_skipped_steps_moved_nothing(opened, answer):
    aggregator, run, context = opened(RUNNING)
    with_toy_parameters(run)
    assert aggregator.accept(answer("A", difference(0.1), skipped_steps=9), context)
    assert run.sent["A"].norm == pytest.approx(0.1 * 7**0.5, rel=1e-5)


def test_an_answer_without_its_images_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    reason = refused(aggregator, run, context, answer("B", difference(1.0), images=...))
    assert reason == "images: None in 1 epoch of a round"


def test_a_refused_answer_leaves_no_norm(healthy, answer):
    aggregator, run, context = healthy()
    refused(aggregator, run, context, answer("B", difference(np.nan)))
    assert set(run.sent) == {"A"}


def test_a_resumed_run_goes_on_with_the_norms_of_the_record(federation, make_run, make_context, answer, weights):
    run, play = federation
    play({"A": 0.1, "B": 0.1, "C": 0.1})
    save_at_the_end(weights, run, {"A": 0.5}, 1)
    resumed = with_toy_parameters(make_run(RUNNING))
    resumed.continue_from(Checkpoint.load(run.folder / FINAL_MODEL))
    aggregator, context = HarmoFLAggregator(), make_context(resumed)
    assert aggregator.accept(answer("A", difference(2.0)), context)
    # without the record only SGD's limit would hold: the norm of the model, which is above that of 2
    assert resumed.sent["A"].factor == pytest.approx(0.05, rel=1e-5)


def test_a_record_of_a_version_without_norms_still_reads(federation):
    run, play = federation
    play({"A": 0.1, "B": 0.1})
    old = run.rounds[0].model_dump(exclude={"norm", "scaled", "outliers", "cosine", "fall"})
    run.rounds.replace([type(run.rounds[0]).model_validate(old)])
    assert play({"A": 0.3, "B": 0.3}) == pytest.approx(0.3)


def scored(run, round_number, scores, directions=None):
    """Close a round whose model the sites scored so, with what they then sent."""
    for site, score in scores.items():
        run.numbers[site] = {"validation": score}
        held = np.array((directions or {}).get(site, (1.0, 0.0)))
        run.sent[site] = SentDifference(1.0, 1.0, "", held)
    return close_round(run, round_number, sorted(scores))


def test_a_sharp_fall_names_who_pointed_away(make_run):
    run = make_run()
    scored(run, 0, {"A": 0.6, "B": 0.7, "C": 0.65}, {"A": (1, 0.2), "B": (1, -0.2), "C": (-1, 0)})
    run.best_round, run.best_scores = 0, {"A": 0.6}
    record = scored(run, 1, {"A": 0.1, "B": 0.0, "C": 0.02})
    assert record.fall == (  # -1 / sqrt(1.04) is -0.98
        "validation fell from 0.650 to 0.040 with round 0: the differences of these sites point away from the rest: "
        "C (cosine -0.98); the best model, of round 0, stays"
    )
    assert round_warnings(record) == [f"round 1: {record.fall}"]


@pytest.mark.parametrize(
    ("before", "after", "falls"),
    [
        ({"A": 0.5, "B": 0.5}, {"A": 0.41, "B": 0.41}, False),  # a fifth of 0.5 is 0.1
        ({"A": 0.5, "B": 0.5}, {"A": 0.39, "B": 0.39}, True),
        ({"A": 0.06, "B": 0.06}, {"A": 0.02, "B": 0.02}, False),  # less than 0.05
        ({"A": 0.9, "B": 0.1}, {"B": 0.1}, False),  # only B scored both
        ({"A": 0.9, "B": None}, {"A": 0.3, "B": 0.9}, True),
        ({"A": 0.2}, {"A": 0.9}, False),
        ({"A": None}, {"A": 0.1}, False),
    ],
)
def test_what_counts_as_a_sharp_fall(make_run, before, after, falls):
    run = make_run()
    assert scored(run, 0, before).fall == ""
    assert bool(scored(run, 1, after).fall) == falls


def test_a_fall_with_all_in_one_direction_blames_nobody(make_run):
    run = make_run()
    scored(run, 0, {"A": 0.6, "B": 0.6})
    assert "no site's difference points away from the rest" in scored(run, 1, {"A": 0.1, "B": 0.1}).fall


def test_results_warn_of_outliers_and_of_the_last_model_s_fall(make_run, numbers):
    run = make_run()
    scored(run, 0, {"A": 0.6, "B": 0.6})
    run.sent["A"] = SentDifference(1e30, 1e-30, "norm 1e+30 a step", np.array([-1.0, 0.0]))
    run.numbers["A"] = run.numbers["B"] = {"validation": 0.6}
    run.sent["B"] = SentDifference(1.0, 1.0, "", np.array([1.0, 0.0]))
    close_round(run, 1, ["A", "B"])
    run.final_validation = {"A": 0.1, "B": 0.1}
    for name in ("best_FL_global_model.pt", "FL_global_model.pt"):
        (run.folder / name).write_bytes(b"")
    lines = write_evidence(run, {site: {"cases": numbers["cases"], "validation": 0.1} for site in "AB"})
    assert any("A: an outlier in 1 of 2 rounds (first: round 1: norm 1e+30 a step)" in line for line in lines)
    assert any("WARNING: validation fell from 0.600 to 0.100 with round 1" in line for line in lines)


def client(name, fqcn=None, fqsn=None, leaf=True):
    made = Client(name, "token")
    made.set_fqcn(fqcn or name)
    made.set_fqsn(fqsn or name)
    made.set_is_leaf(leaf)
    return made


@pytest.mark.parametrize(
    "behind", [client("HK", fqcn="relay-1.HK"), client("HK", fqsn="C1.HK"), client("HK", leaf=False)]
)
def test_holding_all_contributions_is_refused_behind_relays(written, behind):
    written["federation"]["minimum_sites"] = 3
    clients = [client("A"), behind, client("UCL")]
    refuse_relays(resolve(written), clients)
    written["federation"]["aggregation"] = "median"
    experiment = resolve(written)
    refuse_relays(experiment, [client("A"), client("HK")])
    with pytest.raises(ExperimentError, match=r"federation.aggregation 'median' .*\(HK: behind or above others\)"):
        refuse_relays(experiment, clients)


def test_a_run_with_a_median_says_what_it_costs(make_run, written):
    assert not any("aggregation" in note for note in method_notes(make_run()))
    notes = method_notes(make_run({"federation.aggregation": "median", "federation.minimum_sites": 3}))
    assert any("'median': every site counts the same, so that one with more images" in note for note in notes)


def test_whatever_ends_a_job_its_last_word_names_the_outliers_of_the_round_before(federation, make_context):
    run, play = federation
    play({"A": 0.1, "B": 0.1, "C": 0.1})
    play({"A": 0.1, "B": 0.1, "C": 1e30})
    controller, context = HarmoFLScatterAndGather(), make_context(run)
    controller.run = run
    context.set_prop(FLContextKey.APP_ROOT, str(run.folder), private=True, sticky=True)
    # FLARE's own words where one site more than a round can spare could not score the model
    context.set_prop(FLContextKey.EVENT_DATA, "Result from UCL is bad", private=True, sticky=False)
    controller.handle_event(EventType.FATAL_SYSTEM_ERROR, context)
    said = (run.folder / FAILURE_FILE).read_text()
    assert said.startswith(
        "Result from UCL is bad; outliers of round 1: C: norm 2.65e+29 a step is 1e+31 times the median"
    )
