"""`harmofl approve`: what a job would do at a site, and the site's decision about it."""

import getpass
import sys
from datetime import UTC, datetime
from pathlib import Path

from harmofl.app.job import Job, JobError, read_job
from harmofl.app.job_description import describe_job
from harmofl.app.kit import Kit, open_kit
from harmofl.flare.approval import (
    Decision,
    app_digests,
    arrivals,
    decisions,
    job_hash,
    read_decision,
    settings_of_scope,
    write_decision,
)
from harmofl.flare.site import SiteError
from harmofl.job_folder import refuse_links
from harmofl.sections import one_line


def approve(kit: Path, job_folder: Path | None, *, yes: bool, reject: bool) -> int:
    """Show what a job would do and keep what is decided about it; without a job list what was decided and what waits.

    Args:
        kit: startup kit of the site.
        job_folder: the job or bundle, as the lead handed it over.
        yes: approve without a question.
        reject: reject it, without a question too.

    Returns:
        0, or 1 where the question was not answered with yes.

    Raises:
        JobError, ExperimentError: no kit of a site, or a job of which nobody can say what it does here.
    """
    place = open_kit(kit)
    if place.kind != "client":
        raise JobError(f"{place.folder}: is not the kit of a site; jobs are approved where the data is")
    try:
        if job_folder is None:
            if yes or reject:
                raise JobError("name the job or bundle that was handed over")
            return _list(place)
        return _decide(place, read_job(job_folder, []), yes=yes, reject=reject)
    except SiteError as error:
        raise JobError(str(error)) from None


def _decide(kit: Kit, job: Job, *, yes: bool, reject: bool) -> int:
    refuse_links(job.folder)
    app = next((app for app, names in job.meta["deploy_map"].items() if kit.name in names), None)
    if app is None:
        raise JobError(f"{job.folder}: deploys to {', '.join(job.sites)}, not to {kit.name}; ask the lead to add it")
    files = app_digests(job.folder / app)
    digest = job_hash(files, job.meta)
    held = read_decision(_places(kit)[0], digest)
    for line in describe_job(kit, job, app, files):
        sys.stdout.write(f"{line}\n")
    _say("")
    _say(f"hash of this job at {kit.name}: {digest}")
    if held is not None:
        _say(f"{held.decision} by {held.decided_by} at {held.decided_at}")
    if settings_of_scope(kit.folder / "local", job.meta.get("scope")).approval != "required":
        _say('note: this site runs jobs without asking; it says no "approval": "required" in local/privacy.json')
    if not (yes or reject or _answered_yes(f"approve this job for {kit.name}? [y/N] ")):
        _say("nothing was decided")
        return 1
    if app_digests(job.folder / app) != files or job_hash(files, read_job(job.folder, []).meta) != digest:
        raise JobError(f"{job.folder}: was changed while it was shown; look at it again")
    decision = Decision(
        decision="rejected" if reject else "approved",
        job=str(job.meta.get("name", job.folder.name)),
        decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
        decided_by=getpass.getuser(),
    )
    for local in _places(kit):
        write_decision(local, digest, decision)
    _say(f"{decision.decision}: job {decision.job}, {digest}")
    return 0


def _places(kit: Kit) -> list[Path]:
    """The kit's own folder and, where start.sh runs a copy of the kit elsewhere, that copy's."""
    places = [kit.folder / "local"]
    copy = kit.workspace / "local"
    return places + ([copy] if copy.is_dir() and copy.resolve() != places[0].resolve() else [])


def _answered_yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _list(kit: Kit) -> int:
    held, waiting = decisions(_places(kit)[0]), arrivals(kit.state_root)
    for digest, decision in held.items():
        _say(f"{decision.decision}: job {decision.job}, {digest}, {decision.decided_at}, {decision.decided_by}")
    for digest, arrival in waiting.items():
        if digest not in held:
            _say(
                f"pending: job {arrival.job}, {digest}, came {arrival.arrived_at} from {arrival.submitter} as job "
                f"{arrival.job_id}"
            )
    if not held and not waiting:
        _say(f"no job was decided about, and none waits at {kit.name}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{one_line(line)}\n")
