"""Where a kit's processes will write: workspace, state, and a server's jobs and snapshots."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harmofl.app.kit import Check, Kit, KitError, read_json
from harmofl.app.machine import GIB, Demand, size_text

TEMPORARY = Path("/tmp")  # where FLARE's server keeps jobs and snapshots by default
LOG_BYTES = 800 * 2**20  # four log files of ten parts of 20 MiB each
MODEL_COPIES = 10  # two generations of weights and moments at a site; the models and their copies at a server
LEAST_DISK = GIB  # where no job says what it needs


def check_storage(kit: Kit) -> Iterator[Check]:
    """Tell where a server keeps jobs and snapshots, and whether that is a place of its own which lasts."""
    name = kit.local_file("resources.json").name
    found = [_misplaced(kit, place) for place in _storages(kit)]
    for state, message, fix in filter(None, found):
        yield Check(state, name, message, fix)
    if not any(found):
        yield Check("ok", name, "jobs and snapshots are kept outside /tmp, in folders that are there")


def _misplaced(kit: Kit, place: Path) -> Any:
    """State, message and fix of a folder of jobs or snapshots that cannot stay; None for a good one."""
    if place.is_relative_to(TEMPORARY):
        fix = "copy resources.json.default to resources.json and name a folder that lasts"
        return "warning", f"jobs or snapshots are kept in {place}, which a reboot may empty", fix
    fix = f"correct it in resources.json, or: python provisioning/site/prepare_kit.py {kit.folder} --force"
    other = next((folder for folder in place.parents if _is_kit(folder) and folder.resolve() != kit.folder), None)
    if other is not None:
        return "error", f"jobs or snapshots are kept in {place}, which is below another kit, {other}", fix
    if not place.parent.is_dir():
        return "error", f"jobs or snapshots are stored in {place}, but {place.parent} is not a folder", fix
    return None


def _is_kit(folder: Path) -> bool:
    return (folder / "startup").is_dir() and (folder / "local").is_dir()


def _storages(kit: Kit) -> list[Path]:
    """The folders that a server's resources.json names."""
    texts = _texts(read_json(kit.local_file("resources.json")))
    return [Path(text) for text in dict.fromkeys(texts) if text.startswith("/") and text != "/"]


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts(value)


def check_disk(kit: Kit, demand: Demand | None) -> Iterator[Check]:
    """Write and remove a small file where FLARE and HarmoFL will write, and compare the free space with the need."""
    needed = MODEL_COPIES * demand.model + demand.images + LOG_BYTES if demand else LEAST_DISK
    looked_at = [kit.workspace]
    yield _room("workspace", kit.workspace, needed, sure=demand is not None)
    if kit.kind == "admin":
        return
    try:
        yield _room("state", kit.state_root, needed, sure=demand is not None)
        looked_at.append(kit.state_root)
    except KitError as error:
        yield Check("error", "state", str(error))
    for place in _storages(kit) if kit.kind == "server" else ():
        if place.parent.is_dir() and _new(place, looked_at):  # a missing one is the storage's business
            looked_at.append(place)
            yield _room("storage", place, needed, sure=demand is not None)


def _new(place: Path, looked_at: Sequence[Path]) -> bool:
    """Whether this folder, or the one that it will be made in, has not been looked at yet."""
    return _existing(place) not in [_existing(other) for other in looked_at]


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _room(subject: str, folder: Path, needed: int, *, sure: bool) -> Check:
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".preflight-") as file:
            file.write(b"harmofl")
    except OSError as error:
        fix = "mount it writable and give it to the user that runs start.sh"
        return Check("error", subject, f"{place} cannot be written ({error.strerror})", fix)
    free = shutil.disk_usage(place).free
    said = f"{place} is writable, {size_text(free)} free, about {size_text(needed)} needed"
    if free < needed:
        return Check("error" if sure else "warning", subject, said, "free space there, or set HARMOFL_STATE_ROOT")
    return Check("ok", subject, said)
