"""Who a kit says it is, and whether its server answers to it: signatures, certificate, TLS."""

import ipaddress
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from harmofl.app.kit import Check, Kit, read_json
from harmofl.data.findings import count_text

SIGNATURES = "signature.json"
SOON = 30  # days before the end of a certificate from which its renewal is asked for
PATIENCE = 5.0  # seconds for an answer of the server
REFUSAL = 1.0  # seconds in which a server that refuses a certificate says so
GRPC = "grpc"  # of FLARE's drivers the one that holds the server's host name against its certificate
OID_NAMES = {NameOID.COMMON_NAME: "CN", NameOID.ORGANIZATION_NAME: "O", NameOID.UNSTRUCTURED_NAME: "role"}


def check_files(kit: Kit) -> Iterator[Check]:
    """Look at the kit's own files: the private key's rights, and the signature of every startup file."""
    yield Check("ok", kit.folder.name, f"startup kit of {kit.kind} {kit.name}, project {kit.project}")
    if kit.key.exists():  # a missing one is the certificate's business
        rights = kit.key.stat().st_mode & 0o777
        if rights & 0o077:
            yield Check(
                "error", kit.key.name, f"others may read the private key (rights {rights:o})", f"chmod 600 {kit.key}"
            )
        else:
            yield Check("ok", kit.key.name, f"only its owner may read the private key (rights {rights:o})")
    yield from _signatures(kit)


def _signatures(kit: Kit) -> Iterator[Check]:
    from nvflare.lighter.utils import load_crt, verify_content, verify_folder_signature

    again = "take it from the kit as handed over; what a site sets belongs into local/"
    if not (kit.startup / SIGNATURES).exists():
        fix = "ask the operator to provision with kit_signature.KitSignatureBuilder"
        yield Check("warning", SIGNATURES, "the kit is not signed, so an edit would go unnoticed", fix)
        return
    if verify_folder_signature(str(kit.startup), str(kit.root), single_signer=True, signature_file=SIGNATURES):
        yield Check("ok", SIGNATURES, "every startup file is as the project signed it")
        return
    signed = read_json(kit.startup / SIGNATURES)
    edited = []
    for name, signature in signed.items():
        try:
            path = kit.startup / name
            content = name.encode() if path.is_dir() else path.read_bytes()
            verify_content(content, signature, load_crt(str(kit.root)).public_key())
        except FileNotFoundError:
            yield Check("error", name, "was signed and is missing", again)
        except Exception:  # whatever a broken signature, key or certificate makes of it
            edited.append(name)
    if len(edited) == len(signed):
        message = "no file fits its signature: it was made with another root than this kit's rootCA.pem"
        yield Check("error", SIGNATURES, message, "take all of startup/ from one kit as handed over")
    else:
        yield from (Check("error", name, "was edited after it was signed", again) for name in edited)
    for path in sorted(kit.startup.iterdir()):
        if path.name not in signed and path.name != SIGNATURES:
            yield Check("warning", path.name, "is not among the signed files", "remove it if nobody here put it there")


def check_certificate(kit: Kit) -> Iterator[Check]:
    """Look at the kit's certificate: whose it is, how long it lasts, which root and which key it belongs to."""
    again = "take all of startup/ from one kit as handed over"
    try:
        root = x509.load_pem_x509_certificate(kit.root.read_bytes())
        chain = x509.load_pem_x509_certificates(kit.certificate.read_bytes())
        key = load_pem_private_key(kit.key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        name = getattr(error, "filename", None) or "certificate, key or rootCA.pem"
        yield Check("error", "certificate", f"{name} cannot be read ({error})", again)
        return
    own = chain[0]
    subject = kit.certificate.name
    yield Check("ok", subject, f"subject {_show(own.subject)}; issuer {_show(own.issuer)}")
    yield Check("ok", kit.root.name, f"root fingerprint (SHA-256) {fingerprint(root)}; compare it with the operator's")
    yield from _lifetime(own, subject)
    yield from (check for check in _lifetime(root, kit.root.name) if check.state != "ok")
    if not _issued(chain, root):
        yield Check("error", subject, f"was not signed by this kit's {kit.root.name}", again)
    if own.public_key() != key.public_key():
        yield Check("error", kit.key.name, f"is not the key of {subject}", again)
    if issued_to(own) != kit.name:
        message = f"was issued to {issued_to(own)}, but the kit calls itself {kit.name}"
        yield Check("error", subject, message, again)


def _lifetime(certificate: x509.Certificate, subject: str) -> Iterator[Check]:
    begin, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    days = (end - now).days
    valid = f"valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    if now > end:
        yield Check("error", subject, f"expired: {valid}", "ask the operator for a renewed kit")
    elif now < begin:
        yield Check("error", subject, f"not yet valid: {valid}", "set this machine's clock, or wait")
    else:
        renew = "ask the operator for a renewed kit" if days < SOON else ""
        yield Check("warning" if renew else "ok", subject, f"{count_text(days, 'day')} left: {valid}", renew)


def _issued(chain: list[x509.Certificate], root: x509.Certificate) -> bool:
    from nvflare.lighter.utils import verify_cert

    try:
        for certificate, issuer in pairwise([*chain, root]):
            verify_cert(certificate, issuer.public_key())
    except Exception:  # cryptography and FLARE raise many kinds
        return False
    return True


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate, as `openssl x509 -fingerprint -sha256` prints it."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def certificate_role(kit: Kit) -> str:
    """The role that a person's certificate gives them."""
    try:
        own = x509.load_pem_x509_certificates(kit.certificate.read_bytes())[0]
    except (OSError, ValueError):
        return "unknown"  # what is wrong with the certificate is said where it is checked
    return ", ".join(str(name.value) for name in own.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME))


def issued_to(certificate: x509.Certificate) -> str:
    """The name that a certificate was issued to."""
    return ", ".join(str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME))


def _show(name: x509.Name) -> str:
    return ", ".join(f"{OID_NAMES.get(part.oid, part.rfc4514_attribute_name)} {part.value!s}" for part in name)


def check_server(kit: Kit) -> Iterator[Check]:
    """Reach the server as far as TLS, without a word of FLARE's own: nothing is registered."""
    place = f"{kit.host}:{kit.ports[0]}"
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(kit.host, kit.ports[0], type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        fix = f"ask the operator for the server's address; a line in /etc/hosts may give {kit.host} one"
        yield Check("error", place, f"cannot resolve {kit.host} ({getattr(error, 'strerror', error)})", fix)
        return
    yield Check("ok", place, f"{kit.host} is {', '.join(sorted(addresses))}")
    try:
        socket.create_connection((kit.host, kit.ports[0]), PATIENCE).close()
    except OSError as error:
        fix = f"start the server, or let this site's firewall pass outgoing connections to port {kit.ports[0]}"
        yield Check("error", place, f"port closed ({error.strerror or error})", fix)
        return
    try:
        _context(kit)
        x509.load_pem_x509_certificate(kit.root.read_bytes())
    except (OSError, ValueError):  # a wrong key is an SSLError, which is an OSError
        yield Check("note", place, "TLS was not tried: this kit's own certificate cannot be used")
        return
    try:
        yield from _handshake(kit, place)
    except ssl.SSLError as error:
        fix = f"see that FLARE's server answers at {place}, not another program or a proxy that opens TLS"
        yield Check("error", place, f"no TLS connection ({error.reason or error})", fix)
    except OSError as error:
        fix = "see with the operator what the server's log says"
        yield Check("error", place, f"the connection broke off ({error.strerror or error})", fix)


def _handshake(kit: Kit, place: str) -> Iterator[Check]:
    """Shake hands twice: without verification, to see who answers, then as FLARE does."""
    root = x509.load_pem_x509_certificate(kit.root.read_bytes())
    chain = _peer_chain(kit)
    server, top = chain[0], chain[-1]
    if not _issued([certificate for certificate in chain if certificate != root], root):
        theirs = f"that root's fingerprint is {fingerprint(top)}"
        if top.issuer != top.subject:
            theirs = f"the server's certificate has the fingerprint {fingerprint(top)}, its issuer {_show(top.issuer)}"
        message = f"the server's certificate comes from another root: {theirs}, this kit's root {fingerprint(root)}"
        yield Check("error", place, message, "ask the operator for the kit of the server's provisioning")
        return
    for check in _lifetime(server, "server's certificate"):
        fix = check.fix and "ask the operator to renew the server's kit"
        yield Check(check.state, place, f"{check.subject} {check.message}", fix)
        if check.state == "error":
            return
    yield from _named(kit, place, server)
    yield _accepted(kit, place)


def _named(kit: Kit, place: str, server: x509.Certificate) -> Iterator[Check]:
    """Hold the server's certificate against the names that the kit has for it."""
    if issued_to(server) != kit.identity:
        message = f"{issued_to(server)} answers, but this kit's server is called {kit.identity}"
        yield Check("error", place, message, "correct the address: another machine of the project answers there")
    if not _covers(server, kit.host):
        message = f"name {kit.host} is not in the certificate's names ({', '.join(_names(server))})"
        fix = "ask the operator to add it to host_names in project.yml and to provision again"
        if GRPC in kit.scheme:
            yield Check("error", place, message, fix)
        else:
            yield Check("warning", place, message, f"{fix}; FLARE's {kit.scheme} does not look at names, grpc does")


def _accepted(kit: Kit, place: str) -> Check:
    context = _context(kit)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(kit.root)
    try:
        with _connect(kit, context) as connection:
            connection.settimeout(REFUSAL)  # in TLS 1.3 a server refuses a certificate after the handshake
            try:
                refused = "it ended the connection" if connection.recv(1) == b"" else ""
            except TimeoutError:
                refused = ""
    except ssl.SSLCertVerificationError as error:
        return Check("error", place, f"TLS refuses the server ({error.verify_message})", "show this to the operator")
    except ssl.SSLError as error:
        refused = error.reason or str(error)
    if refused:
        fix = "ask the operator for the kit of the server's provisioning"
        return Check("error", place, f"the server refuses this kit's certificate ({refused})", fix)
    return Check("ok", place, "the server and this kit accept each other's certificates (TLS)")


def _context(kit: Kit) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # names are compared apart, to say which one is missing
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(kit.certificate, kit.key)
    if GRPC in kit.scheme:
        context.set_alpn_protocols(["h2"])  # a gRPC server hangs up on whoever does not offer it
    return context


def _connect(kit: Kit, context: ssl.SSLContext) -> ssl.SSLSocket:
    connection = socket.create_connection((kit.host, kit.ports[0]), PATIENCE)
    try:
        return context.wrap_socket(connection, server_hostname=kit.host)
    except BaseException:
        connection.close()
        raise


def _peer_chain(kit: Kit) -> list[x509.Certificate]:
    """The certificates that the server shows, its own first; before Python 3.13 not more where that is not public."""
    with _connect(kit, _context(kit)) as connection:
        holder = connection if hasattr(connection, "get_unverified_chain") else getattr(connection, "_sslobj", None)
        shown = getattr(holder, "get_unverified_chain", list)() or [connection.getpeercert(binary_form=True)]
    chain = []
    for part in filter(None, shown):
        if isinstance(part, bytes):
            chain.append(x509.load_der_x509_certificate(part))
        else:
            chain.append(x509.load_pem_x509_certificate(part.public_bytes().encode()))
    return chain


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [issued_to(certificate)]
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def _covers(certificate: x509.Certificate, host: str) -> bool:
    names = [name.casefold() for name in _names(certificate)]
    try:
        return str(ipaddress.ip_address(host)) in names
    except ValueError:
        return host.casefold() in names or f"*.{host.casefold().partition('.')[2]}" in names
