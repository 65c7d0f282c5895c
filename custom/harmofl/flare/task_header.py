"""TaskHeader: what every task says about its run, read by a strict model before a site does or writes anything."""

from collections.abc import Mapping
from typing import Annotated, Any

from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from pydantic import Field, ValidationError

from harmofl.experiment import Experiment
from harmofl.flare.amplitude_message import MessageError
from harmofl.job_folder import SITE_NAME
from harmofl.sections import Section

AMPLITUDE_TASK, TRAIN_TASK, EVALUATE_TASK = "amplitude", "train", "evaluate"
MOST_SITES, MOST_ROUNDS = 1000, 10**6

_HEADER = "harmofl.header"

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9]{1,64}$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
SiteName = Annotated[str, Field(pattern=rf"^{SITE_NAME.pattern}$", max_length=64)]
Round = Annotated[int, Field(ge=0, le=MOST_ROUNDS)]


class TaskHeader(Section):
    """What a site must know about the run before it does anything.

    Attributes:
        run_id: below which a site keeps its state.
        experiment_hash: of the experiment as the server resolves it.
        demo: whether the server takes the run for a demo.
        round_number: of this task; the number of rounds for the evaluation.
        best_round: the best one so far, whose local layers a site keeps.
        pooled_sites: all sites of a simulated run on pooled data, of which the first trains.
    """

    run_id: RunId
    experiment_hash: Hash
    demo: bool
    round_number: Round
    best_round: Round | None = None
    pooled_sites: Annotated[tuple[SiteName, ...], Field(strict=False, max_length=MOST_SITES)] = ()

    def attach(self, shareable: Shareable) -> Shareable:
        """Write the header into a task's data."""
        shareable.set_header(_HEADER, self.model_dump(mode="json"))
        return shareable

    def refuse_misfit(self, task_name: str, experiment: Experiment, *, simulated: bool) -> None:
        """Hold the header against the experiment that this site resolved.

        Raises:
            MessageError: a round that the experiment does not have, or pooled data outside a simulated run on it.
        """
        rounds = experiment.federation.rounds
        first, last = (rounds, rounds) if task_name == EVALUATE_TASK else (0, rounds - 1)
        if not first <= self.round_number <= last or (self.best_round or 0) >= rounds:
            raise MessageError(
                f"the task {task_name} is of round {self.round_number}, the best one is {self.best_round}, but the "
                f"experiment has {rounds} rounds, counted from 0, and is evaluated after them"
            )
        if self.pooled_sites and not (simulated and experiment.federation.pooled_data):
            raise MessageError("the task's header names pooled_sites, which only a simulated run on pooled data has")


def read_header(shareable: Shareable) -> TaskHeader:
    """The header of a task.

    Raises:
        MessageError: it is missing, so the task does not come from a HarmoFL server, or it holds something that a
            header does not; the line names the key and not its value.
    """
    given = shareable.get_header(_HEADER)
    if not isinstance(given, Mapping):
        raise MessageError("the task carries no HarmoFL header; server and site run different versions")
    try:
        header = TaskHeader.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        place = [str(part) for part in problem["loc"] if isinstance(part, int) or part in TaskHeader.model_fields]
        raise MessageError(
            f"the task's header cannot be used: {'.'.join(place) or 'unknown key'}: {problem['msg']}; server and site "
            "need the same harmofl version"
        ) from None
    told: Any = shareable.get_header(AppConstants.CURRENT_ROUND)
    if told is not None and (type(told) is not int or told != header.round_number):
        raise MessageError("the task's header and FLARE's name different rounds")
    return header
