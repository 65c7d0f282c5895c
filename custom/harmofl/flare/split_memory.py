"""Whether a site's cases are still split as when its run began: a process or a resumed job reads the folder anew."""

import hashlib

from harmofl.data.findings import Finding
from harmofl.data.splits import SITE
from harmofl.flare.state import SiteState
from harmofl.tasks import SiteData


def changed_split(state: SiteState, data: SiteData) -> Finding | None:
    """Keep a digest of the training patients and of the numbers of cases once a run; a warning where they are others.

    Cases that were added, taken away or damaged during a run can move a patient from one part to another, see
    `harmofl.data.splits.split_cases`.
    """
    patients = sorted({str(patient) for patient in data.training_patients})
    digest = hashlib.sha256("\x1f".join([*patients, str(sorted(data.cases.items()))]).encode()).hexdigest()
    held = state.load_once("split")
    if held is None:
        state.save_with_round("split", {"digest": digest})
    if held is None or held["digest"] == digest:
        return None
    message = (
        "the cases are not those that this run began with, so patients may have passed from training to validation or "
        "test, and scores may be of patients that the model has seen"
    )
    return Finding("warning", "split_changed", SITE, message, "start a new run, or put the cases back as they were")
