"""`harmofl purge`: remove what runs left at a site or at the server."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harmofl.app.job import JobError
from harmofl.app.kit import Kit, open_kit
from harmofl.experiment import FILE_NAME, ExperimentError, read_settings
from harmofl.flare.privacy_ledger import FOLDER
from harmofl.flare.site import DATA_ROOT_VARIABLE, SiteError, own_setting
from harmofl.sections import one_line

# FLARE's processes of a job, which run it at a site and at the server; the run folder stays when they have ended
JOB_PROCESSES = {"nvflare.private.fed.app.client.worker_process", "nvflare.private.fed.app.server.runner_process"}
RUN = re.compile(r"[0-9A-Za-z-]+")


@dataclass
class Kept:
    """What is kept of one run: `folders`, of which a server has one a job that went on with it, named in `jobs`."""

    folders: list[Path] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    rounds: set[int] = field(default_factory=set)
    note: str = ""

    def __str__(self) -> str:
        """Return size, age and rounds as one line."""
        rounds = ", ".join(str(number) for number in sorted(self.rounds))
        parts = [_size(self.folders), _last_change(self.folders), f"rounds {rounds}" if rounds else "no round"]
        parts += [f"jobs {', '.join(self.jobs)}"] if self.jobs else []
        parts += [self.note] if self.note else []
        return ", ".join(parts)


def purge(kit: Path, run: str | None, *, everything: bool, cache: bool) -> int:
    """Remove what is kept of a run below a kit; without anything named list what is there.

    A job process is seen where it runs on this machine, in a container too. One that Slurm or Kubernetes put on another
    machine is not: abort the job first.

    Args:
        kit: startup kit of the site or the server.
        run: id of a job, or of a run as results.json names it.
        everything: remove every run.
        cache: remove the decoded images as well; the next run decodes again.

    Returns:
        0, or 1 where something could not be removed.

    Raises:
        JobError: no kit, no such run, or one whose job is running; nothing was removed.
    """
    if run is not None and everything:
        raise JobError("name a run or give --all, not both")
    place = open_kit(kit)
    if place.kind == "admin":
        raise JobError(f"{place.folder}: is the kit of a person; runs leave something at sites and at the server")
    root = place.state_root.resolve()
    held = _held(root)
    images = [root / "cache"] if (root / "cache").is_dir() else []
    if run is None and not everything and not cache:
        _list(root, held, images)
        return 0
    chosen = held if everything else {} if run is None else _named(run, held, root)
    _refuse_data(place, [folder for kept in chosen.values() for folder in kept.folders] + (images if cache else []))
    _refuse_while_running(place, chosen, cache=cache, everything=everything)
    removed = [_remove(f"run {name}", kept.folders, root) for name, kept in chosen.items()]
    if cache:
        removed.append(_remove("cache", images, root))
    if not chosen and not images:
        _say(f"nothing to remove in {root}")
    return 0 if all(removed) else 1


def _held(root: Path) -> dict[str, Kept]:
    """What is kept, by run id, of a site's runs and of a server's."""
    runs: dict[str, Kept] = {}
    for folder in _folders(root / "state"):
        kept = runs.setdefault(folder.name, Kept())
        kept.folders.append(folder)
        if not folder.is_symlink():
            kept.rounds |= {int(path.stem[6:]) for path in folder.glob("round_*.pt") if path.stem[6:].isdecimal()}
    for folder in _folders(root / "runs"):
        run_id, next_round = _checkpoint(folder)
        kept = runs.setdefault(run_id or folder.name.replace("-", ""), Kept())
        kept.folders.append(folder)
        kept.jobs.append(folder.name)
        if run_id is None:
            kept.note = "its checkpoint cannot be read" if any(folder.glob("*.pt")) else "no round was closed"
        elif next_round:
            kept.rounds.add(next_round - 1)
    return runs


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JobError(f"{parent}: cannot be read ({error.strerror}); run this as the user of the site") from None


def _checkpoint(folder: Path) -> tuple[str | None, int]:
    """The run that a job's checkpoint belongs to and the round that would come next; no run where it tells none."""
    from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL  # torch with it, for servers only
    from harmofl.flare.state import Checkpoint, StateError

    for name in () if folder.is_symlink() else (FINAL_MODEL, BEST_MODEL):
        try:
            checkpoint = Checkpoint.load(folder / name)
        except (StateError, OSError):
            continue
        return checkpoint.run_id, checkpoint.next_round
    return None, 0


def _list(root: Path, held: dict[str, Kept], images: Sequence[Path]) -> None:
    if (root / FOLDER).is_dir():
        _say(f"the privacy ledger in {root / FOLDER} is never removed here: with it the site would forget what left it")
    if not held and not images:
        _say(f"nothing is kept in {root}; where start.sh had HARMOFL_STATE_ROOT set, set it here too")
        return
    _say(f"in {root}:")
    for name, kept in held.items():
        _say(f"  run {name}: {kept}")
    if images:
        _say(f"  cache of decoded images: {_size(images)}, {_last_change(images)}")
    _say("nothing was removed; name a run, or give --all or --cache")


def _named(run: str, held: dict[str, Kept], root: Path) -> dict[str, Kept]:
    """The run of this id; a later job that went on with a run is known to the server only."""
    if not RUN.fullmatch(run):
        raise JobError(f"{run!r} is no run: a job id or run id is made of letters, digits and dashes")
    wanted = _plain(run)
    found = [name for name, kept in held.items() if wanted in {_plain(name), *map(_plain, kept.jobs)}]
    exact = [name for name in found if run in (name, *held[name].jobs)]
    if len(exact or found) > 1:
        raise JobError(
            f"{run}: is more than one run in {root}: {', '.join(exact or found)}; name one as it stands here"
        )
    if found:
        name = (exact or found)[0]
        return {name: held[name]}
    known = f"there are {', '.join(held)}" if held else "nothing is kept there"
    raise JobError(f"no run {run} in {root}; {known}; a job that went on from another one keeps the run id of that one")


def _plain(run: str) -> str:
    return run.replace("-", "").lower()


def _refuse_data(kit: Kit, folders: Iterable[Path]) -> None:
    """Refuse a folder that the site has its data in, whoever put it there."""
    try:
        said = own_setting(kit.properties(), "data_root")
    except SiteError as error:
        raise JobError(f"{kit.folder}: {error}; until then nobody knows which folder holds the data") from None
    for root in (os.environ.get(DATA_ROOT_VARIABLE), said):
        for folder in folders:
            if root and Path(root).resolve().is_relative_to(folder.resolve()):
                raise JobError(f"{folder}: holds the data of this site ({root}), which is never removed; move the data")


def _refuse_while_running(kit: Kit, chosen: dict[str, Kept], *, cache: bool, everything: bool) -> None:
    """Refuse to remove a run while its job is running; a resumed job, whose run is not known here, blocks as well."""
    for job in _running(kit.workspace.resolve()):
        own = any(job.replace("-", "") == name or job in kept.jobs for name, kept in chosen.items())
        if own or cache or everything or (chosen and _goes_on(kit.workspace, job)):
            raise JobError(f"job {job} is running here; abort it first (nvflare job abort {job}), or wait for its end")


def _running(workspace: Path) -> Iterator[str]:
    """Jobs that have a process of this workspace, or of a container, which has another name for it."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        module = next((index for index, word in enumerate(line) if word in JOB_PROCESSES), None)
        if module is None:
            continue
        words = line[module + 1 :]
        place, job = (_following(words, option) for option in ("-m", "-n"))
        if job and place and (not Path(place).is_dir() or Path(place).resolve() == workspace):
            yield job


def _following(words: Sequence[str], option: str) -> str:
    return next((after for word, after in zip(words, words[1:], strict=False) if word == option), "")


def _goes_on(workspace: Path, job: str) -> bool:
    for path in workspace.glob(f"{job}/app_*/config/{FILE_NAME}"):
        try:
            federation = read_settings(path).get("federation")
        except ExperimentError:
            continue
        if isinstance(federation, dict) and federation.get("resume_from"):
            return True
    return False


def _remove(what: str, folders: Iterable[Path], root: Path) -> bool:
    """Remove folders that lie in `root` themselves; a link among them is left, with what it points to."""
    good = True
    for folder in folders:
        size = _size([folder])
        try:
            if folder.is_symlink() or not folder.resolve().is_relative_to(root):
                raise OSError(0, f"a link leads to {folder.resolve()}, which is not followed")
            shutil.rmtree(folder)
        except OSError as error:
            good = False
            _say(f"failed: {what}: {folder} cannot be removed ({error.strerror}); remove it by hand")
        else:
            _say(f"removed {what}: {folder}, {size}")
    return good


def _files(folders: Iterable[Path]) -> list[os.stat_result]:
    """What is known of the files in folders; links are not followed."""
    found = []
    for folder in folders:
        for parent, _, names in () if folder.is_symlink() else os.walk(folder):
            for name in names:
                try:
                    found.append((Path(parent) / name).lstat())
                except OSError:  # gone since
                    continue
    return found


def _size(folders: Iterable[Path]) -> str:
    return f"{sum(status.st_size for status in _files(folders)) / 1e6:.1f} MB"


def _last_change(folders: Iterable[Path]) -> str:
    changed = max((status.st_mtime for status in _files(folders)), default=None)
    return "empty" if changed is None else f"last change {time.strftime('%Y-%m-%d %H:%M', time.localtime(changed))}"


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl purge: {one_line(line)}\n")
