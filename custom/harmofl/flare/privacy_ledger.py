"""PrivacyLedger: what a site has released over all jobs, and which of its patients train, in one sealed file.

Patients stand in it as keyed hashes: whoever reads the file without the key beside it cannot try names. The file is
replaced as a whole, under a lock that jobs which run at the same time wait for, and its seal (the same keyed hash over
its content) tells a damaged or edited file. It is written before anything that it records is sent.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from harmofl.data.splits import Part
from harmofl.evidence.results import NoiseStatement
from harmofl.files import remove_leftovers, replaced_file
from harmofl.flare.site import SiteError
from harmofl.sections import Section, parse_json

FOLDER = "privacy"  # below a site's state root; `harmofl purge` leaves it
LEDGER_FILE, KEY_FILE, LOCK_FILE = "ledger.json", "ledger.key", "ledger.lock"
_FORMAT = 1
_KEY_BYTES = 32

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Whole = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1, max_length=200)]


class Member(Section):
    """A case in a released statistic: whose it is, and which of its images carry what weight."""

    case: Hash
    patient: Hash
    images: Hash


class Release(Section):
    """A statistic that left this site, or was about to when the site stopped.

    Attributes:
        number: counted from 1 over all tasks.
        statistic: the settings that say what was measured.
        members: whose images are in it.
        weighted: whether its images carry different weights.
        patients: as stated beside it.
        values: float32 in base 64, with `shape`.
        noise: what is on it.
        runs: that it was sent to, each once.
        sent: how often it was sent, in answer to a run that asks again too.
        first: when it was measured, UTC.
        last: when it was sent last, UTC.
    """

    number: Whole
    task: Text
    statistic: dict[str, Any]
    members: Annotated[tuple[Member, ...], Field(strict=False)]
    weighted: bool
    patients: Whole
    images: Whole
    values: str
    shape: Annotated[tuple[Whole, ...], Field(strict=False)]
    noise: NoiseStatement | None
    runs: Annotated[tuple[Text, ...], Field(strict=False)]
    sent: Whole
    first: Text
    last: Text


class Withheld(Section):
    """A statistic that did not leave, since it would have told about few patients; `instead` was sent in its place."""

    task: Text
    run: Text
    statistic: dict[str, Any]
    patients: Whole
    instead: int | None
    date: Text


class KeptSplit(Section):
    """The split of a task's first job at this site, by which every later one trains.

    Attributes:
        settings: of the experiment that decide the split.
        parts: of each patient that was ever split.
        whole: of a split by slices or patches, a hash of all of them.
        run: that dealt it.
        since: when, UTC.
    """

    settings: dict[str, Any]
    parts: dict[Hash, Part]
    whole: Hash | None
    run: Text
    since: Text


class Reset(Section):
    """A split that somebody at this site gave up."""

    task: Text
    settings: dict[str, Any]
    patients: int
    date: Text


class Content(Section):
    """All that the file holds."""

    releases: Annotated[tuple[Release, ...], Field(strict=False)] = ()
    withheld: Annotated[tuple[Withheld, ...], Field(strict=False)] = ()
    splits: dict[Text, KeptSplit] = {}
    resets: Annotated[tuple[Reset, ...], Field(strict=False)] = ()


class PrivacyLedger:
    """A ledger as it was read; `content` is replaced, and written when `open_ledger` ends."""

    def __init__(self, key: bytes, content: Content) -> None:
        """Keep both."""
        self._key, self.content = key, content

    def hash_of(self, *parts: str) -> str:
        """The keyed hash that stands for a name; 128 bits."""
        text = "\x1f".join(parts).encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[:32]


@contextmanager
def open_ledger(state_root: Path) -> Iterator[PrivacyLedger]:
    """The site's ledger, locked against other jobs; changes are written at the end unless an exception ends it.

    A site without a ledger gets one. It is never begun anew where a part of it is left.

    Raises:
        SiteError: code `privacy_ledger`: it is damaged, was edited, a part of it is missing or cannot be used.
    """
    folder = state_root / FOLDER
    with _failures_named(), _locked(folder):
        ledger = _read(folder)
        before = ledger.content
        yield ledger
        if ledger.content is not before:
            _write(folder, ledger)


def read_ledger(state_root: Path) -> PrivacyLedger | None:
    """The site's ledger as it is; None where this site never had one. Nothing is written.

    Raises:
        SiteError: as `open_ledger`.
    """
    folder = state_root / FOLDER
    with _failures_named():
        if not any((folder / name).exists() for name in (LEDGER_FILE, KEY_FILE)):
            return None
        key = _key_of(folder)
        return PrivacyLedger(b"", Content()) if key is None else PrivacyLedger(key, _unsealed(_text_of(folder), key))


def now() -> str:
    """The time that an entry is of, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def unusable(problem: str, fix: str) -> SiteError:
    """What is said of a ledger that cannot be used; it names no path, since it may leave the site."""
    return SiteError("privacy_ledger", f"this site's privacy ledger {problem}; {fix}")


@contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unusable(
            f"cannot be used ({error.strerror or type(error).__name__})",
            f"give the site's user the right to read and write {FOLDER} in its state root, and space there",
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(folder: Path) -> PrivacyLedger:
    """The ledger, begun where there is nothing of one.

    The file comes first and then the key, so that a site which was stopped in between has an empty file without key.
    """
    for name in (LEDGER_FILE, KEY_FILE):
        remove_leftovers(folder, name)
    begins = not (folder / LEDGER_FILE).exists() and not (folder / KEY_FILE).exists()
    key = None if begins else _key_of(folder)
    if key is not None:
        return PrivacyLedger(key, _unsealed(_text_of(folder), key))
    ledger = PrivacyLedger(secrets.token_bytes(_KEY_BYTES), Content())
    _write(folder, ledger)
    _replace(folder / KEY_FILE, ledger._key)
    return ledger


def _text_of(folder: Path) -> bytes:
    path = folder / LEDGER_FILE
    if not path.exists():
        raise unusable(f"({LEDGER_FILE}) is missing beside its key", "put the file back from a copy")
    return path.read_bytes()


def _key_of(folder: Path) -> bytes | None:
    """The key; None where the ledger was begun and nothing stands in it."""
    path = folder / KEY_FILE
    if not path.exists():
        if not _is_begun(folder / LEDGER_FILE):
            raise unusable(f"has lost its key ({KEY_FILE})", "put the file back from a copy")
        return None
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise unusable(f"has a damaged key ({KEY_FILE})", "put the file back from a copy")
    return key


def _is_begun(path: Path) -> bool:
    try:
        return Content.model_validate(parse_json(path.read_text(encoding="utf-8"))["content"]) == Content()
    except (ValueError, TypeError, KeyError):
        return False


def _unsealed(text: bytes, key: bytes) -> Content:
    damaged = unusable(
        f"({LEDGER_FILE}) is damaged, was edited or belongs to another key", "put the file back from a copy"
    )
    try:
        held = parse_json(text.decode())
        told, seal = held["content"], held["seal"]
    except (ValueError, TypeError, KeyError):
        raise damaged from None
    if held.get("format") != _FORMAT:
        raise unusable(f"({LEDGER_FILE}) is of another format", "use the harmofl that wrote it")
    if not isinstance(seal, str) or not hmac.compare_digest(seal.encode(), _seal(told, key).encode()):
        raise damaged
    try:
        return Content.model_validate(told)
    except ValidationError:
        raise damaged from None


def _write(folder: Path, ledger: PrivacyLedger) -> None:
    told, key = ledger.content.model_dump(mode="json"), ledger._key
    text = json.dumps({"format": _FORMAT, "seal": _seal(told, key), "content": told}, indent=1)
    _replace(folder / LEDGER_FILE, text.encode())


def _seal(told: Any, key: bytes) -> str:
    return hmac.new(key, json.dumps(told, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Only the owner may read it: `replaced_file` makes it so."""
    with replaced_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    with suppress(OSError):  # a file system that knows no such thing
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
