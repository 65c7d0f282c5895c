"""Privacy scope, policy and class list of a hospital, as FLARE reads them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.fed.utils.site_config import project_site_config
from nvflare.security.security import FLAuthorizer

from harmofl.flare.site_settings import LimitSettings, read_site_settings
from tests.secure.provisioning.conftest import KIT_SCRIPT, PROVISIONING, ROOT, read

PROJECT_ADMIN = Person("project_admin@consortium.org", "consortium", "project_admin")
LEAD = Person("lead@ucl.org", "ucl", "lead")
ORG_ADMIN = Person("org_admin@bidmc.org", "bidmc", "org_admin")
MEMBER = Person("member@hk.org", "hk", "member")


class TestTemplatesInFlare:
    def test_privacy_scope_carries_the_data_root_and_the_filter(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        KIT_SCRIPT.prepare_kit(site, data_root=images)
        manager = create_privacy_manager(Workspace(str(site), "HK"), names_only=False)
        scope = manager.default_scope
        settings = read_site_settings(scope.props)
        assert (scope.name, settings.data_root, settings.minimum_cases) == ("harmofl", str(images), 5)
        # the template lists every limit, each at its default
        assert scope.props["limits"].keys() == LimitSettings.model_fields.keys()
        assert settings.limits == LimitSettings()
        assert [type(one).__name__ for one in scope.task_result_filters["out"]] == ["AmplitudeFilter"]
        assert scope.task_result_filters["in"] == scope.task_data_filters["in"] == scope.task_data_filters["out"] == []

    def test_the_two_privacy_files_differ_in_the_noise_only(self) -> None:
        plain = read(PROVISIONING / "site" / "privacy.json")
        noisy = read(PROVISIONING / "site" / "privacy_with_noise.json")
        noise = noisy["scopes"][0]["properties"].pop("amplitude_noise")
        assert noise == {"relative_clip": 0.8, "epsilon": 1.0, "delta": 1e-5}
        assert noisy == plain

    @pytest.mark.parametrize("variant", ["byoc", "preinstalled"])
    def test_policy_at_a_hospital(self, variant: str) -> None:
        policy = FLAuthorizer("hk", read(PROVISIONING / "site" / f"authorization_{variant}.json"))
        brings_code = variant == "byoc"
        assert _may(policy, LEAD, "byoc") is brings_code
        assert _may(policy, PROJECT_ADMIN, "byoc") is brings_code
        assert not _may(policy, ORG_ADMIN, "byoc")
        assert not _may(policy, MEMBER, "byoc")
        # whoever may read files at a site may read findings.txt: nobody from outside
        for command in ["cat", "grep", "head", "tail", "ls", "pwd"]:
            assert not _may(policy, PROJECT_ADMIN, command)
            assert not _may(policy, LEAD, command)
            assert _may(policy, Person("org_admin@hk.org", "hk", "org_admin"), command)
        # `nvflare system shutdown all` of the project admin reaches the site
        assert _may(policy, PROJECT_ADMIN, "shutdown")
        assert not _may(policy, LEAD, "shutdown")

    @pytest.mark.parametrize("variant", ["byoc", "preinstalled"])
    def test_policy_at_the_server(self, variant: str) -> None:
        policy = FLAuthorizer("consortium", read(PROVISIONING / "site" / f"authorization_{variant}.json"))
        other = Person("lead@hk.org", "hk", "lead")
        assert _may(policy, LEAD, "submit_job")
        for command in ["download_job", "abort_job", "get_job_log", "clone_job"]:
            assert _may(policy, LEAD, command, LEAD)
            assert not _may(policy, LEAD, command, other)
            assert not _may(policy, MEMBER, command, LEAD)
        for command in ["submit_job", "download_job", "abort_job", "shutdown", "cat"]:
            assert _may(policy, PROJECT_ADMIN, command, LEAD)
        assert not _may(policy, ORG_ADMIN, "submit_job")
        assert not _may(policy, MEMBER, "submit_job")
        assert _may(policy, MEMBER, "list_jobs")

    @pytest.mark.parametrize(("name", "side"), [("server", "server"), ("HK", "client")])
    def test_a_job_without_code_builds_the_classes_of_our_jobs_and_no_other(
        self, kit: Callable[[str], Path], images: Path, name: str, side: str
    ) -> None:
        folder = kit(name)
        KIT_SCRIPT.prepare_kit(folder, data_root=None if name == "server" else images, preinstalled=True)
        allowed = _allowed(folder)
        files = list((ROOT / "jobs").glob(f"*/app/config/config_fed_{side}.json"))
        assert len(files) == 3
        paths = re.findall(r'"path": "([^"]+)"', "".join(file.read_text() for file in files))
        assert paths
        assert [path for path in paths if not allowed(path)] == []
        assert not allowed("nvflare.app_common.launchers.subprocess_launcher.SubprocessLauncher")
        # FLARE calls whatever a path names: the whole package on the list would let a job call these
        assert not allowed("harmofl.app.purge.purge")
        assert not allowed("harmofl.app.kit.import_module")

    def test_nothing_but_a_switch_is_told_to_the_server_at_registration(
        self, kit: Callable[[str], Path], images: Path
    ) -> None:
        site = kit("HK")
        KIT_SCRIPT.prepare_kit(site, data_root=images)
        told = project_site_config(read(site / "local" / "resources.json"))
        assert told == {"allow_log_streaming": False}


def _may(policy: FLAuthorizer, user: Person, right: str, submitter: Person | None = None) -> bool:
    allowed, _ = policy.authorize(AuthzContext(right, user, submitter or user))
    return bool(allowed)


def _allowed(kit: Path) -> Callable[[str], bool]:
    """Whether FLARE builds a class for a job without code at this site."""
    authorizer = ComponentPathAuthorizer()
    workspace = Workspace(str(kit), "HK")

    def asked(path: str) -> bool:
        try:
            authorizer.authorize_component_config({"path": path, "args": {}}, workspace=workspace)
        except UnsafeComponentError:
            return False
        return True

    return asked
