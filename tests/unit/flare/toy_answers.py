"""Differences and amplitudes as sites send them, and what must hold when one is refused."""

import copy

import numpy as np
from nvflare.apis.dxo import from_shareable

from harmofl.core.spectra import statistic_shape
from harmofl.flare.wire import AmplitudeStatistic


def difference(value=1.0, count=3):
    return {
        "w": np.full((2, 3), value, np.float32),
        "scale": np.array(value, np.float32),
        "count": np.array(count, np.int64),
    }


def bits(arrays):
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in arrays.items()}


def statistic(run, value=1.0, images=5, **told):
    settings, data = run.experiment.amplitude, run.experiment.data
    shape = statistic_shape(settings.region, 3, data.height, data.width, settings.low_fraction)
    patients = min(images, 5)  # as many as the cases of the answers
    return AmplitudeStatistic(np.full(shape, value, np.float32), images, **({"patients": patients} | told))


def aggregate(aggregator, context):
    return from_shareable(aggregator.aggregate(context)).data


def refused(aggregator, run, context, shareable, site="B"):
    """Check that an answer is refused and changes nothing; returns the reason."""
    before = copy.deepcopy((bits(aggregate(aggregator, context)), aggregator.accepted, run.numbers, run.bytes_sent))
    assert aggregator.accept(shareable, context) is False
    after = bits(aggregate(aggregator, context)), aggregator.accepted, run.numbers, run.bytes_sent
    assert after == before
    assert "\n" not in run.refused[site]
    return run.refused[site]
