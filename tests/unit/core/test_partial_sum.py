"""Partial sums: any tree gives the bits of the flat sum, and one from outside is checked before any of it is added."""

import json
from dataclasses import replace

import numpy as np
import pytest

from harmofl.core.aggregation import StreamingMean
from harmofl.core.contributions import ContributionError
from harmofl.core.grid_sum import PIECE
from harmofl.core.partial_sum import PartialSum
from harmofl.core.server_rules import ServerRule
from harmofl.experiment import FederationSettings, TrainingSettings

TREES = 100
PARAMETERS = frozenset({"conv.weight", "conv.bias"})
VARIANCES = frozenset({"norm.running_var"})


def model():
    """Before round 0: biases are all zero, as half of the entries are."""
    generator = np.random.default_rng(0)
    return {
        "conv.weight": (0.05 * generator.standard_normal((2, PIECE // 2 + 50))).astype(np.float32),
        "conv.bias": np.zeros(3, np.float32),
        "norm.running_var": np.ones(3, np.float32),
        "norm.running_mean": np.zeros(3, np.float32),
        "norm.count": np.array(7, np.int64),
    }


def differences(count, seed=1):
    """As of training, some running variances far beyond their scale, and one site that is 1e12 long."""
    generator = np.random.default_rng(seed)
    sent = []
    for index in range(count):
        one = {
            name: (1e-2 * generator.standard_normal(value.shape)).astype(np.float32) for name, value in model().items()
        }
        one["norm.running_var"] = generator.uniform(0, 10.0 ** (index % 6), 3).astype(np.float32)
        one["norm.count"] = np.array(index % 4, np.int64)
        sent.append(one)
    sent[-1]["conv.bias"] = np.full(3, 1e12, np.float32)
    return sent


def round_mean(optimizer="average", norm_bound=None, usual=None):
    settings = FederationSettings(rounds=1, minimum_sites=1, server_optimizer=optimizer, norm_bound=norm_bound)
    training = TrainingSettings(optimizer="sgd", learning_rate=0.1, momentum=0.9, batch_size=1)
    rule = ServerRule(settings, training, PARAMETERS, VARIANCES)
    return rule.open_round(model(), usual, first=usual is None)


def bits(mean):
    return b"".join(np.asarray(value).tobytes() for _, value in sorted(mean.items()))


def passed_on(partial):
    """As another process would have it."""
    message = partial.message()
    numbers = json.loads(json.dumps({key: message[key] for key in ("count", "weight", "weighted_steps", "exponents")}))
    arrays = {
        key: {name: np.frombuffer(value.tobytes(), value.dtype).reshape(value.shape) for name, value in part.items()}
        for key, part in message.items()
        if key not in numbers
    }
    return PartialSum.from_message({**numbers, **arrays})


def by_tree(opened, sites, generator):
    """The mean of sites that are shared out among relays at random, whose sums are merged in pairs at random."""
    held = []
    for indices in np.array_split(generator.permutation(len(sites)), generator.integers(2, len(sites) + 1)):
        relay = opened()
        for index in indices:
            relay.add(*sites[index])
        held.append((relay, [sites[index][2] for index in indices]))
    while len(held) > 1:
        above, steps = opened(), []
        for _ in range(2):
            below, taken = held.pop(generator.integers(len(held)))
            above.merge(passed_on(below.partial()), taken)
            steps += taken
        held.append((above, steps))
    return held[0][0]


@pytest.mark.parametrize("optimizer", ["average", "nova"])
@pytest.mark.parametrize("norm_bound", [None, 10.0])
def test_a_hundred_trees_and_orders_give_the_bits_of_the_flat_sum(optimizer, norm_bound):
    generator = np.random.default_rng(2)
    weights, steps = generator.integers(1, 10**6, 7).tolist(), generator.integers(1, 500, 7).tolist()
    sites = list(zip(differences(7), weights, steps, strict=True))
    if norm_bound is None:
        sites[-1][0]["conv.bias"][:] = 1e3  # there 1e12 times 500,000 images would fit, and leave nothing of the rest

    def opened():
        return round_mean(optimizer, norm_bound, usual=None if norm_bound is None else 0.02)

    flat = opened()
    for site in sites:
        flat.add(*site)
    expected = bits(flat.mean())
    for _ in range(TREES):
        assert bits(by_tree(opened, sites, generator).mean()) == expected
    parts = flat.partial()
    assert parts.count == 7 and parts.weight == sum(weights) and "norm.running_var" in parts.high


def test_a_merged_sum_tells_norm_and_direction_of_its_mean():
    relay, root = round_mean(norm_bound=10.0, usual=0.02), round_mean(norm_bound=10.0, usual=0.02)
    sent = differences(3)[:2]
    for one, weight in zip(sent, (1, 3), strict=True):
        relay.add(one, weight, 500)
    measured = root.merge(relay.partial(), [500, 500])
    mean = np.concatenate([(sent[0][name] + 3.0 * sent[1][name]).ravel() / 4 for name in sorted(PARAMETERS)])
    assert measured.norm == pytest.approx(np.linalg.norm(mean), rel=1e-5)
    assert np.linalg.norm(measured.direction) == pytest.approx(measured.norm, rel=0.2)
    assert root.count == 2


def relay_sum():
    relay = round_mean()
    for one, weight in zip(differences(4)[:3], (1, 2, 4), strict=True):
        relay.add(one, weight, 5)
    return relay.partial()


def with_entry(part, name, value):
    return lambda held: replace(held, **{part: {**getattr(held, part), name: value}})


def without_entry(part, name):
    return lambda held: replace(held, **{part: {key: v for key, v in getattr(held, part).items() if key != name}})


BIAS = np.zeros(3, np.int64)
REFUSED = {
    "no contribution": (lambda held: replace(held, count=0), "partial sum of 0 contributions"),
    "too many": (lambda held: replace(held, count=4096), "partial sum of 4096 contributions, not of 1 to 4095"),
    "true": (lambda held: replace(held, count=True), "partial sum of True contributions"),
    "a fraction": (lambda held: replace(held, weight=7.0), "7.0 is no weight of 3 contributions"),
    "light": (lambda held: replace(held, weight=2), "2 is no weight of 3 contributions"),
    "heavy": (lambda held: replace(held, weight=3 * 2**40 + 1), "is no weight of 3 contributions"),
    "steps": (lambda held: replace(held, weighted_steps=-1), "weighted steps"),
    "missing": (without_entry("low", "conv.bias"), "misses entries: conv.bias"),
    "missing maximum": (without_entry("maxima", "norm.count"), "misses entries: norm.count"),
    "missing exponent": (without_entry("exponents", "conv.bias"), "misses entries: conv.bias"),
    "unknown": (with_entry("low", "head", BIAS), "has unknown entries: head"),
    "unknown far": (with_entry("high", "norm.count", BIAS), "has unknown entries: norm.count"),
    "other scale": (with_entry("exponents", "conv.bias", 1), r"conv.bias was summed with scale 2\^1, not 2\^0"),
    "text scale": (with_entry("exponents", "conv.bias", "x\n"), "conv.bias was summed with scale"),
    "shape": (with_entry("low", "conv.bias", np.zeros(4, np.int64)), r"conv.bias .*not int64 of shape \(3,\)"),
    "floats": (with_entry("low", "conv.bias", np.zeros(3)), "conv.bias .*not int64"),
    "no array": (with_entry("low", "conv.bias", [0, 0, 0]), "conv.bias .*not int64"),
    "maximum type": (with_entry("maxima", "norm.count", np.array(1, np.int32)), "norm.count .*not int64"),
    "out of range": (with_entry("low", "conv.bias", BIAS + (3 * 2**51 + 1)), "conv.bias holds sums that 3"),
    "out of range below": (with_entry("low", "conv.bias", np.full(3, -(2**63))), "conv.bias holds sums that 3"),
    "far out of range": (with_entry("high", "conv.bias", BIAS + 2**62), "conv.bias holds sums that 3"),
    "variance": (
        with_entry("low", "norm.running_var", BIAS - 8 * 2**29),
        "norm.running_var would be a variance below 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_partial_sum_that_no_relay_makes_is_refused_and_leaves_no_bit(name):
    change, message = REFUSED[name]
    root = round_mean()
    root.add(differences(4)[3], 5, 5)
    before = bits(root.mean())
    with pytest.raises(ContributionError, match=message) as caught:
        root.merge(change(relay_sum()), [5, 5, 5])
    assert "\n" not in str(caught.value)
    assert bits(root.mean()) == before and root.count == 1
    root.merge(relay_sum(), [5, 5, 5])
    assert root.count == 4


def test_a_mean_longer_than_any_of_its_sites_may_be_is_refused():
    usual = 0.02
    honest, root = round_mean(norm_bound=10.0, usual=usual), round_mean(norm_bound=10.0, usual=usual)
    honest.add(differences(2)[0], 3, 10)
    held = honest.partial()
    # the limit of 10 steps is 10 * 0.02 * 10 = 2, and the weight 3
    long = with_entry("low", "conv.bias", np.array([round(3 * 2.1 * 2**29), 0, 0]))(held)
    with pytest.raises(
        ContributionError, match=r"parameters of 1 sites is .* long, above 2, which federation.norm_bound"
    ):
        root.merge(long, [10])
    wide = with_entry("low", "norm.running_var", np.array([round(3 * 18 * 2**29), 0, 0]))(held)
    # statistics may change by 10 times their norm, the root of 3
    with pytest.raises(ContributionError, match="statistics of 1 sites is 18 long, above 17.3"):
        root.merge(wide, [10])
    assert root.count == 0
    root.merge(held, [10])


def test_fednova_s_steps_must_be_those_of_the_sites():
    relay, root = round_mean("nova"), round_mean("nova")
    for one, steps in zip(differences(3)[:2], (4, 9), strict=True):
        relay.add(one, 2, steps)
    held = relay.partial()
    for steps, words in (
        ([4], "steps of 1 sites came with a sum of 2"),
        ([4, 4], "weighted steps"),
        ([9, 9], "weighted"),
    ):
        with pytest.raises(ContributionError, match=words):
            root.merge(held, steps)
    with pytest.raises(ContributionError, match="weighted steps"):
        round_mean().merge(held, [4, 9])  # only FedNova has any
    root.merge(held, [4, 9])
    assert bits(root.mean()) == bits(relay.mean())


MESSAGE = {
    "no mapping": lambda message: [message],
    "missing": lambda message: {key: value for key, value in message.items() if key != "count"},
    "one more": lambda message: message | {"more": 1},
    "number": lambda message: message | {"weighted_steps": 3},
    "digits": lambda message: message | {"weighted_steps": "1" * 41},
    "sign": lambda message: message | {"weighted_steps": "-1"},
    "other digits": lambda message: message | {"weighted_steps": "\u0663"},
    "list": lambda message: message | {"low": []},
    "text": lambda message: message | {"count": "3"},
}


@pytest.mark.parametrize("name", MESSAGE)
def test_a_message_of_another_form_is_refused(name):
    with pytest.raises(ContributionError, match="partial sum"):
        PartialSum.from_message(MESSAGE[name](relay_sum().message()))


def test_nothing_added_has_no_partial_sum_and_too_many_do_not_fit():
    with pytest.raises(ContributionError, match="no contribution was accepted"):
        round_mean().partial()
    mean = StreamingMean({"w": np.zeros(1, np.float32)})
    mean.add({"w": np.ones(1, np.float32)}, 1)
    held = mean.partial()
    with pytest.raises(ContributionError, match="at most 4095 contributions"):
        mean.merge(replace(held, count=4095, weight=4095))


def test_only_the_mean_has_partial_sums():
    settings = FederationSettings(rounds=1, minimum_sites=3, aggregation="median")
    training = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=1)
    opened = ServerRule(settings, training, PARAMETERS).open_round(model())
    with pytest.raises(ContributionError, match="only 'mean' has partial sums"):
        opened.partial()
