"""Mean, FedNova and FedAdam against closed forms and against the published algorithms in float64 NumPy. C11."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from harmofl.core.aggregation import StreamingMean
from harmofl.core.contributions import ContributionError
from harmofl.core.server_rules import ServerRule, apply_difference, local_steps
from harmofl.experiment import FederationSettings, TrainingSettings

PARAMETERS = frozenset({"w", "b"})


def rule(optimizer="average", parameters=PARAMETERS, momentum=0.9, local="sgd", **federation):
    # none of these differences is as small as what training makes of a model; test_norm_rule.py bounds them
    federation = {"norm_bound": None} | federation
    settings = FederationSettings(rounds=1, minimum_sites=1, server_optimizer=optimizer, **federation)
    training = TrainingSettings(optimizer=local, learning_rate=0.1, momentum=momentum, batch_size=1)
    return ServerRule(settings, training, parameters)


def model(seed=0, scale=1.0):
    """Two parameters, a running mean, a counter."""
    generator = np.random.default_rng(seed)
    return {
        "w": (scale * generator.standard_normal((2, 3))).astype(np.float32),
        "b": np.asarray(scale * generator.standard_normal(), np.float32),
        "mean": (scale * generator.standard_normal(3)).astype(np.float32),
        "count": np.asarray(seed + 2, np.int64),
    }


def averaged(chosen, differences, weights, steps):
    opened = chosen.open_round(differences[0])
    for difference, weight, taken in zip(differences, weights, steps, strict=True):
        opened.add(difference, weight, taken)
    return opened.mean()


def bits(arrays):
    return {name: np.asarray(value).tobytes() for name, value in arrays.items()}


def plain(differences, weights):
    mean = StreamingMean(differences[0])
    for difference, weight in zip(differences, weights, strict=True):
        mean.add(difference, weight)
    return mean.mean()


def test_average_is_the_plain_mean_whatever_the_steps():
    differences = [model(seed) for seed in range(3)]
    assert bits(averaged(rule(), differences, [1, 2, 3], [5, 1, 9])) == bits(plain(differences, [1, 2, 3]))


def test_average_moves_by_its_rate():
    weights, difference = model(0), model(1)
    moved = rule(server_learning_rate=0.5).next_model(weights, difference)
    assert bits(moved) == bits(apply_difference(weights, difference, 0.5, PARAMETERS))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_c11_tau_is_how_far_sgd_goes_along_a_constant_gradient(momentum, steps):
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones((), dtype=torch.float64)
        optimizer.step()
    assert local_steps(steps, momentum) == pytest.approx(-float(weight.detach()), rel=1e-12)


def test_c11_tau_by_hand():
    # rho 0.9, 3 steps: the gradients count 1 + 0.9 + 0.81, 1 + 0.9 and 1 times
    assert local_steps(3, 0.9) == pytest.approx(2.71 + 1.9 + 1)
    assert local_steps(3, 0.0) == 3


@pytest.mark.parametrize("local", ["sgd", "adam"])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_c11_fednova_with_equal_steps_is_fedavg(local, steps):
    differences, weights = [model(seed) for seed in range(3)], [10, 25, 7]
    nova = averaged(rule("nova", local=local), differences, weights, [steps] * 3)
    for name, expected in plain(differences, weights).items():
        # divided by tau and multiplied again in float64: at most one unit of float32 from rounding another way
        np.testing.assert_allclose(nova[name], expected, rtol=2e-7, atol=0)
        assert nova[name].dtype == expected.dtype


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_is_the_published_formula(momentum):
    differences, weights, steps = [model(seed) for seed in range(4)], [3, 1, 4, 2], [1, 5, 2, 9]
    nova = averaged(rule("nova", momentum=momentum), differences, weights, steps)
    # Wang et al. 2020, Eq 5 and section 4: p_i = n_i / n, tau_i as the sum of the gradients' factors
    shares = np.array(weights) / sum(weights)
    taus = np.array([sum(sum(momentum**j for j in range(k)) for k in range(1, taken + 1)) for taken in steps])
    for name in PARAMETERS:
        parts = [p / tau * d[name].astype(float) for p, tau, d in zip(shares, taus, differences, strict=True)]
        expected = (shares * taus).sum() * np.sum(parts, axis=0)
        np.testing.assert_allclose(nova[name], expected, rtol=1e-6)


@pytest.mark.parametrize("steps", [(1, 3), (60_000, 5), (65_536, 65_536)])
def test_fednova_s_mean_is_as_near_as_the_plain_one(steps):
    """Divided by tau, rounded and multiplied by the mean tau: within 2^-30 scales up to 65,536 steps."""
    generator = np.random.default_rng(3)
    sent = [(1e-3 * generator.standard_normal(500)).astype(np.float32) for _ in steps]
    opened = rule("nova", frozenset({"w"}), momentum=0.0).open_round({"w": np.full(500, 0.05, np.float32)})
    for value, taken in zip(sent, steps, strict=True):
        opened.add({"w": value}, 1, taken)
    found = opened.mean()["w"]
    for index in range(500):
        parts = [Fraction(float(value[index])) / taken for value, taken in zip(sent, steps, strict=True)]
        exact = Fraction(sum(steps), 2) * sum(parts) / 2
        # 2^-53 of each product and half a digit of the float32 come on top
        slack = Fraction(1, 2**24) * abs(exact) + Fraction(1, 2**40)
        assert abs(Fraction(float(found[index])) - exact) <= Fraction(1, 2**30) + slack


def test_c11_running_statistics_and_counters_are_no_sums_of_gradients():
    differences, weights = [model(seed) for seed in range(3)], [1, 2, 1]
    nova, mean = averaged(rule("nova"), differences, weights, [1, 5, 30]), plain(differences, weights)
    assert bits(nova)["mean"] == bits(mean)["mean"]
    assert int(nova["count"]) == 4 and nova["count"].dtype == np.int64, "the maximum of 2, 3 and 4"
    assert not np.allclose(nova["w"], mean["w"])


def test_fednova_with_adam_counts_steps():
    differences, weights = [model(seed) for seed in range(2)], [1, 1]
    nova = averaged(rule("nova", local="adam", momentum=0.9), differences, weights, [2, 6])
    # taus 2 and 6, their mean 4: 4 * (d0 / 2 + d1 / 6) / 2
    expected = differences[0]["w"].astype(float) + differences[1]["w"].astype(float) / 3
    np.testing.assert_allclose(nova["w"], expected, rtol=1e-6)


def test_fednova_does_not_depend_on_the_order_of_arrival():
    sent = [(model(seed, 10.0**seed), weight, taken) for seed, weight, taken in ((0, 3, 1), (1, 7, 7), (2, 9, 3))]
    results = {str(bits(averaged(rule("nova"), *zip(*order, strict=True)))) for order in itertools.permutations(sent)}
    assert len(results) == 1


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, None])
def test_fednova_refuses_what_is_no_number_of_steps(steps):
    opened = rule("nova").open_round(model())
    with pytest.raises(ContributionError, match="number of training steps"):
        opened.add(model(1), 1, steps)
    assert opened.count == 0
    opened.add(model(2), 1, 4)
    np.testing.assert_allclose(opened.mean()["w"], model(2)["w"], rtol=2e-7)


@pytest.mark.parametrize("optimizer", ["average", "nova"])
def test_a_refused_difference_leaves_no_trace(optimizer):
    opened = rule(optimizer).open_round(model())
    opened.add(model(1), 1, 3)
    for broken in (model(2) | {"w": np.full((2, 3), np.nan, np.float32)}, {"w": model()["w"]}, model() | {"w": "x"}):
        with pytest.raises(ContributionError):
            opened.add(broken, 1, 3)
    assert opened.count == 1
    np.testing.assert_allclose(opened.mean()["w"], model(1)["w"], rtol=2e-7)


def test_nothing_added_has_no_mean():
    with pytest.raises(ContributionError, match="no contribution"):
        rule("nova").open_round(model()).mean()


def quadratic_sites(chosen, rounds=600):
    """Two sites with losses (x - 0)^2 / 2 and (x - 1)^2 / 2 that take 1 and 5 plain steps of 0.01 a round."""
    weights = {"w": np.full(1, 3.0, np.float32)}
    for _ in range(rounds):
        opened = chosen.open_round(weights)
        for optimum, steps in ((0.0, 1), (1.0, 5)):
            moved = optimum + (weights["w"].astype(float) - optimum) * 0.99**steps
            opened.add({"w": (moved - weights["w"]).astype(np.float32)}, 1, steps)
        weights = chosen.next_model(weights, opened.mean())
    return float(weights["w"][0])


def test_c11_unequal_steps_reach_the_optimum_of_a_quadratic():
    # The mean loss is least at 0.5. FedAvg stops where 0.01 (0 - x) + (1 - 0.99^5)(1 - x) = 0, that is at
    # 0.04901 / 0.05901 = 0.8305; FedNova has 0.01 and 0.04901 / 5 = 0.0098 instead, 0.0098 / 0.0198 = 0.495.
    assert quadratic_sites(rule()) == pytest.approx(0.8305, abs=1e-3)
    assert quadratic_sites(rule("nova", momentum=0.0)) == pytest.approx(0.495, abs=1e-3)


def published_adam(weights, gradients, rate, betas, epsilon):
    """Kingma and Ba, algorithm 1, in float64: what FedAdam is with the bias correction that Reddi et al. leave out."""
    value, first, second = np.asarray(weights, float), 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        corrected = second / (1 - betas[1] ** step)
        value = value - rate * first / (1 - betas[0] ** step) / (np.sqrt(corrected) + epsilon)
    return value


ADAM = {"server_learning_rate": 0.03, "server_betas": (0.8, 0.95), "server_epsilon": 0.01}


def test_fedadam_is_adam_on_minus_the_mean_difference():
    chosen, weights = rule("adam", **ADAM), model()
    differences = [model(seed, 0.1) for seed in range(1, 7)]
    for difference in differences:
        weights = chosen.next_model(weights, difference)
    for name in PARAMETERS:
        gradients = [-difference[name].astype(float) for difference in differences]
        expected = published_adam(model()[name], gradients, 0.03, (0.8, 0.95), 0.01)
        np.testing.assert_allclose(weights[name], expected, rtol=2e-5, atol=1e-6)
        assert weights[name].dtype == np.float32 and weights[name].shape == model()[name].shape


def test_fedadam_is_torch_s_adam_bit_for_bit():
    chosen, weights = rule("adam", **ADAM), model()
    own = torch.nn.Parameter(torch.tensor(weights["w"]))
    optimizer = torch.optim.Adam([own], lr=0.03, betas=(0.8, 0.95), eps=0.01)
    for seed in range(1, 5):
        weights = chosen.next_model(weights, model(seed))
        own.grad = -torch.tensor(model(seed)["w"])
        optimizer.step()
        assert weights["w"].tobytes() == own.detach().numpy().tobytes()


def test_c11_fedadam_moves_buffers_by_the_whole_mean():
    weights, difference = model(0), model(1)
    moved = rule("adam", **ADAM).next_model(weights, difference)
    assert moved["mean"].tobytes() == (weights["mean"] + difference["mean"]).tobytes()
    assert int(moved["count"]) == 5 and moved["count"].dtype == np.int64


@pytest.mark.parametrize("rate", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("optimizer", ["average", "nova", "adam"])
def test_no_rule_moves_a_running_statistic_beyond_the_sites_own(optimizer, rate):
    chosen = rule(optimizer, server_learning_rate=rate)
    weights = {"w": np.ones(2, np.float32), "var": np.array([1.0, 0.5], np.float32), "count": np.asarray(3, np.int64)}
    # the sites' variances fell to 0.25 and 0 of 1, and to 0.125 and 0.25 of 0.5: 0.125 and 0.1875 on average
    sent = [{"var": [-0.75, -0.375]}, {"var": [-1.0, -0.25]}]
    differences = [
        {"w": np.full(2, 0.5, np.float32), "count": np.asarray(4, np.int64), "var": np.array(one["var"], np.float32)}
        for one in sent
    ]
    opened = chosen.open_round(weights)
    for difference in differences:
        opened.add(difference, 1, 2)
    moved = chosen.next_model(weights, opened.mean())
    assert moved["var"].tolist() == [0.125, 0.1875]
    assert int(moved["count"]) == 7
    if optimizer != "adam":
        # FedNova of equal steps is the mean, up to the rounding of its division
        np.testing.assert_allclose(moved["w"], 1 + rate * 0.5, rtol=1e-6)


def test_fedadam_goes_on_where_its_moments_were_kept():
    whole, weights = rule("adam", **ADAM), model()
    for seed in range(1, 5):
        weights = whole.next_model(weights, model(seed))
    first, second, halves = rule("adam", **ADAM), rule("adam", **ADAM), model()
    for seed in (1, 2):
        halves = first.next_model(halves, model(seed))
    second.moments = first.moments
    for seed in (3, 4):
        halves = second.next_model(halves, model(seed))
    assert bits(halves) == bits(weights)
    assert second.moments["w"]["step"] == 4 and second.moments["w"]["exp_avg"].dtype == torch.float32


def test_fedadam_leaves_the_model_before_alone():
    weights = model()
    before = bits(weights)
    rule("adam", **ADAM).next_model(weights, model(1))
    assert bits(weights) == before


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("optimizer", ["average", "nova", "adam"])
def test_a_model_that_would_not_be_finite_is_refused(optimizer):
    weights = {"w": np.full(2, 3e38, np.float32)}
    with pytest.raises(ValueError, match="not be finite in w; lower federation.server_learning_rate"):
        rule(optimizer, frozenset({"w"})).next_model(weights, {"w": np.full(2, 3e38, np.float32)})
