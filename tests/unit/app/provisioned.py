"""Real startup kits in a second, and what is done to them in tests: other certificates, edits signed or not."""

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from nvflare.lighter.entity import Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.utils import (
    Identity,
    generate_cert,
    generate_keys,
    serialize_cert,
    serialize_pri_key,
    sign_folders,
)

from harmofl.app.kit import Check
from tests.loose_limits import REHEARSAL

PROJECT = "harmofl_test"
LEAD = "lead@ucl.org"
MEMBER = "member@hk.org"
FILTER = "harmofl.flare.filters.AmplitudeFilter"
Lines = Callable[..., list[str]]  # of the fixtures of these names
Packed = Callable[..., Path]


@dataclass(frozen=True)
class Provisioning:
    """A project's kits, its root and the key that signs with it."""

    folder: Path
    root: x509.Certificate
    root_key: RSAPrivateKey

    def copy(self, name: str, target: Path, *, port: int = 8002, **edits: str) -> Path:
        """A signed copy of a kit that connects to `port`, with texts of its fed_*.json replaced."""
        shutil.copytree(self.folder / name, target)
        for path in target.glob("startup/fed_*.json"):
            text = path.read_text().replace("8002", str(port))
            for old, new in edits.items():
                text = text.replace(f'"{old}', f'"{new}')
            path.write_text(text)
        self.sign(target)
        return target

    def sign(self, kit: Path) -> None:
        """Sign the startup files as they are now."""
        (kit / "startup" / "signature.json").unlink(missing_ok=True)
        sign_folders(str(kit / "startup"), self.root_key, signature_file="signature.json")

    def issue(self, kit: Path, name: str, days: tuple[float, float] = (-1, 300), **more: Any) -> None:
        """Put a certificate of this root into a kit, valid from and to so many days from now, with its key."""
        key, public = generate_keys()
        begin, end = (datetime.now(UTC) + timedelta(days=count) for count in days)
        certificate = generate_cert(
            Identity(name, "hk", None),
            Identity(PROJECT),
            self.root_key,
            public,
            not_valid_before=begin,
            not_valid_after=end,
            **more,
        )
        kind = "server" if (kit / "startup" / "server.crt").exists() else "client"
        (kit / "startup" / f"{kind}.crt").write_bytes(serialize_cert(certificate))
        (kit / "startup" / f"{kind}.key").write_bytes(serialize_pri_key(key))
        self.sign(kit)


def provision(workspace: Path) -> Provisioning:
    """A server called `server`, reached at localhost, two sites, a lead and a member, all on port 8002."""
    project = Project(PROJECT, "kits for tests", props={"api_version": 3})
    ports = {"fed_learn_port": 8002, "admin_port": 8002}
    project.set_server("server", "consortium", {**ports, "host_names": ["127.0.0.1"], "default_host": "localhost"})
    for site in ("BIDMC", "HK"):
        project.add_client(site, site.lower(), {})
    for name, role in ((LEAD, "lead"), (MEMBER, "member")):
        project.add_admin(name, "ucl", {"role": role})
    builders = [WorkspaceBuilder(["master_template.yml"]), StaticFileBuilder(config_folder="config"), CertBuilder()]
    context = Provisioner(str(workspace), builders).provision(project)
    folder = workspace / PROJECT / "prod_00"
    root = x509.load_pem_x509_certificate((folder / "HK/startup/rootCA.pem").read_bytes())
    return Provisioning(folder, root, context["root_pri_key"])


def set_privacy(kit: Path, **properties: Any) -> Path:
    """Write local/privacy.json as provisioning/site has it, with these properties; limits are a rehearsal's."""
    scope = {
        "name": "harmofl",
        "properties": {"minimum_cases": 5, "limits": REHEARSAL, **properties},
        "task_result_filters": [{"path": FILTER, "args": {}}],
        "task_data_filters": [],
    }
    return write(kit, "privacy.json", {"scopes": [scope], "default_scope": "harmofl"})


def change(kit: Path, name: str, **keys: Any) -> Path:
    """Change keys of a file in local/, taken from its .default where the site has none of its own."""
    path = kit / "local" / name
    held = path if path.exists() else path.with_name(f"{name}.default")
    return write(kit, name, json.loads(held.read_text()) | keys)


def write(kit: Path, name: str, content: Any) -> Path:
    """Write a file of local/."""
    path = kit / "local" / name
    with suppress(FileNotFoundError):
        path.unlink()
    path.write_text(json.dumps(content))
    return path


def problems(checks: Iterable[Check]) -> list[Check]:
    """The checks that are not good."""
    return [check for check in checks if check.state != "ok"]


def closed_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


class TlsServer:
    """A server on loopback with a kit's certificate; it answers nothing and keeps what it hears."""

    def __init__(self, kit: Path | None, *, hang_up: bool = False) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.heard = b""
        self.hang_up = hang_up
        self.context: ssl.SSLContext | None = None
        if kit is not None:
            self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(kit / "startup/rootCA.pem"))
            self.context.verify_mode = ssl.CERT_REQUIRED  # as FLARE's server: both sides show a certificate
            self.context.load_cert_chain(kit / "startup/server.crt", kit / "startup/server.key")
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        """Answer one connection after the other until `stop`."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            try:
                self.answer(connection)
            except OSError:
                connection.close()

    def answer(self, connection: socket.socket) -> None:
        """Shake hands and listen; without a certificate answer as a web server does."""
        if self.context is None:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
            return
        with self.context.wrap_socket(connection, server_side=True) as secured:
            if self.hang_up:
                return
            while data := secured.recv(100):
                self.heard += data

    def stop(self) -> None:
        """End the thread."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(15)
