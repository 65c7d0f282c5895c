"""An experiment as a hospital reads its own folder: names and rows there are the hospital's to tell, not a job's."""

from collections.abc import Sequence

from harmofl.experiment import Experiment


def experiment_at_hospital(
    experiment: Experiment, site: str, *, patient_pattern: str | None = None, centers: Sequence[int] | None = None
) -> Experiment:
    """The experiment with what a job says of folders, names and rows at a site replaced by the hospital's own words.

    A job's `data.aliases` and `reader.centers` name nothing here, so that what a site finds and counts does not depend
    on them. Its hash is another one: compare that of the job's own experiment.

    Args:
        experiment: as the job resolves.
        site: the hospital's name as a site.
        patient_pattern: the hospital's own; it comes before the job's `data.patient_from`.
        centers: of task camelyon17 the values of the column `center` that are the hospital's; None for the only one.
    """
    data = experiment.data.model_copy(update={"aliases": {}, "patient_pattern": patient_pattern})
    reader = experiment.reader
    if experiment.task == "camelyon17":
        reader = reader | {"centers": {site: list(centers or ())}}
    return experiment.model_copy(update={"data": data, "reader": reader})
