"""A site's limits for whoever reads them: those in force, and what of a job exceeds them."""

from collections.abc import Iterator

from harmofl.app.job import Job
from harmofl.app.kit import Check, Kit
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment, resolve
from harmofl.flare.site import SiteError, own_setting
from harmofl.flare.site_limits import Excess, described_limits, exceeded
from harmofl.flare.site_settings import MINIMUM_CASES, LimitSettings


def limits_of(kit: Kit) -> LimitSettings:
    """The limits that a site's kit sets; the defaults where they cannot be read, which its policy section says."""
    try:
        limits: LimitSettings = own_setting(kit.properties(), "limits")
    except SiteError:
        return LimitSettings()
    return limits


def minimum_cases_of(kit: Kit) -> int:
    """Of how many patients an amplitude may leave; the default where it cannot be read."""
    try:
        return int(own_setting(kit.properties(), "minimum_cases"))
    except SiteError:
        return MINIMUM_CASES


def check_limits(kit: Kit, job: Job | None, experiment: Experiment | None) -> Iterator[Check]:
    """Tell the limits in force, those that are looser than the defaults, and what of a job exceeds them.

    Args:
        kit: of a site.
        job: that is to run.
        experiment: its settings; None where its task is the job's own code, which is not run here.
    """
    limits = limits_of(kit)
    held = described_limits(limits, minimum_cases_of(kit)).items()
    yield Check("ok", "limits", f"in force: {', '.join(f'{name} {_shown(value)}' for name, value in held)}")
    if limits.minimum_sites < LimitSettings().minimum_sites:
        message = f"minimum_sites is {limits.minimum_sites}: {_told_by_few(limits.minimum_sites)}"
        yield Check("note", "limits", message, "for a rehearsal; with patients leave it at 3 or more")
    for found in _exceeded(limits, job, experiment) if job else ():
        yield Check("error", found.setting, found.message, found.fix)


def check_default_limits(job: Job, experiment: Experiment | None) -> Iterator[Check]:
    """Tell whoever submits a job what of it a hospital refuses that has left its limits at the defaults."""
    for found in _exceeded(LimitSettings(), job, experiment):
        message = f"{found.message} at a hospital with the default limits, which refuses the job"
        yield Check("warning", found.setting, message, found.fix)


def check_patients(kit: Kit, patients: int) -> Iterator[Check]:
    """Hold the training patients of a site against the fewest that must stand behind its weights."""
    needed = limits_of(kit).training_patients
    if patients < needed:
        message = f"{count_text(patients, 'training patient')}, limits.training_patients is {needed}"
        yield Check("error", "data", f"{message}: this site would not train", "add patients, or lower that limit here")


def warnings_for_careful_sites(job: Job, experiment: Experiment) -> list[str]:
    """What of a job a hospital refuses that has left its limits at the defaults, a line each."""
    from harmofl.tasks import is_outside

    found = _exceeded(LimitSettings(), job, None if is_outside(experiment.task) else experiment)
    return [f"a hospital with the default limits refuses this job: {excess}" for excess in found]


def _exceeded(limits: LimitSettings, job: Job, experiment: Experiment | None) -> list[Excess]:
    """What of a job exceeds limits; the size of its network too, where its task is no code of the job's own."""
    from harmofl.flare.network_size import large_network  # torch with it

    found = exceeded(limits, experiment or resolve(job.settings), len(job.sites))
    return found if experiment is None else [*found, *large_network(limits, experiment)]


def _told_by_few(sites: int) -> str:
    if sites == 1:
        return "what this site alone sends is the model"
    return "the other site can subtract its own part from the mean"


def _shown(value: object) -> str:
    return " and ".join(value) if isinstance(value, list) else str(value).lower()
