"""`harmofl resume`: a copy of a submitted job that resumes the job that ended from its checkpoint."""

import json
import sys
from pathlib import Path

from nvflare.fuel.hci.cmd_arg_utils import join_args, split_to_args

from harmofl.app.flare_refusals import refuse_job_name
from harmofl.app.job import JobError, read_job
from harmofl.app.session import connected
from harmofl.flare.server_store import JOB_ID
from harmofl.sections import one_line


def resume(job_folder: Path, job_id: str, *, output: Path, kit: Path | None) -> int:
    """Write a job equal to `job_folder` but for the checkpoint it begins with, and submit it where a kit is given.

    Args:
        job_folder: the job or bundle that was submitted as `job_id`; other settings would be refused by the server.
        job_id: as FLARE gave it to the job that ended.
        output: receives a folder of the job's name.
        kit: of the user who submits.

    Returns:
        0.

    Raises:
        JobError, ExperimentError: a mistake in the command or the job; nothing was written.
    """
    if not JOB_ID.fullmatch(job_id):
        raise JobError(f"{job_id!r} is not a job id; `nvflare job list` names them")
    job = read_job(job_folder, [f"federation.resume_from={json.dumps(job_id)}"])
    refuse_job_name(job.folder.name)
    if kit is not None:
        _refuse_unsubmittable(output / job.folder.name)
    target = job.copy_to(output)
    say(f"{target} resumes job {job_id}")
    if kit is None:
        say(f"submit it: nvflare job submit -j {target} --startup-kit KIT")
        return 0
    with connected(kit) as session:
        say(f"submitted as job {session.submit_job(str(target.absolute()))}")
    return 0


def _refuse_unsubmittable(target: Path) -> None:
    """Refuse a path that does not come back from the line as which FLARE hands it to its own command."""
    words = ["submit_job", str(target.absolute())]
    if split_to_args(join_args(words)) != words:
        raise JobError(f"-o {target.parent}: FLARE cannot submit a job from a path with quotes; name another folder")


def say(line: str) -> None:
    """One line for the operator."""
    sys.stdout.write(f"harmofl resume: {one_line(line)}\n")
