"""Which differences are outliers and what they are scaled by: by hand, and against torch's own Adam."""

import itertools
import math

import numpy as np
import pytest
import torch

from harmofl.core.contributions import ContributionError
from harmofl.core.norm_rule import OUTLIER, adam_reach, usual_norm
from harmofl.core.server_rules import ServerRule
from harmofl.experiment import FederationSettings, TrainingSettings

PARAMETERS = frozenset({"w", "b"})


def rule(local="sgd", keep_moments=True, parameters=PARAMETERS, learning_rate=0.1, **federation):
    settings = FederationSettings(**({"rounds": 1, "minimum_sites": 3} | federation))
    training = TrainingSettings(
        optimizer=local, learning_rate=learning_rate, batch_size=1, momentum=0.0, keep_moments=keep_moments
    )
    return ServerRule(settings, training, parameters)


def model():
    """Parameters of norm 5, statistics of norm 2, a counter."""
    return {
        "w": np.array([3.0, 0.0], np.float32),
        "b": np.array(4.0, np.float32),
        "variance": np.array([2.0], np.float32),
        "count": np.array(1, np.int64),
    }


def change(w, variance=0.0):
    """Parameters of norm |w|."""
    return {
        "w": np.array([0.0, w], np.float32),
        "b": np.array(0.0, np.float32),
        "variance": np.array([variance], np.float32),
        "count": np.array(1, np.int64),
    }


def test_the_usual_norm_is_the_median_and_of_two_the_lower_one():
    assert usual_norm([5.0, 1.0, 2.0]) == 2.0
    assert usual_norm([1e30, 1.0]) == usual_norm([1.0, 2.0, 1e30, 1e30][:2]) == 1.0
    assert usual_norm([1.0, 2.0, 1e30, 1e30]) == 2.0
    assert usual_norm([]) is usual_norm([0.0, 0.0]) is None


def test_a_long_difference_is_scaled_to_a_usual_one_and_named():
    opened = rule().open_round(model(), 0.05, first=False)
    # the limit is 10 * 0.05 a step, 1 for 2 steps, below the model's norm of 5; a usual one has 0.05 * 2 = 0.1 of 4
    sent = opened.add(change(4.0, variance=-1.0), 1, 2)
    assert (sent.norm, sent.factor) == (2.0, 0.025)
    assert sent.note == (
        "norm 2 a step is 40 times the median of the round before (0.05); scaled by 0.025 (federation.norm_bound 10)"
    )
    mean = opened.mean()
    # statistics take the same share of their way: 2 - 0.025 stays above 0
    assert mean["w"].tolist() == pytest.approx([0.0, 0.1]) and mean["variance"].tolist() == pytest.approx([-0.025])
    assert int(mean["count"]) == 1


def test_the_steps_that_were_taken_count():
    told = [rule().open_round(model(), 0.05, first=False).add(change(4.0), 1, steps) for steps in (1, 8, 16, 17)]
    # 4 / 8 = 0.5 is the bound itself; OUTLIER times 0.05 is 0.25 = 4 / 16
    assert [sent.factor for sent in told] == [0.0125, 1.0, 1.0, 1.0]
    assert [bool(sent.note) for sent in told] == [True, True, False, False]


def test_without_a_bound_an_outlier_is_named_and_added_as_it_is():
    opened = rule(norm_bound=None).open_round(model(), 0.05, first=False)
    sent = opened.add(change(1e9), 1, 1)
    assert sent.factor == 1 and "(federation.norm_bound is null)" in sent.note and "1e+09" in sent.note
    assert opened.mean()["w"][1] == np.float32(1e9)


def test_without_a_bound_what_does_not_fit_into_the_sum_is_refused():
    opened = rule(norm_bound=None).open_round(model(), 0.05, first=False)
    with pytest.raises(ContributionError, match=r"entry w is 1e\+30 with its weight.*set federation.norm_bound"):
        opened.add(change(1e30), 1, 1)
    assert opened.count == 0


def test_1e30_becomes_a_usual_difference():
    opened = rule().open_round(model(), 0.1, first=False)
    sent = opened.add(change(1e30), 1, 1)
    assert opened.mean()["w"].tolist() == pytest.approx([0.0, 0.1])
    assert sent.norm == pytest.approx(1e30, rel=1e-5) and sent.factor == pytest.approx(1e-31, rel=1e-5)


def test_in_the_first_round_sgd_may_move_the_model_by_its_own_norm():
    opened = rule().open_round(model())
    assert (opened.add(change(4.9), 1, 7).factor, opened.add(change(50.0), 1, 7).factor) == (1.0, 0.1)
    note = rule().open_round(model()).add(change(50.0), 1, 10).note
    assert note.startswith("norm 5 a step is above 0.5: the round moved the model by more than the model's norm")


def test_in_the_first_round_adam_may_move_each_weight_by_its_reach():
    # 3 values, one step: 1.1 * 0.1 * sqrt(3) * reach 1
    opened = rule("adam").open_round(model())
    sent = opened.add(change(1.0), 1, 1)
    assert sent.factor == pytest.approx(0.11 * 3**0.5)
    assert "the most that Adam can do at this learning rate" in sent.note


@pytest.mark.parametrize("growth", [0.5, 0.9 / 0.999, 1.0, 1.5])
def test_no_gradients_move_torch_s_adam_beyond_its_reach(growth):
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, eps=0.0)
    before, largest = 0.0, 0.0
    for step in range(1, 101):
        weight.grad = torch.tensor(growth**step, dtype=torch.float64)
        optimizer.step()
        moved, before = abs(float(weight.detach()) - before), float(weight.detach())
        assert moved <= adam_reach(step) * (1 + 1e-9)
        largest = max(largest, moved / adam_reach(step))
    assert largest == pytest.approx(1, rel=1e-6), "the first step reaches it"


def test_the_worst_gradients_come_near_the_reach_of_adam():
    # equality in Cauchy and Schwarz: gradients in proportion to (b1 / b2)^(t - i)
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, eps=0.0)
    for step in range(60):
        before = float(weight.detach())
        weight.grad = torch.tensor((0.999 / 0.9) ** step, dtype=torch.float64)
        optimizer.step()
    assert abs(float(weight.detach()) - before) == pytest.approx(adam_reach(60), rel=1e-6)
    assert adam_reach(1) == pytest.approx(1) and adam_reach(100_000) == pytest.approx(7.27, abs=0.01)


def test_kept_moments_may_take_longer_steps_in_later_rounds():
    def factor(keep, first):
        opened = rule("adam", keep_moments=keep).open_round(model(), first=first)
        return opened.add(change(1.0), 1, 1).factor

    assert factor(True, True) == factor(False, False) == factor(False, True) == pytest.approx(0.11 * 3**0.5)
    assert factor(True, False) == 1.0  # 7.27 * 0.11 * sqrt(3) is above 1


def test_running_statistics_have_a_limit_of_their_own():
    opened = rule().open_round(model(), 0.05, first=False)
    assert opened.add(change(0.05, variance=20.0), 1, 1).factor == 1.0  # 10 times their norm of 2
    sent = opened.add(change(0.05, variance=-200.0), 1, 1)
    assert sent.factor == 0.1 and sent.note.startswith("running statistics changed by 200, above 20")


def test_a_variance_below_0_is_refused():
    settings = FederationSettings(rounds=1, minimum_sites=1)
    training = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=1)
    opened = ServerRule(settings, training, PARAMETERS, frozenset({"variance"})).open_round(model())
    with pytest.raises(ContributionError, match="entry variance would be a variance below 0"):
        opened.add(change(0.1, variance=-2.1), 1, 1)
    assert opened.count == 0
    # of a variance of 0 the difference of float32 numbers may be one rounding too much
    opened.add(change(0.1, variance=float(np.nextafter(np.float32(-2), np.float32(-3)))), 1, 1)
    with pytest.raises(ContributionError, match="shape"):
        opened.add(change(0.1) | {"variance": np.zeros(2, np.float32)}, 1, 1)


def test_a_bound_below_the_outlier_s_names_what_it_scales():
    assert OUTLIER > 2
    sent = rule(norm_bound=2.0).open_round(model(), 0.5, first=False).add(change(2.0), 1, 1)
    assert sent.factor == 0.25 and "4 times the median" in sent.note


def test_nobody_is_bounded_on_pooled_data():
    opened = rule(pooled_data=True).open_round(model(), 0.05, first=False)
    assert opened.add(change(4.0), 1, 1).factor == 1.0


def test_a_model_of_zeros_and_a_round_without_motion_bound_nothing():
    still = {name: np.zeros_like(value) for name, value in model().items()}
    assert rule().open_round(still, usual_norm([0.0])).add(change(100.0, 5.0), 1, 1).factor == 1.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_bounds_the_difference_before_it_takes_the_steps_out(momentum):
    settings = FederationSettings(rounds=1, minimum_sites=1, server_optimizer="nova")
    training = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=1, momentum=momentum)
    nova = ServerRule(settings, training, PARAMETERS).open_round(model(), 0.05, first=False)
    sent = nova.add(change(4.0, variance=8.0), 1, 4)
    # limit 10 * 0.05 * 4 = 2, a usual one 0.05 * 4 = 0.2 of 4; of one site tau cancels
    assert (sent.norm, sent.factor) == (pytest.approx(1.0), pytest.approx(0.05))
    assert nova.mean()["w"][1] == pytest.approx(0.2) and nova.mean()["variance"][0] == pytest.approx(0.4)
    below = ServerRule(settings, training, PARAMETERS).open_round(model(), 0.05, first=False)
    assert below.add(change(1.9), 1, 4).factor == 1.0


def test_float16_on_the_way_is_bounded_alike():
    half = {name: value.astype(np.float16) if name in PARAMETERS else value for name, value in change(4.0).items()}
    opened = rule(exchange="float16").open_round(model(), 0.05, first=False)
    assert opened.add(half, 1, 2).factor == 0.025
    assert opened.mean()["w"].dtype == np.float32


def test_bounded_means_do_not_depend_on_the_order_of_arrival():
    generator = np.random.default_rng(0)
    sent = [
        (change(0.0) | {"w": (generator.standard_normal(2) * scale).astype(np.float32)}, weight, steps)
        for scale, weight, steps in ((1.0, 3, 4), (1e30, 7, 1), (-40.0, 11, 9), (0.1, 5, 2))
    ]
    for optimizer in ("average", "nova"):
        results, factors = set(), set()
        for order in itertools.permutations(sent):
            opened = rule(server_optimizer=optimizer).open_round(model(), 0.3, first=False)
            factors.add(frozenset(opened.add(*one).factor for one in order))
            results.add(b"".join(value.tobytes() for value in opened.mean().values()))
        assert len(results) == len(factors) == 1
        assert min(next(iter(factors))) < 1e-20


def test_steps_that_point_anywhere_make_a_norm_of_their_root():
    """Where OUTLIER and the default bound come from: 25 and 100 times fewer steps."""
    generator = np.random.default_rng(0)

    def per_step(steps):
        return np.linalg.norm(generator.standard_normal((steps, 4000)).sum(axis=0)) / steps

    assert per_step(4) / per_step(100) == pytest.approx(math.sqrt(25), rel=0.1) and math.sqrt(25) == OUTLIER
    assert per_step(2) / per_step(200) == pytest.approx(10, rel=0.1)
    assert FederationSettings(rounds=1, minimum_sites=1).norm_bound == 10
