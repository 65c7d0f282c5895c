"""HarmoFLAggregator: whole contributions or nothing, whatever comes in. A10 to A17 are numbers of known pains."""

import itertools
import math

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReservedKey
from nvflare.app_common.app_constant import AppConstants
from toy_answers import aggregate, bits, difference, refused

from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.wire import ModelMessage, pack_model

SAMPLES = {"federation.weights": "samples"}


def test_the_mean_of_two_sites(healthy, answer):
    aggregator, run, context = healthy()
    assert aggregator.accept(answer("B", difference(5.0, count=9)), context) is True
    result = aggregate(aggregator, context)
    assert from_shareable(aggregator.aggregate(context)).data_kind == DataKind.WEIGHT_DIFF
    assert result["w"].tolist() == [[3.5] * 3] * 2
    assert aggregator.accepted == ["A", "B"]
    assert run.refused == {}
    # 6 values of 4 bytes, a scalar of 4, a counter of 8
    sent = run.bytes_sent["B"]
    assert (sent["weights"], sent["amplitude"]) == (36, 0) and 100 < sent["numbers"] < 1000
    assert run.numbers["B"]["loss"] == 0.5


def test_weights_by_images(healthy, answer):
    aggregator, _, context = healthy(SAMPLES, images=30)
    aggregator.accept(answer("B", difference(6.0), images=10), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[3.0] * 3] * 2  # (30 * 2 + 10 * 6) / 40


def test_equal_weights_whatever_the_images(healthy, answer):
    aggregator, _, context = healthy(images=30)
    aggregator.accept(answer("B", difference(6.0), images=10), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[4.0] * 3] * 2


def test_every_order_of_arrival_gives_the_same_bits(opened, answer):
    generator = np.random.default_rng(0)
    sent = {
        site: difference() | {"w": (generator.standard_normal((2, 3)) * scale).astype(np.float32)}
        for site, scale in (("A", 1e-6), ("B", 1.0), ("C", 1e6))
    }
    results = []
    for order in itertools.permutations(sent):
        aggregator, _, context = opened(SAMPLES)
        for site in order:
            assert aggregator.accept(answer(site, sent[site], images=7 + ord(site)), context)
        results.append(bits(aggregate(aggregator, context)))
    assert all(result == results[0] for result in results)


def test_a_new_round_starts_empty(healthy, answer):
    aggregator, _, context = healthy()
    aggregator.reset(context)
    assert (aggregator.accepted, aggregate(aggregator, context)) == ([], {})
    assert aggregator.accept(answer("A", difference(7.0)), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[7.0] * 3] * 2


def test_nothing_accepted_gives_an_empty_difference(opened):
    aggregator, _, context = opened()
    assert aggregate(aggregator, context) == {}


@pytest.mark.parametrize("round_number", [3, 5, None])
def test_a10_another_round_or_none_is_refused(healthy, answer, round_number):
    aggregator, run, context = healthy()
    reason = refused(aggregator, run, context, answer("B", difference(9.0), round_number))
    assert reason == f"answer of round {round_number} came in round 4"


def test_a10_a_second_answer_of_one_site_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    assert "second answer" in refused(aggregator, run, context, answer("A", difference(9.0)), "A")
    assert aggregator.accept(answer("B", difference(2.0)), context)


@pytest.mark.parametrize(("site", "shown"), [("Z", "Z"), (None, "unknown site")])
def test_a10_an_unknown_site_is_refused(healthy, answer, site, shown):
    aggregator, run, context = healthy()
    assert "not a site of this job" in refused(aggregator, run, context, answer(site, difference(9.0)), shown)


def test_a10_an_answer_to_another_model_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    sent = answer("B", difference(9.0), received_sha256="0" * 64)
    assert "did not train the model" in refused(aggregator, run, context, sent)


def test_an_answer_that_lacks_numbers_is_not_said_to_be_of_another_model(healthy, answer, wire):
    aggregator, run, context = healthy()
    sent = answer("B", difference(9.0), received_sha256=...)
    assert "does not say which model the site received" in refused(aggregator, run, context, sent)
    run.refused.clear()
    without = wire(DXO(DataKind.WEIGHT_DIFF, data=difference(9.0)).to_shareable())
    without.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    without.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
    assert "carries no numbers (harmofl.numbers in its meta)" in refused(aggregator, run, context, without)


@pytest.mark.parametrize("kind", [DataKind.ANALYTIC, "PICTURES"])
def test_an_answer_of_another_kind_is_refused_by_that_kind(healthy, wire, kind):
    aggregator, run, context = healthy()
    sent = wire(DXO(kind, data=difference(9.0), meta={"harmofl.numbers": {}}).to_shareable())
    sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    sent.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
    reason = refused(aggregator, run, context, sent)
    assert reason == f"the answer is of kind '{str.__str__(kind)}', which no task of HarmoFL has"


def test_a10_a_refused_site_may_answer_again(healthy, answer):
    aggregator, run, context = healthy()
    refused(aggregator, run, context, answer("B", difference(9.0), 3))
    assert aggregator.accept(answer("B", difference(4.0)), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[3.0] * 3] * 2


class Unreadable(dict):
    def items(self):
        raise OSError("/data/patients/miller.nii.gz is gone")


def test_a12_half_of_a_refused_contribution_does_not_stay(healthy, numbers):
    aggregator, run, context = healthy()
    # not serialized: nothing like it survives the wire, but a decomposer may give something that reads late
    data = Unreadable(difference(9.0))
    sent = DXO(DataKind.WEIGHT_DIFF, data=data, meta={"harmofl.numbers": numbers}).to_shareable()
    sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    sent.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
    # the message of the exception may name a file, so only its kind is kept
    assert refused(aggregator, run, context, sent) == "unreadable contribution (OSError)"


def test_a12_accepting_never_raises(healthy, answer, wire, weights):
    aggregator, run, context = healthy()
    for broken in (DXO(DataKind.METRICS, data={"a": 1}), DXO(DataKind.COLLECTION, data={"weights": {"w": 1}})):
        sent = wire(broken.to_shareable())
        sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
        sent.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
        refused(aggregator, run, context, sent)
        run.refused.clear()
    sent = wire(pack_model(ModelMessage(weights)))
    sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    sent.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
    assert "not weight differences" in refused(aggregator, run, context, sent)


def test_a12_an_answer_without_weights_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    assert "no weights" in refused(aggregator, run, context, answer("B", None))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float64(1e300), np.float16(math.inf)])
@pytest.mark.parametrize("name", ["w", "scale"])
def test_a13_values_that_are_not_finite_are_refused(healthy, answer, bad, name):
    aggregator, run, context = healthy()
    sent = difference(9.0)
    sent[name] = sent[name].astype(np.asarray(bad).dtype)
    sent[name][(0,) * sent[name].ndim] = bad
    assert f"entry {name} holds values that are not finite" in refused(aggregator, run, context, answer("B", sent))


def test_a13_one_bad_site_does_not_end_the_round(healthy, answer):
    aggregator, run, context = healthy()
    refused(aggregator, run, context, answer("B", difference(math.nan)))
    assert aggregator.accept(answer("C", difference(4.0)), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[3.0] * 3] * 2
    assert set(run.refused) == {"B"}


@pytest.mark.parametrize("changes", [{}, SAMPLES])
def test_a14_counters_take_the_maximum_and_keep_their_type(healthy, answer, changes):
    # the mean would be 11.5 with equal weights
    aggregator, _, context = healthy(changes, images=7)
    aggregator.accept(answer("B", difference(5.0, count=20), images=5), context)
    result = aggregate(aggregator, context)["count"]
    assert (result.dtype, result.shape, int(result)) == (np.int64, (), 20)


def test_a14_a_counter_sent_as_a_float_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    sent = answer("B", difference(9.0) | {"count": np.array(5.5)})
    assert "count holds float64, not int64" in refused(aggregator, run, context, sent)


@pytest.mark.parametrize("images", [0, -1, math.nan, math.inf, 2.5, True, "12", None, ..., 2**63])
def test_a16_a_number_of_images_that_is_no_weight_is_refused(healthy, answer, images):
    aggregator, run, context = healthy(SAMPLES)
    refused(aggregator, run, context, answer("B", difference(9.0), images=images))


def test_a16_when_every_weight_is_zero_nothing_is_aggregated(opened, answer):
    aggregator, run, context = opened(SAMPLES)
    for site in run.expected:
        assert not aggregator.accept(answer(site, difference(), images=0), context)
    assert (aggregator.accepted, aggregate(aggregator, context)) == ([], {})
    assert set(run.refused) == {"A", "B", "C"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sent: {"v" if name == "w" else name: value for name, value in sent.items()}, "misses entries: w"),
        (lambda sent: {f"module.{name}": value for name, value in sent.items()}, "misses entries: count, scale, w"),
        (lambda sent: {name: value for name, value in sent.items() if name != "count"}, "misses entries: count"),
        (lambda sent: sent | {"head": np.zeros(1, np.float32)}, "has unknown entries: head"),
        (lambda sent: sent | {"w": sent["w"].T.copy()}, "w has shape (3, 2), not (2, 3)"),
        (lambda sent: {}, "misses entries: count, scale, w"),
    ],
)
def test_a17_other_names_or_shapes_are_refused_by_name(healthy, answer, change, words):
    aggregator, run, context = healthy()
    assert words in refused(aggregator, run, context, answer("B", change(difference(9.0))))


def test_a_first_contribution_that_is_refused_leaves_nothing(opened, answer):
    aggregator, run, context = opened()
    assert not aggregator.accept(answer("A", {"w": np.zeros(1)}), context)
    assert aggregate(aggregator, context) == {}
    assert aggregator.accept(answer("B", difference(4.0)), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("told", [{"steps": "many"}, {"steps": None}, {"seconds": math.nan}, {"skipped_steps": [1]}])
def test_numbers_that_cannot_be_recorded_do_not_break_the_round(opened, answer, numbers, told):
    aggregator, run, context = opened()
    # a site of another version does not check what it sends
    sent = DXO(DataKind.WEIGHT_DIFF, data=difference(), meta={"harmofl.numbers": numbers | told}).to_shareable()
    sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    sent.set_peer_props({ReservedKey.IDENTITY_NAME: "A"})
    assert not aggregator.accept(sent, context)
    assert next(iter(told)) in run.refused["A"]


def test_without_a_run_the_wiring_is_named(make_context, answer):
    with pytest.raises(RuntimeError, match="HarmoFLScatterAndGather must be the workflow"):
        HarmoFLAggregator().accept(answer("A", difference()), make_context(None))
