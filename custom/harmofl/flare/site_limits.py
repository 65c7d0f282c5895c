"""A site's limits: which settings of a job exceed them, how long a task may take, and which are in force."""

import time
from collections.abc import Callable
from typing import NamedTuple

from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_settings import LimitSettings

InForce = dict[str, int | list[str] | bool]


class Excess(NamedTuple):
    """A setting of a job that exceeds a limit: its name, what is wrong, and what the lead can do."""

    setting: str
    message: str
    fix: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.setting} {self.message}; {self.fix}"


def exceeded(limits: LimitSettings, experiment: Experiment, sites: int | None = None) -> list[Excess]:
    """Every setting of a job that exceeds a site's limits; the patients are counted where the data is open.

    Args:
        limits: the site's.
        experiment: the job's, resolved.
        sites: number of sites that the job deploys to, where it is known.
    """
    amplitude, federation, training = experiment.amplitude, experiment.federation, experiment.training
    shared = amplitude.region != "off"
    fewest = limits.minimum_sites
    least = {"federation.minimum_sites": federation.minimum_sites}
    if shared:
        least["amplitude.minimum_sites"] = amplitude.minimum_sites
    found = [_too_low(setting, value, "minimum_sites", fewest) for setting, value in least.items() if value < fewest]
    if sites is not None and sites < fewest:
        message = f"names {count_text(sites, 'site')}, limits.minimum_sites is {fewest}"
        found.append(Excess("deploy_map", message, "add sites, or ask the hospital to lower its limit"))
    most = {
        "data.height": (experiment.data.height, "image_size", limits.image_size),
        "data.width": (experiment.data.width, "image_size", limits.image_size),
        "training.batch_size": (training.batch_size, "batch_size", limits.batch_size),
        "training.local_epochs": (training.local_epochs, "local_epochs", limits.local_epochs),
        "federation.rounds": (federation.rounds, "rounds", limits.rounds),
    }
    found += [_too_high(setting, *held) for setting, held in most.items() if held[0] > held[2]]
    if shared and amplitude.region not in limits.regions:
        found.append(_not_allowed("amplitude.region", amplitude.region, "regions", limits.regions))
    if shared and amplitude.estimation not in limits.estimations:
        found.append(_not_allowed("amplitude.estimation", amplitude.estimation, "estimations", limits.estimations))
    return found


def _too_low(setting: str, value: int, limit: str, least: int) -> Excess:
    message = f"is {value}, limits.{limit} is {least}"
    return Excess(setting, message, f"raise it to {least}, or ask the hospital to lower its limit")


def _too_high(setting: str, value: int, limit: str, most: int) -> Excess:
    message = f"is {value}, limits.{limit} is {most}"
    return Excess(setting, message, f"lower it to {most}, or ask the hospital to raise its limit")


def _not_allowed(setting: str, value: str, limit: str, allowed: tuple[str, ...]) -> Excess:
    message = f"is {value}, limits.{limit} allows {', '.join(allowed) or 'none'}"
    return Excess(setting, message, "choose one of these, or ask the hospital to allow it")


def refuse_excess(site: SiteConfig, experiment: Experiment, sites: int | None) -> None:
    """Refuse a job that asks for more than the site allows, before any of its data is read; none is in simulation.

    Raises:
        SiteError: code `limits`, with every setting that exceeds one.
    """
    found = exceeded(site.limits, experiment, sites) if site.limits else []
    if found:
        # the server shows 200 letters of it; preflight and bundle say the fix of each
        told = "; ".join(f"{excess.setting} {excess.message}" for excess in found)
        raise SiteError("limits", f"site {site.name} does not run this job: {told}; change it, or ask the hospital")


def refuse_few_patients(site: SiteConfig, patients: int, *, weights_leave: bool = True) -> None:
    """Refuse to train on fewer patients than must stand behind weights that leave, or without weights behind the loss.

    Raises:
        SiteError: code `limits`.
    """
    if site.limits is None:
        return
    name, what = ("training_patients", "weights") if weights_leave else ("scored_patients", "a training loss")
    needed = getattr(site.limits, name)
    if patients < needed:
        raise SiteError(
            "limits",
            f"site {site.name} has {count_text(patients, 'training patient')}, its limits.{name} is {needed}: {what} "
            f"of fewer {'do' if weights_leave else 'does'} not leave",
        )


class TaskClock:
    """Whether a task must stop: because the job was aborted, or because it has computed as long as the site allows."""

    def __init__(self, site: SiteConfig, aborted: Callable[[], bool]) -> None:
        """Begin to count."""
        self._site, self._aborted = site, aborted
        self._end = time.monotonic() + site.limits.task_seconds if site.limits else float("inf")

    def should_stop(self) -> bool:
        """Asked between two batches."""
        return self._aborted() or self._expired()

    def _expired(self) -> bool:
        return time.monotonic() >= self._end

    def refuse_late(self) -> None:
        """Say that a task which has stopped took too long; nothing where it was aborted.

        Raises:
            SiteError: code `task_seconds`.
        """
        if self._site.limits and self._expired() and not self._aborted():
            raise SiteError(
                "task_seconds",
                f"site {self._site.name} stopped the task after {self._site.limits.task_seconds} s, its "
                "limits.task_seconds; lower training.local_epochs, or ask the hospital to raise its limit",
            )


def limits_in_force(site: SiteConfig) -> InForce:
    """The limits by name, with the fewest patients behind an amplitude; empty in simulation, which has none."""
    return described_limits(site.limits, site.minimum_cases) if site.limits else {}


def described_limits(limits: LimitSettings, minimum_cases: int) -> InForce:
    """The limits as numbers and names, in the order of the model."""
    held = {name: list(value) if isinstance(value, tuple) else value for name, value in dict(limits).items()}
    return {**held, "minimum_cases": minimum_cases}
