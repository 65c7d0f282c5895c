"""The way to the server, with a planted failure of each kind."""

import hashlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harmofl.app.connection import check_server
from harmofl.app.kit import Check, open_kit
from tests.unit.app.provisioned import Provisioning, TlsServer, problems

Serve = Callable[..., int]


@pytest.fixture
def servers() -> Iterator[list[TlsServer]]:
    running: list[TlsServer] = []
    yield running
    for server in running:
        server.stop()


@pytest.fixture
def serve(servers: list[TlsServer]) -> Serve:
    def start(kit: Path | None, *, hang_up: bool = False) -> int:
        servers.append(TlsServer(kit, hang_up=hang_up))
        return servers[-1].port

    return start


def reach(kit: Path) -> list[Check]:
    return list(check_server(open_kit(kit)))


def test_a_good_server_hears_nothing(
    kits: Provisioning, tmp_path: Path, serve: Serve, servers: list[TlsServer]
) -> None:
    site = kits.copy("HK", tmp_path / "site", port=serve(kits.folder / "server"))
    checks = reach(site)
    assert not problems(checks)
    assert "accept each other's certificates" in checks[-1].message
    servers[0].stop()
    assert servers.pop(0).heard == b""  # no word of FLARE's, so nothing is registered


def test_a_lead_reaches_the_server_too(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    assert not problems(reach(kits.copy("lead@ucl.org", tmp_path / "lead", port=serve(kits.folder / "server"))))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_name_without_an_address(kits: Provisioning, tmp_path: Path, host: str) -> None:
    (check,) = reach(kits.copy("HK", tmp_path / "site", localhost=host))
    assert check.state == "error" and f"cannot resolve {host}" in check.message and check.fix


def test_a_closed_port(kits: Provisioning, tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound but not listening: nobody else gets it
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        (check,) = problems(reach(kits.copy("HK", tmp_path / "site", port=port)))
    assert check.state == "error" and "port closed" in check.message and str(port) in check.fix


def test_a_server_of_another_project_with_our_roots_name(
    kits: Provisioning, others: Provisioning, tmp_path: Path, serve: Serve
) -> None:
    site = kits.copy("HK", tmp_path / "site", port=serve(others.folder / "server"))
    (check,) = problems(reach(site))
    assert check.state == "error" and "comes from another root" in check.message
    for folder in (kits.folder, others.folder):
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert((folder / "HK/startup/rootCA.pem").read_text())).digest()
        assert digest.hex(":").upper() in check.message


def test_a_server_whose_certificate_has_expired(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    server = kits.copy("server", tmp_path / "server")
    kits.issue(server, "server", (-20, -1), server_default_host="localhost")
    (check,) = problems(reach(kits.copy("HK", tmp_path / "site", port=serve(server))))
    assert check.state == "error" and "expired" in check.message and "renew the server's kit" in check.fix


@pytest.mark.parametrize(("scheme", "state"), [("http", "warning"), ("grpc", "error")])
def test_a_host_that_the_certificate_does_not_name(
    kits: Provisioning, tmp_path: Path, serve: Serve, scheme: str, state: str
) -> None:
    server = kits.copy("server", tmp_path / "server")
    kits.issue(server, "server", server_default_host="fl.example.org")
    (check,) = problems(reach(kits.copy("HK", tmp_path / "site", port=serve(server), http=scheme)))
    assert check.state == state
    assert "name localhost is not in the certificate's names" in check.message and "fl.example.org" in check.message


def test_an_address_may_be_named(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    site = kits.copy("HK", tmp_path / "site", port=serve(kits.folder / "server"), localhost="127.0.0.1")
    assert not problems(reach(site))


def test_another_machine_of_the_project_answers(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    server = kits.copy("server", tmp_path / "server")
    kits.issue(server, "BIDMC", server_default_host="localhost")
    (check,) = problems(reach(kits.copy("HK", tmp_path / "site", port=serve(server))))
    assert check.state == "error" and "BIDMC answers, but this kit's server is called server" in check.message


def test_a_server_refuses_a_foreign_certificate(
    kits: Provisioning, others: Provisioning, tmp_path: Path, serve: Serve
) -> None:
    site = kits.copy("HK", tmp_path / "site", port=serve(kits.folder / "server"))
    others.issue(site, "HK")
    (check,) = problems(reach(site))
    assert check.state == "error" and "the server refuses this kit's certificate" in check.message


def test_a_server_that_hangs_up_refuses_too(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    # FLARE's http server closes the connection where a foreign certificate is shown, without an alert
    site = kits.copy("HK", tmp_path / "site", port=serve(kits.folder / "server", hang_up=True))
    (check,) = problems(reach(site))
    assert check.state == "error" and "it ended the connection" in check.message


def test_another_program_at_the_port(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    (check,) = problems(reach(kits.copy("HK", tmp_path / "site", port=serve(None))))
    assert check.state == "error" and "no TLS connection" in check.message


def test_a_broken_certificate_keeps_tls_from_being_tried(kits: Provisioning, tmp_path: Path, serve: Serve) -> None:
    site = kits.copy("HK", tmp_path / "site", port=serve(kits.folder / "server"))
    (site / "startup/client.key").write_bytes((kits.folder / "BIDMC/startup/client.key").read_bytes())
    assert [check.state for check in problems(reach(site))] == ["note"]
