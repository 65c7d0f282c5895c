"""Signatures and certificates of a kit, with a planted failure of each kind."""

import hashlib
import ssl
from pathlib import Path

import pytest

from harmofl.app.connection import check_certificate, check_files
from harmofl.app.kit import Check, open_kit
from tests.unit.app.provisioned import Provisioning, problems


def files(kit: Path) -> list[Check]:
    return list(check_files(open_kit(kit)))


def certificate(kit: Path) -> list[Check]:
    return list(check_certificate(open_kit(kit)))


def test_a_kit_as_handed_over_is_good(site: Path) -> None:
    assert not problems(files(site)) and len(files(site)) == 3
    assert not problems(certificate(site))


def test_a_kit_of_stock_flare_is_not_signed(kits: Provisioning) -> None:
    (check,) = problems(files(kits.folder / "HK"))
    assert check.state == "warning" and "not signed" in check.message and "KitSignatureBuilder" in check.fix


def test_an_edited_file_is_named(site: Path) -> None:
    with (site / "startup/start.sh").open("a") as file:
        file.write("\n")
    (check,) = problems(files(site))
    assert (check.state, check.subject) == ("error", "start.sh") and "edited" in check.message


def test_a_missing_and_an_added_file_are_named(site: Path) -> None:
    (site / "startup/stop_fl.sh").rename(site / "startup/stop.sh")
    missing, added = problems(files(site))
    assert (missing.state, missing.subject) == ("error", "stop_fl.sh") and "missing" in missing.message
    assert (added.state, added.subject) == ("warning", "stop.sh")


def test_signatures_of_another_project_are_said_once(site: Path, others: Provisioning) -> None:
    others.sign(site)
    (check,) = problems(files(site))
    assert check.state == "error" and "another root" in check.message


def test_a_private_key_is_for_its_owner(site: Path) -> None:
    (site / "startup/client.key").chmod(0o640)
    (check,) = problems(files(site))
    assert check.state == "error" and "640" in check.message and check.fix.startswith("chmod 600 ")


def test_the_root_is_shown_as_openssl_prints_it(site: Path) -> None:
    coded = ssl.PEM_cert_to_DER_cert((site / "startup/rootCA.pem").read_text())
    digest = hashlib.sha256(coded).hexdigest().upper()
    pairs = ":".join(digest[place : place + 2] for place in range(0, 64, 2))
    assert any(check.subject == "rootCA.pem" and pairs in check.message for check in certificate(site))


def test_a_certificate_shows_whose_it_is(kits: Provisioning) -> None:
    shown = certificate(kits.folder / "lead@ucl.org")[0].message
    assert shown == "subject CN lead@ucl.org, O ucl, role lead; issuer CN harmofl_test"


@pytest.mark.parametrize(
    ("days", "state", "part"),
    [
        ((-30, -1), "error", "expired: valid from"),
        ((1, 30), "error", "not yet valid"),
        ((-1, 10.5), "warning", "10 days left"),
        ((-1, 29.5), "warning", "29 days left"),
    ],
)
def test_a_certificate_that_has_run_out_or_soon_will(
    kits: Provisioning, site: Path, days: tuple[float, float], state: str, part: str
) -> None:
    kits.issue(site, "HK", days)
    (check,) = problems(certificate(site))
    assert check.state == state and part in check.message and check.fix


def test_thirty_days_are_enough(kits: Provisioning, site: Path) -> None:
    kits.issue(site, "HK", (-1, 30.5))
    assert not problems(certificate(site))


def test_a_certificate_of_another_root_with_the_same_name(site: Path, others: Provisioning) -> None:
    others.issue(site, "HK")
    (check,) = problems(certificate(site))
    assert check.state == "error" and "not signed by this kit's rootCA.pem" in check.message


def test_a_key_of_another_certificate(site: Path, kits: Provisioning) -> None:
    key = (site / "startup/client.key").read_bytes()
    kits.issue(site, "HK")
    (site / "startup/client.key").write_bytes(key)
    (check,) = problems(certificate(site))
    assert check.state == "error" and check.subject == "client.key" and "is not the key" in check.message


def test_a_certificate_of_another_name(site: Path, kits: Provisioning) -> None:
    kits.issue(site, "BIDMC")
    (check,) = problems(certificate(site))
    assert check.state == "error" and "issued to BIDMC, but the kit calls itself HK" in check.message


def test_a_certificate_that_cannot_be_read(site: Path) -> None:
    (site / "startup/client.crt").write_text("nothing")
    (check,) = certificate(site)
    assert check.state == "error" and check.fix
    (site / "startup/client.crt").unlink()
    (check,) = certificate(site)
    assert check.state == "error" and "client.crt" in check.message
