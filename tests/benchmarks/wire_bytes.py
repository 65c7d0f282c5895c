"""Bytes that FLARE's own transport writes to its socket for a model on its way down and a difference on its way up."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection
from nvflare.fuel.utils.network_utils import get_open_ports
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

import harmofl.flare.packed_arrays  # noqa: F401  # registers how a model is serialized, in either process

CHANNEL, TOPIC, SERVER, SITE = "harmofl", "round", "server", "site-1"
PATIENCE = 60.0


class Link:
    """A server and a site, each a process of its own with FLARE's cell, over TCP on this machine."""

    def __init__(self, server: Cell, site: Connection, written: dict[str, int]) -> None:
        self._server, self._site, self._written = server, site, written

    def down(self, message: Shareable) -> int:
        """Bytes that the server writes for a task."""
        before = self._written["bytes"]
        _ask(self._server, SITE, message)
        return self._written["bytes"] - before

    def up(self, message: Shareable) -> int:
        """Bytes that the site writes for an answer."""
        self._site.send(message)
        sent: int = self._site.recv()
        return sent


@contextmanager
def open_link() -> Iterator[Link]:
    """Both processes, connected."""
    written = _count_frames()
    url = f"tcp://localhost:{get_open_ports(1)[0]}"
    server = _open_cell(SERVER, url)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    site = spawn.Process(target=_site, args=(url, there), daemon=True)
    site.start()
    try:
        here.recv()  # it is connected
        yield Link(server, here, written)
    finally:
        here.send(None)
        site.join(10)
        site.kill()
        server.stop()


def _site(url: str, orders: Connection) -> None:
    written = _count_frames()
    cell = _open_cell(SITE, url)
    time.sleep(1)
    orders.send("ready")
    while (message := orders.recv()) is not None:
        before = written["bytes"]
        _ask(cell, SERVER, message)
        orders.send(written["bytes"] - before)
    cell.stop()


def _open_cell(name: str, url: str) -> Cell:
    nvflare_fobs_initialize()
    cell = Cell(name, url, secure=False, credentials={})
    cell.register_request_cb(
        channel=CHANNEL, topic=TOPIC, cb=lambda message: Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, None)
    )
    cell.start()
    return cell


def _ask(cell: Cell, target: str, message: Shareable) -> None:
    reply = cell.send_request(
        channel=CHANNEL, topic=TOPIC, target=target, request=new_cell_message({}, message), timeout=PATIENCE
    )
    code = reply.get_header(MessageHeaderKey.RETURN_CODE)
    if code != ReturnCode.OK:
        raise RuntimeError(f"the message to {target} did not arrive: {code}")


def _count_frames() -> dict[str, int]:
    """Count what this process writes to connections that it opens from now on."""
    written = {"bytes": 0}
    opened = SfmConnection.__init__

    def open_and_count(self: SfmConnection, conn: Any, *rest: Any, **named: Any) -> None:
        opened(self, conn, *rest, **named)
        send = conn.send_frame

        def count(frame: Any) -> None:
            written["bytes"] += len(frame)
            send(frame)

        conn.send_frame = count

    SfmConnection.__init__ = open_and_count
    return written
