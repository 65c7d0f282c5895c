"""`harmofl watch` and `harmofl resume` against a server that is played."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nvflare.fuel.flare_api.api_spec import InternalError, JobNotFound, JobNotRunning

from harmofl.app import resume as resume_module
from harmofl.app import session as session_module
from harmofl.app import watch as watch_module
from harmofl.app.bundle import bundle
from harmofl.app.job import JobError, read_job
from harmofl.app.resume import resume
from harmofl.app.session import connected
from harmofl.app.watch import COMPLETED, progress_lines, watch
from harmofl.experiment import ExperimentError
from harmofl.job_folder import MANIFEST
from tests.unit.app.provisioned import LEAD, Provisioning, closed_port

JOB_ID = "6f84c8d9-90d2-404a-9d40-a8408d110832"
PROGRESS: dict[str, Any] = {
    "rounds": 3,
    "sites": ["A", "B", "C"],
    "start_round": 0,
    "seconds_left": 150.0,
    "amplitude_sites": ["A", "B"],
    "closed": [
        {"round": 0, "accepted": ["A", "B", "C"], "refused": {}, "mean": None, "worst": None},
        {"round": 1, "accepted": ["A", "B"], "refused": {"C": "no data"}, "mean": 0.5, "worst": ["B", 0.25]},
    ],
}


class Server:
    """Answers in turn; an answer that is an exception is raised."""

    def __init__(self, metas: list[Any], stats: list[Any], result: Path | None = None) -> None:
        self.metas, self.stats, self.result = metas, stats, result
        self.submitted: list[str] = []

    def get_job_meta(self, job_id: str) -> Any:
        return self._next(self.metas)

    def show_stats(self, job_id: str, target: str) -> Any:
        return self._next(self.stats)

    def download_job_result(self, job_id: str, place: str) -> str:
        if self.result is None:
            raise InternalError("nothing is kept")
        target = Path(place) / job_id
        self.result.rename(target)
        return str(target)

    def submit_job(self, folder: str) -> str:
        self.submitted.append(folder)
        return "new-job"

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a server behind the commands."""

    def play(server: Server) -> Server:
        @contextmanager
        def session(kit: Path) -> Iterator[Server]:
            yield server

        monkeypatch.setattr(watch_module, "connected", session)
        monkeypatch.setattr(resume_module, "connected", session)
        monkeypatch.setattr(watch_module, "POLL", 0)
        return server

    return play


def test_a_line_a_round_with_who_failed_and_the_time_left() -> None:
    assert progress_lines(PROGRESS) == [
        "amplitude of 2 of 3 sites frozen",
        "round 0: 3 of 3 sites accepted, received model scores undefined",
        "round 1: 2 of 3 sites accepted, received model scores mean 0.500, worst 0.250 B, C failed: no data, "
        "about 2 minutes left",
    ]
    assert progress_lines(None) == []
    odd = {
        **PROGRESS["closed"][0],
        "norms": [0.0212, 4e29],
        "warnings": ["round 0: B is an outlier: norm 4e+29 a step"],
    }
    assert progress_lines({**PROGRESS, "closed": [odd], "seconds_left": None})[1:] == [
        "round 0: 3 of 3 sites accepted, received model scores undefined, norms a step 0.021 to 4e+29",
        "WARNING: round 0: B is an outlier: norm 4e+29 a step",
    ]
    assert progress_lines({**PROGRESS, "start_round": 1, "closed": []})[0] == "resumed from round 1"


def test_each_news_is_told_once_and_the_results_come(played: Any, tmp_path: Path, capsys: Any) -> None:
    result = tmp_path / "downloaded"
    (result / "workspace" / "app_server").mkdir(parents=True)
    first = {**PROGRESS, "closed": PROGRESS["closed"][:1], "seconds_left": 300.0}
    played(
        Server(
            [{"status": "SUBMITTED"}, {"status": "RUNNING"}] + [{"status": "RUNNING"}] * 3 + [{"status": COMPLETED}],
            [JobNotFound("not yet"), {"server": {"harmofl": first}}, {"server": {}}, {"server": {"harmofl": PROGRESS}}],
            result,
        )
    )
    assert watch(tmp_path, JOB_ID, tmp_path / "out") == 0
    lines = [line.removeprefix("harmofl watch: ") for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [f"job {JOB_ID} is submitted", f"job {JOB_ID} is running"]
    assert [line.split(",")[0] for line in lines[2:5]] == [
        "amplitude of 2 of 3 sites frozen",
        "round 0: 3 of 3 sites accepted",
        "round 1: 2 of 3 sites accepted",
    ]
    assert lines[-1] == f"job {JOB_ID} completed" and (tmp_path / "out" / JOB_ID / "workspace").is_dir()


def test_a_failed_job_says_its_own_last_word(played: Any, tmp_path: Path, capsys: Any) -> None:
    result = tmp_path / "downloaded"
    (result / "workspace" / "app_server").mkdir(parents=True)
    (result / "workspace" / "app_server" / "failure.txt").write_text("round 1: 1 of 3 sites accepted\n")
    played(Server([{"status": "FINISHED:EXECUTION_EXCEPTION"}], [], result))
    assert watch(tmp_path, JOB_ID, None) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "harmofl watch: failed: round 1: 1 of 3 sites accepted (FINISHED:EXECUTION_EXCEPTION)"
    )


def test_a_job_that_a_site_refused_names_the_site(played: Any, tmp_path: Path, capsys: Any) -> None:
    detail = ["server: OK", "A: OK", "B: NVFLARE_ERROR: BYOC not permitted"]
    played(Server([{"status": "FINISHED:FAILED_TO_RUN", "job_deploy_detail": detail}], []))
    assert watch(tmp_path, JOB_ID, None) == 1
    assert "failed: B: NVFLARE_ERROR: BYOC not permitted" in capsys.readouterr().out


def test_a_completed_job_whose_results_do_not_come_is_no_success(played: Any, tmp_path: Path, capsys: Any) -> None:
    played(Server([{"status": COMPLETED}], []))
    assert watch(tmp_path, JOB_ID, tmp_path / "out") == 1
    assert "no results could be downloaded" in capsys.readouterr().out


def test_a_server_that_is_gone_for_long_is_given_up(played: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(watch_module, "LOST", -1.0)
    played(Server([InternalError("gone")], []))
    with pytest.raises(JobError, match="has not answered"):
        watch(tmp_path, JOB_ID, None)


def test_an_unknown_job_and_a_taken_folder_are_mistakes(played: Any, tmp_path: Path) -> None:
    played(Server([JobNotFound("x")], []))
    with pytest.raises(JobError, match="no such job"):
        watch(tmp_path, JOB_ID, None)
    (tmp_path / "out" / JOB_ID).mkdir(parents=True)
    with pytest.raises(JobError, match="is there already"):
        watch(tmp_path, JOB_ID, tmp_path / "out")


def test_of_a_server_that_is_not_there_only_our_line_is_shown(
    kits: Provisioning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session_module, "PATIENCE", 1.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a command: Python itself prints warnings then
    kit = kits.copy(LEAD, tmp_path / "lead", port=closed_port())
    with pytest.raises(JobError, match="cannot log in"), connected(kit):
        pass
    told = capfd.readouterr()
    assert told.out + told.err == ""
    logging.getLogger("harmofl").warning("our own line")
    assert capfd.readouterr().err == "our own line\n"


def test_a_kit_without_a_user_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no kit of a user"), connected(tmp_path):
        pass


def test_a_resumed_bundle_differs_in_the_checkpoint_alone(job: Path, tmp_path: Path) -> None:
    bundle(job, [], output=tmp_path / "dist", demo=False, preinstalled=True, project=None)
    made = tmp_path / "dist" / job.name
    assert resume(made, JOB_ID, output=tmp_path / "again", kit=None) == 0
    copy = tmp_path / "again" / job.name
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    assert files == {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    changed = {name for name in files if (made / name).read_bytes() != (copy / name).read_bytes()}
    assert changed == {"app/config/experiment.json", f"app/config/{MANIFEST}"}
    one, other = read_job(made, []), read_job(copy, [])
    assert other.settings["federation"].pop("resume_from") == JOB_ID
    assert one.settings["federation"].pop("resume_from") is None and one.settings == other.settings
    manifest = json.loads((copy / "app" / "config" / MANIFEST).read_text())
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((copy / name).read_bytes()).hexdigest() == digest


def test_a_resumed_job_is_submitted_where_a_kit_is_given(job: Path, tmp_path: Path, played: Any, capsys: Any) -> None:
    server = played(Server([], []))
    assert resume(job, JOB_ID, output=tmp_path / "again", kit=tmp_path) == 0
    assert server.submitted == [str(tmp_path / "again" / job.name)]
    assert "submitted as job new-job" in capsys.readouterr().out


def test_a_mistaken_id_or_a_taken_folder_writes_nothing(job: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="is not a job id"):
        resume(job, "../../etc", output=tmp_path / "again", kit=None)
    assert not (tmp_path / "again").exists()
    (tmp_path / "again" / job.name).mkdir(parents=True)
    with pytest.raises(ExperimentError, match="is where the job itself lies"):
        resume(job, JOB_ID, output=job / "again", kit=None)
    assert not (job / "again").exists()
    with pytest.raises(ExperimentError, match="is there already"):
        resume(job, JOB_ID, output=tmp_path / "again", kit=None)


def test_the_statistics_of_a_job_that_has_ended_are_no_error(played: Any, tmp_path: Path) -> None:
    played(Server([{"status": "RUNNING"}, {"status": COMPLETED}], [JobNotRunning("over")]))
    assert watch(tmp_path, JOB_ID, None) == 0


FORGED = "x\nharmofl watch: job 1 completed\x1b[2J\u202e"


def test_what_a_server_tells_is_one_printable_line() -> None:
    closed = {"round": 0, "accepted": ["A"], "refused": {f"B{FORGED}": FORGED * 9}, "mean": None, "worst": None}
    (amplitude, line) = progress_lines({**PROGRESS, "closed": [closed]})
    assert line.isprintable() and amplitude and "Bx harmofl watch: job 1 completed?[2J? failed: x harmofl" in line
    assert len(line) < 500


@pytest.mark.parametrize("told", [{}, {"sites": 3}, [1], "x", {**PROGRESS, "closed": 1}, {**PROGRESS, "closed": [{}]}])
def test_progress_of_another_form_is_one_line(told: Any) -> None:
    assert progress_lines(told) == ["the server tells its progress in a form that this version does not know"]


def test_no_line_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    watch_module.say(f"failed: {FORGED}")
    assert capsys.readouterr().out == "harmofl watch: failed: x harmofl watch: job 1 completed?[2J?\n"


def test_what_a_server_tells_is_short_and_its_numbers_are_numbers() -> None:
    long = "x" * 5000
    closed = {**PROGRESS["closed"][0], "round": long, "worst": [long, 0.5], "warnings": [long]}
    lines = progress_lines({**PROGRESS, "start_round": long, "amplitude_sites": [], "closed": [closed]})
    assert [len(line) < limit for line, limit in zip(lines, (250, 650, 2050), strict=True)] == [True] * 3
    # JSON has numbers that no float can hold
    for told in ({**PROGRESS, "seconds_left": 10**400}, {**PROGRESS, "closed": [{**closed, "mean": 10**400}]}):
        assert progress_lines(told) == ["the server tells its progress in a form that this version does not know"]
