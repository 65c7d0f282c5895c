"""Names of patients stay in findings.txt, whatever FLARE does with its logs."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.secure.provisioning.conftest import KIT_SCRIPT, PROVISIONING, read

PATIENT = "PROSTATEX-0042"
LOGGING_SITE = f"""
import logging, sys
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.log_utils import configure_logging, dynamic_log_config
workspace = Workspace(sys.argv[1], "HK")
job = sys.argv[2] or None
configure_logging(workspace, job)
for mode in sys.argv[3:]:  # an operator's `nvflare system log`
    dynamic_log_config(mode, workspace.get_log_root(job), workspace.get_log_config_file_path())
logging.getLogger("harmofl.findings").info("{PATIENT}: label missing")
logging.getLogger("harmofl.findings").error("{PATIENT}: not readable")
logging.getLogger("harmofl.progress").info("HK round 0: received model scores 0.5")
logging.getLogger("nvflare.private.fed").info("framework line")
logging.getLogger("nvflare.app_common.workflows").info("workflow line")
"""


class TestLogging:
    JOB = "5f9b7f0e-3c3c-4b4e-8a51-0f6a1c1f2d3e"

    def run(self, site: Path, job: str, *modes: str) -> tuple[dict[str, str], str]:
        """Log as a process of a site does; the log files of its folder, and its console."""
        folder = site / job if job else site
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", LOGGING_SITE, str(site), job, *modes]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}, ran.stdout + ran.stderr

    @pytest.fixture
    def site(self, kit: Callable[[str], Path], images: Path) -> Path:
        folder = kit("HK")
        KIT_SCRIPT.prepare_kit(folder, data_root=images)
        return folder

    @pytest.mark.parametrize("job", ["", JOB], ids=["site", "job"])
    def test_patients_are_named_in_findings_only(self, site: Path, job: str) -> None:
        files, console = self.run(site, job)
        assert files["findings.txt"].count(PATIENT) == 2
        assert [name for name, text in files.items() if PATIENT in text] == ["findings.txt"]
        assert PATIENT not in console
        assert {"log.txt", "log.json", "log_fl.txt", "error_log.txt", "findings.txt"} <= set(files)

    def test_our_progress_is_in_the_short_log(self, site: Path) -> None:
        files, console = self.run(site, self.JOB)
        for name in ["log.txt", "log_fl.txt"]:
            assert "HK round 0: received model scores 0.5" in files[name]
        assert "HK round 0" in console
        assert "workflow line" in files["log_fl.txt"]
        assert "framework line" not in files["log_fl.txt"]
        assert "framework line" in files["log.txt"]
        assert "HK round 0" not in files["findings.txt"]

    def test_stock_configuration_would_name_patients_everywhere(self, site: Path) -> None:
        """What the template is for; where this fails FLARE has changed and the template may be superfluous."""
        (site / "local" / "log_config.json").unlink()
        files, console = self.run(site, self.JOB)
        assert sorted(name for name, text in files.items() if PATIENT in text) == [
            "error_log.txt",
            "log.json",
            "log.txt",
        ] + (
            ["log_fl.txt"]  # warnings and errors of any logger
        )
        assert PATIENT in console
        assert "HK round 0" not in files["log_fl.txt"]

    @pytest.mark.parametrize("mode", ["full", "verbose", "DEBUG", "reload"])
    def test_a_log_level_set_from_outside_names_nobody(self, site: Path, mode: str) -> None:
        files, console = self.run(site, self.JOB, mode)
        assert [name for name, text in files.items() if PATIENT in text] == ["findings.txt"]
        assert PATIENT not in console

    def test_template_is_the_provisioned_one_with_two_additions(self, project: Path) -> None:
        default = read(project / "prod_00" / "HK" / "local" / "log_config.json.default")
        ours = read(PROVISIONING / "site" / "log_config.json")
        ours["filters"]["FLFilter"]["logger_names"].remove("harmofl")
        handler = ours["handlers"].pop("findingsFileHandler")
        assert handler["filename"] == "findings.txt"
        assert ours["loggers"].pop("harmofl.findings") == {
            "level": "INFO",
            "handlers": ["findingsFileHandler"],
            "propagate": False,
        }
        assert ours == default
