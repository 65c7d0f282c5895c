"""`harmofl privacy`: what has left a site over all jobs, what noise was spent, and which split its jobs train by."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harmofl.app.job import JobError
from harmofl.app.kit import Check, Kit, KitError, open_kit
from harmofl.data.findings import count_text
from harmofl.data.splits import PARTS, KeptParts
from harmofl.experiment import Experiment
from harmofl.flare.privacy_ledger import FOLDER, LEDGER_FILE, Content, PrivacyLedger, Release, read_ledger
from harmofl.flare.releases import counts_of, set_of
from harmofl.flare.site import SiteError, site_settings
from harmofl.flare.split_memory import parts_of_ledger, reset_split, split_problem, split_settings

_PART_NAMES = {"train": "training", "val": "validation", "test": "test"}


def privacy(kit: Path, *, reset: str | None, yes: bool) -> int:
    """Print a site's ledger of releases, or give up the split of a task.

    Args:
        kit: startup kit of the site.
        reset: task whose split is given up.
        yes: do it without asking.

    Returns:
        0, or 1 where nothing was given up.

    Raises:
        JobError: no kit of a site, a ledger that cannot be used, or no such split.
    """
    place = open_kit(kit)
    if place.kind != "client":
        raise JobError(f"{place.folder}: is not the kit of a site; only sites keep a ledger of what left them")
    if reset is not None:
        return _reset(place, reset, yes=yes)
    content = _content(place)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if content is None:
        console.print(
            f"nothing has left {place.name}, as far as {place.state_root / FOLDER} tells; where start.sh had "
            "HARMOFL_STATE_ROOT set, set it here too"
        )
        return 0
    console.print(f"privacy ledger of {place.name}: {place.state_root / FOLDER / LEDGER_FILE}")
    _print_releases(content, console)
    for title, lines in (
        ("epsilon and delta spent", _spent(content)),
        ("held back, since few patients could have been told from it", _withheld(content)),
        ("split of each task, by which every job trains", _splits(content)),
    ):
        console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(f"  {line}")
    console.print(
        "\nThe ledger covers amplitudes. Weight differences and scores leave beside them in every run and carry no "
        "noise."
    )
    return 0


def check_ledger(kit: Kit, experiment: Experiment | None) -> Iterator[Check]:
    """The state of a site's ledger in one line, and whether a job would train by the split that stays."""
    try:
        content = _content(kit)
    except KitError:
        if _has_state_root(kit):
            raise
        return  # said where the disk is looked at
    if content is None:
        yield Check("note", "ledger", "nothing has left this site so far; its first job begins the ledger")
        return
    named = [entry.task for entry in content.releases] + [entry.task for entry in content.withheld]
    tasks = sorted({*named, *content.splits})
    told = "; ".join(f"{task}: {_counted(content, task)}" for task in tasks) or "nothing has left this site so far"
    yield Check("ok", "ledger", told, f"harmofl privacy {kit.folder} shows more" if tasks else "")
    held = None if experiment is None else content.splits.get(experiment.task)
    if experiment is None or held is None:
        return
    try:
        settings = split_settings(experiment, site_settings(kit.properties()))
    except SiteError:  # said where the kit's own settings are looked at
        return
    problem = split_problem(held, settings, experiment.task, str(kit.folder))
    if problem:
        yield Check("error", "split", problem)


def _has_state_root(kit: Kit) -> bool:
    try:
        return bool(kit.state_root)
    except KitError:
        return False


def kept_parts(kit: Kit, task: str) -> KeptParts:
    """The parts that the site's patients have in a task, to look at a folder as its next job will."""
    try:
        return parts_of_ledger(_ledger(kit), task)
    except KitError:  # said where the ledger is looked at
        return parts_of_ledger(None, task)


def _content(kit: Kit) -> Content | None:
    ledger = _ledger(kit)
    return None if ledger is None else ledger.content


def _ledger(kit: Kit) -> PrivacyLedger | None:
    try:
        return read_ledger(kit.state_root)
    except SiteError as error:
        raise KitError(f"{kit.state_root / FOLDER}: {error}") from None


def _counted(content: Content, task: str) -> str:
    counts = counts_of(content, task)
    split = content.splits.get(task)
    since = f", split since {split.since[:10]}" if split else ""
    released = count_text(counts["new"], "release")
    return f"{released}, {counts['repeated']} sent again, {counts['withheld']} held back{since}"


def _print_releases(content: Content, console: Console) -> None:
    console.print("\namplitudes that left this site", style="bold")
    if not content.releases:
        console.print("  none")
        return
    table = Table(box=None, pad_edge=True, show_edge=False)
    for heading, justify in (
        ("no.", "right"), ("task", "left"), ("what", "left"), ("patients", "right"), ("images", "right"),
        ("noise", "left"), ("first sent (UTC)", "left"), ("last sent", "left"), ("times", "right"), ("runs", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for entry in content.releases:
        cells: Sequence[Any] = (
            entry.number, entry.task, _what(entry.statistic), entry.patients, entry.images, _noise(entry),
            entry.first[:16], entry.last[:16], entry.sent, len(entry.runs),
        )  # fmt: skip
        table.add_row(*map(str, cells))
    console.print(table)


def _what(statistic: dict[str, Any]) -> str:
    return "{region} after {intensity}, {height} x {width}, {estimation}".format_map(Counter(statistic) | statistic)


def _noise(entry: Release) -> str:
    return "none" if entry.noise is None else f"epsilon {entry.noise.epsilon:g}, delta {entry.noise.delta:g}"


def _spent(content: Content) -> Iterator[str]:
    """By task and by set of patients; sums are a bound for each patient (basic composition)."""
    if not content.releases:
        yield "none"
    for task in sorted({entry.task for entry in content.releases}):
        releases = [entry for entry in content.releases if entry.task == task]
        sets = list(dict.fromkeys(set_of(entry) for entry in releases))
        yield f"{task}, in all: {_sum(releases)}"
        for held in sets if len(sets) > 1 else ():
            of_set = [entry for entry in releases if set_of(entry) == held]
            numbers = ", ".join(str(entry.number) for entry in of_set)
            patients = count_text(len({member.patient for member in of_set[0].members}), "patient")
            yield f"  set of {patients} (no. {numbers}): {_sum(of_set)}"


def _sum(releases: Iterable[Release]) -> str:
    held = list(releases)
    noised = [entry.noise for entry in held if entry.noise is not None]
    spent = (
        f"epsilon {sum(noise.epsilon for noise in noised):g}, delta {sum(noise.delta for noise in noised):g} by "
        f"{count_text(len(noised), 'release')} with noise"
    )
    without = len(held) - len(noised)
    if not without:
        return spent
    bare = f"no bound, {count_text(without, 'release')} without noise"
    return f"{bare}; {spent}" if noised else bare


def _withheld(content: Content) -> Iterator[str]:
    if not content.withheld:
        yield "nothing"
    for entry in content.withheld:
        then = "nothing was sent" if entry.instead is None else f"no. {entry.instead} was sent in its place"
        yield (
            f"{entry.date[:16]} {entry.task}, {_what(entry.statistic)}, of {count_text(entry.patients, 'patient')}: "
            f"{then} (run {entry.run})"
        )


def _splits(content: Content) -> Iterator[str]:
    if not content.splits and not content.resets:
        yield "none yet"
    for task, held in sorted(content.splits.items()):
        counts = Counter(held.parts.values())
        parts = ", ".join(f"{counts[part]} {_PART_NAMES[part]}" for part in PARTS)
        fractions = ", ".join(f"{part:g}" for part in held.settings.get("fractions", ()))
        amounts = parts if held.parts else "all slices or patches anew (as_published)"
        yield f"{task}: {amounts}; seed {held.settings.get('seed')}, fractions {fractions}; since {held.since[:16]}"
    for entry in content.resets:
        yield f"{entry.task}: a split of {count_text(entry.patients, 'patient')} was given up here, {entry.date[:16]}"


def _reset(kit: Kit, task: str, *, yes: bool) -> int:
    content = _content(kit)
    splits = {} if content is None else content.splits
    if task not in splits:
        known = f"there is one of {', '.join(sorted(splits))}" if splits else "there is none yet"
        raise JobError(f"--reset-split {task}: {kit.name} keeps no split of this task; {known}")
    _say(
        f"the next job of {task} may put patients of validation and test into training: scores are then of patients "
        "that earlier models have seen. Releases stay in the ledger, and so does this reset."
    )
    if not yes and not _confirmed(task):
        _say("nothing was changed; answer with the name of the task, or give --yes")
        return 1
    try:
        reset_split(kit.state_root, task)
    except SiteError as error:
        raise KitError(f"{kit.state_root / FOLDER}: {error}") from None
    _say(f"the split of {task} was given up; the next job of it leaves a new one")
    return 0


def _confirmed(task: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"harmofl privacy: type {task} to give its split up: ").strip() == task


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl privacy: {line}\n")
