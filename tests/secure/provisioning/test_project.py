"""The project as a consortium provisions it, in production and POC, and how its certificates are renewed."""

import shutil
import stat
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from nvflare.lighter.utils import load_crt

from tests.secure.provisioning.conftest import (
    EVERYBODY,
    PROVISIONING,
    ROOT,
    certificate_of,
    flare,
    is_signed,
    module_of,
    provision,
    read,
)

RENEWAL = module_of(PROVISIONING / "renew_certificates.py")


class TestProject:
    def test_everybody_has_a_kit(self, project: Path) -> None:
        assert sorted(path.name for path in (project / "prod_00").iterdir()) == sorted(EVERYBODY)

    def test_sites_are_those_of_the_job(self) -> None:
        participants = yaml.safe_load((PROVISIONING / "project.yml").read_text())["participants"]
        deployed = read(ROOT / "jobs" / "harmofl_prostate" / "meta.json")["deploy_map"]["app"]
        assert ["server", *(one["name"] for one in participants if one["type"] == "client")] == deployed

    def test_keys_are_for_their_owner_alone(self, project: Path) -> None:
        keys = list((project / "prod_00").glob("*/startup/*.key"))
        assert len(keys) == 11  # one server, six sites, four people
        assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}

    def test_server_is_known_by_name_and_reached_by_its_hosts(self, project: Path) -> None:
        certificate = certificate_of(project / "prod_00" / "server")
        assert [one.value for one in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)] == ["server"]
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        # default_host and host_names: the name itself only where it is one of them
        assert set(names.get_values_for_type(x509.DNSName)) == {"localhost"}
        assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]

    def test_clients_connect_to_the_one_port_of_the_default_host(self, project: Path) -> None:
        client = read(project / "prod_00" / "HK" / "startup" / "fed_client.json")["servers"][0]
        assert (client["service"]["target"], client["identity"]) == ("localhost:8002", "server")
        admin = read(project / "prod_00" / "lead@ucl.org" / "startup" / "fed_admin.json")["admin"]
        assert (admin["host"], admin["port"], admin["connection_security"]) == ("localhost", 8002, "mtls")

    def test_validity_is_what_the_comments_say(self, project: Path) -> None:
        root = load_crt(str(project / "prod_00" / "HK" / "startup" / "rootCA.pem"))
        assert (root.not_valid_after_utc - root.not_valid_before_utc).days == 3650
        for name in EVERYBODY:
            certificate = certificate_of(project / "prod_00" / name)
            assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 360

    def test_poc_makes_the_same_signed_kits(self, tmp_path: Path) -> None:
        environment = {"PYTHONPATH": str(PROVISIONING / "builders")}
        assert flare(tmp_path, "poc", "config", "-pw", str(tmp_path / "poc"), **environment).returncode == 0
        project_file = str(PROVISIONING / "project.yml")
        run = flare(tmp_path, "poc", "prepare", "-i", project_file, "--force", **environment)
        assert run.returncode == 0, run.stdout + run.stderr
        for name in EVERYBODY:
            assert is_signed(tmp_path / "poc" / "harmofl_prostate" / "prod_00" / name)


class TestRenewal:
    def test_new_certificates_for_those_named_under_the_same_authority(self, project: Path, tmp_path: Path) -> None:
        copied = Path(shutil.copytree(project, tmp_path / "workspace" / "harmofl_prostate"))
        assert RENEWAL.main([str(copied), "HK", "lead@ucl.org"]) == 0
        assert stat.S_IMODE((copied / "state" / "cert.json").stat().st_mode) == 0o600
        run = provision(tmp_path)
        assert run.returncode == 0, run.stdout + run.stderr
        before, after = copied / "prod_00", copied / "prod_01"
        changed = [name for name in EVERYBODY if certificate_of(before / name) != certificate_of(after / name)]
        assert changed == ["HK", "lead@ucl.org"]
        root = "HK/startup/rootCA.pem"
        assert (before / root).read_bytes() == (after / root).read_bytes()
        assert is_signed(after / "HK")

    def test_an_unknown_name_changes_nothing(
        self, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copied = Path(shutil.copytree(project, tmp_path / "harmofl_prostate"))
        before = (copied / "state" / "cert.json").read_bytes()
        assert RENEWAL.main([str(copied), "HK", "HKU"]) == 2
        assert "knows no HKU" in capsys.readouterr().err
        assert (copied / "state" / "cert.json").read_bytes() == before

    def test_a_folder_without_state_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert RENEWAL.main([str(tmp_path), "HK"]) == 2
        assert f"{tmp_path / 'state' / 'cert.json'} cannot be read" in capsys.readouterr().err
