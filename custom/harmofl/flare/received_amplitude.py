"""Whether a task brings the amplitude that its experiment asks for, so that a site sends its own one no oftener."""

from harmofl.experiment import Experiment
from harmofl.flare.amplitude_message import AmplitudeStatistic, MessageError


def refuse_amplitude_task(experiment: Experiment) -> None:
    """Refuse to measure the amplitude of all training images for a job whose settings do not ask for it.

    Raises:
        MessageError: the region is `off`, or the amplitude is estimated in the first round.
    """
    settings = experiment.amplitude
    if settings.region == "off" or settings.estimation != "before_training":
        raise MessageError(
            f"the server asks for an amplitude before training, but amplitude.region is {settings.region} and "
            f"amplitude.estimation {settings.estimation}"
        )


def refuse_other_amplitude(
    experiment: Experiment, received: AmplitudeStatistic | None, *, first_round: bool = False
) -> None:
    """Refuse a task without the frozen amplitude, for which the site would send its own one again, or with a needless.

    Args:
        experiment: as this site resolved it.
        received: the amplitude of the task.
        first_round: the task is the first round's, in which an amplitude may be estimated.

    Raises:
        MessageError: one line.
    """
    settings = experiment.amplitude
    if settings.region == "off":
        if received is not None:
            raise MessageError("the task carries an amplitude, but amplitude.region is off")
        return
    estimated = first_round and settings.estimation != "before_training"
    if received is None and not estimated:
        raise MessageError("the task carries no global amplitude, which was frozen before it")
