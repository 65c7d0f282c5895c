"""`harmofl watch`: a submitted job to its end, one line a round, and its results on this machine."""

import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import (
    AuthorizationError,
    InternalError,
    JobNotDone,
    JobNotFound,
    JobNotRunning,
    NoConnection,
    TargetType,
)
from nvflare.fuel.flare_api.flare_api import Session

from harmofl.app.job import JobError
from harmofl.app.session import connected
from harmofl.evidence.results import REPORT_FILE
from harmofl.flare.live import FAILURE_FILE, GROUP, MOST_REASON
from harmofl.flare.server_run import UNFINISHED_FILE
from harmofl.flare.server_store import JOB_ID
from harmofl.sections import one_line, outside_text

COMPLETED = "FINISHED:COMPLETED"
POLL = 1.0  # seconds between two questions to the server
WHERE_TO_LOOK = "log.txt in KIT/JOB_ID there, `harmofl preflight KIT` and the server's log.txt tell more"
LOST = 60.0  # seconds without any answer after which the server is given up


def watch(kit: Path, job_id: str, output: Path | None) -> int:
    """Follow a job until it ends; say why where it failed.

    Args:
        kit: of the user who submitted it.
        job_id: as FLARE gave it.
        output: receives the job's results, in a folder of its id.

    Returns:
        0 where the job completed and, where asked for, its results are here; else 1.

    Raises:
        JobError: no such job, or the user may not see it.
    """
    if not JOB_ID.fullmatch(job_id):
        raise JobError(f"{job_id!r} is not a job id; `nvflare job list` names them")
    if output is not None and (output / job_id).exists():
        raise JobError(f"{output / job_id}: is there already; name another folder with -o")
    if output is not None and output.exists() and not output.is_dir():
        raise JobError(f"-o {output}: is a file; name a folder")
    with connected(kit) as session:
        meta = _follow(session, job_id)
        status = outside_text(meta.get("status"))
        with tempfile.TemporaryDirectory(prefix="harmofl-") as place:
            result = _download(session, job_id, Path(place))
            reason = _reason(meta, result)
            if output is not None and result is not None:
                output.mkdir(parents=True, exist_ok=True)
                shutil.move(result, output / job_id)
    if output is not None:
        say(f"results in {output / job_id}" if result is not None else "no results could be downloaded")
        report = server_run_folder(output / job_id) / REPORT_FILE
        if report.is_file():
            say(f"report: {report}")
    if status != COMPLETED:
        say(f"failed: {reason} ({status})")
        return 1
    say(f"job {job_id} completed")
    return 0 if output is None or result is not None else 1


def say(line: str) -> None:
    """One line for whoever watches."""
    sys.stdout.write(f"harmofl watch: {one_line(line)}\n")
    sys.stdout.flush()


def server_run_folder(result: Path) -> Path:
    """The server's run folder, with models, results and report, in what FLARE downloads of a job."""
    return result / "workspace" / "app_server"


def _follow(session: Session, job_id: str) -> Mapping[str, Any]:
    """Print each new line of progress until the job has ended; its last meta data."""
    shown: set[str] = set()
    answered = time.monotonic()
    while True:
        try:
            meta: dict[str, Any] = session.get_job_meta(job_id)
            answered = time.monotonic()
        except JobNotFound:
            raise JobError(f"{job_id}: no such job at this server; `nvflare job list` names them") from None
        except AuthorizationError as error:
            raise JobError(f"{job_id}: this user may not see the job ({error})") from None
        except (NoConnection, InternalError, OSError):
            if time.monotonic() - answered > LOST:
                raise JobError(f"the server has not answered for {LOST:.0f} s; is it up?") from None
            time.sleep(POLL)
            continue
        status = outside_text(meta.get("status"))
        lines = progress_lines(_ask(session, job_id)) if status == "RUNNING" else []
        lines = [f"runs without {answer}" for answer in _refusals(meta) if status == "RUNNING"] + lines
        for line in [f"job {job_id} is {status}".lower(), *lines]:
            if _key(line) not in shown and not status.startswith("FINISHED"):
                shown.add(_key(line))
                say(line)
        if status.startswith("FINISHED"):
            return meta
        time.sleep(POLL)


def _key(line: str) -> str:
    """A line without the time that is left: the same news is told once."""
    return line.partition(", about")[0]


def _ask(session: Session, job_id: str) -> Mapping[str, Any] | None:
    """The job's own progress, None while it has none to tell."""
    try:
        told = session.show_stats(job_id, TargetType.SERVER)
    except (
        JobNotRunning,
        JobNotFound,
        AuthorizationError,
        InternalError,
        NoConnection,
        RuntimeError,
    ):  # not begun, or just over
        return None
    groups = [groups for groups in told.values() if isinstance(groups, dict)] if isinstance(told, dict) else []
    return next((found[GROUP] for found in groups if GROUP in found), None)


def progress_lines(progress: Mapping[str, Any] | None) -> list[str]:
    """What `harmofl.flare.live.progress` tells, a line a closed round."""
    try:
        return [] if progress is None else _progress_lines(progress)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return ["the server tells its progress in a form that this version does not know"]


def _progress_lines(progress: Mapping[str, Any]) -> list[str]:
    sites = len(progress["sites"])
    lines = []
    if progress["start_round"]:
        lines.append(f"resumed from round {outside_text(progress['start_round'])}")
    if progress["amplitude_sites"]:
        lines.append(f"amplitude of {len(progress['amplitude_sites'])} of {sites} sites frozen")
    last = len(progress["closed"]) - 1
    for position, closed in enumerate(progress["closed"]):
        line = f"round {outside_text(closed['round'])}: {len(closed['accepted'])} of {sites} sites accepted, "
        if closed.get("scored", True):
            line += "received model scores "
            line += "undefined" if closed["mean"] is None else f"mean {closed['mean']:.3f}"
        else:
            line += "received model not scored"
        if closed["worst"]:
            line += f", worst {closed['worst'][1]:.3f} {outside_text(closed['worst'][0])}"
        if closed.get("norms"):
            line += ", norms a step {:.2g} to {:.2g}".format(*closed["norms"])
        refused = {outside_text(site): outside_text(reason) for site, reason in closed["refused"].items()}
        line += "".join(f", {site} failed: {reason}" for site, reason in refused.items())
        if position == last and progress["seconds_left"] is not None:
            line += f", about {_duration(progress['seconds_left'])} left"
        lines.append(line)
        # one about a fall of the score names every site that points away
        lines += [f"WARNING: {one_line(warning, MOST_REASON)}" for warning in closed.get("warnings", [])]
    return lines


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _download(session: Session, job_id: str, place: Path) -> Path | None:
    """The job's files below `place`, None where FLARE keeps none."""
    try:
        return Path(session.download_job_result(job_id, str(place)))
    except (JobNotDone, JobNotFound, InternalError, AuthorizationError, NoConnection, OSError, RuntimeError):
        return None


def _reason(meta: Mapping[str, Any], result: Path | None) -> str:
    """Why a job failed: its own last word, what the sites answered when it was sent to them, or where to look."""
    told = [server_run_folder(result) / name for name in (FAILURE_FILE, UNFINISHED_FILE)] if result is not None else []
    texts = (path.read_text(encoding="utf-8", errors="replace").strip() for path in told if path.is_file())
    said = next((one_line(text, MOST_REASON) for text in texts), "")
    if said:
        return said if told[0].is_file() else f"{said}; {WHERE_TO_LOOK}"
    if refused := _refusals(meta):
        return "; ".join(refused)
    return f"a process of the job ended before it could say why; {WHERE_TO_LOOK}"


def _refusals(meta: Mapping[str, Any]) -> list[str]:
    """What sites answered that did not take the job in, such as `HK: NVFLARE_ERROR: approval_pending: ...`."""
    answers = [outside_text(answer) for answer in meta.get("job_deploy_detail") or []]
    return [answer for answer in answers if not answer.endswith(": OK")]
