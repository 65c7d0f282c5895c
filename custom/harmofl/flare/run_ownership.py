"""Whether the run that a task names belongs to its job, so that no job reaches the state of another one's run."""

from harmofl.experiment import Experiment
from harmofl.flare.amplitude_message import MessageError
from harmofl.flare.rule_memory import keep_rules
from harmofl.flare.state import SiteState

_BEGUN = "begun"


def refuse_other_run(state: SiteState, job_id: str, experiment: Experiment) -> None:
    """Hold the run of a task against its job; outside simulation only, where a run is called as its first job.

    A job that goes on with another one (`federation.resume_from`) has the run of that one, which may itself have gone
    on with an earlier one. Beside the state of a run stands the hash of the experiment that it was begun with.

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
            "the task names a run that is not of this job; a job goes on with another one's run only by "
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


def _plain(job_id: str) -> str:
    """A job's id as its run has it."""
    return job_id.replace("-", "").lower()
