"""Median and trimmed mean against NumPy's median and Python's sort, whatever the order of arrival."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.core.contributions import ContributionError
from harmofl.core.coordinatewise import CoordinatewiseMean
from harmofl.core.server_rules import ServerRule
from harmofl.experiment import FederationSettings, TrainingSettings


def contribution(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return {
        "large": (scale * generator.standard_normal(70_001)).astype(np.float32),
        "small": (scale * generator.standard_normal((2, 3))).astype(np.float32),
        "scalar": np.array(scale * generator.standard_normal(), np.float32),
        "half": (generator.standard_normal(4)).astype(np.float16),
        "count": np.array(seed, np.int64),
    }


def combined(sent, share=None):
    mean = CoordinatewiseMean(sent[0], frozenset(), share)
    for one in sent:
        mean.add(one, 1)
    return mean.mean()


@pytest.mark.parametrize("sites", [3, 4, 5, 8])
def test_the_median_is_numpy_s(sites):
    sent = [contribution(seed) for seed in range(sites)]
    for name, value in combined(sent).items():
        rows = np.stack([one[name] for one in sent]).astype(np.float64)
        expected = rows.max(axis=0) if name == "count" else np.median(rows, axis=0)
        assert value.dtype == sent[0][name].dtype and value.shape == sent[0][name].shape
        np.testing.assert_array_equal(value, expected.astype(value.dtype))


# at least one at each end; floor(0.2 * 9) is 1, floor(0.4 * 8) is 3
@pytest.mark.parametrize(("sites", "share", "cut"), [(3, 0.1, 1), (5, 0.2, 1), (9, 0.2, 1), (10, 0.2, 2), (8, 0.4, 3)])
def test_the_trimmed_mean_leaves_the_same_number_out_at_both_ends(sites, share, cut):
    sent = [contribution(seed) for seed in range(sites)]
    found = combined(sent, share)
    for name in ("large", "small", "scalar"):
        rows = [np.ravel(one[name]).tolist() for one in sent]
        # by Python's own sort, value by value
        middles = [sorted(column)[cut : sites - cut] for column in zip(*rows, strict=True)]
        expected = [sum(middle) / len(middle) for middle in middles]
        np.testing.assert_allclose(np.ravel(found[name]), expected, rtol=1e-6, atol=1e-9)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=5), st.sampled_from([None, 0.2, 0.4]))
def test_the_order_of_arrival_changes_no_bit(values, share):
    results = {
        combined([{"w": np.array([value], np.float32)} for value in order], share)["w"].tobytes()
        for order in itertools.permutations(values)
    }
    assert len(results) == 1


def test_one_of_three_cannot_move_the_median_out_of_the_others():
    honest = [contribution(seed) for seed in range(2)]
    floats = ("large", "small", "scalar")
    hostile = {name: np.full_like(honest[0][name], -(2.0**60)) for name in floats}
    honest = [{name: one[name] for name in hostile} for one in honest]
    found = combined([*honest, hostile])
    for name in floats:
        np.testing.assert_array_equal(found[name], np.minimum(honest[0][name], honest[1][name]))


def test_what_was_received_may_be_written_to_afterwards():
    sent = [contribution(seed) for seed in range(3)]
    expected = {name: value.copy() for name, value in combined(sent).items()}
    mean = CoordinatewiseMean(sent[0])
    for one in sent:
        mean.add(one, 1)
        for value in one.values():
            value[...] = 0
    assert all(np.array_equal(value, expected[name]) for name, value in mean.mean().items())


def test_weights_do_not_count():
    sent, mean = [contribution(seed) for seed in range(3)], CoordinatewiseMean(contribution(0))
    for one, weight in zip(sent, (1, 50, 1000), strict=True):
        mean.add(one, weight)
    found, expected = mean.mean(), combined(sent)
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_two_contributions_are_too_few():
    with pytest.raises(ContributionError, match="2 of at least 3 contributions came"):
        combined([contribution(0), contribution(1)])


@pytest.mark.parametrize("refused", [{"large": 1}, {"small": np.full((2, 3), np.nan, np.float32)}])
def test_a_refused_contribution_is_not_held(refused):
    mean = CoordinatewiseMean(contribution(0))
    with pytest.raises(ContributionError):
        mean.add(contribution(1) | refused, 1)
    for seed in range(3):
        mean.add(contribution(seed), 1)
    assert np.array_equal(mean.mean()["large"], combined([contribution(seed) for seed in range(3)])["large"])


def opened(aggregation, optimizer="average", **more):
    settings = FederationSettings(
        rounds=1, minimum_sites=3, aggregation=aggregation, server_optimizer=optimizer, **more
    )
    training = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=1)
    return ServerRule(settings, training, frozenset({"w"}))


@pytest.mark.parametrize(("aggregation", "expected"), [("mean", 4.0), ("median", 2.0), ("trimmed_mean", 2.0)])
@pytest.mark.parametrize("optimizer", ["average", "adam"])
def test_every_rule_of_the_server_takes_any_aggregation(aggregation, expected, optimizer):
    weights = {"w": np.full(2, 1.0, np.float32), "variance": np.ones(1, np.float32)}
    rule = opened(aggregation, optimizer, norm_bound=None)
    mean = rule.open_round(weights)
    for value in (1.0, 2.0, 9.0):
        mean.add({"w": np.full(2, value, np.float32), "variance": np.full(1, value, np.float32)}, 1, 1)
    difference = mean.mean()
    assert difference["w"].tolist() == [expected] * 2 and difference["variance"].tolist() == [expected]
    moved = rule.next_model(weights, difference)
    assert moved["variance"].tolist() == [1 + expected]
    # Adam's first step is the rate, 1, but for epsilon 0.001 beside the gradient
    step = expected if optimizer == "average" else expected / (expected + 1e-3)
    assert moved["w"] == pytest.approx(1 + step, rel=1e-6)


def test_a_long_difference_is_scaled_before_it_is_held():
    mean = opened("median").open_round({"w": np.full(1, 5.0, np.float32)}, 0.1, first=False)
    for value in (8.0, 16.0, 4.0):  # the bound is 1, a usual one 0.1
        mean.add({"w": np.full(1, value, np.float32)}, 1, 1)
    assert mean.mean()["w"].tolist() == pytest.approx([0.1])
