"""What `harmofl check` finds out about each site, before anything is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harmofl.app.job import Job, JobError
from harmofl.data.findings import DataRootError, Finding, SharedFolderError
from harmofl.experiment import Experiment
from harmofl.flare.site_settings import MINIMUM_CASES
from harmofl.tasks import FolderReport, load_task, place_sites

ALIKE = 1.2  # ratio of pixel sizes that counts as one resolution
NOT_SENT, BELOW_OWN = "amplitude_not_sent", "below_own_minimum"  # codes of findings
Pixel = tuple[float, float]


@dataclass(frozen=True)
class SiteInspection:
    """One site: its folder, what the folder holds, and all findings, errors first."""

    name: str
    folder: Path
    report: FolderReport
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Inspection:
    """All sites that were looked at; `problems` are sites without a folder, one line each."""

    sites: tuple[SiteInspection, ...]
    problems: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        """Whether a site is missing or anything in a folder cannot be used."""
        findings = [*self.findings, *(finding for site in self.sites for finding in site.findings)]
        return bool(self.problems) or any(finding.severity == "error" for finding in findings)


def inspect(
    root: Path, job: Job, experiment: Experiment, only: str | None, own_minimum: int | None = None
) -> Inspection:
    """Look into the folder of every site of the job, or of one.

    Args:
        root: folder of the sites' folders, or one site's own.
        job: its sites.
        experiment: as the job resolves.
        only: the only site to look at.
        own_minimum: `minimum_cases` of that site's privacy scope, where it is known: the root is that site's own then.

    Raises:
        JobError: the root is not a folder, or the job has no such site.
    """
    at_hospital = only is not None and own_minimum is not None
    expected = (only,) if only is not None and at_hospital and only in job.sites else job.sites
    folders, problems = _folders(root, job, experiment, only, expected)
    sites = []
    for name, folder in folders.items():
        try:
            sites.append(_inspect_site(name, folder, experiment, own_minimum))
        except DataRootError as error:
            problems.append(str(error))
    medians = {site.name: _median_pixel(site.report) for site in sites if site.report.pixels}
    between = [*_resolution_finding(medians, experiment, "between sites")] if len(medians) > 1 else []
    if {site.name for site in sites} == set(job.sites) and not at_hospital:
        between += _sites_without_amplitude(sites, experiment)
    if folders and not folders.keys() & set(job.sites):
        between += _one_of_several(root, job)
    return Inspection(tuple(sites), tuple(problems), tuple(between))


def _folders(
    root: Path, job: Job, experiment: Experiment, only: str | None, expected: Sequence[str]
) -> tuple[dict[str, Path], list[str]]:
    """Folder of each site, and one line for each that has none; `expected` are the sites whose data may be here."""
    if not root.is_dir():
        raise JobError(f"{root} is not a folder; name the folder of the sites' folders, or one site's own")
    if only is not None and only not in job.sites:
        raise JobError(f"--site {only}: the job's sites are {', '.join(job.sites)}")
    task = load_task(experiment)
    places = place_sites(experiment, dict.fromkeys(expected, root))
    loose = [
        site
        for site, place in places.items()
        if isinstance(place, SharedFolderError) or (place == root and task.part(root, site, experiment) is None)
    ]
    if len(loose) == len(expected):
        return {only or _name_of(root, job, experiment): root}, []  # the root is one site's own folder
    wanted = {site: place for site, place in places.items() if only in (None, site)}
    folders = {site: place for site, place in wanted.items() if isinstance(place, Path) and site not in loose}
    problems = [
        f"{site} {place}" if isinstance(place, SharedFolderError) else f"{site} would read the loose cases in {root}"
        for site, place in wanted.items()
        if site in loose
    ]
    problems += [str(place) for site, place in wanted.items() if isinstance(place, DataRootError) and site not in loose]
    return folders, list(dict.fromkeys(problems))  # a folder of DICOM is the same mistake for every site


def _one_of_several(root: Path, job: Job) -> list[Finding]:
    """Say that a folder was taken for one site's, which a run of all sites on one machine refuses."""
    message = f"taken for the folder of one site, whichever of {', '.join(job.sites)} that is"
    fix = (
        "to run all sites on this machine, create one folder per site with the name of the site (nuclei: or sites.json)"
    )
    return [Finding("notice", "one_site", root.resolve().name, message, fix)]


def _name_of(folder: Path, job: Job, experiment: Experiment) -> str:
    """The site that a folder is named after, else the folder's own name."""
    own = folder.resolve().name
    for site in job.sites:
        if own.casefold() in {name.casefold() for name in (site, *experiment.data.aliases.get(site, ()))}:
            return site
    return own


def _inspect_site(name: str, folder: Path, experiment: Experiment, own_minimum: int | None) -> SiteInspection:
    report = load_task(experiment).inspect(folder, name, experiment)
    findings = [*report.findings, *_resolution_finding(report.pixels, experiment, name)]
    if report.training_images:
        findings += _few_patients(report.training_patients, experiment, own_minimum)
    order = ("error", "warning", "notice")
    findings.sort(key=lambda finding: order.index(finding.severity))
    return SiteInspection(name, folder, report, tuple(findings))


def _few_patients(training: int, experiment: Experiment, own_minimum: int | None) -> list[Finding]:
    """Say where a site may send no amplitude: by the job's minimum, or by its own."""
    needed, own = experiment.amplitude.minimum_cases, MINIMUM_CASES if own_minimum is None else own_minimum
    if experiment.amplitude.region == "off" or training >= max(needed, own):
        return []
    then = "sends no amplitude and trains with the global one of the others"
    if training < needed:
        message = f"training patients: {training}, amplitude.minimum_cases is {needed}, so this site {then}"
        return [Finding("warning", NOT_SENT, "site", message, "add cases if its images shall count there")]
    fix = "set minimum_cases in the site's privacy scope if the hospital agrees"
    if own_minimum is None:
        message = f"training patients: {training}; outside simulation a site of fewer than {own} {then}"
        return [Finding("warning", BELOW_OWN, "site", message, fix)]
    message = f"training patients: {training}, this site's own minimum_cases is {own}, so it {then}"
    return [Finding("warning", BELOW_OWN, "site", message, fix)]


def _sites_without_amplitude(sites: Sequence[SiteInspection], experiment: Experiment) -> list[Finding]:
    """Who sends no amplitude: an error where too few are left and the job fails, else a notice."""
    silent, below = (
        [site.name for site in sites if any(finding.code == code for finding in site.findings)]
        for code in (NOT_SENT, BELOW_OWN)
    )
    needed, sending = experiment.amplitude.minimum_sites, len(sites) - len(silent)
    if not silent and not below:
        return []
    told = f"{sending} of {len(sites)} sites send an amplitude, amplitude.minimum_sites is {needed}"
    fix = "add cases, or lower amplitude.minimum_cases or amplitude.minimum_sites"
    if sending < needed:
        return [Finding("error", "too_few_amplitudes", ", ".join(silent), f"{told}: the job fails", fix)]
    if sending - len(below) < needed:
        message = f"{told}; outside simulation these send none and the job fails"
        return [Finding("warning", "too_few_amplitudes", ", ".join(silent + below), message, fix)]
    if not silent:
        return []
    return [
        Finding(
            "notice", "without_amplitude", ", ".join(silent), f"{told}: who sends none trains with that of the others"
        )
    ]


def _median_pixel(report: FolderReport) -> Pixel:
    return median(height for height, _ in report.pixels.values()), median(width for _, width in report.pixels.values())


def _resolution_finding(pixels: Mapping[str, Pixel], experiment: Experiment, subject: str) -> Sequence[Finding]:
    """Warn where pixels differ: the amplitude's radial frequencies are in cycles a pixel, not in cycles a mm."""
    if not pixels or experiment.amplitude.region in ("off", "dc"):
        return []
    edges = []
    for axis in (0, 1):
        low, high = (pick(pixels, key=lambda name: pixels[name][axis]) for pick in (min, max))  # noqa: B023
        edges.append((pixels[high][axis] / pixels[low][axis], pixels[low][axis], low, pixels[high][axis], high))
    ratio, smallest, low, largest, high = max(edges)
    if ratio <= ALIKE:
        return []
    message = (
        f"a pixel at the job's size is {smallest:.2f} mm ({low}) to {largest:.2f} mm ({high}), {ratio - 1:.0%} apart, "
        "and the amplitude compares frequencies in cycles a pixel"
    )
    return [Finding("warning", "resolution_differs", subject, message, "crop or resample to one field of view")]
