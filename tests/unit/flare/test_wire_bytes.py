"""Messages of the jobs' own networks are hardly larger than the model; the socket is counted by tests.benchmarks."""

import numpy as np
import pytest
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.core.networks import build_network
from harmofl.core.spectra import statistic_shape
from harmofl.core.training import arrays_sha256, state_arrays
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import (
    AmplitudeStatistic,
    ModelMessage,
    UpdateMessage,
    in_exchange_type,
    pack_model,
    pack_update,
)


def size_of(message) -> int:
    common_decomposers.register()
    return len(fobs.dumps(message))


@pytest.mark.parametrize(("network", "norm", "pixels"), [("unet", "instance", 384), ("densenet121", "batch", 96)])
def test_a_round_after_the_freeze(network, norm, pixels, numbers):
    model = state_arrays(build_network(network, 3, (0.5, 0.5), width=32, norm=norm, seed=0))
    weight = sum(value.nbytes for value in model.values())
    for region in ("site_gain", "full"):  # the default, and the largest one
        shape = statistic_shape(region, 3, pixels, pixels, 0.1)
        task = pack_model(ModelMessage(model, AmplitudeStatistic(np.zeros(shape, np.float32), 1000)))
        down = size_of(
            TaskHeader(run_id="0" * 32, experiment_hash="0" * 16, demo=False, round_number=3, best_round=1).attach(task)
        )
        assert weight < down <= 1.03 * weight
    told = numbers | {"received_sha256": arrays_sha256(model)}
    up = size_of(pack_update(UpdateMessage(model, None, told)))
    assert weight < up <= 1.004 * weight  # array by array it would be 1.009 for the DenseNet
    half = size_of(pack_update(UpdateMessage(in_exchange_type(model, "float16"), None, told)))
    assert half <= 0.51 * up
    whole, rounded = (size_of(pack_model(ModelMessage(sent))) for sent in (model, in_exchange_type(model, "float16")))
    assert rounded <= 0.51 * whole
