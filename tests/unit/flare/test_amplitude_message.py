"""A site's amplitude says of how many patients it is and what noise is on it, checked where it is packed and read."""

from dataclasses import replace

import numpy as np
import pytest
from nvflare.apis.dxo import from_shareable

from harmofl.evidence.results import NoiseStatement
from harmofl.flare.wire import (
    AmplitudeStatistic,
    MessageError,
    ModelMessage,
    UpdateMessage,
    pack_model,
    pack_update,
    unpack_model,
    unpack_update,
)

NOISE = NoiseStatement(mechanism="analytic_gaussian", epsilon=1, delta=1e-5, clip=5, patients=6, sigma=0.5)
PLAIN = AmplitudeStatistic(np.full((3, 4), 1 / 3), 17, patients=6)
CLIPPED = replace(PLAIN, clip=5.0, relative_clip=0.8)


def sent(wire, statistic, **changed):
    """Packed, changed as another version might, sent and read."""
    packed = pack_update(UpdateMessage(amplitude=statistic))
    dxo = from_shareable(packed)
    dxo.data.update(changed)
    return unpack_update(wire(dxo.update_shareable(packed))).amplitude


@pytest.mark.parametrize("statistic", [PLAIN, replace(PLAIN, noise=NOISE), CLIPPED])
def test_what_is_said_comes_back(wire, statistic):
    received = sent(wire, statistic)
    assert (received.images, received.patients, received.noise) == (17, 6, statistic.noise)
    assert (received.clip, received.relative_clip) == (statistic.clip, statistic.relative_clip)
    # on its way to the site's own filter it is not rounded yet
    assert received.values.dtype == (np.float32 if statistic.clip is None else np.float64)


def test_the_global_amplitude_says_nothing_of_patients(weights, wire):
    received = unpack_model(wire(pack_model(ModelMessage(weights, AmplitudeStatistic(PLAIN.values, 17))))).amplitude
    assert (received.patients, received.clip, received.noise) == (None, None, None)


@pytest.mark.parametrize("patients", [None, 0, -1, True, 2.0, "5"])
def test_an_amplitude_of_no_number_of_patients_is_neither_packed_nor_read(wire, patients):
    with pytest.raises(MessageError, match="patients"):
        pack_update(UpdateMessage(amplitude=replace(PLAIN, patients=patients)))
    with pytest.raises(MessageError, match="patients"):
        sent(wire, PLAIN, patients=patients)


def test_more_patients_than_images_are_refused(wire):
    with pytest.raises(MessageError, match="17 images and 18 patients"):
        sent(wire, PLAIN, patients=18)
    # patients without a readable image count in a clipped mean
    assert sent(wire, CLIPPED, patients=18).patients == 18


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mechanism", "laplace"), ("epsilon", 0.0), ("epsilon", "Jane"), ("delta", 1.0), ("clip", -1.0),
        ("sigma", float("inf")), ("patients", 5), ("note", "Jane"),
    ],
)  # fmt: skip
def test_a_statement_about_noise_of_another_form_is_refused(wire, key, value):
    with pytest.raises(MessageError, match=key) as caught:
        sent(wire, PLAIN, noise=NOISE.model_dump() | {key: value})
    assert "Jane" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("noise", ["none", 3, [NOISE.model_dump()], {}])
def test_a_statement_that_is_no_statement_is_refused(wire, noise):
    with pytest.raises(MessageError, match="noise"):
        sent(wire, PLAIN, noise=noise)


@pytest.mark.parametrize("key", ["clip", "relative_clip"])
@pytest.mark.parametrize("value", ["5", 5, True, [5.0], 0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_that_is_no_distance_is_refused(wire, key, value):
    with pytest.raises(MessageError, match="at what distance"):
        sent(wire, CLIPPED, **{key: value})


def test_a_clip_without_its_multiple_of_the_scale_is_refused(wire):
    with pytest.raises(MessageError, match="at what distance"):
        sent(wire, CLIPPED, relative_clip=None)
