"""All sites' data in one place, for comparison with a federation: only a simulated site can have it."""

from collections.abc import Mapping
from dataclasses import replace

from torch.utils.data import ConcatDataset

from harmofl.tasks import SiteData


def pooled(name: str, sites: Mapping[str, SiteData]) -> SiteData:
    """The data of site `name` with the training items of all sites, in the order of the names.

    What is scored, and what is counted, stays that of the site itself.
    """
    ordered = [sites[site] for site in sorted(sites)]
    return replace(
        sites[name],
        training=ConcatDataset([data.training for data in ordered]),
        training_patients=[(site, patient) for site in sorted(sites) for patient in sites[site].training_patients],
        findings=[finding for data in ordered for finding in data.findings],
        late_findings=lambda: [finding for data in ordered for finding in data.late_findings()],
        unreadable=tuple,  # asked for where an amplitude is measured, which pooled data never has
    )
