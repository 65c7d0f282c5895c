"""What `harmofl check` finds out about each site, before anything is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harmofl.app.job import Job, JobError
from harmofl.data.checks import CaseReport, SiteReport, check_site
from harmofl.data.findings import DataRootError, Finding
from harmofl.data.splits import split_slices_as_published
from harmofl.experiment import Experiment
from harmofl.tasks import load_task
from harmofl.tasks.prostate import volume_settings

ALIKE = 1.2  # ratio of pixel sizes that counts as one resolution
NOT_SENT = "amplitude_not_sent"
PATIENT_SPLIT = {"too_few_cases", "split_filled"}  # findings that a split by slices does not have
Pixel = tuple[float, float]


@dataclass(frozen=True)
class SiteInspection:
    """One site: its folder, what the folder holds, and all findings, errors first."""

    name: str
    folder: Path
    report: SiteReport
    findings: tuple[Finding, ...]
    training_images: int
    validation_slices: int


@dataclass(frozen=True)
class Inspection:
    """All sites that were looked at; `problems` are sites without a folder, one line each."""

    sites: tuple[SiteInspection, ...]
    problems: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        """Whether a site is missing or anything in a folder cannot be used."""
        between = any(finding.severity == "error" for finding in self.findings)
        return bool(self.problems) or between or any(site.report.has_errors for site in self.sites)


def inspect(root: Path, job: Job, experiment: Experiment, only: str | None) -> Inspection:
    """Look into the folder of every site of the job, or of one.

    Raises:
        JobError: the root is no folder, or the job has no such site.
    """
    folders, problems = _folders(root, job, experiment, only)
    sites = []
    for name, folder in folders.items():
        try:
            sites.append(_inspect_site(name, folder, experiment))
        except DataRootError as error:
            problems.append(str(error))
    medians = {site.name: _median_pixel(site, experiment) for site in sites if site.report.cases}
    between = [*_resolution_finding(medians, experiment, "between sites")] if len(medians) > 1 else []
    if {site.name for site in sites} == set(job.sites):
        between += _too_few_amplitudes(sites, experiment)
    return Inspection(tuple(sites), tuple(problems), tuple(between))


def _folders(root: Path, job: Job, experiment: Experiment, only: str | None) -> tuple[dict[str, Path], list[str]]:
    """Folder of each site, and one line for each that has none."""
    if not root.is_dir():
        raise JobError(f"{root} is no folder; name the folder of the sites' folders, or one site's own")
    if only is not None and only not in job.sites:
        raise JobError(f"--site {only}: the job's sites are {', '.join(job.sites)}")
    if experiment.task != "prostate":
        raise JobError(f"{job.folder}: check knows the task prostate, not {experiment.task}")
    task = load_task(experiment)
    folders: dict[str, Path] = {}
    problems: list[str] = []
    for site in [only] if only else job.sites:
        try:
            folders[site] = task.locate(root, site, experiment)
        except DataRootError as error:
            # a folder of DICOM is the same mistake for every site
            problems += [] if str(error) in problems else [str(error)]
    if only is None and folders and all(folder == root for folder in folders.values()):
        return {_name_of(root, job, experiment): root}, []
    loose = [site for site, folder in folders.items() if folder == root and len(folders) > 1]
    if loose:
        problems.append(f"{', '.join(loose)} would read the loose cases in {root}; give each site a folder of its own")
    return {site: folder for site, folder in folders.items() if site not in loose}, problems


def _name_of(folder: Path, job: Job, experiment: Experiment) -> str:
    """The site that a folder is named after, else the folder's own name."""
    own = folder.resolve().name
    for site in job.sites:
        if own.casefold() in {name.casefold() for name in (site, *experiment.data.aliases.get(site, ()))}:
            return site
    return own


def _inspect_site(name: str, folder: Path, experiment: Experiment) -> SiteInspection:
    data = experiment.data
    report = check_site(folder, volume_settings(experiment), experiment.seed, data.fractions, data.patient_of)
    cases = {case.name: case for case in report.cases}
    pixels = {case.name: _pixel(case, experiment) for case in report.cases}
    findings = [*report.findings, *_resolution_finding(pixels, experiment, name)]
    if data.split == "as_published":
        findings = [finding for finding in findings if finding.code not in PATIENT_SPLIT]
        findings += split_slices_as_published((), experiment.seed).findings
        used = sum(case.foreground_slices for case in report.cases)
        images, validation = used * 64 // 100, used * 16 // 100
    else:
        training = [cases[case] for case in report.split.train]
        images = sum(case.shape[0] if data.slices == "all" else case.foreground_slices for case in training)
        validation = sum(cases[case].shape[0] for case in report.split.val)
        findings += _few_patients(len(set(map(data.patient_of, report.split.train))), experiment) if training else []
    order = ("error", "warning", "notice")
    findings.sort(key=lambda finding: order.index(finding.severity))
    return SiteInspection(name, folder, report, tuple(findings), images, validation)


def _few_patients(training: int, experiment: Experiment) -> list[Finding]:
    needed = experiment.amplitude.minimum_cases
    if experiment.amplitude.region == "off" or training >= needed:
        return []
    message = f"training patients: {training}, amplitude.minimum_cases is {needed}, so this site sends no amplitude"
    return [Finding("warning", NOT_SENT, "site", message, "add cases, or ask the lead to lower it")]


def _too_few_amplitudes(sites: Sequence[SiteInspection], experiment: Experiment) -> list[Finding]:
    """An error where so many sites send no amplitude that the job fails."""
    silent = [site.name for site in sites if any(finding.code == NOT_SENT for finding in site.findings)]
    needed, sending = experiment.amplitude.minimum_sites, len(sites) - len(silent)
    if not silent or sending >= needed:
        return []
    message = f"{sending} of {len(sites)} sites send an amplitude, amplitude.minimum_sites is {needed}: the job fails"
    mend = "add cases, or lower amplitude.minimum_cases or amplitude.minimum_sites"
    return [Finding("error", "too_few_amplitudes", ", ".join(silent), message, mend)]


def _pixel(case: CaseReport, experiment: Experiment) -> Pixel:
    """Height and width of a pixel in mm after the resize to the experiment's size."""
    _, row, column = case.spacing
    _, rows, columns = case.shape
    return row * rows / experiment.data.height, column * columns / experiment.data.width


def _median_pixel(site: SiteInspection, experiment: Experiment) -> Pixel:
    pixels = [_pixel(case, experiment) for case in site.report.cases]
    return median(height for height, _ in pixels), median(width for _, width in pixels)


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
