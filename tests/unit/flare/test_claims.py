"""What a site claims is refused beyond its bounds, by key; what honest sites of every task say is not."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from toy_answers import difference, refused, statistic

from harmofl.core.gaussian_mechanism import calibrate_sigma
from harmofl.evidence.results import NoiseStatement
from harmofl.flare.claims import _check_summaries, check_amplitude, check_numbers, note_counts
from harmofl.flare.site_limits import described_limits
from harmofl.flare.site_settings import LimitSettings
from harmofl.flare.task_header import AMPLITUDE_TASK, EVALUATE_TASK, TRAIN_TASK
from harmofl.flare.wire import MessageError, SiteNumbers, UpdateMessage
from harmofl.tasks import TaskBounds

CASES = {"training": 5, "validation": 2, "test": 2}


def problem(run, task_name, site="A", **told):
    update = UpdateMessage(numbers={"cases": CASES} | told)
    with pytest.raises(MessageError) as caught:
        check_numbers(site, update, run, task_name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# An epoch of 40 images in batches of 4: 10 steps. A volume has 1 to 1000 slices that are trained on.
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"images": 4, "steps": 1}, "images: 4 of 5 training cases, of which task prostate makes 5 to 5000"),
        ({"images": 5001, "steps": 1251}, "images: 5001 of 5 training cases"),
        ({"images": ...}, "images: None"),
        ({"cases": {}}, "cases.training: a site that trains has one at least"),
        ({"cases": {"training": 10_000_001}}, "cases.training: 10000001, at most 10000000 are taken"),
        ({"steps": 9}, "steps: 9, 40 images in batches of 4 make 10"),
        ({"steps": 11}, "steps: 11, 40 images in batches of 4 make 10"),
        ({"images": 41, "steps": 10}, "steps: 10, 41 images in batches of 4 make 11"),
        ({"skipped_steps": 10}, "skipped_steps: 10 of 10"),
        ({"loss": math.nan}, "loss: nan is not finite"),
        ({"loss": math.inf}, "loss: inf is not finite"),
        ({"loss": None}, "loss: None is not finite"),
        ({"validation": 1.01}, "validation: 1.01 does not lie in 0 to 1"),
        ({"validation": -0.01}, "validation: -0.01 does not lie"),
        ({"validation": math.inf}, "validation: inf does not lie"),
        ({"seconds": 3600.0}, "seconds: 3600, the task went out 0."),
        ({"skipped": {"geometry": 10_000_001}}, "skipped.geometry: 10000001"),
        ({"warnings": {f"code_{number}": 1 for number in range(101)}}, "warnings: 101 codes"),
        ({"test": {"final": {"dice": [1.0]}}}, "test: only the answer to the evaluation has test scores"),
    ],
)
def test_what_a_site_cannot_have_trained_is_refused_by_key_and_leaves_nothing(healthy, answer, told, said):
    aggregator, run, context = healthy()
    before = dict(run.first_counts)
    sent = answer("B", difference(9.0), **{"steps": 10} | told)
    assert said in refused(aggregator, run, context, sent)
    assert run.first_counts == before and "B" not in before
    assert aggregator.accept(answer("B", difference()), context)


@pytest.mark.parametrize("images", [5, 39, 41, 5000])
def test_any_number_of_images_that_its_cases_allow_is_taken(healthy, answer, images):
    aggregator, _, context = healthy()
    assert aggregator.accept(answer("B", difference(), images=images), context)


def test_images_of_a_round_are_those_of_its_epochs(healthy, answer):
    aggregator, run, context = healthy({"training.local_epochs": 3}, images=33, steps=9)  # 3 of ceil(11 / 4)
    assert run.first_counts["A"]["images"] == 11
    assert "steps: 27, 33 images in batches of 4 make 9" in refused(
        aggregator, run, context, answer("B", difference(9.0), images=33, steps=27)
    )
    run.refused.clear()
    assert "images: 34 in 3 epochs" in refused(
        aggregator, run, context, answer("B", difference(9.0), images=34, steps=9)
    )


def test_weights_by_samples_cannot_jump_from_round_to_round(healthy, answer):
    aggregator, run, context = healthy({"federation.weights": "samples"})
    aggregator.reset(context)
    said = refused(aggregator, run, context, answer("A", difference(9.0), images=41), "A")
    assert said == "images: 41, 40 in the round before with the same cases; start a new run"
    run.refused.clear()
    cases = {"training": 6, "validation": 2, "test": 2}
    # twice the first answer's 40, and 10
    said = refused(aggregator, run, context, answer("A", difference(9.0), images=91, cases=cases), "A")
    assert said.startswith("images: 91, 40 at first in this run")
    assert aggregator.accept(answer("A", difference(), images=90, cases=cases), context)
    # the first answer of the run stays the measure, or a site would double with every round
    aggregator.reset(context)
    cases = {"training": 7, "validation": 2, "test": 2}
    run.refused.clear()
    assert "40 at first" in refused(aggregator, run, context, answer("A", difference(9.0), images=91, cases=cases), "A")
    run.refused.clear()
    cases = {"training": 21, "validation": 2, "test": 2}
    said = refused(aggregator, run, context, answer("A", difference(9.0), images=90, cases=cases), "A")
    assert said.startswith("cases.training: 21, 5 at first in this run; a site may grow to 20")


def test_a_resumed_run_keeps_what_a_site_said_at_first(healthy):
    _, run, _ = healthy()
    assert run.record()["first_counts"] == {"A": {**CASES, "images": 40}}


def test_the_amplitude_task_counts_as_a_first_answer(make_run):
    run = make_run()
    note_counts("A", UpdateMessage(numbers={"cases": CASES}), run)
    assert "cases.training: 21" in problem(run, TRAIN_TASK, cases={"training": 21})
    assert problem(run, AMPLITUDE_TASK, steps=1) == "steps: this answer is not of training"


POOLED = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 2, "patients": 2, "no_interval": None, "by_patient": [(1, 2)]}


def pooled(name="dice", **changed):
    return {"pooled": {"final": {name: POOLED | changed}}}


SUMMARY = {"mean": 0.5, "low": 0.4, "high": 0.6, "cases": 2, "patients": 2}


def summaries(**changed):
    return {"summaries": {"final": {"dice": SUMMARY | {"no_interval": None, "undefined": 0} | changed}}}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"test": {"final": {"dice": [0.5, 1.5]}}}, "test.final.dice: 1.5 does not lie in 0 to 1"),
        ({"test": {"best": {"dice": [-0.5]}}}, "test.best.dice: -0.5 does not lie"),
        ({"test": {"final": {"dice": [math.inf]}}}, "test.final.dice: inf"),
        ({"test": {"final": {"dice": [0.5] * 3}}}, "test.final.dice: 3 scores, the site says it has 2 test cases"),
        ({"test": {"final": {"accuracy": [0.5]}}}, "test: this task has no score accuracy, only dice, published_dice"),
        ({"patients": {"final": [0, 0, 0]}}, "patients.final: 3 numbers"),
        ({"patients": {"final": [0, 2]}}, "patients.final: 3 patients"),
        ({"images": 5}, "steps: this answer is not of training"),
        (pooled("auroc"), "pooled: this task has no score auroc"),
        (pooled(value=1.5), "pooled.final.dice: 1.5"),
        (pooled(low=-0.1), "pooled.final.dice: -0.1"),
        (pooled(high=math.inf), "pooled.final.dice: inf"),
        (pooled(value=0.7), "pooled.final.dice: 0.7 does not lie in its interval, 0.4 to 0.6"),
        (pooled(low=0.55), "pooled.final.dice: 0.5 does not lie in its interval"),
        (pooled(n=3), "pooled.final.dice: 3 images"),
        (pooled(patients=3), "pooled.final.dice: 3 patients"),
        (pooled(by_patient=[(1, 1)] * 3), "pooled.final.dice: 3 parts"),
        (pooled(by_patient=[(1, 3)]), "pooled.final.dice: 3 images by patient"),
        (pooled(by_patient=[(2, 1)]), "pooled.final.dice: a patient of whom more images count"),
        (pooled(value=math.nan), "pooled.final.dice: has an interval and is undefined"),
        (summaries(mean=None), "summaries.final.dice: has an interval and is undefined"),
        (summaries(mean=None, low=0.9, high=0.1), "summaries.final.dice: undefined does not lie in its interval, 0.9"),
        ({"not_sent": {"best": ["dice"] * 101}}, "not_sent: 101 scores, at most 100 are taken"),
        ({"not_sent": {"best": ["smith"]}}, "not_sent: this task has no score smith"),
        ({"not_sent": {"final": ["dice"]}} | summaries(), "not_sent.final: dice is sent"),
        ({"not_sent": {"validation": ["dice"]}, "validation": 0.5}, "not_sent.validation: dice is sent"),
        ({"limits": {"image_sise": 64}}, "limits.image_sise: no limit that a site can have"),
        ({"limits": {"rounds": True}}, "limits.rounds: no limit"),
        ({"limits": {"rounds": 2**63 + 1}}, "limits.rounds: no limit"),
        ({"limits": {"minimum_cases": 0}}, "limits.minimum_cases: no limit"),
        ({"limits": {"minimum_cases": ["dc"]}}, "limits.minimum_cases: no limit"),
        ({"limits": {"regions": ["smith"]}}, "limits.regions: no limit"),
        ({"limits": {"regions": ["dc"] * 101}}, "limits.regions: 101 names, at most 100 are taken"),
        ({"releases": {"new": 10_000_001}}, "releases.new: more than 10000000"),
        ({"precision": "float16"}, "precision: float16, training.precision is auto"),
    ],
)
def test_scores_that_no_model_can_have_are_refused_by_key(make_run, told, said):
    assert said in problem(make_run(), EVALUATE_TASK, **told)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"validation": None},
        {"validation": math.nan},
        {"validation": 1.0, "test": {"final": {"dice": [0.0, math.nan]}}, "patients": {"final": [0, 1]}},
        pooled(),
        pooled(value=math.nan, low=math.nan, high=math.nan, n=0, patients=0, no_interval="undefined", by_patient=[]),
        pooled(low=math.nan, high=math.nan, no_interval="too_few"),
    ],
)
def test_scores_that_are_not_defined_are_taken(make_run, told):
    check_numbers("A", UpdateMessage(numbers={"cases": CASES} | told), make_run(), EVALUATE_TASK)


def test_a_task_that_names_no_scores_may_have_distances(make_run, monkeypatch):
    monkeypatch.setattr("harmofl.flare.claims.bounds_of", lambda experiment: TaskBounds())
    numbers = {"cases": CASES, "test": {"final": {"hd95_mm": [31.5]}}, "validation": 12.0}
    check_numbers("A", UpdateMessage(numbers=numbers), make_run(), EVALUATE_TASK)
    assert "does not lie in 0 to inf" in problem(make_run(), EVALUATE_TASK, test={"final": {"hd95_mm": [math.inf]}})
    names = {f"score_{number}": [0.5] for number in range(101)}
    assert problem(make_run(), EVALUATE_TASK, test={"final": names}) == "test: 101 scores, at most 100 are taken"


def test_what_a_site_says_of_its_own_limits_and_ledger_is_taken(make_run):
    in_force = described_limits(LimitSettings(), 5)
    for told in (in_force, {"rounds": 5}, {"regions": [], "case_scores": True}):  # an earlier version may know fewer
        numbers = {"cases": CASES, "limits": told, "releases": {"new": 2, "withheld": 1}}
        check_numbers("A", UpdateMessage(numbers=numbers), make_run(), EVALUATE_TASK)
    silent = {"cases": CASES, "not_sent": {"validation": ["dice"], "best": ["dice", "published_dice"]}}
    check_numbers("A", UpdateMessage(numbers=silent), make_run(), EVALUATE_TASK)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mean": 1.5}, "summaries.final.dice: 1.5 does not lie in 0 to 1"),
        ({"low": 0.55}, "summaries.final.dice: 0.5 does not lie in its interval, 0.55 to 0.6"),
        ({"cases": 3}, "summaries.final.dice: 3 cases, the site says it has 2 test cases"),
        ({"patients": 3}, "summaries.final.dice: 3 patients, the site says it has 2 cases"),
    ],
)
def test_a_summary_in_the_place_of_scores_of_cases_is_bounded_as_they_are(changed, said):
    numbers, bounds = SiteNumbers(cases=CASES), TaskBounds(scores={"dice": 1.0})
    _check_summaries({"final": {"dice": SimpleNamespace(**SUMMARY)}}, numbers, bounds)
    undefined = SimpleNamespace(**SUMMARY | {"mean": None, "low": None, "high": None})
    _check_summaries({"final": {"dice": undefined}}, numbers, bounds)
    with pytest.raises(MessageError, match=said):
        _check_summaries({"final": {"dice": SimpleNamespace(**SUMMARY | changed)}}, numbers, bounds)


def amplitude_problem_of(run, sent, **told):
    with pytest.raises(MessageError) as caught:
        check_amplitude(sent, UpdateMessage(numbers={"cases": CASES} | told), run)
    return str(caught.value)


def test_an_amplitude_stands_on_no_more_images_and_patients_than_the_site_has(make_run):
    run = make_run()
    check_amplitude(statistic(run, -2.0, images=5000), UpdateMessage(numbers={"cases": CASES}), run)
    assert "mean of 5001 images, the site has at most 5000" in amplitude_problem_of(run, statistic(run, -2.0, 5001))
    assert "of 41 images, the site has at most 40" in amplitude_problem_of(run, statistic(run, -2.0, 41), images=40)
    assert "of 6 patients and 5 training cases" in amplitude_problem_of(run, statistic(run, -2.0, 40, patients=6))


@pytest.mark.parametrize("counts", [{"new": 1, "withheld": 1}, {"new": 1, "repeated": 1}])
def test_an_amplitude_of_an_earlier_set_may_be_of_patients_who_left(make_run, counts):
    """A site whose set lost a patient sends that of the earlier, larger one: see harmofl.flare.releases."""
    run = make_run()
    told = UpdateMessage(numbers={"cases": CASES, "images": 40, "releases": counts})
    check_amplitude(statistic(run, -2.0, 48, patients=6), told, run)
    # twice 5 and 10
    assert "of 21 patients" in amplitude_problem_of(run, statistic(run, -2.0, 48, patients=21), releases=counts)
    assert "at most 20000" in amplitude_problem_of(run, statistic(run, -2.0, 20001), images=40, releases=counts)


# 64 x 64 pixels in 0 to 1: at most 4096 at zero frequency; the log profile of a z-scored image is at most about 3.5
@pytest.mark.parametrize(
    ("changes", "possible", "beyond"),
    [
        ({"amplitude.preset": "as_described"}, 1.0, 5000.0),
        ({"amplitude.preset": "as_published"}, 1.0, 5000.0),
        ({"amplitude.region": "dc", "amplitude.intensity": "window"}, 4096.0, 4200.0),
        ({}, -2.0, 5.0),
    ],
)
def test_an_amplitude_that_no_image_has_is_refused_with_its_weights(make_run, changes, possible, beyond):
    run = make_run(changes)
    check_amplitude(statistic(run, possible), UpdateMessage(numbers={"cases": CASES}), run)
    assert amplitude_problem_of(run, statistic(run, beyond)).startswith("amplitude: ")


def test_an_impossible_amplitude_leaves_nothing_in_the_round(healthy, answer):
    aggregator, run, context = healthy({"amplitude.preset": "as_published"})
    said = refused(aggregator, run, context, answer("B", difference(9.0), amplitude=statistic(run, 1e6)))
    assert said.startswith("amplitude: 1e+06 at zero frequency")
    gathered = aggregator.gathered_amplitude()
    assert gathered is None or gathered.sites == []


def noise_of(run, *, epsilon=1.0, clip=0.8, patients=5, sigma=None):
    scale = math.sqrt(3 * 11)  # site_gain at 64 x 64: 3 channels of 11 bins
    distance = clip * scale
    sigma = calibrate_sigma(epsilon, 1e-5, 2 * distance / patients) if sigma is None else sigma
    return NoiseStatement(
        mechanism="analytic_gaussian", epsilon=epsilon, delta=1e-5, clip=distance, patients=patients, sigma=sigma
    )


def test_noise_widens_the_bounds_only_as_far_as_it_was_due(make_run):
    run = make_run()
    told = UpdateMessage(numbers={"cases": CASES})
    generator = np.random.default_rng(0)
    noise = noise_of(run)
    noised = statistic(run, 0.0, patients=5, noise=noise)
    noised.values[:] = noise.sigma * generator.standard_normal(noised.values.shape)
    assert noised.values.max() > 5, "more than an image has"
    check_amplitude(noised, told, run)
    for bad, said in (
        (noise_of(run, sigma=1.0), "what it says of itself makes"),
        (noise_of(run, clip=2.1), "clip 12.0636 is more than 2 times the scale"),
        (noise_of(run, epsilon=0.01), "hides it, at most 20 times the scale"),
    ):
        assert said in amplitude_problem_of(run, statistic(run, 0.0, patients=5, noise=bad))
    assert "a log profile of" in amplitude_problem_of(run, statistic(run, 9 * noise.sigma + 6, noise=noise))
