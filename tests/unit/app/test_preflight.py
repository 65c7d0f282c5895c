"""harmofl preflight as a whole: kit, machine, data and job."""

import json
import os
import shutil
from pathlib import Path

import pytest

from harmofl.app.cli import main
from harmofl.app.job import JobError
from harmofl.app.preflight import preflight
from harmofl.experiment import ExperimentError
from tests.unit.app.provisioned import LEAD, Lines, Packed, Provisioning, TlsServer, change, set_privacy, write

pytestmark = pytest.mark.usefixtures("data")


def test_a_good_server_and_its_job_end_with_0(server: Path, packed: Packed, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight(server, packed(), []) == 0
    out = capsys.readouterr().out
    assert "error:" not in out and "0 errors" in out.splitlines()[-1]
    for title in ("kit", "certificate", "processes", "server", "storage", "memory", "disk", "versions"):
        assert f"\n{title}\n" in out
    assert "data" not in out.split() and "policy" not in out.split()  # a server has none


def test_a_good_site_and_its_lead_end_with_0(
    kits: Provisioning, tmp_path: Path, packed: Packed, sites_root: Path
) -> None:
    answering = TlsServer(kits.folder / "server")
    try:
        site = kits.copy("HK", tmp_path / "site", port=answering.port)
        set_privacy(site, data_root=str(sites_root))
        assert preflight(site, packed(), []) == 0
        assert preflight(kits.copy(LEAD, tmp_path / "lead", port=answering.port), packed(), []) == 0
    finally:
        answering.stop()
    assert answering.heard == b""


def test_a_good_site_has_one_problem_where_its_server_is_not_there(site: Path, job: Path, lines: Lines) -> None:
    assert lines(site, job) == []
    (data,) = [line for line in lines(site, job, state="ok") if "3 cases" in line]
    assert f"{site.name}: 3 cases: 1 training, 1 validation, 1 test" in data and "0 errors" in data


def test_a_run_changes_nothing_in_the_kit(site: Path, job: Path) -> None:
    def content() -> dict[str, tuple[bytes, int]]:
        found = (path for path in sorted(site.rglob("*")) if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}

    before = content()
    preflight(site, job, [])
    assert content() == before


def test_all_problems_are_said_at_once(
    site: Path, job: Path, kits: Provisioning, capsys: pytest.CaptureFixture[str]
) -> None:
    kits.issue(site, "HK", (-9, -1))
    set_privacy(site, data_root="images", minimum_cases=0, device="cuda:9")
    (site / "startup/client.key").chmod(0o644)
    (site / "shutdown.fl").touch()
    (site / "local/resources.json").write_text("{")
    assert preflight(site, job, []) == 1
    out = capsys.readouterr().out
    errors = [line for line in out.splitlines() if line.startswith("error: ")]
    for part in (
        "expired",
        "relative path",
        "minimum_cases",
        "cuda:9",
        "chmod 600",
        "shutdown.fl",
        "port closed",
        "resources.json: is not JSON",
    ):
        assert sum(part in line for line in errors) >= 1, part
    assert out.splitlines()[-1].startswith(f"{len(errors)} errors, ")
    assert "Traceback" not in out


def test_json_of_another_form_is_one_line(site: Path, job: Path, lines: Lines) -> None:
    manager = {"path": "nvflare.app_common.resource_managers.gpu_resource_manager.GPUResourceManager", "args": [1]}
    write(site, "resources.json", {"components": [manager]})
    content = json.loads((site / "local/privacy.json").read_text())
    content["scopes"][0]["task_result_filters"] = 3
    write(site, "privacy.json", content)
    (line,) = lines(site, job)
    assert line.startswith("error: files: a file of the kit or the job has another form than expected")


def test_mistakes_in_the_command_end_with_2(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="is not a startup kit"):
        preflight(tmp_path, None, [])
    with pytest.raises(JobError, match="--job"):
        preflight(site, None, ["federation.rounds=1"])
    with pytest.raises(ExperimentError, match=r"meta\.json"):
        preflight(site, tmp_path / "nowhere", [])
    assert main(["preflight", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_data_root(site: Path, lines: Lines) -> None:
    set_privacy(site)
    (line,) = lines(site)
    assert "HK has no data root" in line and "HARMOFL_DATA_ROOT" in line and "data_root" in line


@pytest.mark.parametrize(("root", "part"), [("images", "is a relative path"), ("/nowhere/images", "is not a folder")])
def test_a_data_root_that_cannot_be_used(site: Path, lines: Lines, root: str, part: str) -> None:
    set_privacy(site, data_root=root)
    (line,) = lines(site)
    assert f"data_root in local/privacy.json: {root} {part}" in line


def test_a_data_root_that_is_no_text(site: Path, lines: Lines) -> None:
    set_privacy(site, data_root=5)
    (line,) = lines(site)
    assert line == "error: data: data_root is 5; data_root in local/privacy.json must be text, an absolute path"


def test_the_environment_wins_over_the_scope(site: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARMOFL_DATA_ROOT", "/nowhere")
    (line,) = lines(site)
    assert "HARMOFL_DATA_ROOT: /nowhere is not a folder" in line


def test_rights_on_the_data(site: Path, lines: Lines, sites_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    granted = os.R_OK | os.X_OK | os.W_OK
    root = sites_root / "HK"
    monkeypatch.setattr(os, "access", lambda place, mode: place != root or mode & granted == mode)
    assert any("is writable; training only reads it; mount it read-only" in line for line in lines(site, state="note"))
    granted = os.R_OK | os.X_OK
    assert not any("is writable" in line for line in lines(site, state="note"))
    granted = os.R_OK
    (line,) = lines(site)
    assert "cannot be read" in line


def test_without_a_job_data_is_only_looked_for(site: Path, lines: Lines) -> None:
    assert any("only looked for, not checked" in line for line in lines(site, state="note"))


def test_findings_in_the_data_are_errors(site: Path, job: Path, lines: Lines, sites_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "own"
    shutil.copytree(sites_root / "HK", root)
    (root / "Case01_segmentation.nii.gz").unlink()
    set_privacy(site, data_root=str(root))
    first, second = lines(site, job)
    assert first.startswith("error: Case01.nii.gz: the image has no mask; add Case01_segmentation.nii.gz")
    assert "2 patients cannot be training, validation and test" in second
    assert any("2 errors" in line and "harmofl check" in line for line in lines(site, job, state="note"))


def test_a_site_below_its_own_limit_is_told_that_it_sends_no_amplitude(
    site: Path, job: Path, lines: Lines, sites_root: Path
) -> None:
    told = "it sends no amplitude and trains with the global one of the others"
    set_privacy(site, data_root=str(sites_root / "HK"), minimum_cases=2)  # 3 patients: 1 for training
    assert any(f"this site's own minimum_cases is 2, so {told}" in line for line in lines(site, job, state="warning"))
    set_privacy(site, data_root=str(sites_root / "HK"), minimum_cases=1)
    assert not any(told in line for line in lines(site, job, state="warning"))
    assert lines(site, job) == []


def test_data_of_a_site_that_is_not_there(site: Path, job: Path, lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    set_privacy(site, data_root=str(tmp_path / "empty"))
    (line,) = lines(site, job)
    assert "no data for site HK" in line


def test_needs_of_the_job_are_held_against_the_machine(site: Path, job: Path, lines: Lines) -> None:
    # a batch of 10^5 images of 64 x 64 needs far more than any machine of these tests has
    limit, line = lines(site, job, "training.batch_size=1000000")
    assert limit.startswith("error: training.batch_size: is 1000000, limits.batch_size is 256")
    assert line.startswith("error: memory: ") and "needed; " in line


def test_who_says_whose_a_case_is(site: Path, job: Path, lines: Lines, sites_root: Path) -> None:
    def told(*assignments: str) -> str:
        (line,) = [line for line in lines(site, job, *assignments, state="note") if line.startswith("note: patients: ")]
        return line

    assert "by the job's data.patient_from: each case is one of its own; where a patient has several cases" in told()
    assert "what stands before the first _, . or -" in told("data.patient_from=before_separator")
    assert "the first 4 characters" in told("data.patient_from=4")
    set_privacy(site, data_root=str(sites_root / "HK"), minimum_cases=1, patient_pattern="^Case")
    assert "are told by patient_pattern of local/privacy.json" in told("data.patient_from=4")
    # by hand: all three cases are of one patient, which trains
    (error,) = lines(site, job)
    assert "1 patient cannot be training, validation and test" in error
    assert any(
        "3 training, 0 validation, 0 test" in line and "; 1 patient to train on" in line
        for line in lines(site, job, state="note")
    )


def test_the_sites_own_folder_in_its_data_root(site: Path, job: Path, lines: Lines, sites_root: Path) -> None:
    aliased = f"data.aliases={json.dumps({'HK': ['BIDMC']})}"
    set_privacy(site, data_root=str(sites_root), folder="bidmc", minimum_cases=1)
    assert lines(site, job) == []
    (line,) = [line for line in lines(site, job, state="ok") if "data root" in line]
    assert line.endswith("of which BIDMC is this site's")
    assert not any("data.aliases" in line for line in lines(site, job, aliased, state="note"))
    set_privacy(site, data_root=str(sites_root), folder="Jane", minimum_cases=1)
    (line,) = lines(site, job)
    assert (
        line == f"error: data: folder in local/privacy.json: {sites_root / 'Jane'} is not a folder; mount it or "
        "correct the path"
    )
    set_privacy(site, data_root=str(sites_root / "HK"), minimum_cases=1)
    assert any(
        "BIDMC are names of this site's folder in a simulated run only" in line
        for line in lines(site, job, aliased, state="note")
    )


@pytest.mark.parametrize(
    ("own", "part"),
    [
        ({"patient_pattern": "^((a)+)+$"}, "repeats a group, )+"),
        ({"patient_pattern": "(P"}, "is no regular expression"),
        ({"folder": "a/b"}, "pattern"),
        ({"centers": []}, "at least 1 item"),
        ({"centers": [-1]}, "greater than or equal to 0"),
    ],
)
def test_words_of_the_site_that_cannot_be_used(
    site: Path, lines: Lines, sites_root: Path, own: dict[str, object], part: str
) -> None:
    (key,) = own
    set_privacy(site, data_root=str(sites_root / "HK"), minimum_cases=1, **own)
    (line,) = lines(site)
    assert line.startswith(f"error: privacy.json: {key}") and part in line


def test_logs_that_a_job_may_stream(site: Path, lines: Lines) -> None:
    (line,) = [line for line in lines(site, state="warning") if "allow_log_streaming" in line]
    assert "a job may send logs of this site, findings.txt too, to the server; set it to false" in line
    change(site, "resources.json", allow_log_streaming=False)
    assert not any("allow_log_streaming" in line for line in lines(site, state="warning"))
