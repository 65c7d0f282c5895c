"""Where a server keeps checkpoints beyond the job that wrote them, so that another job can go on."""

import fcntl
import re
from pathlib import Path
from typing import IO

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_constant import DefaultCheckpointFileName

from harmofl.experiment import ExperimentError
from harmofl.flare.site import SiteError, is_simulated, state_root
from harmofl.flare.state import StateError

FINAL_MODEL, BEST_MODEL = DefaultCheckpointFileName.GLOBAL_MODEL, DefaultCheckpointFileName.BEST_GLOBAL_MODEL
JOB_ID = re.compile(r"[0-9a-fA-F][0-9a-fA-F-]{7,63}")


def checkpoint_path(resume_from: str, store: Path | None) -> Path:
    """The checkpoint that a job names: a path in simulation, elsewhere the id of a job of this server.

    Raises:
        ExperimentError: a job chooses a path at a real server.
        StateError: that job left no checkpoint here.
    """
    if store is None:
        return Path(resume_from)
    if not JOB_ID.fullmatch(resume_from):
        raise ExperimentError(
            f"federation.resume_from: {resume_from!r} is not a job id; outside simulation it names the job to resume"
        )
    path = store.with_name(resume_from) / FINAL_MODEL
    if not path.is_file():
        raise StateError(
            f"job {resume_from} left no checkpoint at this server: it ended before its first round was closed, or was "
            "purged; submit it as a new job"
        )
    return path


def lock_run(path: Path) -> IO[str]:
    """Hold the run for this job until its process ends, however it ends.

    Raises:
        StateError: another job of this server has resumed the run; sites keep one state for both.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    held = path.open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise StateError(
            "the run that this job resumes is still running in another job; abort that one first"
        ) from None
    return held


def store_of(fl_ctx: FLContext) -> Path | None:
    """Where this server keeps the checkpoints of a job."""
    if is_simulated(fl_ctx):
        return None
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    try:  # inside a job FLARE gives the server the project's name; its state folder is called what jobs call it
        root = state_root("server", Path(workspace.get_root_dir()))
    except SiteError as error:
        raise StateError(str(error)) from None
    return root / "runs" / str(fl_ctx.get_job_id())
