"""What a hospital's kit says about its folder, its patients' names and its split, for commands that read its images."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from harmofl.app.job import JobError
from harmofl.app.kit import Check, Kit, open_kit
from harmofl.app.privacy import kept_parts
from harmofl.data.splits import keep_parts
from harmofl.experiment import Experiment
from harmofl.flare.site import SiteError, own_root, site_settings
from harmofl.flare.site_settings import SiteSettings
from harmofl.tasks.at_hospital import experiment_at_hospital


@dataclass(frozen=True)
class Hospital:
    """A site by its kit: its name, its own settings, and of how many patients an amplitude may leave."""

    name: str
    settings: SiteSettings
    fewest: int
    kit: Kit

    def words_in(self, experiment: Experiment) -> Experiment:
        """An experiment as this site reads its folder."""
        own = self.settings
        return experiment_at_hospital(experiment, self.name, patient_pattern=own.patient_pattern, centers=own.centers)

    def own_folder(self, root: Path) -> Path:
        """The folder in `root` that the settings name, where it is there, else `root` itself."""
        folder = own_root(str(root), self.settings)
        return folder if folder.is_dir() else root

    def split_as_kept(self, task: str) -> AbstractContextManager[None]:
        """Let patients be split inside as this site's jobs of a task split them since the first one."""
        return keep_parts(kept_parts(self.kit, task))


def read_hospital(kit: Path) -> Hospital:
    """What a kit says of its site.

    Raises:
        JobError: no kit of a site, or settings of it that cannot be used; one line.
    """
    opened = open_kit(kit)
    if opened.kind != "client":
        raise JobError(f"--kit {kit}: is the kit of {opened.name}, which has no images; name that of a site")
    properties = opened.properties()
    try:
        own = site_settings(properties)
        return Hospital(opened.name, own, own.minimum_cases, opened)
    except SiteError as error:
        raise JobError(f"--kit {kit}: {error}") from None


def names_in_force(site: str, job: Experiment, own: SiteSettings) -> Iterator[Check]:
    """Who says whose a case is, and what the job says about names that does not count here.

    Args:
        site: its name.
        job: the experiment as the job resolves.
        own: the site's settings.
    """
    subject = "patients"
    if job.task == "camelyon17":
        yield Check("note", subject, "are those of metadata.csv, whatever patient_pattern says")
    elif own.patient_pattern is not None:
        yield Check("note", subject, "are told by patient_pattern of local/privacy.json")
    elif job.task == "nuclei":
        yield Check("note", subject, "are told by folders, barcodes and names of images")
    else:
        told = {"name": "each case is one of its own", "before_separator": "what stands before the first _, . or -"}
        form = job.data.patient_from
        said = told[form] if isinstance(form, str) else f"the first {form} characters of a case's name"
        fix = "where a patient has several cases and that does not tell them, set patient_pattern in local/privacy.json"
        yield Check("note", subject, f"by the job's data.patient_from: {said}", fix)
    if site in job.data.aliases and own.folder is None:
        message = f"{' and '.join(job.data.aliases[site])} are names of this site's folder in a simulated run only"
        yield Check("note", "data.aliases", message, "a folder that is called so is named by `folder` in privacy.json")
