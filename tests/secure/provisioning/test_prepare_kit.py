"""What a hospital's kit is given, and that nobody's edits are lost."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harmofl.flare.site_settings import read_site_settings
from tests.secure.provisioning.conftest import KIT_SCRIPT, PROVISIONING, contents, is_signed, read, storage_of


class TestPrepareKit:
    def test_a_site_gets_four_files_and_nothing_else_changes(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        before = contents(site)
        written = KIT_SCRIPT.prepare_kit(site, data_root=images)
        names = ["privacy.json", "authorization.json", "log_config.json", "resources.json"]
        assert written == [site / "local" / name for name in names]
        after = contents(site)
        assert {path: after[path] for path in before} == before
        assert sorted(set(after) - set(before)) == sorted(Path("local") / name for name in names)
        assert is_signed(site)

    def test_a_relay_gets_no_privacy_file(self, kit: Callable[[str], Path], images: Path) -> None:
        relay = kit("HK")
        written = KIT_SCRIPT.prepare_kit(relay, relay=True, preinstalled=True)
        names = ["authorization.json", "log_config.json", "resources.json"]
        assert written == [relay / "local" / name for name in names]
        assert "harmofl.flare.executor.HarmoFLExecutor" in read(relay / "local" / "resources.json")["class_allow_list"]
        with pytest.raises(KIT_SCRIPT.KitError, match="HK: a relay has no images"):
            KIT_SCRIPT.prepare_kit(relay, relay=True, data_root=images)
        (relay / "local" / "privacy.json").write_text("{}")
        with pytest.raises(KIT_SCRIPT.KitError, match="lets no sum of others out"):
            KIT_SCRIPT.prepare_kit(relay, relay=True)

    def test_again_changes_nothing(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        KIT_SCRIPT.prepare_kit(site, data_root=images)
        before = contents(site)
        assert KIT_SCRIPT.prepare_kit(site, data_root=images) == []
        assert contents(site) == before

    def test_another_layout_of_the_same_is_no_edit(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        KIT_SCRIPT.prepare_kit(site, data_root=images)
        privacy = site / "local" / "privacy.json"
        privacy.write_text(json.dumps(read(privacy), indent=8))
        assert KIT_SCRIPT.prepare_kit(site, data_root=images) == []

    def test_an_edit_is_kept_until_forced(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        KIT_SCRIPT.prepare_kit(site, data_root=images)
        privacy = site / "local" / "privacy.json"
        edited = read(privacy)
        edited["scopes"][0]["properties"]["minimum_cases"] = 20
        privacy.write_text(json.dumps(edited))
        before = contents(site)
        with pytest.raises(KIT_SCRIPT.KitError, match=r"HK: local/privacy.json, local/authorization.json would change"):
            KIT_SCRIPT.prepare_kit(site, data_root=images, preinstalled=True)
        assert contents(site) == before  # neither of the two
        written = KIT_SCRIPT.prepare_kit(site, data_root=images, preinstalled=True, force=True)
        assert written == [privacy, site / "local" / "authorization.json"]
        assert read(privacy)["scopes"][0]["properties"]["minimum_cases"] == 5

    def test_resources_keep_what_the_participant_was_given(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        default = read(site / "local" / "resources.json.default")
        default["components"][0]["args"] = {"num_of_gpus": 2, "mem_per_gpu_in_GiB": 24, "expiration_period": 300}
        (site / "local" / "resources.json.default").write_text(json.dumps(default))
        KIT_SCRIPT.prepare_kit(site, data_root=images)
        expected = {**default, "allow_log_streaming": False}
        expected["class_allow_list"] = [*default["class_allow_list"], "harmofl.flare.executor.HarmoFLExecutor"]
        deployer = {"id": "app_deployer", "path": "harmofl.flare.deployer.ApprovedJobDeployer", "args": {}}
        expected["components"] = [*default["components"], deployer]
        assert read(site / "local" / "resources.json") == expected
        assert len(expected["class_allow_list"]) == 89  # FLARE 2.9 lists 88

    def test_server_keeps_jobs_in_its_kit(self, kit: Callable[[str], Path]) -> None:
        server = kit("server")
        written = KIT_SCRIPT.prepare_kit(server)
        assert [path.name for path in written] == ["authorization.json", "log_config.json", "resources.json"]
        assert storage_of(server) == (server / "jobs-storage", server / "snapshot-storage")
        assert "/tmp/nvflare" not in (server / "local" / "resources.json").read_text()
        assert is_signed(server)

    def test_server_keeps_jobs_where_told(self, kit: Callable[[str], Path], tmp_path: Path) -> None:
        server = kit("server")
        KIT_SCRIPT.prepare_kit(server, storage=tmp_path / "disk")
        assert storage_of(server) == (tmp_path / "disk" / "jobs-storage", tmp_path / "disk" / "snapshot-storage")

    def test_noise_is_written_and_checked(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        KIT_SCRIPT.prepare_kit(site, data_root=images, noise=KIT_SCRIPT.Noise(0.7, 2.0, 1e-6))
        properties = read(site / "local" / "privacy.json")["scopes"][0]["properties"]
        assert properties["amplitude_noise"] == {"relative_clip": 0.7, "epsilon": 2.0, "delta": 1e-6}
        for wrong in [(0.0, 1.0, 1e-5), (5.0, 1.0, 1e-5), (0.8, 0.0, 1e-5), (0.8, 1.0, 0.0), (0.8, 1.0, 1.0)]:
            with pytest.raises(KIT_SCRIPT.KitError, match="noise needs"):
                KIT_SCRIPT.prepare_kit(site, data_root=images, noise=KIT_SCRIPT.Noise(*wrong), force=True)

    def test_limits_are_written_and_checked(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        asked = ["minimum_sites=2", "case_scores=true", "regions=dc,full"]
        KIT_SCRIPT.prepare_kit(site, data_root=images, limits=asked)
        held = read(site / "local" / "privacy.json")["scopes"][0]["properties"]["limits"]
        assert (held["minimum_sites"], held["case_scores"], held["regions"]) == (2, True, ["dc", "full"])
        assert held["training_patients"] == 5, "the others stay"
        for text, message in [
            ("minimum_site=2", "did you mean minimum_sites?"),
            ("minimum_sites", "write it as NAME=VALUE"),
            ("minimum_sites=0", "minimum_sites=0: give a whole number above 0"),
            ("minimum_sites=true", "give a whole number"),
            ("minimum_sites=" + "9" * 5000, "give a whole number"),
            ("case_scores=1", "case_scores=1: give true or false"),
        ]:
            with pytest.raises(KIT_SCRIPT.KitError, match=re.escape(message)):
                KIT_SCRIPT.prepare_kit(site, data_root=images, limits=[text], force=True)

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("HK", {}, "say where the images are"),
            ("HK", {"data_root": Path("images")}, "relative path"),
            ("HK", {"data_root": Path("/nowhere/images")}, "is not a folder here"),
            ("HK", {"data_root": Path("/"), "storage": Path("/srv")}, "belongs to the server"),
            ("server", {"data_root": Path("/")}, "has no images"),
            ("server", {"storage": Path("jobs")}, "relative path"),
            ("server", {"limits": ["minimum_sites=2"]}, "has no images"),
            ("lead@ucl.org", {}, "kit of a person"),
        ],
    )
    def test_mistakes_are_named_and_leave_no_trace(
        self, kit: Callable[[str], Path], name: str, options: dict[str, Any], message: str
    ) -> None:
        folder = kit(name)
        before = contents(folder)
        with pytest.raises(KIT_SCRIPT.KitError, match=message):
            KIT_SCRIPT.prepare_kit(folder, **options)
        assert contents(folder) == before

    def test_folders_that_are_no_kit_are_named(self, tmp_path: Path, images: Path) -> None:
        with pytest.raises(KIT_SCRIPT.KitError, match="is not a startup kit"):
            KIT_SCRIPT.prepare_kit(images, data_root=images)
        (tmp_path / "startup").mkdir()
        (tmp_path / "local").mkdir()
        with pytest.raises(KIT_SCRIPT.KitError, match="neither fed_client.json nor fed_server.json"):
            KIT_SCRIPT.prepare_kit(tmp_path, data_root=images)

    def test_command_needs_only_the_standard_library(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        script = [sys.executable, "-I", "-S", str(PROVISIONING / "site" / "prepare_kit.py"), str(site)]
        first = subprocess.run([*script, "--data-root", str(images)], capture_output=True, text=True, check=False)
        assert first.returncode == 0, first.stderr
        assert first.stdout.count("wrote ") == 4
        again = subprocess.run([*script, "--data-root", str(images)], capture_output=True, text=True, check=False)
        assert (again.returncode, again.stdout) == (0, "nothing to change\n")
        wrong = subprocess.run([*script, "--data-root", "images"], capture_output=True, text=True, check=False)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)

    def test_a_file_that_is_nested_too_deeply_is_named(self, kit: Callable[[str], Path], images: Path) -> None:
        path = kit("HK") / "local" / "resources.json.default"
        path.write_text("[" * 100_000)
        with pytest.raises(KIT_SCRIPT.KitError, match="resources.json.default is not JSON"):
            KIT_SCRIPT.prepare_kit(path.parents[1], data_root=images)

    def test_names_are_written_as_the_package_reads_them(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        names = KIT_SCRIPT.Names("^(P[0-9]+)", "ISBI", (0, 3))
        KIT_SCRIPT.prepare_kit(site, data_root=images, names=names)
        properties = read(site / "local" / "privacy.json")["scopes"][0]["properties"]
        held = read_site_settings(properties)
        assert (held.patient_pattern, held.folder, held.centers) == ("^(P[0-9]+)", "ISBI", (0, 3))
        for wrong in [("(P", None, None), (None, "../Jane", None), (None, "a/b", None), (None, None, (-1,))]:
            with pytest.raises(KIT_SCRIPT.KitError, match="HK: --"):
                KIT_SCRIPT.prepare_kit(site, data_root=images, names=KIT_SCRIPT.Names(*wrong), force=True)
        with pytest.raises(KIT_SCRIPT.KitError, match="has no images"):
            KIT_SCRIPT.prepare_kit(kit("server"), names=names)

    def test_the_command_takes_names(self, kit: Callable[[str], Path], images: Path) -> None:
        site = kit("HK")
        options = ["--data-root", str(images), "--folder", "ISBI", "--patient-pattern", "^(P[0-9]+)"]
        assert KIT_SCRIPT.main([str(site), *options, "--centers", "0", "3"]) == 0
        properties = read(site / "local" / "privacy.json")["scopes"][0]["properties"]
        assert properties["patient_pattern"] == "^(P[0-9]+)" and properties["centers"] == [0, 3]
