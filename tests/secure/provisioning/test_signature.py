"""An edited kit is refused by FLARE, and what it does not look at is what the README says."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.fuel.sec.security_content_service import LoadResult, SecurityContentManager, SecurityContentService
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert
from nvflare.private.fed.utils.fed_utils import _check_secure_content

from tests.secure.provisioning.conftest import EVERYBODY, PROVISIONING, SITES, is_signed, module_of

SIGNATURE = module_of(PROVISIONING / "builders" / "kit_signature.py")


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


class TestSignature:
    @pytest.fixture
    def refused(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
        """The files for which FLARE refuses to start a server or site from a kit."""

        def check(kit: Path) -> list[str]:
            monkeypatch.setattr(SecurityContentService, "security_content_manager", None)
            SecurityContentService.initialize(content_folder=str(kit / "startup"))
            assert SecurityContentService.security_content_manager.valid_config
            kind = "server" if (kit / "startup" / "fed_server.json").exists() else "client"
            return [Path(name).name for name in _check_secure_content(kind)]

        return check

    @pytest.mark.parametrize("name", EVERYBODY)
    def test_every_kit_as_provisioned_is_clean(self, project: Path, name: str) -> None:
        assert is_signed(project / "prod_00" / name)

    @pytest.mark.parametrize("name", ["server", *SITES])
    def test_server_and_sites_start_from_a_clean_kit(
        self, project: Path, refused: Callable[[Path], list[str]], name: str
    ) -> None:
        assert refused(project / "prod_00" / name) == []

    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("server", "fed_server.json"),
            ("server", "server.crt"),
            ("server", "server.key"),
            ("HK", "fed_client.json"),
            ("HK", "client.crt"),
            ("HK", "client.key"),
            ("HK", "rootCA.pem"),
        ],
    )
    def test_an_edited_file_is_refused_by_name(
        self, kit: Callable[[str], Path], refused: Callable[[Path], list[str]], name: str, file: str
    ) -> None:
        edited = kit(name)
        _append(edited / "startup" / file)
        assert refused(edited) == [file]
        assert not is_signed(edited)

    def test_another_authority_of_the_same_name_fits_no_file(
        self, kit: Callable[[str], Path], refused: Callable[[Path], list[str]]
    ) -> None:
        mixed = kit("HK")
        private, public = generate_keys()
        name = Identity("harmofl_prostate")
        foreign = generate_cert(name, name, private, public, ca=True)
        (mixed / "startup" / "rootCA.pem").write_bytes(serialize_cert(foreign))
        assert refused(mixed) == ["fed_client.json", "client.crt", "client.key", "rootCA.pem"]

    def test_resources_slipped_into_startup_are_refused(
        self, kit: Callable[[str], Path], refused: Callable[[Path], list[str]]
    ) -> None:
        site = kit("HK")
        (site / "startup" / "extra__p_resources.json").write_text("{}")
        assert refused(site) == ["extra__p_resources.json"]

    def test_an_edited_kit_of_a_person_is_refused(self, kit: Callable[[str], Path]) -> None:
        lead = kit("lead@ucl.org")
        _append(lead / "startup" / "fed_admin.json")
        _, result = SecurityContentManager(str(lead / "startup")).load_json("fed_admin.json")
        assert result is LoadResult.INVALID_SIGNATURE

    def test_limits_are_those_the_readme_states(
        self, kit: Callable[[str], Path], refused: Callable[[Path], list[str]]
    ) -> None:
        site = kit("HK")
        _append(site / "startup" / "sub_start.sh")
        assert refused(site) == []  # a script is not looked at when it starts
        assert not is_signed(site)  # the tool sees it
        (site / "startup" / "signature.json").unlink()
        assert not SecurityContentManager(str(site / "startup")).valid_config  # no signature, no check at start
        assert not is_signed(site)

    def test_a_wrong_order_of_builders_is_named(self) -> None:
        with pytest.raises(RuntimeError, match="after CertBuilder"):
            SIGNATURE.KitSignatureBuilder().build(SimpleNamespace(), {})
