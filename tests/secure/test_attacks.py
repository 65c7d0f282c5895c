"""Drills: kits that do not belong here, were edited or have expired. FLARE keeps them out, preflight says why."""

import datetime
import json
import shutil
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from nvflare.lighter.utils import sign_folders

from tests.secure.conftest import Drill
from tests.secure.consortium import SERVER, Consortium, copy_kit, wait_for

pytestmark = pytest.mark.slow
SITE = "BMC"  # never runs but here
STARTED = "topic ObjectStreamer.Abort"  # the last line of a client before it connects; FLARE says no more of a refusal
LONG_ENOUGH = 8  # seconds; the last drill shows that a good kit has registered by then


@pytest.fixture(scope="module")
def foreign(consortium: Consortium, tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """Another project of the same name, so that its authority has the name of ours, at the same address."""
    return Consortium(tmp_path_factory.mktemp("foreign"), [SITE], port=consortium.port)


def test_a_kit_of_a_foreign_authority(consortium: Consortium, foreign: Consortium, drill: Drill) -> None:
    """Kit of another project, whose authority has the name of ours: it never registers, preflight names both roots."""
    attempt(consortium, foreign.kit(SITE), "CERTIFICATE_VERIFY_FAILED")
    drill.saw(preflight(consortium, foreign.kit(SITE), "root"))


def test_a_foreign_certificate_under_our_root(
    consortium: Consortium, foreign: Consortium, tmp_path: Path, drill: Drill
) -> None:
    """Certificate of another project beside our root certificate and without a signature: it never registers,
    preflight says that our authority did not sign it.
    """
    kit = copy_kit(foreign.kit(SITE), tmp_path / SITE)
    shutil.copyfile(consortium.kit(SITE) / "startup" / "rootCA.pem", kit / "startup" / "rootCA.pem")
    (kit / "startup" / "signature.json").unlink()
    attempt(consortium, kit, STARTED)
    drill.saw(preflight(consortium, kit, "certificate"))


def test_an_edited_kit(consortium: Consortium, tmp_path: Path, drill: Drill) -> None:
    """Edited kit: it does not start, and the file is named."""
    kit = copy_kit(consortium.kit(SITE), tmp_path / SITE)
    path = kit / "startup" / "fed_client.json"
    path.write_text(path.read_text().replace("localhost", "127.0.0.1"))
    said = attempt(consortium, kit, "not secure content")
    assert "fed_client.json" in said
    drill.saw(preflight(consortium, kit, "fed_client.json"))


def test_an_expired_certificate(consortium: Consortium, tmp_path: Path, drill: Drill) -> None:
    """Certificate that expired a minute ago, in a kit signed anew: it never registers, preflight says since when."""
    kit = copy_kit(consortium.kit(SITE), tmp_path / SITE)
    expire(kit, consortium.folder / "workspace")
    attempt(consortium, kit, STARTED)
    drill.saw(preflight(consortium, kit, "expired"))


def test_the_kit_as_provisioned(consortium: Consortium, tmp_path: Path, drill: Drill) -> None:
    """The same kit untouched, for comparison: it registers in the time that the others had."""
    kit = copy_kit(consortium.kit(SITE), tmp_path / SITE)
    said = attempt(consortium, kit, STARTED, registers=True)
    drill.saw(next(line for line in said.splitlines() if "Successfully registered" in line).split(" - ")[-1])


def attempt(consortium: Consortium, kit: Path, mark: str, *, registers: bool = False) -> str:
    """Start a kit, wait until it says `mark` and then long enough to register; what it printed."""
    log = consortium.kit(SERVER) / "log.txt"
    before = len(log.read_text())
    output = consortium.folder / f"{SITE}.out"
    output.unlink(missing_ok=True)
    consortium.start(SITE, kits={SITE: kit})
    try:
        wait_for(lambda: output.is_file() and mark in output.read_text(errors="replace"), 40, f"{SITE} says {mark}")
        time.sleep(LONG_ENOUGH)
    finally:
        consortium.stop(SITE)
    assert (f"client {SITE} registered" in log.read_text()[before:]) == registers
    return output.read_text(errors="replace")


def preflight(consortium: Consortium, kit: Path, word: str) -> str:
    """What preflight says about it, in the line that matters."""
    finished = consortium.harmofl("preflight", str(kit), check=False)
    assert finished.returncode == 1, finished.stdout
    found = [line for line in finished.stdout.splitlines() if "error" in line and word in line]
    assert found, finished.stdout
    return found[0].strip()


def expire(kit: Path, workspace: Path) -> None:
    """Give a kit a certificate of its own key and name that has expired, and sign the kit again, as its authority
    can.
    """
    state = json.loads(next(workspace.rglob("cert.json")).read_text())
    root_key = serialization.load_pem_private_key(state["root_pri_key"].encode(), None)
    path = kit / "startup" / "client.crt"
    held = x509.load_pem_x509_certificate(path.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(held.subject)
        .issuer_name(held.issuer)
        .public_key(held.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now - datetime.timedelta(minutes=1))
    )
    for extension in held.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    path.write_bytes(builder.sign(root_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))  # type: ignore[arg-type]
    (kit / "startup" / "signature.json").unlink()
    sign_folders(str(kit / "startup"), root_key, signature_file="signature.json")
