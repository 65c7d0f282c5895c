"""Whose a run is: a task's run belongs to its job, and only who submitted it, or a project admin, resumes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey

from harmofl.experiment import Experiment, ExperimentError
from harmofl.flare.amplitude_message import MessageError
from harmofl.flare.rule_memory import keep_rules
from harmofl.flare.site import SiteError
from harmofl.flare.state import SiteState, StateError, write_text_atomically
from harmofl.sections import Section, parse_json

OWNER_FILE = "owner.json"
_OWNER, _BEGUN = "owner", "begun"  # in a site's state of a run
PROJECT_ADMIN = "project_admin"


class RunOwner(Section):
    """A submitter as FLARE's server has authenticated him."""

    name: str
    org: str


def submitter_of(fl_ctx: FLContext) -> tuple[RunOwner, str]:
    """Who submitted the running job, and his role, from the meta data that FLARE's server keeps of it.

    Raises:
        StateError: FLARE does not say.
    """
    meta: Mapping[str, Any] = fl_ctx.get_prop(FLContextKey.JOB_META) or {}
    name, org, role = (
        meta.get(key.value) for key in (JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE)
    )
    if not (isinstance(name, str) and name and isinstance(org, str)):
        raise StateError("FLARE does not say who submitted this job, so its run would belong to nobody")
    return RunOwner(name=name, org=org), str(role)


def owner_of_resumed(job: str, folder: Path, fl_ctx: FLContext) -> RunOwner:
    """Whose the run is that this job resumes; nothing of the run is read but its owner.

    Args:
        job: id of the job that is resumed, as the experiment names it.
        folder: of that job in the server's store.
        fl_ctx: of the job that resumes it.

    Raises:
        ExperimentError: the submitter is neither the owner nor a project admin.
        StateError: the owner cannot be read.
    """
    submitter, role = submitter_of(fl_ctx)
    owner = _read_owner(folder)
    if role == PROJECT_ADMIN:
        return owner or submitter
    if owner is None:
        raise ExperimentError(
            f"federation.resume_from: job {job} is of a version that kept no owner of a run, so only a project admin "
            "may resume it"
        )
    if owner != submitter:
        raise ExperimentError(
            f"federation.resume_from: job {job} was not submitted by {submitter.name} of {submitter.org}; its "
            "submitter or a project admin may resume it"
        )
    return owner


def refuse_other_run(state: SiteState, job_id: str, experiment: Experiment) -> None:
    """Hold the run of a task against its job; outside simulation only, where a run is called as its first job.

    A job that resumes another one (`federation.resume_from`) has the run of that one, which may itself have
    resumed an earlier one. Beside the state of a run stands the hash of the experiment that it was begun with.

    Args:
        state: of the run that the task names.
        job_id: FLARE's, of the running job.
        experiment: as this site resolved it.

    Raises:
        MessageError: the run belongs to another job, or to one of other settings.
    """
    resumed, held = _plain(experiment.federation.resume_from or ""), state.load_once(_BEGUN)
    own = state.run_id in (_plain(job_id), resumed)
    if not own and (not resumed or (held is None and state.holds_anything)):
        raise MessageError(
            "the task names a run that is not of this job; a job resumes another one's run only by "
            "federation.resume_from"
        )
    if held is None:
        keep_rules(state)
        state.save_with_round(_BEGUN, {"experiment": experiment.hash})
    elif held["experiment"] != experiment.hash:
        raise MessageError(
            f"the run was begun with experiment {held['experiment']}, this job has {experiment.hash}; submit it as a "
            "new job"
        )


def refuse_run_of_another(state: SiteState, site: str, fl_ctx: FLContext) -> None:
    """Keep at a site whose a run is, and let no job of somebody else use what the site remembers of it.

    A job that brings code for the server may put any run id into its tasks. A run that an earlier version began has no
    owner yet, and gets the one of the job that trains it next.

    Raises:
        SiteError: code `run_of_another`.
        StateError: FLARE does not say who submitted the job.
    """
    submitter, role = submitter_of(fl_ctx)
    held = state.load_once(_OWNER)
    if held is None:
        state.save_with_round(_OWNER, submitter.model_dump())
    elif RunOwner.model_validate(held) != submitter and role != PROJECT_ADMIN:
        raise SiteError(
            "run_of_another", f"site {site} keeps this run for another submitter, who or a project admin may resume it"
        )


def write_owner(owner: RunOwner, folder: Path) -> None:
    """Keep whose a run is beside the checkpoints of a job, before there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(owner.model_dump_json() + "\n", folder / OWNER_FILE)


def _read_owner(folder: Path) -> RunOwner | None:
    path = folder / OWNER_FILE
    try:
        return RunOwner.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise StateError(
            f"{OWNER_FILE} of the run that this job resumes cannot be read; copy it again from a backup"
        ) from None


def _plain(job_id: str) -> str:
    """A job's id as its run has it."""
    return job_id.replace("-", "").lower()
