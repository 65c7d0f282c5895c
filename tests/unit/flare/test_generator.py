"""The generator: what a train task carries, and theta + eta * mean difference in float32."""

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.networks import build_network
from harmofl.core.server_rules import ServerRule, apply_difference
from harmofl.core.training import arrays_sha256, load_arrays, state_arrays
from harmofl.flare.generator import HarmoFLShareableGenerator
from harmofl.flare.task_header import TaskHeader, read_header
from harmofl.flare.wire import AmplitudeStatistic, unpack_model

PARAMETERS = frozenset({"w", "scale"})


def difference():
    return {
        "w": np.full((2, 3), 0.25, np.float32),
        "scale": np.array(-1.0, np.float32),
        "count": np.array(3, np.int64),
    }


@pytest.mark.parametrize("frozen", [False, True])
def test_a_train_task_carries_header_weights_and_frozen_amplitude(make_run, make_context, weights, wire, frozen):
    run = make_run()
    context = make_context(run)
    if frozen:
        run.amplitude = AmplitudeStatistic(np.ones((3, 11), np.float32), 40)
    task = HarmoFLShareableGenerator().learnable_to_shareable(make_model_learnable(weights, {}), context)
    task = wire(task)
    assert read_header(task) == TaskHeader(
        run_id="0123abcd", experiment_hash=run.experiment.hash, demo=False, round_number=4
    )
    received = unpack_model(task)
    assert {name: value.tobytes() for name, value in received.weights.items()} == {
        name: value.tobytes() for name, value in weights.items()
    }
    assert (received.amplitude is not None) == frozen
    assert received.best_weights is None
    assert run.model_sha256 == arrays_sha256(received.weights)


@pytest.mark.parametrize("rate", [1.0, 0.5, 2.0])
def test_the_next_model_is_theta_plus_rate_times_difference(make_run, make_context, weights, wire, rate):
    run = make_run({"federation.server_learning_rate": rate})
    run.rule = ServerRule(run.experiment.federation, run.experiment.training, frozenset({"w"}))
    mean = wire(DXO(DataKind.WEIGHT_DIFF, data=difference()).to_shareable())
    model = HarmoFLShareableGenerator().shareable_to_learnable(mean, make_context(run))
    moved = model[ModelLearnableKey.WEIGHTS]
    # quarters and halves are exact in float32
    assert moved["w"].tolist() == (np.arange(6).reshape(2, 3) + rate * 0.25).tolist()
    # no parameter: the whole of it
    assert float(moved["scale"]) == 0.5
    # a counter counts what happened: no rate
    assert int(moved["count"]) == 10


def test_types_and_shapes_are_kept(weights):
    moved = apply_difference(weights, difference(), 0.1, PARAMETERS)
    kinds = {name: (np.asarray(value).dtype, np.shape(value)) for name, value in moved.items()}
    assert kinds == {name: (value.dtype, value.shape) for name, value in weights.items()}


def test_the_rate_is_applied_in_float32():
    # 0.1 as float32 times 3, rounded to float32, added to 1, rounded to float32: no float64 on the way
    weights, change = {"w": np.ones(1, np.float32)}, {"w": np.full(1, 3, np.float32)}
    expected = np.float32(1) + np.float32(np.float32(0.1) * np.float32(3))
    assert apply_difference(weights, change, 0.1, PARAMETERS)["w"].tobytes() == np.array([expected]).tobytes()


def test_no_difference_is_the_identity(weights):
    nothing = {name: np.zeros_like(value) for name, value in weights.items()}
    moved = apply_difference(weights, nothing, 1.0, PARAMETERS)
    assert {name: np.asarray(value).tobytes() for name, value in moved.items()} == {
        name: value.tobytes() for name, value in weights.items()
    }


def test_the_old_model_is_left_alone(weights):
    before = {name: value.tobytes() for name, value in weights.items()}
    apply_difference(weights, difference(), 1.0, PARAMETERS)
    assert {name: value.tobytes() for name, value in weights.items()} == before


def test_a_network_moves_by_a_difference_and_server_and_site_agree_on_its_hash(wire, make_run, make_context):
    # batch norm counters have no dimension: NumPy makes scalars of them, which must travel and load all the same
    first, second = (build_network("unet", 3, (0.5, 0.5), width=2, norm="batch", seed=seed) for seed in (0, 1))
    old, new = state_arrays(first), state_arrays(second)
    new = {name: value + 5 if name.endswith("num_batches_tracked") else value for name, value in new.items()}
    moved = apply_difference(old, {name: new[name] - old[name] for name in old}, 1.0, frozenset(old))
    run = make_run()
    context = make_context(run)
    context.set_prop(AppConstants.CURRENT_ROUND, 5, private=True, sticky=True)
    task = wire(HarmoFLShareableGenerator().learnable_to_shareable(make_model_learnable(moved, {}), context))
    load_arrays(first, unpack_model(task).weights)
    arrays = state_arrays(first)
    assert arrays_sha256(arrays) == run.model_sha256
    for name, value in arrays.items():
        # a + (b - a) is b up to the rounding of two float32 operations
        np.testing.assert_allclose(value, new[name], rtol=0, atol=1e-6)
    assert int(arrays["conv_0.conv_0.adn.N.num_batches_tracked"]) == 5
