"""What a kit is, and what its site says in local/."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harmofl.app.job import JobError
from harmofl.app.kit import Check, Kit, KitError, check_policy, open_kit
from tests.unit.app.provisioned import FILTER, LEAD, PROJECT, Provisioning, change, set_privacy, write

SITE_FILES = Path(__file__).resolve().parents[3] / "provisioning" / "site"


def policy(kit: Path) -> list[Check]:
    return list(check_policy(open_kit(kit)))


def of(checks: list[Check], subject: str) -> list[Check]:
    return [check for check in checks if check.subject == subject]


def test_each_kind_of_kit_is_told_apart(kits: Provisioning) -> None:
    # what provision() asked for: the server is named server, reached at localhost, everything on port 8002
    folder = kits.folder
    common: tuple[Any, ...] = ((8002,), "http", "server")
    assert open_kit(folder / "HK") == Kit(folder / "HK", "client", "HK", PROJECT, "localhost", *common)
    assert open_kit(folder / LEAD) == Kit(folder / LEAD, "admin", LEAD, PROJECT, "localhost", *common)
    assert open_kit(folder / "server") == Kit(folder / "server", "server", "server", PROJECT, "server", *common)
    assert open_kit(folder / "server").key.is_file() and open_kit(folder / "HK").key.is_file()


def test_a_second_port_of_a_server_is_read(kits: Provisioning, tmp_path: Path) -> None:
    kit = kits.copy("server", tmp_path / "server")
    path = kit / "startup/fed_server.json"
    path.write_text(path.read_text().replace('"admin_port": 8002', '"admin_port": 8003'))
    assert open_kit(kit).ports == (8002, 8003)


def test_a_site_behind_a_relay_keeps_its_name(kits: Provisioning, tmp_path: Path) -> None:
    site = kits.copy("HK", tmp_path / "site")
    path = site / "startup/fed_client.json"
    settings = json.loads(path.read_text())
    settings["client"]["fqsn"] = "relay.HK"
    path.write_text(json.dumps(settings))
    assert open_kit(site).name == "HK"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"servers": []}', '{"servers": [{"service": {"target": "x"}}]}'])
def test_what_is_no_kit_is_a_mistake_in_the_command(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "startup").mkdir()
        (tmp_path / "startup/fed_client.json").write_text(content)
    with pytest.raises(KitError) as raised:
        open_kit(tmp_path)
    assert isinstance(raised.value, JobError)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_places_of_workspace_and_state(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = open_kit(site)
    assert (kit.workspace, kit.state_root) == (site, site / "harmofl")
    monkeypatch.setenv("NVFL_WORKSPACE", str(tmp_path / "work"))
    assert (kit.workspace, kit.state_root) == (tmp_path / "work", tmp_path / "work/harmofl")
    monkeypatch.setenv("HARMOFL_STATE_ROOT", str(tmp_path / "states"))
    assert kit.state_root == tmp_path / "states/HK"
    monkeypatch.setenv("HARMOFL_STATE_ROOT", "states")
    with pytest.raises(KitError, match="site HK: HARMOFL_STATE_ROOT is a relative path; give an absolute one"):
        assert kit.state_root


def test_a_sites_own_file_wins_over_the_default(site: Path) -> None:
    kit = open_kit(site)
    assert kit.local_file("resources.json") == site / "local/resources.json.default"
    own = change(site, "resources.json")
    assert kit.local_file("resources.json") == own


def test_properties_are_those_of_the_default_scope(site: Path) -> None:
    assert open_kit(site).properties() == {}
    scopes = [{"name": "one", "properties": {"data_root": "/1"}}, {"name": "two", "properties": {"data_root": "/2"}}]
    write(site, "privacy.json", {"scopes": scopes, "default_scope": "two"})
    assert open_kit(site).properties() == {"data_root": "/2"}


def test_reading_a_kit_needs_no_torch() -> None:
    code = "import sys, harmofl.app.kit; sys.exit(bool({'torch', 'monai'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_check_is_one_line() -> None:
    assert str(Check("error", "a", "b\n  c", "d")) == "error: a: b c; d"
    assert str(Check("ok", "a", "b")) == "ok: a: b"


@pytest.mark.parametrize("name", ["privacy.json", "privacy_with_noise.json"])
def test_the_files_for_sites_pass(site: Path, name: str) -> None:
    write(site, "privacy.json", json.loads((SITE_FILES / name).read_text()))
    write(site, "log_config.json", json.loads((SITE_FILES / "log_config.json").read_text()))
    assert [check.state for check in policy(site)] == ["ok", "ok"]


def test_findings_without_a_file_of_their_own_are_a_note(site: Path) -> None:
    assert [check.state for check in of(policy(site), "log_config.json.default")] == ["note"]
    change(site, "log_config.json", loggers={"harmofl.findings": {"handlers": ["logFileHandler"]}})
    assert [check.state for check in of(policy(site), "log_config.json")] == ["note"]  # it propagates to log.txt


def test_no_privacy_file_is_a_warning(site: Path) -> None:
    (check,) = of(policy(site), "privacy.json")
    assert check.state == "warning" and "missing" in check.message


@pytest.mark.parametrize(
    ("properties", "state", "part"),
    [
        ({"minimum_cases": 0}, "error", "minimum_cases"),
        ({"minimum_cases": "5"}, "error", "minimum_cases"),
        ({"minimum_cases": True}, "error", "minimum_cases"),
        ({"workers": -1}, "error", "workers is -1"),
        ({"threads": 0}, "error", "threads is 0; threads in local/privacy.json must be a whole number above 0"),
        ({"workers": None}, "error", "workers is null"),
        ({"workers": True}, "error", "workers is true"),
        ({"compile": "yes"}, "error", 'compile is "yes"; compile in local/privacy.json must be true or false'),
        ({"minimum_case": 9}, "error", "did you mean 'minimum_cases'?"),
        ({"amplitude_noise": {"relative_clip": 0.8, "epsilon": 1.0}}, "error", "amplitude_noise.delta"),
        ({"amplitude_noise": {"relative_clip": 0.8, "epsilon": 1.0, "delta": 1.0}}, "error", "amplitude_noise.delta"),
        ({"amplitude_noise": {"relative_clip": 0.0, "epsilon": 1.0, "delta": 1e-5}}, "error", "noise.relative_clip"),
        ({"amplitude_noise": {"clip": 5.0, "epsilon": 1.0, "delta": 1e-5}}, "error", "write relative_clip"),
        (
            {"amplitude_noise": {"relative_clip": 0.8, "epsilom": 1.0, "delta": 1e-5}},
            "error",
            "did you mean 'epsilon'?",
        ),
        ({"amplitude_noise": 3}, "error", "clip, epsilon and delta"),
    ],
)
def test_a_property_that_cannot_be_used(site: Path, properties: dict[str, Any], state: str, part: str) -> None:
    set_privacy(site, **properties)
    (check,) = of(policy(site), "privacy.json")
    assert check.state == state and part in str(check)


def test_all_wrong_properties_are_said_at_once(site: Path) -> None:
    set_privacy(site, minimum_cases=0, workers="two", amplitude_noise={})
    assert [check.state for check in of(policy(site), "privacy.json")] == ["error"] * 3


def test_a_filter_must_be_there_before_any_job(site: Path) -> None:
    path = set_privacy(site)
    path.write_text(path.read_text().replace(FILTER, "absent_filters.Own"))
    first, second = of(policy(site), "privacy.json")
    assert first.state == "error" and "absent_filters.Own cannot be imported" in first.message
    assert second.state == "warning" and "the amplitude leaves as it is" in second.message


def test_a_filter_may_be_the_sites_own(site: Path) -> None:
    content = json.loads(set_privacy(site).read_text())
    content["scopes"][0]["task_result_filters"].append({"path": "hospital_filters.Own"})
    write(site, "privacy.json", content)
    (site / "local/custom").mkdir()
    (site / "local/custom/hospital_filters.py").write_text("class Own: pass\n")
    before = list(sys.path)
    assert [check.state for check in of(policy(site), "privacy.json")] == ["ok"]
    assert sys.path == before


def test_noise_without_the_filter_that_adds_it_is_an_error(site: Path) -> None:
    path = set_privacy(site, amplitude_noise={"relative_clip": 0.8, "epsilon": 1.0, "delta": 1e-5})
    policy_file = json.loads(path.read_text())
    policy_file["scopes"][0]["task_result_filters"] = []
    write(site, "privacy.json", policy_file)
    (check,) = of(policy(site), "privacy.json")
    assert check.state == "error" and FILTER in check.fix


@pytest.mark.parametrize(
    ("default", "part"), [(None, "default_scope names none"), ("other", "default scope 'other' does not exist")]
)
def test_a_default_scope_must_exist(site: Path, default: str | None, part: str) -> None:
    content = json.loads(set_privacy(site).read_text()) | {"default_scope": default}
    write(site, "privacy.json", content)
    (check,) = of(policy(site), "privacy.json")
    assert check.state == "error" and part in check.message


def test_what_flares_own_parser_refuses_is_an_error(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads(set_privacy(site).read_text())
    content["scopes"] *= 2  # two scopes of one name
    write(site, "privacy.json", content)
    (check,) = of(policy(site), "privacy.json")
    assert check.state == "error" and "duplicate" in check.message
    told = capfd.readouterr()
    assert told.out + told.err == "", "FLARE prints it, too"


def test_a_broken_file_does_not_hide_the_next_one(site: Path) -> None:
    (site / "local/privacy.json").write_text("{")
    first, second = policy(site)
    assert first.state == "error" and "privacy.json: is not JSON" in first.message
    assert second.subject == "log_config.json.default"


def test_names_that_are_no_list_are_said_before_a_job_comes(site: Path) -> None:
    set_privacy(site, allowed_names="dice")
    found = [check for check in check_policy(open_kit(site)) if "allowed_names" in check.message]
    assert [check.state for check in found] == ["error"]


def test_a_folder_with_the_files_of_two_kits_is_neither(site: Path) -> None:
    shutil.copyfile(site / "startup/fed_client.json", site / "startup/fed_admin.json")
    with pytest.raises(
        KitError, match=r"holds the startup files of several kits \(startup/fed_client.json, startup/fed_a"
    ):
        open_kit(site)


def test_a_check_of_foreign_text_is_printable() -> None:
    shown = str(Check("error", "meta.json", "scope a\x1b[2J\nerror: forged\u202e"))
    assert shown == "error: meta.json: scope a?[2J error: forged?"
