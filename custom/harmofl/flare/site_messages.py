"""What a site's messages may do to the server's process of a job: refuse one contribution, never end the run of all.

FLARE 2.9.0 ends that process (`os._exit` in nvflare.fuel.f3.cellnet.cell) where an answer cannot be decoded or a site
refuses a message as too large, it ends the job on some return codes of one site's answer, takes any command that a
server may send itself from any site, and fires whatever event a site names. It has no setting for any of this, so the
controller puts callbacks of its own in front of FLARE's, by `Cell`'s own registration, and replaces one function:
`_is_server_job_cell`, which decides that the process ends. Both depend on FLARE's version, which is pinned.
"""

import math
import re
import zipfile
from collections.abc import Callable
from io import BytesIO
from typing import Any

import nvflare.fuel.f3.cellnet.cell as flare_cell
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.fuel.f3.cellnet.cell import Adapter, Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import decode_payload, make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import BlobSizeError
from nvflare.fuel.utils.fobs import FOBSContextKey
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.server.server_command_agent import ServerCommandAgent
from nvflare.private.fed.server.server_commands import ServerCommands
from nvflare.private.fed.server.server_runner import ServerRunner
from nvflare.widgets.fed_event import FED_EVENT_TOPIC, FedEventHeader

from harmofl.core.spectra import statistic_shape
from harmofl.flare.log_records import guard_log_records
from harmofl.flare.progress import PROGRESS
from harmofl.flare.server_run import ServerRun
from harmofl.flare.wire import error_reply
from harmofl.sections import outside_text
from harmofl.tasks import load_task

MIB = 2**20
SLACK = 16 * MIB  # of an answer beyond its arrays: names, scores of some hundred thousand cases
BYTES_OF_AN_ENTRY = 1024  # FLARE sends an array that travels alone as a file of its own, with a header
MOST_MESSAGE = 8 * MIB  # of a message without its arrays, which FLARE streams apart; decoded it may take 64 times that
UNDECODABLE, UNUSABLE = "undecodable_answer", "unusable_answer"
_EVENTS = {f"{prefix}{ANALYTIC_EVENT_TYPE}" for prefix in ("", "fed.")}
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)  # of a task, and of the id that FLARE gives it


class SiteMessages:
    """Stands before FLARE's own callbacks in the server's process of a job.

    Attributes:
        expects: by site the name and the id of the task that it was sent last.
        too_large: cells of sites whose last reply was larger than all arrays of an answer may be.
    """

    def __init__(
        self, agent: ServerCommandAgent, *, job_id: str, client_of: Callable[[str], Any], most_bytes: int
    ) -> None:
        """Prepare; nothing is put in place yet.

        Args:
            agent: takes the messages of the job's sites, in the server's process of the job.
            job_id: as FLARE gave it.
            client_of: FLARE's client by the token of a message; None for a token that it never gave.
            most_bytes: of all arrays of one answer, or of one alone.
        """
        self.expects: dict[str, tuple[str, str]] = {}
        self.too_large: set[str] = set()
        self._agent, self._cell = agent, agent.cell
        self._job_id, self._client_of, self._most_bytes = job_id, client_of, most_bytes

    def install(self) -> None:
        """Put the callbacks in front of FLARE's, which get what passes."""
        flare_cell._is_server_job_cell = lambda my_info: False
        for channel, topic, callback in (
            (CellChannel.SERVER_COMMAND, "*", self.take_command),
            (CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE, self.take_answer),
            (CellChannel.AUX_COMMUNICATION, FED_EVENT_TOPIC, self.take_event),
        ):
            self._cell.register_request_cb(channel=channel, topic=topic, cb=callback)
        adapter = _AnswerAdapter(self, self._cell, self._most_bytes)
        self._cell.register_blob_cb(CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE, adapter.call)
        replies = self._cell.byte_receiver.registry.find(CellChannel.RETURN_ONLY, "*").cb
        self._cell.register_stream_cb(CellChannel.RETURN_ONLY, "*", lambda *given: self._take_reply(replies, *given))
        self.bound_messages()

    def bound_messages(self) -> None:
        """Let FLARE refuse a larger message by the size that its first frame tells, before any of it is kept."""
        for callback in list(self._cell.byte_receiver.registry.reg.values()):
            handler = getattr(callback.cb, "__self__", None)
            if isinstance(handler, BlobHandler):
                handler.max_blob_size = MOST_MESSAGE

    def _take_reply(self, handle: Callable[..., int], future: Any, stream: Any, *more: Any) -> int:
        """Take what a site replies, its arrays among it, up to the bound; FLARE would take a refusal for a delay."""
        handler = getattr(handle, "__self__", None)
        if isinstance(handler, BlobHandler):
            handler.max_blob_size = self._most_bytes
        if stream.get_size() > self._most_bytes:
            self.too_large.add(str((stream.headers or {}).get(MessageHeaderKey.ORIGIN, "")))
        return handle(future, stream, *more)

    def take_answer(self, request: Message) -> Message:
        """Pass a site's answer on, in a form that FLARE can work with; an error in its place where it has none."""
        client = self._client_of(str(request.get_header(CellMessageHeaderKeys.TOKEN, "")))
        if client is not None:
            request.payload = self._usable(request.payload, client.name)
        elif not isinstance(request.payload, Shareable):
            request.payload = Shareable()  # FLARE refuses who sends it
        reply: Message = self._agent.execute_command(request)
        return reply

    def take_command(self, request: Message) -> Message:
        """Pass on what a site may ask, and everything that the server itself sends to its job."""
        topic = request.get_header(MessageHeaderKey.TOPIC)
        asked = topic in ServerCommands.client_request_commands_names and isinstance(request.payload, Shareable)
        if asked or _is_of_server(request):
            reply: Message = self._agent.execute_command(request)
            return reply
        return _refuse(request, f"command {outside_text(topic)}")

    def take_event(self, request: Message) -> Message:
        """Pass on events that carry numbers to plot; any other could end the job for all."""
        told = request.payload.get_header(FedEventHeader.EVENT_TYPE) if isinstance(request.payload, Shareable) else None
        if (isinstance(told, str) and told in _EVENTS) or _is_of_server(request):
            reply: Message = self._agent.aux_communicate(request)
            return reply
        return _refuse(request, f"event {outside_text(told)}")

    def _usable(self, answer: Any, site: str) -> Shareable:
        """The answer with the name of who sent it, or an error for the task that the site was sent."""
        task_name, task_id = self.expects.get(site, ("", ""))
        problem = answer.problem if isinstance(answer, _Undecodable) else _problem(answer, task_name, task_id)
        if problem:
            answer = error_reply(UNDECODABLE if isinstance(answer, _Undecodable) else UNUSABLE, problem)
            answer.set_header(FLContextKey.TASK_NAME, task_name)
            answer.add_cookie(FLContextKey.TASK_ID, task_id)
        context = FLContext()
        context.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
        context.set_prop(ReservedKey.RUN_NUM, self._job_id, private=False, sticky=False)
        answer.set_peer_context(context)
        return answer


def guard_messages(run: ServerRun, fl_ctx: FLContext) -> SiteMessages:
    """Put the callbacks in place for a run, in the process that runs it."""
    engine = fl_ctx.get_engine()
    messages = SiteMessages(
        engine.server.command_agent,
        job_id=fl_ctx.get_job_id(),
        client_of=engine.server.client_manager.clients.get,
        most_bytes=most_bytes_of_answer(run),
    )
    messages.install()
    guard_log_records()
    return messages


def most_bytes_of_answer(run: ServerRun) -> int:
    """Bytes that the arrays of an answer may have: those of the model and of a statistic in float64, and some slack."""
    settings, data = run.experiment.amplitude, run.experiment.data
    channels = load_task(run.experiment).in_channels
    shape = statistic_shape(settings.region, channels, data.height, data.width, settings.low_fraction)
    entries = run.initial_weights().values() if run.has_global_model else ()
    model = sum(value.nbytes + BYTES_OF_AN_ENTRY for value in entries)
    # a relay's sum has two integers of 8 bytes a value, and its sites' statistics
    most = max((len(sites) for sites in run.relays.values()), default=0)
    return (4 if most else 1) * model + (1 + most) * 8 * math.prod(shape) + SLACK


class _Undecodable(dict[str, Any]):
    """Stands for an answer that cannot be decoded; FLARE takes the length of what it passes on."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem


class _AnswerAdapter(Adapter):
    """FLARE's way from a streamed answer to its callback, with the decoding done before, within bounds."""

    def __init__(self, messages: SiteMessages, cell: Cell, most_bytes: int) -> None:
        super().__init__(messages.take_answer, cell.core_cell.my_info, cell)
        self._messages, self._most_bytes = messages, most_bytes

    def call(self, future: Any, *args: Any, **kwargs: Any) -> None:
        """Called by the stream of an answer with its first bytes."""
        self._messages.bound_messages()  # FLARE registers more callbacks when the first arrays travel
        headers = dict(future.headers)
        request = Message(headers, None)
        origin = str(request.get_header(MessageHeaderKey.ORIGIN, ""))
        bounded = _BoundedCell(self.cell, origin, self._most_bytes, self._messages.too_large)
        try:
            request.payload = future.result()
            context = self.cell.get_fobs_context(props={FOBSContextKey.PASS_THROUGH: False})
            context[FOBSContextKey.CELL] = bounded
            decode_payload(request, StreamHeaderKey.PAYLOAD_ENCODING, fobs_ctx=context)
            if not isinstance(request.payload, Shareable):
                raise TypeError
        except Exception as error:  # whatever FLARE, msgpack or NumPy raise on bytes that a site chose
            told = f"its message without the arrays has more than {MOST_MESSAGE // MIB} MiB"
            reason = told if isinstance(error, BlobSizeError) else type(error).__name__
            request.payload = _Undecodable(f"the answer cannot be decoded: {bounded.problem or reason}")
        headers.pop(StreamHeaderKey.PAYLOAD_ENCODING, None)
        super().call(_Received(headers, request.payload), *args, **kwargs)


class _Received:
    """A finished stream, as FLARE's adapter reads it."""

    def __init__(self, headers: dict[str, Any], payload: Any) -> None:
        self.headers, self._payload = headers, payload

    def result(self) -> Any:
        return self._payload


class _BoundedCell:
    """A cell through which FLARE fetches the arrays of one answer: from the site that sent it, up to a number of bytes.

    Equal to the cell itself, by which FLARE's download service knows where it has registered. `problem` says why it was
    refused: FLARE itself tells only that it was.
    """

    def __init__(self, cell: Cell, origin: str, most_bytes: int, too_large: set[str]) -> None:
        self._cell, self._origin, self._left, self._most_bytes = cell, origin, most_bytes, most_bytes
        self._too_large = too_large
        self.problem = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cell, name)

    def __eq__(self, other: object) -> bool:
        return other is self._cell or other is self

    def __hash__(self) -> int:
        return hash(self._cell)

    def send_request(self, *args: Any, target: str, **kwargs: Any) -> Message:
        """Ask for the next arrays.

        Raises:
            ValueError: they lie elsewhere than at the site that sent the answer, or are more than it may have.
        """
        if not _same_site(target, self._origin):
            self.problem = "its arrays lie at another participant"
            raise ValueError(self.problem)
        self._too_large.discard(target)
        reply: Message = self._cell.send_request(*args, target=target, **kwargs)
        self._left -= int(reply.get_header(MessageHeaderKey.PAYLOAD_LEN) or 0)
        data = reply.payload.get("data") if isinstance(reply.payload, dict) else None
        refused = target in self._too_large or self._left < 0
        if refused or any(_unpacked_bytes(item) > self._most_bytes for item in data or []):
            self.problem = f"its arrays have more than the {self._most_bytes // MIB} MiB that an answer may have"
            raise ValueError(self.problem)
        return reply


def _unpacked_bytes(item: Any) -> int:
    """Bytes of an array file that FLARE will read; a compressed one can hold a thousand times its size."""
    with zipfile.ZipFile(BytesIO(item)) as archive:
        return sum(info.file_size for info in archive.infolist())


def _same_site(one: str, other: str) -> bool:
    """Whether two cells belong to one site: those of a job lie directly below that of the site."""
    parent = FQCN.split(other)[:-1]
    return one == other or (bool(parent) and FQCN.split(one)[: len(parent)] == parent)


def _is_of_server(request: Message) -> bool:
    origin = FQCN.split(str(request.get_header(MessageHeaderKey.ORIGIN, "")))
    return bool(origin) and origin[0] == FQCN.ROOT_SERVER


def _problem(answer: Any, task_name: str, task_id: str) -> str:
    """Why FLARE cannot work with an answer, or must not; empty where it can."""
    if not isinstance(answer, Shareable) or not isinstance(answer.get(ReservedHeaderKey.HEADERS), dict):
        return f"the answer is {outside_text(type(answer).__name__)}, no answer to a task, or lacks its headers"
    jar = answer.get_cookie_jar()
    told = (answer.get_header(FLContextKey.TASK_NAME), jar.get(FLContextKey.TASK_ID) if isinstance(jar, dict) else None)
    if not all(isinstance(text, str) and _NAME.fullmatch(text) for text in told):
        return "the answer does not say to which task it belongs"
    if told[1] == task_id and told[0] != task_name:
        return f"the answer to {task_name} says that it is one to {outside_text(told[0])}"
    code = answer.get_return_code()
    if not isinstance(code, str) or not _NAME.fullmatch(code) or code in ServerRunner.ABORT_RETURN_CODES:
        return f"the answer has return code {outside_text(code)}, which FLARE would end the job for, or not know"
    if not _NAME.fullmatch(str(answer.get_header(ReservedHeaderKey.AUDIT_EVENT_ID, "none"))):
        return "the answer's audit event has another form"  # FLARE writes it into the audit log
    return ""


def _refuse(request: Message, what: str) -> Message:
    origin = outside_text(str(request.get_header(MessageHeaderKey.ORIGIN, "")))
    PROGRESS.warning(f"{origin}: {what} refused: no site may send it to a job")
    return make_reply(CellReturnCode.INVALID_REQUEST, "no site may send this to a job")
