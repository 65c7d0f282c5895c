"""`harmofl approve`: what it shows of a job, what it keeps, and what preflight says about it."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harmofl.app import approve as approve_module
from harmofl.app.approval_checks import DEPLOYER
from harmofl.app.approve import approve
from harmofl.app.cli import main
from harmofl.app.job import JobError
from harmofl.core.networks import build_network
from harmofl.flare.approval import Arrival, note_arrival, read_decision
from harmofl.job_folder import sha256
from tests.unit.app.provisioned import Lines, Packed, Provisioning, change, set_privacy

Shown = Callable[..., str]


@pytest.fixture
def asks(site: Path, sites_root: Path) -> Path:
    """The kit of a site that approves jobs."""
    set_privacy(site, approval="required", data_root=str(sites_root / "HK"))
    held = json.loads((site / "local" / "resources.json.default").read_text())["components"]
    change(site, "resources.json", components=[*held, {"id": "app_deployer", "path": DEPLOYER, "args": {}}])
    return site


@pytest.fixture
def shown(asks: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Approve a job of HK, or what is said otherwise, and give what was printed."""

    def run(job: Path | None, code: int = 0, **options: bool) -> str:
        assert approve(asks, job, **{"yes": not options.get("reject"), "reject": False, **options}) == code
        return capsys.readouterr().out

    return run


def hash_in(text: str) -> str:
    return text.rpartition("hash of this job at HK: ")[2][:64]


def test_it_shows_the_job_and_keeps_the_decision(asks: Path, packed: Packed, shown: Shown, lines: Lines) -> None:
    job = packed(preinstalled=True)
    assert any("this job is not approved" in line for line in lines(asks, job))
    text = shown(job)
    for line in (
        "  sites BIDMC, HK",
        "  federation.rounds = 1 (no default, the job chooses)",
        "  training.precision = float32 (default auto)",
        "  data.aliases = {'RUNMC': ['ISBI'], 'BMC': ['ISBI_1.5']} (default {})",
        "  the job brings no code (no folder custom)",
        "  harmofl.flare.executor.HarmoFLExecutor (this package)",
        "  this site's, on what leaves: harmofl.flare.filters.AmplitudeFilter",
        "  the job's, on what leaves: none",
        f"  config/experiment.json: sha256 {sha256(job / 'app/config/experiment.json')}",
    ):
        assert f"\n{line}\n" in text, line
    assert "training.optimizer = adam (no" in text and "momentum = 0.9" not in text, "a default is not listed"
    assert "perturbation.alpha" not in text and "amplitude.region" not in text, "as the preset robust has them"
    network = build_network("unet", 3, (0.5, 0.5), width=4, norm="instance", seed=0)
    numbers = sum(value.numel() for value in network.state_dict().values())
    assert f"every one of 1 round: weight differences of unet, {numbers:,} numbers (float32)" in text
    # 3 channels x 11 frequencies at 64 pixels, as jobs/README.md has it
    assert "(region site_gain, before_training), 33 numbers, of at least 5 patients, without noise" in text
    assert "amplitudes released, sent again and held back over all jobs" in text and "this site's limits" in text
    assert "at the end: test scores of at least 1 patient, " in text
    held = read_decision(asks / "local", hash_in(text))
    assert held is not None and held.decision == "approved" and held.job == "harmofl_prostate"
    assert not [line for line in lines(asks, job) if "approv" in line]
    (job / "app/config/experiment.json").open("a").write(" ")
    assert any("this job is not approved, or was changed since" in line for line in lines(asks, job))


def test_a_bundle_with_code_shows_what_is_not_the_installed_package(packed: Packed, shown: Shown) -> None:
    job = packed()
    assert "each equal to that of the harmofl installed here" in shown(job)
    edited, own = job / "app/custom/harmofl/flare/executor.py", job / "app/custom/mine.py"
    edited.write_text(edited.read_text() + "\n# sends more\n")
    own.write_text("x = 1\n")
    path = job / "app/config/config_fed_client.json"
    config = json.loads(path.read_text())
    config["components"] = [{"id": "a", "path": "mine.Component", "args": {"x": {"path": "nvflare.apis.dxo.DXO"}}}]
    config["task_result_filters"] = [{"tasks": ["train"], "filters": [{"path": "other.Filter"}]}]
    path.write_text(json.dumps(config))
    text = shown(job)
    assert f"\n  custom/harmofl/flare/executor.py: sha256 {sha256(edited)}, NOT that of the harmofl installed" in text
    assert f"\n  custom/mine.py: sha256 {sha256(own)}\n" in text and "each equal" not in text
    assert "\n  mine.Component (brought by the job), arguments {'x': {'path': 'nvflare.apis.dxo.DXO'}}\n" in text
    assert "\n  nvflare.apis.dxo.DXO (FLARE)\n" in text and "\n  other.Filter (installed at this site)\n" in text
    assert "\n  the job's, on what leaves: other.Filter\n" in text


def test_the_decision_is_asked_for(asks: Path, packed: Packed, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    job = packed(preinstalled=True)
    for answer in ("", "n\n", "\n", "yess\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        text = shown(job, code=1, yes=False)
        assert "approve this job for HK? [y/N]" in text and "nothing was decided" in text
        assert read_decision(asks / "local", hash_in(text)) is None
    monkeypatch.setattr("sys.stdin", io.StringIO("Y\n"))
    assert "[y/N] approved: job harmofl_prostate" in shown(job, yes=False)


def test_a_job_can_be_rejected_after_it_was_approved(asks: Path, packed: Packed, shown: Shown, lines: Lines) -> None:
    job = packed(preinstalled=True)
    shown(job)
    text = shown(job, reject=True)
    assert "\napproved by " in text and "\nrejected: job" in text
    assert any("this job was rejected by" in line for line in lines(asks, job))
    assert len(list((asks / "local" / "approvals").iterdir())) == 1


def test_it_lists_decisions_and_what_waits(asks: Path, packed: Packed, shown: Shown) -> None:
    assert shown(None, yes=False) == "no job was decided about, and none waits at HK\n"
    approved = hash_in(shown(packed(preinstalled=True)))
    for job in (approved, "f" * 64):  # one came before it was approved
        arrival = Arrival(job="trial", job_id="0123", submitter="lead@ucl.org", arrived_at="2026-11-30T23:00:00+00:00")
        note_arrival(asks / "harmofl", job, arrival)
    first, second = shown(None, yes=False).splitlines()
    assert first.startswith(f"approved: job harmofl_prostate, {approved}, ")
    assert second == f"pending: job trial, {'f' * 64}, came 2026-11-30T23:00:00+00:00 from lead@ucl.org as job 0123"


def test_a_job_that_changes_while_it_is_shown_is_not_approved(
    asks: Path, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = packed(preinstalled=True)

    def edit(question: str) -> bool:
        (job / "app/config/experiment.json").open("a").write(" ")
        return True

    monkeypatch.setattr(approve_module, "_answered_yes", edit)
    with pytest.raises(JobError, match="was changed while it was shown; look at it again"):
        approve(asks, job, yes=False, reject=False)
    assert not (asks / "local" / "approvals").exists()


def link(job: Path) -> None:
    (job / "app/config/more.json").symlink_to("/etc/hostname")


def link_the_app(job: Path) -> None:
    shutil.move(job / "app", job.parent / "elsewhere")
    (job / "app").symlink_to(job.parent / "elsewhere")


def another_form(job: Path) -> None:
    shutil.copyfile(job / "app/config/config_fed_client.json", job / "app/config/config_fed_client.conf")


def without_hk(job: Path) -> None:
    meta = json.loads((job / "meta.json").read_text())
    (job / "meta.json").write_text(json.dumps(meta | {"deploy_map": {"app": ["server", "BIDMC"]}}))


def compiled(job: Path) -> None:
    (job / "app/custom").mkdir()
    (job / "app/custom/task.pyc").write_bytes(b"")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (link, "app/config/more.json: is a link, which no job may hold; put the file itself there"),
        (link_the_app, "app: is a link, which no job may hold; put the file itself there"),
        (another_form, "app: FLARE would read config/config_fed_client.conf, config/config_fed_client.json; the job"),
        (without_hk, "deploys to BIDMC, not to HK; ask the lead to add it"),
        (compiled, "custom/task.pyc: is compiled Python code, which nobody can read; bundle the job without it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_job_of_which_nobody_can_say_what_it_does(
    asks: Path, packed: Packed, capsys: pytest.CaptureFixture[str], edit: Callable[[Path], Any], said: str
) -> None:
    job = packed(preinstalled=True)
    edit(job)
    assert main(["approve", str(asks), str(job), "--yes"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (asks / "local" / "approvals").exists()


def test_a_decision_needs_a_job_and_the_kit_of_a_site(
    asks: Path, server: Path, packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["approve", str(asks), "--yes"]) == 2
    assert "name the job or bundle that was handed over" in capsys.readouterr().err
    assert main(["approve", str(server), str(packed(preinstalled=True))]) == 2
    assert "is not the kit of a site" in capsys.readouterr().err


def test_a_running_copy_of_the_kit_learns_it_too(
    asks: Path, packed: Packed, shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "local").mkdir(parents=True)
    monkeypatch.setenv("NVFL_WORKSPACE", str(tmp_path / "run"))
    digest = hash_in(shown(packed(preinstalled=True)))
    assert read_decision(tmp_path / "run" / "local", digest) == read_decision(asks / "local", digest) is not None


def test_preflight_names_a_kit_that_would_not_ask(asks: Path, lines: Lines) -> None:
    assert not [line for line in lines(asks) if "app_deployer" in line]
    (asks / "local" / "resources.json").unlink()
    found = [line for line in lines(asks) if "app_deployer" in line]
    assert len(found) == 1 and "a job's code would run before anybody is asked" in found[0]


def test_preflight_names_a_scope_that_does_not_ask(asks: Path, lines: Lines, kits: Provisioning) -> None:
    path = asks / "local" / "privacy.json"
    content = json.loads(path.read_text())
    content["scopes"].append({"name": "open", "properties": {}, "task_result_filters": [], "task_data_filters": []})
    path.write_text(json.dumps(content))
    found = [line for line in lines(asks, state="warning") if "approval" in line]
    assert found == [
        'warning: approval: scope open asks for none, and a job may choose it; write "approval": "required" into its '
        "properties"
    ]


def test_of_a_task_of_the_job_s_own_its_code_decides(packed: Packed, shown: Shown) -> None:
    job = packed(preinstalled=True)
    path = job / "app/config/experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": "disks.Disks"}))
    text = shown(job)
    assert "\n  task = disks.Disks (no default, the job chooses)\n" in text
    assert "\n  the task disks.Disks is the job's own, so its code decides; this site's filters let out" in text


def test_no_text_of_a_job_reaches_the_terminal_as_it_is(
    asks: Path, packed: Packed, shown: Shown, tmp_path: Path
) -> None:
    job = packed(preinstalled=True)
    meta = json.loads((job / "meta.json").read_text())
    (job / "meta.json").write_text(json.dumps(meta | {"name": "a\x1b[2Jb\nc", "x\x1b": "\r"}))
    arrival = Arrival(job="\x1b[2J", job_id="\n", submitter="a", arrived_at="b")
    note_arrival(asks / "harmofl", "f" * 64, arrival)
    for text in (shown(job), shown(None, yes=False)):
        assert text.replace("\n", "").isprintable()
        assert "approved: job a?[2Jb c, " in text


def test_a_scope_that_stands_twice_lets_nobody_decide(
    asks: Path, packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    path = asks / "local" / "privacy.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"scopes": content["scopes"] * 2}))
    assert main(["approve", str(asks), str(packed(preinstalled=True)), "--yes"]) == 2
    assert "local/privacy.json: has two scopes of the name harmofl" in capsys.readouterr().err
