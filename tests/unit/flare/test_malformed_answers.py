"""Answers of any form, from whatever bytes a site chose: one line about one contribution, and no gigabytes."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from toy_answers import difference, refused

from harmofl.flare.packed_arrays import PackedArrays, PackedArraysDecomposer, UnreadableArrays
from harmofl.flare.site_messages import _problem
from harmofl.flare.wire import MessageError, UpdateMessage, pack_update, read_error, round_of, unpack_update

MIB = 2**20
FOREIGN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(["", "w", "f4", "a\n\x1b", "harmofl.numbers", "DXO"])
    | st.binary(max_size=4)
    | st.sampled_from([np.zeros(3, np.float32), np.array(1.0), np.zeros(2, "U3"), np.float32(1)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def peak_mib(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def decomposed():
    return PackedArraysDecomposer().decompose(PackedArrays(difference(1.0)))


@pytest.mark.parametrize(
    "shape",
    [["a", 300_000_000], [b"a", 300_000_000], [[0], 100_000_000], [True, True], [-1], [2**62], [0] * 99, "ab", 7, None],
    ids=str,
)
def test_a_shape_that_is_no_list_of_sizes_names_its_entry_and_costs_nothing(shape):
    told = decomposed()
    told["entries"][0][1] = shape
    received = []
    # the product of the first shape is 286 MiB of text
    assert peak_mib(lambda: received.append(PackedArraysDecomposer().recompose(told))) < 1
    assert isinstance(received[0], UnreadableArrays)
    assert received[0].problem in ("entry w has a shape that is no list of sizes",)


@pytest.mark.parametrize(
    "small",
    [{"f4": np.zeros((7, 1), np.float32)}, {"f4": np.zeros(7, np.int64)}, {7: np.zeros(1)}, {"U9": np.zeros(1)}],
)
def test_small_entries_that_are_no_vector_of_their_type_are_refused(small):
    told = PackedArraysDecomposer().decompose(PackedArrays({"w": np.zeros(7, np.float32)}))
    assert "no vector of that type" in PackedArraysDecomposer().recompose(told | {"small": small}).problem


def test_sizes_beyond_what_was_sent_are_refused():
    told = decomposed()
    told["entries"][0][1] = [2**39, 2**39]
    assert PackedArraysDecomposer().recompose(told).problem == "entry w is larger than what was sent of it"


@given(st.sampled_from(["entries", "large", "small"]), FOREIGN, FOREIGN)
def test_foreign_parts_of_packed_arrays_are_no_exception(part, whole, piece):
    for told in (whole, decomposed() | {part: whole}, decomposed() | {"entries": [piece, *decomposed()["entries"]]}):
        received = PackedArraysDecomposer().recompose(told)
        problem = getattr(received, "problem", "printable")
        assert problem.isprintable() and len(problem) < 600
        assert all(isinstance(value, np.ndarray) for value in received.values())


@pytest.fixture
def sent(answer):
    return answer("B", difference(1.0))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.sampled_from(["data", "meta", "kind", "numbers", "entry", "headers", "jar", "code", "DXO"]), FOREIGN)
def test_foreign_parts_of_an_answer_are_one_line(healthy, answer, place, value):
    aggregator, run, context = healthy()
    sent = answer("B", difference(1.0))
    dxo = from_shareable(sent)
    if place == "entry":
        sent["DXO"]["data"]["w"] = value
    elif place == "numbers":
        sent["DXO"]["meta"]["harmofl.numbers"] = value
    elif place in ("data", "meta", "kind"):
        sent["DXO"][place] = value
    elif place == "headers":
        sent[ReservedHeaderKey.HEADERS] = value
    elif place == "DXO":
        sent["DXO"] = value
    else:
        sent.set_header({"jar": ReservedHeaderKey.COOKIE_JAR, "code": ReservedKey.RC}[place], value)
    if place == "headers" and not isinstance(value, dict):
        assert _problem(sent, "train", "1")  # FLARE itself cannot read who sent it
        return
    try:
        unpack_update(sent)
    except MessageError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
    accepted = aggregator.accept(sent, context)
    assert accepted or (all(reason.isprintable() for reason in run.refused.values()) and aggregator.accepted == ["A"])
    assert dxo.data_kind == DataKind.WEIGHT_DIFF


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(st.data())
def test_changed_bytes_of_an_answer_take_no_memory(numbers, data):
    common_decomposers.register()
    packed = pack_update(UpdateMessage(difference(1.0), None, numbers))
    intact = fobs.dumps(packed)
    changed = bytearray(intact[: data.draw(st.integers(0, len(intact)))] if data.draw(st.booleans()) else intact)
    for _ in range(data.draw(st.integers(1, 4))):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    received = []

    def decode():
        try:
            received.append(fobs.loads(bytes(changed)))
        except Exception as error:  # of FLARE's decoding: `harmofl.flare.site_messages` answers for it
            assert not isinstance(error, MessageError)

    assert peak_mib(decode) < 64
    for answer in received:
        if not _problem(answer, "", ""):
            try:
                unpack_update(answer)
            except MessageError as error:
                assert str(error).isprintable()


def test_numbers_beyond_any_answer_are_refused_before_they_are_read(healthy, answer):
    deep = {}
    for _ in range(20):
        deep = {"a": deep}
    for wrong in ({f"k{index}": 1 for index in range(2000)}, deep, [0.0] * 2_000_000, {"x" * 1000: 1}, {1: 1}):
        aggregator, run, context = healthy()
        sent = answer("B", difference(1.0))
        sent["DXO"]["meta"]["harmofl.numbers"] = {"skipped": wrong}
        reason = refused(aggregator, run, context, sent)
        assert reason.startswith("the answer's numbers cannot be used: ") and len(reason) < 200


@pytest.mark.parametrize("value", ["0.5", True, b"1"])
def test_what_reads_as_a_number_is_none(healthy, answer, value):
    aggregator, run, context = healthy()
    assert "loss" in refused(aggregator, run, context, answer("B", difference(1.0), loss=value))


def test_an_entry_that_would_grow_when_it_is_converted_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    sent = answer("B", difference(1.0))
    sent["DXO"]["data"]["w"] = ["", *[""] * 1000, "x" * 1_000_000]  # as an array of text: 3.7 GiB
    assert peak_mib(lambda: refused(aggregator, run, context, sent)) < 10
    assert run.refused["B"] == "entry w is list, no array"


def test_a_list_as_an_amplitude_is_refused(healthy, answer):
    aggregator, run, context = healthy()
    sent = answer("B", difference(1.0))
    parts = {
        "weights": from_shareable(sent),
        "amplitude": DXO(DataKind.APP_DEFINED, data={"amplitude": ["1", "2"], "images": 3, "patients": 3}),
    }
    collection = DXO(DataKind.COLLECTION, data=parts, meta=from_shareable(sent).meta).to_shareable()
    collection.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    collection.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
    assert refused(aggregator, run, context, collection) == "the amplitude has another form"


@pytest.mark.parametrize("cookie", [{"a": 1}, [4], "4", True, None, 4.0])
def test_a_round_that_is_no_number_is_none(cookie):
    sent = Shareable()
    sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, cookie)
    assert round_of(sent) is None
    sent.set_header(ReservedHeaderKey.COOKIE_JAR, cookie)
    assert round_of(sent) is None


@pytest.mark.parametrize("told", [["a"], {"a": "b"}, b"\x1b", 7, "x\n\x1b[2J" * 100], ids=str)
def test_the_code_and_the_line_of_an_error_are_printable_whatever_they_are(told):
    sent = Shareable()
    for key in (ReservedKey.RC, "harmofl.code", "harmofl.reason"):
        sent.set_header(key, told)
    for text in read_error(sent):
        assert text.isprintable() and len(text) <= 200


def test_problem_names_the_task_an_answer_claims():
    answer = Shareable()
    assert _problem(SimpleNamespace(), "train", "1").startswith("the answer is SimpleNamespace, no answer to a task")
    answer.set_header(FLContextKey.TASK_NAME, "evaluate")
    answer.add_cookie(FLContextKey.TASK_ID, "1")
    assert _problem(answer, "train", "1") == "the answer to train says that it is one to evaluate"
    assert _problem(answer, "evaluate", "1") == ""
