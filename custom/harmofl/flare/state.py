"""What must last: a site's state between two rounds and the server's checkpoint, in atomic files."""

import json
import os
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from harmofl.files import remove_leftovers, replaced_file
from harmofl.sections import one_line, parse_json

_FORMAT = 1
_GENERATIONS = 2


def _object_in(text: Any) -> Any:
    """The JSON object that a note of a checkpoint holds as text."""
    content = parse_json(text) if isinstance(text, str) else None
    if not isinstance(content, dict):
        raise ValueError("no text with a JSON object")
    return content


JsonObject = Annotated[dict[str, Any], BeforeValidator(_object_in)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]  # what a tensor can hold


class _Content(BaseModel):
    """What a checkpoint file must hold, each of its type: a file from elsewhere may hold anything."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    model: dict[str, Tensor]
    experiment: JsonObject
    experiment_hash: str
    run_id: str
    next_round: Whole
    amplitude: Tensor | None
    amplitude_images: Whole
    amplitude_sites: list[str]
    record: JsonObject
    server_moments: dict[str, dict[str, Tensor]] = {}  # no file of a version before FedAdam has them
    server_weights: dict[str, Tensor] = {}  # nor one from before the model that is sent could be rounded
    rules: dict[str, Whole] = {}  # nor does one from before rules had numbers


class StateError(RuntimeError):
    """A state or checkpoint file that cannot be used; one line with the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def save_atomically(content: Any, path: Path) -> None:
    """Write plain data and tensors with torch.save so that `path` holds the old or the new content, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    with replaced_file(path) as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a file so that `target` holds the old or the new content, also after the machine has lost its power."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, target.name)
    with replaced_file(target) as copy, source.open("rb") as original:
        shutil.copyfileobj(original, copy)
        copy.flush()
        os.fsync(copy.fileno())


def write_text_atomically(text: str, path: Path) -> None:
    """Write a text file so that a reader sees the old or the new content."""
    remove_leftovers(path.parent, path.name)
    with replaced_file(path, "w", encoding="utf-8") as file:
        file.write(text)
        os.chmod(file.fileno(), 0o644)


def _load(path: Path) -> Any:
    """Read what `save_atomically` wrote; torch.load itself takes flipped bytes of a tensor as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            spoiled = archive.testzip()
        if spoiled is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"{path.name} cannot be read ({type(error).__name__}); it is damaged or no HarmoFL file"
        ) from None
    raise StateError(f"{path.name} is damaged (the checksum of {spoiled} in it differs); copy it again")


class SiteState:
    """A site's memory of one run: two generations by round, and what was estimated once before training.

    Executors may be a new process for every task, so nothing lives in memory. Two generations let a site that is one
    round ahead of a resumed server step back. Where rounds have been trained, only a round that is trained next
    changes a file: a job that resumes the run and fails before that leaves everything as it was.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        """Use `<folder>/<run_id>`; the run id is issued by the server and kept by a resumed run."""
        if not run_id.isalnum():
            raise StateError("the run id of the task is not made of letters and digits")
        self.run_id = run_id
        self._folder = folder / run_id
        self._waiting: dict[str, dict[str, Any]] = {}

    @property
    def holds_anything(self) -> bool:
        """Whether something of this run is kept here."""
        return self._folder.is_dir() and any(self._folder.iterdir())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was kept of this run yet."""
        return not any(self._folder.glob("*.pt"))

    def save_round(self, round_number: int, content: dict[str, Any]) -> None:
        """Keep what follows from having finished `round_number`, and forget all but two generations."""
        remove_leftovers(self._folder)
        for name in tuple(self._waiting):
            save_atomically(self._waiting.pop(name), self._folder / f"{name}.pt")
        save_atomically(content, self._round_file(round_number))
        held = sorted(self._folder.glob("round_*.pt"))
        newer = [path for path in held if path > self._round_file(round_number)]
        older = [path for path in held if path <= self._round_file(round_number)]
        abandoned = [path for path in self._folder.glob("marked_*.pt") if path >= self._marked_file(round_number)]
        for path in newer + older[:-_GENERATIONS] + abandoned:
            path.unlink()

    def load_round(self, round_number: int) -> dict[str, Any] | None:
        """The state after `round_number`, or None where this site did not finish that round."""
        path = self._round_file(round_number)
        return _load(path) if path.is_file() else None

    def latest_round(self, until: int | None = None) -> dict[str, Any] | None:
        """The newest state that is held of a round, of those up to and with `until` where it is given."""
        limit = None if until is None else self._round_file(until)
        held = [path for path in sorted(self._folder.glob("round_*.pt")) if limit is None or path <= limit]
        return _load(held[-1]) if held else None

    def keep_marked(self, round_number: int, content: dict[str, Any]) -> None:
        """Keep something of a round beyond its generations, beside what was kept so of one round before it.

        Finishing that round anew forgets it.
        """
        save_atomically(content, self._marked_file(round_number))
        for path in sorted(self._folder.glob("marked_*.pt"))[:-_GENERATIONS]:
            path.unlink()

    def load_marked(self, round_number: int) -> dict[str, Any] | None:
        """What `keep_marked` kept of a round, or None."""
        path = self._marked_file(round_number)
        return _load(path) if path.is_file() else None

    def save_once(self, name: str, content: dict[str, Any]) -> None:
        """Keep something that holds for the whole run, at once: for what must be kept before something leaves."""
        save_atomically(content, self._folder / f"{name}.pt")

    def save_with_round(self, name: str, content: dict[str, Any]) -> None:
        """Keep something that holds for the whole run, such as the site's own amplitude.

        It is written at once where no round has been trained yet, else together with the next round.
        """
        if any(self._folder.glob("round_*.pt")):
            self._waiting[name] = content
        else:
            self.save_once(name, content)

    def load_once(self, name: str) -> dict[str, Any] | None:
        """What `save_once` or `save_with_round` kept, or None."""
        if name in self._waiting:
            return self._waiting[name]
        path = self._folder / f"{name}.pt"
        return _load(path) if path.is_file() else None

    def _round_file(self, round_number: int) -> Path:
        return self._folder / f"round_{round_number:06d}.pt"

    def _marked_file(self, round_number: int) -> Path:
        return self._folder / f"marked_{round_number:06d}.pt"


@dataclass(frozen=True)
class Checkpoint:
    """A self-contained model: weights, the frozen amplitude, and how it came about. Plain tensors and JSON.

    `server_moments` and `server_weights` are what a resumed server needs beside that: its optimizer's, and the float32
    weights of entries that `model` has rounded.
    """

    model: dict[str, Tensor]
    experiment: dict[str, Any]
    experiment_hash: str
    run_id: str
    next_round: int
    amplitude: Tensor | None
    amplitude_images: int
    amplitude_sites: tuple[str, ...]
    record: dict[str, Any]
    server_moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    server_weights: dict[str, Tensor] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write atomically; loads with torch.load(weights_only=True), weights under the key `model`."""
        notes = {
            "format": _FORMAT,
            "experiment": json.dumps(self.experiment),
            "experiment_hash": self.experiment_hash,
            "run_id": self.run_id,
            "next_round": self.next_round,
            "amplitude": self.amplitude,
            "amplitude_frozen": self.amplitude is not None,
            "amplitude_images": self.amplitude_images,
            "amplitude_sites": list(self.amplitude_sites),
            "record": json.dumps(self.record),
            "server_moments": self.server_moments,
            "server_weights": self.server_weights,
            "rules": self.rules,
        }
        save_atomically({"model": self.model, "harmofl": notes}, path)
        path.chmod(0o644)  # a model is shared; a site's state is not

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Read a checkpoint.

        Raises:
            StateError: the file is missing, damaged, or not written by HarmoFL.
        """
        if not path.is_file():
            raise StateError(f"{path}: no such checkpoint")
        content = _load(path)
        notes = content.get("harmofl") if isinstance(content, dict) else None
        if not isinstance(notes, dict) or type(notes.get("format")) is not int or notes["format"] != _FORMAT:
            raise StateError(f"{path.name}: not a HarmoFL checkpoint of format {_FORMAT}")
        held = {**notes, "model": content["model"]} if "model" in content else notes
        missing = sorted(_Content.model_fields.keys() - held.keys() - {"server_moments", "server_weights", "rules"})
        if missing:
            raise StateError(f"{path.name}: the checkpoint lacks {', '.join(missing)}")
        try:
            checked = _Content.model_validate(held)
        except ValidationError as error:
            key = one_line(".".join(str(part) for part in error.errors()[0]["loc"]))
            raise StateError(f"{path.name}: {key} of the checkpoint has another form; take another file") from None
        fields = {name: getattr(checked, name) for name in _Content.model_fields}
        return cls(**fields | {"amplitude_sites": tuple(checked.amplitude_sites)})
