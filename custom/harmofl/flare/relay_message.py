"""What a relay sends on in the place of its sites' answers: a partial sum, and of each site all but its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harmofl.core.direction import WIDTH
from harmofl.core.norm_rule import SentDifference
from harmofl.core.partial_sum import PartialSum
from harmofl.flare.amplitude_message import MessageError
from harmofl.flare.packed_arrays import PackedArrays
from harmofl.flare.wire import UpdateMessage, pack_update, unpack_update
from harmofl.sections import outside_text

_SUM, _ANSWER, _NOTES, _REFUSED, _MEASURE = "sum", "answer.", "harmofl.notes", "harmofl.refused", "harmofl.measure"
_ARRAYS = ("low", "high", "maxima")
MOST_REFUSED = 1000  # sites behind one relay


class SiteNotes(BaseModel):
    """What a relay has measured of a site's difference, and the bytes that it sent.

    `norm` is by training step, `factor` what the difference was multiplied by, `cosine` that to the others.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    weight_bytes: Annotated[int, Field(ge=0, lt=2**50)] = 0
    norm: Annotated[float, Field(ge=0)] | None = None
    factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    outlier: Annotated[str, Field(max_length=2000)] = ""
    cosine: Annotated[float, Field(ge=-1.01, le=1.01)] | None = None

    def sent(self) -> SentDifference | None:
        """As the server notes what it has measured itself; the direction stays at the relay."""
        if self.norm is None:
            return None
        return SentDifference(self.norm, self.factor, outside_text(self.outlier), np.zeros(WIDTH))


class RoundMeasure(BaseModel):
    """Norms and steps of the round before, with which a round's differences are compared (`NormRule`)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    usual: Annotated[float, Field(gt=0)] | None
    usual_steps: Annotated[int, Field(ge=0, lt=2**40)] | None
    first: bool

    def attach(self, shareable: Shareable) -> None:
        """Write it into a task's data, for relays; a site makes nothing of it."""
        shareable.set_header(_MEASURE, self.model_dump())


def read_measure(shareable: Shareable) -> RoundMeasure:
    """The measure of a task.

    Raises:
        MessageError: the task carries none, or one of another form.
    """
    try:
        return RoundMeasure.model_validate(shareable.get_header(_MEASURE))
    except ValidationError:
        raise MessageError("the task does not say what a relay holds its sites' differences against") from None


@dataclass(frozen=True)
class GatheredAnswers:
    """What came to a relay: by site its answer without the weights, and what the relay has measured of these.

    Attributes:
        updates: by site; `difference` is None.
        notes: of the same sites.
        refused: by site why its answer is not among them.
        partial: the sum of the differences; None where there is none.
    """

    updates: dict[str, UpdateMessage]
    notes: dict[str, SiteNotes]
    refused: dict[str, str] = field(default_factory=dict)
    partial: PartialSum | None = None


def pack_gathered(gathered: GatheredAnswers) -> Shareable:
    """As a message of FLARE."""
    parts = {_ANSWER + site: from_shareable(pack_update(update)) for site, update in gathered.updates.items()}
    if gathered.partial is not None:
        told = gathered.partial.message()
        arrays = {name: DXO(DataKind.APP_DEFINED, data={"arrays": PackedArrays(told[name])}) for name in _ARRAYS}
        plain = {name: value for name, value in told.items() if name not in _ARRAYS}
        parts[_SUM] = DXO(DataKind.APP_DEFINED, data={"plain": plain, **arrays})
    meta = {
        _NOTES: {site: notes.model_dump() for site, notes in gathered.notes.items()},
        _REFUSED: dict(gathered.refused),
    }
    return DXO(DataKind.COLLECTION, data=parts or {"none": DXO(DataKind.METRICS, data={})}, meta=meta).to_shareable()


def unpack_gathered(shareable: Shareable) -> GatheredAnswers:
    """The reverse of `pack_gathered`.

    Raises:
        MessageError, ContributionError: it has another form.
    """
    try:
        outer = from_shareable(shareable)
        told = {site: SiteNotes.model_validate(notes) for site, notes in dict(outer.get_meta_prop(_NOTES)).items()}
        refused = dict(outer.get_meta_prop(_REFUSED))
        parts = dict(outer.data)
    except Exception as error:  # FLARE looks into headers and content before it checks what they are
        raise MessageError(f"the relay's answer cannot be read ({outside_text(type(error).__name__)})") from None
    if len(refused) > MOST_REFUSED or not all(isinstance(text, str) for pair in refused.items() for text in pair):
        raise MessageError("the relay's answer does not say in lines which sites it refused")
    sites = [name.removeprefix(_ANSWER) for name in parts if str(name).startswith(_ANSWER)]
    if sorted(sites) != sorted(told):
        raise MessageError("the relay's answer has no notes of each of its sites")
    updates = {site: _update(parts[_ANSWER + site]) for site in sites}
    lines = {outside_text(site): outside_text(reason) for site, reason in refused.items()}
    return GatheredAnswers(updates, told, lines, _partial(parts[_SUM]) if _SUM in parts else None)


def _update(part: Any) -> UpdateMessage:
    if not isinstance(part, DXO):
        raise MessageError("an answer that the relay sends on has another form")
    update = unpack_update(part.to_shareable())
    if update.difference is not None:
        raise MessageError("the relay sends the weights of one site")
    return update


def _partial(part: Any) -> PartialSum:
    if not isinstance(part, DXO) or not isinstance(part.data, Mapping) or not isinstance(part.data.get("plain"), dict):
        raise MessageError("the relay's sum has another form")
    parts = {name: part.data.get(name) for name in _ARRAYS}
    arrays = {name: dxo.data.get("arrays") for name, dxo in parts.items() if isinstance(dxo, DXO)}
    if arrays.keys() != set(_ARRAYS) or any(type(held) is not dict for held in arrays.values()):
        raise MessageError("the relay's sum has no arrays")
    return PartialSum.from_message({**part.data["plain"], **arrays})
