"""What may leave of a site's amplitudes over all jobs: each set of patients once, and no set close to an earlier one.

Two sums over sets of patients that differ by few tell about those few, whatever job asked for them and whatever each
measured: regions are parts of one another and sizes and intensity steps make nearly the same of an image, so that sets
are compared across all statistics of a task. What is compared are cases and which of their images count, so that
neither another rule that finds patients in names nor another choice of slices makes a set look new.
"""

import base64
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harmofl.core.released_sets import ReleasedSet, patients_between, reveals_few
from harmofl.flare.privacy_ledger import Content, Member, PrivacyLedger, Release, Withheld, now, open_ledger
from harmofl.flare.wire import AmplitudeStatistic

Outcome = Literal["new", "repeated", "withheld"]
_REPEATED: Outcome = "repeated"


@dataclass(frozen=True)
class Offer:
    """A statistic that a run asks for, before it is known whether it may leave.

    Attributes:
        task: of the experiment.
        run: id of the run.
        statistic: the settings that say what is measured; equal ones make one statistic of one set.
        members: (case, patient, which images with which weights) of every case in it, as text; hashed in the ledger.
        weighted: whether its images carry different weights.
        limit: fewest patients behind anything that may be known.
    """

    task: str
    run: str
    statistic: dict[str, Any]
    members: tuple[tuple[str, str, str], ...]
    weighted: bool
    limit: int


@dataclass(frozen=True)
class Answer:
    """What leaves: the statistic offered, that of an earlier release, or none."""

    outcome: Outcome
    statistic: AmplitudeStatistic | None
    counts: dict[str, int] = field(default_factory=dict)


def release(state_root: Path, offer: Offer, measure: Callable[[], AmplitudeStatistic]) -> Answer:
    """Decide about a statistic and write it down before it is sent.

    A run that asks again, and the same statistic of the same set, get the earlier array, bit for bit. Of a set that
    would reveal few patients together with earlier ones the nearest earlier set's array of the same statistic is sent,
    or none where there is none.

    Args:
        state_root: of the site.
        offer: what the run asks for.
        measure: gives the array that leaves where it may, noise and all; called at most once.

    Raises:
        SiteError: the ledger cannot be used; nothing may leave then.
    """
    with open_ledger(state_root) as ledger:
        members = _hashed(offer, ledger)
        earlier = [held for held in ledger.content.releases if held.task == offer.task]
        sent, outcome = _same(offer, members, earlier), _REPEATED
        if sent is None and _would_reveal_few(offer, members, earlier):
            outcome, sent = "withheld", _nearest(offer, members, earlier)
            ledger.content = _with_withheld(ledger.content, offer, members, sent)
        elif sent is None:
            outcome, ledger.content = "new", _with_new(ledger.content, offer, members, measure())
            sent = ledger.content.releases[-1]
        if outcome != "new" and sent is not None:
            ledger.content = _with_repeated(ledger.content, sent, offer.run)
        statistic = None if sent is None else _statistic_of(sent)
        return Answer(outcome, statistic, counts_of(ledger.content, offer.task))


def counts_of(content: Content, task: str) -> dict[str, int]:
    """How many statistics of a task left this site, how often one was sent again, how many did not leave."""
    held = [entry for entry in content.releases if entry.task == task]
    withheld = [entry for entry in content.withheld if entry.task == task]
    return {"new": len(held), "repeated": sum(entry.sent - 1 for entry in held), "withheld": len(withheld)}


def set_of(entry: Release) -> frozenset[tuple[str, str]]:
    """What makes the set of a release: cases and which of their images count."""
    return frozenset((member.case, member.images) for member in entry.members)


def members_of(
    cases: Sequence[Hashable], patients: Sequence[Hashable], marks: Sequence[str]
) -> tuple[tuple[str, str, str], ...]:
    """Case, patient and images of every case of a training set.

    Args:
        cases: of each training item.
        patients: of each training item.
        marks: of each training item what it counts for, empty where it counts for nothing.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    seen: dict[str, int] = {}
    for case, patient, mark in zip(map(str, cases), map(str, patients), marks, strict=True):
        seen[case] = position = seen.get(case, -1) + 1
        if mark:
            found.setdefault(case, (patient, []))[1].append(f"{position}:{mark}")
    return tuple((case, patient, " ".join(images)) for case, (patient, images) in sorted(found.items()))


def _hashed(offer: Offer, ledger: PrivacyLedger) -> tuple[Member, ...]:
    return tuple(
        Member(
            case=ledger.hash_of(offer.task, "case", case),
            patient=ledger.hash_of(offer.task, "patient", patient),
            images=ledger.hash_of(offer.task, "images", case, images),
        )
        for case, patient, images in offer.members
    )


def _same(offer: Offer, members: Sequence[Member], earlier: Sequence[Release]) -> Release | None:
    """What this run got of the statistic already, whatever the site says of noise since; else that of the same set."""
    wanted = frozenset((member.case, member.images) for member in members)
    for held in earlier:
        if offer.run in held.runs and _without_noise(held.statistic) == _without_noise(offer.statistic):
            return held
    return next((held for held in earlier if held.statistic == offer.statistic and set_of(held) == wanted), None)


def _without_noise(statistic: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in statistic.items() if key != "noise"}


def _would_reveal_few(offer: Offer, members: Sequence[Member], earlier: Sequence[Release]) -> bool:
    """Whether the set, together with what was released, would tell about fewer patients than the limit.

    Of means with different weights it is not known here what a combination leaves, so that one must share nobody with
    another set. Sets are compared by images, and by cases alone: the sums over most of the images of a case and over
    all of them are nearly one, so that a job which chooses other images must not get a close set of cases.
    """
    offered = _columns(members)
    cases = {member.case for member in members}
    for held in earlier:
        shared = cases & {member.case for member in held.members}
        if (offer.weighted or held.weighted) and shared and _columns(held.members).keys() != offered.keys():
            return offer.limit > 1
    return any(
        reveals_few([columns(held.members) for held in earlier], columns(members), offer.limit)
        for columns in (_columns, _case_columns)
    )


def _columns(members: Sequence[Member]) -> ReleasedSet:
    return {(member.case, member.images): member.patient for member in members}


def _case_columns(members: Sequence[Member]) -> ReleasedSet:
    return {member.case: member.patient for member in members}


def _nearest(offer: Offer, members: Sequence[Member], earlier: Sequence[Release]) -> Release | None:
    """The release of the same statistic whose set differs by the fewest patients, the later of two."""
    alike = [held for held in earlier if held.statistic == offer.statistic]
    offered = _columns(members)
    return min(alike, key=lambda held: (patients_between(_columns(held.members), offered), -held.number), default=None)


def _with_new(content: Content, offer: Offer, members: tuple[Member, ...], measured: AmplitudeStatistic) -> Content:
    assert measured.patients is not None, "of a site"
    values = np.ascontiguousarray(measured.values, np.float32)
    entry = Release(
        number=len(content.releases) + 1,
        task=offer.task,
        statistic=offer.statistic,
        members=members,
        weighted=offer.weighted,
        patients=measured.patients,
        images=measured.images,
        values=base64.b64encode(values.tobytes()).decode(),
        shape=values.shape,
        noise=measured.noise,
        runs=(offer.run,),
        sent=1,
        first=now(),
        last=now(),
    )
    return content.model_copy(update={"releases": (*content.releases, entry)})


def _with_repeated(content: Content, sent: Release, run: str) -> Content:
    runs = sent.runs if run in sent.runs else (*sent.runs, run)
    again = sent.model_copy(update={"runs": runs, "sent": sent.sent + 1, "last": now()})
    releases = tuple(again if held.number == sent.number else held for held in content.releases)
    return content.model_copy(update={"releases": releases})


def _with_withheld(content: Content, offer: Offer, members: Sequence[Member], sent: Release | None) -> Content:
    entry = Withheld(
        task=offer.task,
        run=offer.run,
        statistic=offer.statistic,
        patients=len({member.patient for member in members}),
        instead=None if sent is None else sent.number,
        date=now(),
    )
    told = [(held.task, held.run, held.statistic) for held in content.withheld]
    return (
        content
        if (entry.task, entry.run, entry.statistic) in told
        else content.model_copy(update={"withheld": (*content.withheld, entry)})
    )


def _statistic_of(entry: Release) -> AmplitudeStatistic:
    values = np.frombuffer(base64.b64decode(entry.values), np.float32).reshape(entry.shape).copy()
    return AmplitudeStatistic(values, entry.images, entry.patients, noise=entry.noise)
