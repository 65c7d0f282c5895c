"""Messages survive FLARE's own serialization, and whatever does not follow the contract is refused in one line."""

import math

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.utils import fobs

from harmofl.flare.packed_arrays import PackedArraysDecomposer
from harmofl.flare.task_header import TaskHeader, read_header
from harmofl.flare.wire import (
    AmplitudeStatistic,
    MessageError,
    ModelMessage,
    UpdateMessage,
    error_reply,
    in_exchange_type,
    pack_model,
    pack_update,
    payload_bytes,
    read_error,
    round_of,
    unpack_model,
    unpack_update,
)

HEADER = TaskHeader(run_id="0123abcd", experiment_hash="89c82bf707d952a8", demo=True, round_number=3)
AMPLITUDE = AmplitudeStatistic(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), 17, patients=6)


def assert_equal(first, second):
    assert list(first) == list(second)
    for name, value in first.items():
        other = np.asarray(second[name])
        assert (other.dtype, other.shape, other.tobytes()) == (value.dtype, value.shape, value.tobytes())


def assert_same_amplitude(first, second):
    if first is None:
        assert second is None
        return
    assert_equal({"values": first.values}, {"values": second.values})
    assert first.images == second.images
    assert type(second.images) is int


@pytest.mark.parametrize("amplitude", [None, AMPLITUDE])
@pytest.mark.parametrize("best", [False, True])
def test_a_model_comes_back(weights, wire, amplitude, best):
    message = ModelMessage(weights, amplitude, {name: value + 1 for name, value in weights.items()} if best else None)
    received = unpack_model(wire(pack_model(message)))
    assert_equal(weights, received.weights)
    assert_same_amplitude(amplitude, received.amplitude)
    if best:
        assert_equal({name: np.asarray(value + 1) for name, value in weights.items()}, received.best_weights)
    else:
        assert received.best_weights is None


@pytest.mark.parametrize("amplitude", [None, AMPLITUDE])
@pytest.mark.parametrize("with_weights", [False, True])
def test_an_update_comes_back(weights, wire, numbers, amplitude, with_weights):
    received = unpack_update(wire(pack_update(UpdateMessage(weights if with_weights else None, amplitude, numbers))))
    assert received.numbers == numbers
    assert_same_amplitude(amplitude, received.amplitude)
    if with_weights:
        assert_equal(weights, received.difference)
    else:
        assert received.difference is None


def test_numbers_keep_undefined_scores(wire):
    numbers = {"validation": None, "loss": math.inf, "test": {"final": {"dice": [0.5, math.nan]}}}
    received = unpack_update(wire(pack_update(UpdateMessage(numbers=numbers)))).numbers
    assert (received["validation"], received["loss"]) == (None, math.inf)
    first, second = received["test"]["final"]["dice"]
    assert first == 0.5
    assert math.isnan(second)


SHARE = {"value": 0.75, "low": 0.5, "high": math.nan, "n": 8, "patients": 2, "no_interval": "too_few"}


def test_scores_by_patient_come_back_as_counts_without_names(wire):
    counted = SHARE | {"by_patient": [[2, 4], [4, 4]]}
    numbers = {
        "test": {"best": {"accuracy_by_slide": [0.5, 1.0, 1.0]}},
        "patients": {"best": [0, 0, 1]},
        "pooled": {"best": {"accuracy": counted}},
    }
    received = unpack_update(wire(pack_update(UpdateMessage(numbers=numbers)))).numbers
    np.testing.assert_equal(received, numbers)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"patients": {"best": [0]}},
        {"patients": {"best": ["Jane Doe", 1]}},
        {"pooled": {"best": {"accuracy": SHARE | {"by_patient": [["Jane Doe", 4]]}}}},
        {"pooled": {"best": {"accuracy": SHARE | {"by_patient": [], "name": "Jane Doe"}}}},
        {"pooled": {"best": {"accuracy": SHARE | {"by_patient": [], "no_interval": "Jane Doe"}}}},
    ],
)
def test_scores_by_patient_of_another_form_are_refused(spoiled):
    numbers = {"test": {"best": {"dice": [0.5, 1.0]}}} | spoiled
    with pytest.raises(MessageError, match="the answer's numbers cannot be used") as caught:
        pack_update(UpdateMessage(numbers=numbers))
    assert "Jane" not in str(caught.value)


def test_plain_weights_after_the_amplitude_is_frozen(weights):
    # DESIGN: a collection while the amplitude is being estimated, plain weights after that
    alone = from_shareable(pack_update(UpdateMessage(weights)))
    both = from_shareable(pack_update(UpdateMessage(weights, AMPLITUDE)))
    assert (alone.data_kind, both.data_kind) == (DataKind.WEIGHT_DIFF, DataKind.COLLECTION)
    assert {name: part.data_kind for name, part in both.data.items()} == {
        "weights": DataKind.WEIGHT_DIFF,
        "amplitude": DataKind.APP_DEFINED,
    }


@pytest.mark.parametrize("difference", [None, {"w": np.zeros(2, np.float32)}])
@pytest.mark.parametrize("amplitude", [None, AMPLITUDE])
def test_the_step_count_stands_where_flare_looks_for_it(difference, amplitude):
    outer = from_shareable(pack_update(UpdateMessage(difference, amplitude, {"steps": 5})))
    assert outer.get_meta_prop("NUM_STEPS_CURRENT_ROUND") == 5


def test_an_amplitude_travels_as_float32(wire):
    sent = AmplitudeStatistic(np.array([1 / 3, 2.0]), 5, patients=5)  # float64
    received = unpack_update(wire(pack_update(UpdateMessage(amplitude=sent)))).amplitude
    assert received.values.dtype == np.float32
    assert received.values.tolist() == [float(np.float32(1 / 3)), 2.0]


def test_a_header_comes_back(weights, wire):
    assert read_header(wire(HEADER.attach(pack_model(ModelMessage(weights))))) == HEADER
    assert read_header(wire(HEADER.attach(Shareable()))) == HEADER


@pytest.mark.parametrize("held", [None, "text", 3, [1, 2, 3, 4]])
def test_a_task_without_our_header_is_refused(held):
    task = Shareable()
    if held is not None:
        task.set_header("harmofl.header", held)
    with pytest.raises(MessageError, match="no HarmoFL header.*different versions"):
        read_header(task)


@pytest.mark.parametrize(
    "task",
    [
        Shareable(),
        Shareable({"weights": {"w": np.zeros(1)}}),
        make_reply(ReturnCode.OK),
        DXO(DataKind.METRICS, data={"w": 1}).to_shareable(),
        pack_update(UpdateMessage(amplitude=AMPLITUDE)),
        DXO(DataKind.COLLECTION, data={"best": DXO(DataKind.WEIGHTS, data={"w": 1})}).to_shareable(),
        DXO(DataKind.WEIGHTS, data={"w": [1.0, 2.0]}).to_shareable(),
        DXO(DataKind.WEIGHTS, data={3: np.zeros(1)}).to_shareable(),
        DXO(
            DataKind.COLLECTION,
            data={"weights": DXO(DataKind.WEIGHTS, data={"w": np.zeros(1)}), "more": DXO(DataKind.WEIGHTS, data={})},
        ).to_shareable(),
    ],
)
def test_a_task_without_weights_is_refused(task):
    with pytest.raises(MessageError) as caught:
        unpack_model(task)
    assert "\n" not in str(caught.value)


def test_weights_instead_of_differences_are_refused(weights, wire):
    sent = wire(pack_model(ModelMessage(weights)))
    with pytest.raises(MessageError, match=r"holds \S*WEIGHTS, not weight differences"):
        unpack_update(sent)
    with pytest.raises(MessageError, match=r"holds \S*WEIGHTS, not weight differences"):
        unpack_update(wire(pack_model(ModelMessage(weights, AMPLITUDE))))


def test_differences_instead_of_weights_are_refused(weights, wire):
    with pytest.raises(MessageError):
        unpack_model(wire(pack_update(UpdateMessage(weights))))


@pytest.mark.parametrize("name", ["weights", "amplitude"])
def test_a_collection_of_something_else_is_refused(name, wire):
    answer = wire(DXO(DataKind.COLLECTION, data={name: {"w": np.zeros(1)}}).to_shareable())
    with pytest.raises(MessageError):
        unpack_update(answer)


def test_an_answer_that_is_no_message_is_refused():
    with pytest.raises(MessageError, match="cannot be read"):
        unpack_update(Shareable({"w": 1}))


def test_numbers_of_another_form_are_refused():
    answer = DXO(DataKind.WEIGHT_DIFF, data={"w": np.zeros(1)}, meta={"harmofl.numbers": [1, 2]}).to_shareable()
    with pytest.raises(MessageError, match="numbers"):
        unpack_update(answer)


@pytest.mark.parametrize("images", [0, -1, True, 2.0, "5", None])
def test_an_amplitude_of_no_images_is_refused(images, wire):
    sent = AmplitudeStatistic(AMPLITUDE.values, images, patients=1)
    with pytest.raises(MessageError, match="images"):
        unpack_update(wire(pack_update(UpdateMessage(amplitude=sent))))


@pytest.mark.parametrize(
    "data", [{"images": 3}, {"amplitude": np.ones(2)}, {"amplitude": "loud", "images": 3}, {"amplitude": [], "i": 1}]
)
def test_an_amplitude_of_another_form_is_refused(data):
    with pytest.raises(MessageError, match="amplitude"):
        unpack_update(DXO(DataKind.APP_DEFINED, data=data).to_shareable())


def test_numpy_image_counts_are_accepted(wire):
    sent = AmplitudeStatistic(AMPLITUDE.values, np.int64(17), patients=np.int64(6))
    assert_same_amplitude(AMPLITUDE, unpack_update(wire(pack_update(UpdateMessage(amplitude=sent)))).amplitude)


def test_an_error_travels_as_code_and_line(wire):
    reply = wire(error_reply("no_data", "site A has no case to train on"))
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert read_error(reply) == ("no_data", "site A has no case to train on")


def test_an_error_that_flare_made_has_its_code():
    code, reason = read_error(make_reply(ReturnCode.TASK_ABORTED))
    assert code == ReturnCode.TASK_ABORTED
    assert "site's log" in reason


def test_the_round_comes_from_the_cookie():
    answer = Shareable()
    assert round_of(answer) is None
    answer.add_cookie(AppConstants.CONTRIBUTION_ROUND, 5)
    assert round_of(answer) == 5


def test_payload_is_counted_by_kind(weights, wire):
    # weights: 6 * 4 + 4 + 8 bytes, amplitude: 12 * 4; FLARE gives NumPy scalars or arrays of no dimension back
    assert payload_bytes(UpdateMessage(weights, AMPLITUDE)) == {"weights": 36, "amplitude": 48, "numbers": 0}
    assert payload_bytes(UpdateMessage()) == {"weights": 0, "amplitude": 0, "numbers": 0}
    # numbers as JSON: {"steps": 5} has 12 characters
    received = unpack_update(wire(pack_update(UpdateMessage(weights, AMPLITUDE, {"steps": 5}))))
    assert payload_bytes(received) == {"weights": 36, "amplitude": 48, "numbers": 12}


def test_float16_halves_what_goes_up_and_leaves_counters_alone(weights, numbers, wire):
    generator = np.random.default_rng(0)
    # as large as a layer of the networks, so that names and numbers beside it are below a hundredth
    large = weights | {"w": (1e-3 * generator.standard_normal((64, 32, 3, 3))).astype(np.float32)}
    half = in_exchange_type(large, "float16")
    assert {name: value.dtype for name, value in half.items()} == {
        "w": np.float16,
        "scale": np.float16,
        "count": np.int64,
    }
    full, halved = (len(fobs.dumps(pack_update(UpdateMessage(sent, None, numbers)))) for sent in (large, half))
    assert 0.5 < halved / full < 0.51
    assert all(sent is large[name] for name, sent in in_exchange_type(large, "float32").items())
    came = unpack_update(wire(pack_update(UpdateMessage(half, None, numbers)))).difference
    assert_equal(half, came)


def test_float16_rounds_a_change_to_a_small_part_of_it_or_to_a_step(weights):
    sent = np.array([1e-3, -2e-5, 3e-8, 1e-9, 65504.0], np.float32)
    got = in_exchange_type({"w": sent}, "float16")["w"].astype(np.float64)
    # half a unit: 2^-11 of a normal number; below 2^-14 half of the step 2^-24
    assert (np.abs(got - sent) <= np.maximum(2.0**-11 * np.abs(sent), 2.0**-25)).all()
    assert got[3] == 0


def test_running_statistics_are_not_rounded():
    # 1.0006 is 1.0009765625 in float16, whose steps are 2^-10 there: a variance that fell to 0 would be -0.0004
    before = np.array([1.0006], np.float32)
    fell = {"norm.running_var": -before, "w": -before}
    sent = in_exchange_type(fell, "float16", frozenset({"norm.running_var"}))
    assert {name: value.dtype for name, value in sent.items()} == {"norm.running_var": np.float32, "w": np.float16}
    assert (before + sent["norm.running_var"]).tolist() == [0]
    assert (before + sent["w"] < -3e-4).all()


def test_a_change_beyond_float16_is_named_and_not_sent(weights):
    with pytest.raises(MessageError, match=r"changed scale by 7e\+04, float16 ends at 65504; set federation.exchange"):
        in_exchange_type(weights | {"scale": np.array(-7e4, np.float32)}, "float16")


def test_a_server_whose_arrays_contradict_themselves_is_refused_at_the_site(weights, wire, monkeypatch):
    honest = PackedArraysDecomposer.decompose

    def hostile(self, target, manager=None):
        told = honest(self, target, manager)
        told["entries"][0][1] = ["a", 300_000_000]
        return told

    monkeypatch.setattr(PackedArraysDecomposer, "decompose", hostile)
    received = wire(pack_model(ModelMessage(weights, AMPLITUDE)))
    with pytest.raises(MessageError, match="entry w has a shape that is no list of sizes"):
        unpack_model(received)
