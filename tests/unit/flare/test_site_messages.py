"""What stands before FLARE's callbacks in the server's process of a job: who may send what, and how much of it."""

import logging
import zlib
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import job_from_meta
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.f3.cellnet import cell as flare_cell
from nvflare.fuel.f3.cellnet.defs import Encoding, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.cellnet.registry import Callback, Registry
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError, Stream, StreamFuture
from nvflare.fuel.utils import fobs
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.widgets.fed_event import FedEventHeader

from harmofl.flare.controller import HarmoFLScatterAndGather
from harmofl.flare.site_messages import (
    MIB,
    MOST_MESSAGE,
    SiteMessages,
    _AnswerAdapter,
    _BoundedCell,
    most_bytes_of_answer,
)
from harmofl.flare.wire import read_error

TOKENS = {"token-A": Client("A", "token-A"), "token-B": Client("B", "token-B")}


class ToyAgent:
    """FLARE's agent; keeps what reaches it."""

    def __init__(self) -> None:
        self.cell = SimpleNamespace()
        self.commands: list[Message] = []
        self.events: list[Message] = []

    def execute_command(self, request: Message) -> Message:
        self.commands.append(request)
        return Message({"passed": True})

    def aux_communicate(self, request: Message) -> Message:
        self.events.append(request)
        return Message({"passed": True})


@pytest.fixture
def agent() -> ToyAgent:
    return ToyAgent()


@pytest.fixture
def messages(agent: ToyAgent) -> SiteMessages:
    """In a job where B was sent task `train` with id 7."""
    held = SiteMessages(agent, job_id="job", client_of=TOKENS.get, most_bytes=MIB)  # type: ignore[arg-type]
    held.expects["B"] = "train", "7"
    return held


def request(payload: Any, topic: str = "submit_update", origin: str = "B.job", token: str = "token-B") -> Message:
    return Message(
        {MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.TOPIC: topic, CellMessageHeaderKeys.TOKEN: token}, payload
    )


def answer(site: str = "B", code: Any = ReturnCode.OK, name: Any = "train", task_id: Any = "7") -> Shareable:
    """As FLARE's client sends it, with a context that says who it is."""
    sent = make_reply(code)
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    sent.set_peer_context(context)
    sent.set_header(FLContextKey.TASK_NAME, name)
    sent.add_cookie(FLContextKey.TASK_ID, task_id)
    return sent


def passed_on(agent: ToyAgent) -> Shareable:
    (message,) = agent.commands
    return message.payload


def test_a_sound_answer_passes_with_the_name_of_who_sent_it(messages, agent):
    sent = answer(site="A")  # B says that it is A
    assert messages.take_answer(request(sent)).get_header("passed")
    got = passed_on(agent)
    assert got is sent and got.get_return_code() == ReturnCode.OK
    context = got.get_peer_context()
    assert (context.get_identity_name(), context.get_job_id()) == ("B", "job")


@pytest.mark.parametrize("code", [*("RUN_MISMATCH", "TASK_UNKNOWN", "UNSAFE_JOB"), ["OK"], {}, "a\nb", "x" * 999, 7])
def test_no_return_code_of_one_site_ends_the_job(messages, agent, code):
    messages.take_answer(request(answer(code=code)))
    got = passed_on(agent)
    assert got.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert (got.get_header(FLContextKey.TASK_NAME), got.get_cookie(FLContextKey.TASK_ID)) == ("train", "7")
    told, line = read_error(got)
    assert told == "unusable_answer" and line.startswith("the answer has return code") and line.isprintable()


@pytest.mark.parametrize(
    "sent",
    [
        *([1], b"bytes", None, {"a": 1}, Shareable(), Shareable({ReservedHeaderKey.HEADERS: [1]})),
        *(answer(name=["train"]), answer(name="train\nx"), answer(task_id={"a": 1}), answer(name="evaluate")),
    ],
    ids=["list", "bytes", "none", "dict", "empty", "headers", "name_list", "name_lines", "task_id", "other_task"],
)
def test_an_answer_of_another_form_is_an_error_for_the_task_of_its_site(messages, agent, sent):
    messages.take_answer(request(sent))
    got = passed_on(agent)
    assert (got.get_header(FLContextKey.TASK_NAME), got.get_cookie(FLContextKey.TASK_ID)) == ("train", "7")
    assert read_error(got)[0] == "unusable_answer"
    assert got.get_peer_context().get_identity_name() == "B"


def test_a_text_for_the_audit_log_is_refused(messages, agent):
    sent = answer()
    sent.set_header(ReservedHeaderKey.AUDIT_EVENT_ID, "x\n[forged]")
    messages.take_answer(request(sent))
    assert read_error(passed_on(agent))[1] == "the answer's audit event has another form"


def test_of_an_unknown_sender_nothing_is_taken(messages, agent):
    messages.take_answer(request([1], token="guessed"))  # FLARE refuses it by its token
    assert passed_on(agent) == Shareable()


@pytest.mark.parametrize("topic", ["abort", "server_state", "handle_dead_job", "app_command", "show_stats", "x\x1b[2J"])
def test_only_the_server_commands_its_job(messages, agent, caplog, topic):
    with caplog.at_level(logging.WARNING, "harmofl.progress"):
        reply = messages.take_command(request(Shareable(), topic))
    assert reply.get_header(MessageHeaderKey.RETURN_CODE) == CellReturnCode.INVALID_REQUEST
    assert not agent.commands and caplog.messages[0].isprintable() and "B.job: command" in caplog.messages[0]
    assert messages.take_command(request(Shareable(), topic, origin="server")).get_header("passed")


def test_a_site_asks_for_tasks(messages, agent):
    assert messages.take_command(request(Shareable(), "get_task")).get_header("passed")
    assert not messages.take_command(request([1], "get_task")).get_header("passed")


@pytest.mark.parametrize(
    ("event", "passes"),
    [("fed.analytix_log_stats", True), ("_fatal_system_error", False), ("_end_run", False), (["a"], False), (7, False)],
)
def test_only_events_with_numbers_to_plot_pass(messages, agent, event, passes):
    sent = Shareable()
    sent.set_header(FedEventHeader.EVENT_TYPE, event)
    assert bool(messages.take_event(request(sent, "fed.event")).get_header("passed")) is passes
    assert len(agent.events) is int(passes)


class ToyCell:
    """As much of a cell as the adapter and the arrays of an answer need."""

    def __init__(self, *replies: Message) -> None:
        self.core_cell = SimpleNamespace(my_info=SimpleNamespace(fqcn="server.job"))
        self.decode_pass_through_channels: set[str] = set()
        self.decode_pass_through_topics: set[tuple[str, str]] = set()
        self._replies = list(replies)

    def get_fobs_context(self, props: Any = None) -> dict[str, Any]:
        return dict(props or {})

    def send_request(self, *args: Any, **kwargs: Any) -> Message:
        return self._replies.pop(0)


class ToyFuture:
    def __init__(self, result: Any) -> None:
        self.headers = {
            MessageHeaderKey.ORIGIN: "B.job",
            CellMessageHeaderKeys.TOKEN: "token-B",
            StreamHeaderKey.CHANNEL: "server_command",
            StreamHeaderKey.TOPIC: "submit_update",
            StreamHeaderKey.PAYLOAD_ENCODING: Encoding.FOBS,
        }
        self._result = result

    def result(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@pytest.fixture
def arrive(messages, monkeypatch):
    """Let bytes arrive as an answer of B. Were they to end the process, as in FLARE, this would fail."""
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("the process of the job ended"))
    monkeypatch.setattr(messages, "bound_messages", lambda: None)
    adapter = _AnswerAdapter(messages, ToyCell(), MIB)  # type: ignore[arg-type]
    return lambda result: adapter.call(ToyFuture(result))


def test_bytes_that_can_be_decoded_reach_flare(arrive, agent):
    common_decomposers.register()
    sent = answer()
    sent.set_peer_context(None)
    arrive([fobs.dumps(sent)])
    assert passed_on(agent).get_return_code() == ReturnCode.OK


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ([b""], "the answer cannot be decoded: "),
        ([b"\x64\x00" + b"\xff" * 40], "the answer cannot be decoded: "),
        ([b"\x64\x00" + (8).to_bytes(8, "big") + b"\x81\xa1"], "the answer cannot be decoded: RuntimeError"),
        ([fobs.dumps(7)], "the answer cannot be decoded: TypeError"),
        (MemoryError(), "the answer cannot be decoded: MemoryError"),
        (BlobSizeError("9 GB"), "the answer cannot be decoded: its message without the arrays has more than 8 MiB"),
    ],
    ids=["empty", "header", "cut", "number", "memory", "size"],
)
def test_bytes_that_cannot_be_decoded_are_an_error_of_their_site(arrive, agent, result, line):
    arrive(result)
    code, told = read_error(passed_on(agent))
    assert code == "undecodable_answer" and told.startswith(line)
    assert passed_on(agent).get_cookie(FLContextKey.TASK_ID) == "7"


def array_file(array: np.ndarray, *, compressed: bool = False) -> bytes:
    stream = BytesIO()
    (np.savez_compressed if compressed else np.savez)(stream, T0=array)
    return stream.getvalue()


def arrays(*items: bytes) -> Message:
    return Message({MessageHeaderKey.PAYLOAD_LEN: sum(map(len, items))}, {"data": list(items)})


def fetch(*replies: Message, target: str = "B.job") -> tuple[_BoundedCell, Any]:
    bounded = _BoundedCell(ToyCell(*replies), "B.job", MIB, set())  # type: ignore[arg-type]
    return bounded, lambda: [bounded.send_request(target=target) for _ in replies]


def test_arrays_within_bounds_are_fetched():
    _, ask = fetch(arrays(array_file(np.zeros(2**17, np.float32))), Message({}, None))
    assert len(ask()) == 2


@pytest.mark.parametrize(
    ("replies", "line"),
    [
        # two files of 3/4 MiB each where one MiB is the limit
        ([arrays(array_file(np.zeros(3 * 2**16, np.float32)))] * 2, "more than the 1 MiB"),
        # 64 MiB of zeros are 64 KiB compressed
        ([arrays(array_file(np.zeros(2**24, np.float32), compressed=True))], "more than the 1 MiB"),
    ],
    ids=["more files", "a file that unpacks to more"],
)
def test_more_arrays_than_an_answer_may_have_are_refused(replies, line):
    bounded, ask = fetch(*replies)
    with pytest.raises(ValueError, match=line):
        ask()
    assert line in bounded.problem


@pytest.mark.parametrize("target", ["A.job", "server", "server.job", "B2.job", "x\n"])
def test_arrays_are_fetched_from_the_site_that_sent_the_answer(target):
    bounded, ask = fetch(arrays(b""), target=target)
    with pytest.raises(ValueError, match="at another participant"):
        ask()
    assert bounded.problem.isprintable()


def test_a_relayed_site_is_the_same_site():
    _, ask = fetch(Message({}, None), target="B.job.trainer")
    ask()


class Registered(ToyCell):
    """A cell with FLARE's own registries of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_receiver = SimpleNamespace(registry=Registry())
        for channel in ("return_only", "aux_communication"):
            self.register_blob_cb(channel, "*", lambda future: None)

    def register_stream_cb(self, channel: str, topic: str, callback: Any) -> None:
        self.byte_receiver.registry.set(channel, topic, Callback(callback, (), {}))

    def register_blob_cb(self, channel: str, topic: str, callback: Any) -> None:
        self.register_stream_cb(channel, topic, BlobHandler(callback).handle_blob_cb)

    def register_request_cb(self, channel: str, topic: str, cb: Any) -> None:
        self.register_blob_cb(channel, topic, cb)


@pytest.fixture
def installed(messages, monkeypatch):
    """What stands before the callbacks of a cell, and the cell."""
    monkeypatch.setattr(flare_cell, "_is_server_job_cell", flare_cell._is_server_job_cell)  # undone afterwards
    messages._cell = Registered()
    messages.install()
    return messages, messages._cell


def test_every_stream_has_a_bound_and_no_callback_of_flare_ends_the_process(installed):
    messages, cell = installed
    find = cell.byte_receiver.registry.find
    asked = [("server_command", "submit_update"), ("server_command", "get_task"), ("aux_communication", "fed.event")]
    for channel, topic in [*asked, ("aux_communication", "x")]:
        assert find(channel, topic).cb.__self__.max_blob_size == MOST_MESSAGE
    assert not flare_cell._is_server_job_cell(SimpleNamespace(fqcn="server.job"))


class EmptyStream(Stream):
    def read(self, chunk_size: int) -> bytes:
        return b""


@pytest.mark.parametrize("size", [MIB, MIB + 1, 2**40])
def test_a_reply_larger_than_an_answer_is_known_by_its_sender(installed, size):
    messages, cell = installed
    told: list[Any] = []
    handle = cell.byte_receiver.registry.find("return_only", "*").cb
    stream: Any = EmptyStream(size, {MessageHeaderKey.ORIGIN: "B.job"})
    stream.task = SimpleNamespace(stop=told.append)
    handle(StreamFuture(1, stream.headers), stream, False)
    assert messages.too_large == (set() if size <= MIB else {"B.job"})
    assert [type(error) for error in told] == ([] if size <= MIB else [BlobSizeError])


def test_a_refused_reply_is_the_end_of_the_answer():
    too_large: set[str] = set()

    class Refuses(ToyCell):
        def send_request(self, *args: Any, **kwargs: Any) -> Message:
            too_large.add("B.job")
            return Message({MessageHeaderKey.RETURN_CODE: CellReturnCode.TIMEOUT}, None)

    bounded = _BoundedCell(Refuses(), "B.job", MIB, too_large)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than the 1 MiB"):  # FLARE would ask three times more
        bounded.send_request(target="B.job")


def test_the_bound_is_the_model_and_some(make_run):
    run = make_run()
    weights = run.initial_weights()
    model = sum(value.nbytes for value in weights.values())
    assert model < most_bytes_of_answer(run) < 2 * model + 32 * MIB
    assert len(zlib.compress(bytes(MIB))) < MIB // 500  # what the bound on unpacked bytes is for


def test_a_job_that_began_with_more_sites_needs_its_minimum(make_run, make_context):
    run = make_run({"federation.minimum_sites": 2})
    context = make_context(run)
    meta = {"min_clients": 3, "name": "job", "deploy_map": {"app": ["server", "A", "B", "C"]}}
    context.set_prop(FLContextKey.JOB_META, meta, private=True, sticky=True)
    HarmoFLScatterAndGather._keep_on_without_lost_sites(SimpleNamespace(run=run), context)  # type: ignore[arg-type]
    # FLARE reads it of a context of its own
    assert job_from_meta(context._get_ctx_manager().new_context().get_prop(FLContextKey.JOB_META)).min_sites == 2
    assert meta["min_clients"] == 3
