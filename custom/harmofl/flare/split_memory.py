"""Who trains at a site: the split of a task's first job stays for every later one, and a run's cases are compared.

A job that could choose another seed or other fractions would choose who trains, and what it gets of each choice tells
the patients apart.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harmofl.data.findings import Finding
from harmofl.data.splits import SITE, KeptParts, keep_parts
from harmofl.experiment import Experiment
from harmofl.flare.privacy_ledger import KeptSplit, PrivacyLedger, Reset, now, open_ledger
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_settings import SiteSettings
from harmofl.flare.state import SiteState
from harmofl.tasks import SiteData

ATTEMPTS = 5  # of reading a folder while other jobs deal its new patients


def split_settings(experiment: Experiment, own: SiteSettings) -> dict[str, Any]:
    """The settings that decide which patients train."""
    data, pattern = experiment.data, own.patient_pattern or experiment.data.patient_pattern
    return {
        "seed": experiment.seed,
        "fractions": list(data.fractions),
        "split": data.split,
        "patient_pattern": pattern,
        # a pattern comes first, so that the job's closed form decides nothing beside it
        "patient_from": None if pattern else data.patient_from,
    }


def open_with_kept_split(
    site: SiteConfig, experiment: Experiment, run_id: str, open_site: Callable[[], SiteData]
) -> SiteData:
    """Read a site's folder by the split that the first job of its task left, or leave this one's.

    Patients stay in their parts, also those who are gone for a while; new ones are dealt beside them. The folder is
    read without the ledger's lock: where another job dealt a patient otherwise in the meantime it is read once more.

    Args:
        site: this site.
        experiment: of the job.
        run_id: of the run.
        open_site: reads and splits the folder.

    Raises:
        SiteError: code `split_differs`: the job would split otherwise; `privacy_ledger`.
    """
    for _ in range(ATTEMPTS):
        with open_ledger(site.state_root) as ledger:
            kept = _kept_parts(ledger, site, experiment)
        with keep_parts(kept):
            data = open_site()
        with open_ledger(site.state_root) as ledger:
            if _store(ledger, kept, site, experiment, run_id):
                return data
    raise SiteError("split_differs", f"site {site.name}: other jobs deal its new patients at the same time; try again")


def split_problem(held: KeptSplit, settings: dict[str, Any], task: str, kit: str = "KIT") -> str | None:
    """How a job would split otherwise than the first one of its task did, in one line with both ways out."""
    other = [key for key, value in settings.items() if held.settings.get(key) != value]
    if not other:
        return None
    told = [
        "another rule that finds the patient in a case's name"
        if key == "patient_pattern"
        else f"{_key_of(key)} {_shown(settings[key])} instead of {_shown(held.settings.get(key))}"
        for key in other
    ]
    return (
        f"the first job's split of {task} stays until harmofl privacy {kit} --reset-split {task}; this job has "
        f"{', '.join(told)}"
    )


def _key_of(setting: str) -> str:
    return setting if setting == "seed" else f"data.{setting}"


def _shown(value: Any) -> str:
    return ", ".join(f"{part:g}" for part in value) if isinstance(value, list) else str(value)


def reset_split(state_root: Path, task: str) -> bool:
    """Give up the split that a task's first job left and write that down; false where there is none."""
    with open_ledger(state_root) as ledger:
        held = ledger.content.splits.get(task)
        if held is None:
            return False
        entry = Reset(task=task, settings=held.settings, patients=len(held.parts), date=now())
        others = {name: split for name, split in ledger.content.splits.items() if name != task}
        ledger.content = ledger.content.model_copy(update={"splits": others, "resets": (*ledger.content.resets, entry)})
        return True


def parts_of_ledger(ledger: PrivacyLedger | None, task: str) -> KeptParts:
    """The parts that a site's patients have in a task."""
    held = None if ledger is None else ledger.content.splits.get(task)
    if ledger is None or held is None:
        return KeptParts(lambda patient: None)
    return KeptParts(lambda patient: held.parts.get(ledger.hash_of(task, "split", patient)))


def _kept_parts(ledger: PrivacyLedger, site: SiteConfig, experiment: Experiment) -> KeptParts:
    task = experiment.task
    held = ledger.content.splits.get(task)
    problem = None if held is None else split_problem(held, split_settings(experiment, site.settings), task)
    if problem:
        raise SiteError("split_differs", f"site {site.name}: {problem}")
    return parts_of_ledger(ledger, task)


def _store(ledger: PrivacyLedger, kept: KeptParts, site: SiteConfig, experiment: Experiment, run_id: str) -> bool:
    """Keep the parts of patients who have none yet; whether this reading agrees with those that others have."""
    task = experiment.task
    # another job may have been first since
    _kept_parts(ledger, site, experiment)
    held = ledger.content.splits.get(task)
    used = {ledger.hash_of(task, "split", patient): part for patient, part in kept.used.items()}
    whole = None if kept.whole is None else ledger.hash_of(task, "whole", kept.whole)
    if held is not None and held.whole != whole:
        raise SiteError(
            "split_differs",
            f"site {site.name}: data.split as_published deals everything anew whenever a case comes or goes, and its "
            f"cases of task {task} are not those of its first job; put them back, or let the hospital give the split "
            f"up: harmofl privacy KIT --reset-split {task}",
        )
    before = {} if held is None else held.parts
    if any(before.get(patient, part) != part for patient, part in used.items()):
        return False
    if held is None or used.keys() - before.keys():
        since, run, settings = (now(), run_id, split_settings(experiment, site.settings))
        if held is not None:
            since, run, settings = held.since, held.run, held.settings
        entry = KeptSplit(settings=settings, parts=before | used, whole=whole, run=run, since=since)
        ledger.content = ledger.content.model_copy(update={"splits": ledger.content.splits | {task: entry}})
    return True


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
