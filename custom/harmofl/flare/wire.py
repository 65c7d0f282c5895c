"""What travels between server and sites: one place that packs and unpacks it.

Down, with every task: the header (run id, experiment hash, demo flag, round) and, for `train` and `evaluate`, weights
and the frozen amplitude. Up: weight differences, the amplitude while it is being estimated, and numbers. Arrays are
NumPy float32, but for parameters and their differences where `federation.exchange` says float16
(`harmofl.core.exchange`); counters keep their integer type.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from harmofl.core.clustered import Why
from harmofl.core.exchange import LARGEST, BeyondFloat16Error, to_exchange_types
from harmofl.experiment import Precision
from harmofl.flare.amplitude_message import (
    AMPLITUDE,
    AmplitudeStatistic,
    MessageError,
    count_of,
    pack_amplitude,
    read_amplitude,
)
from harmofl.flare.packed_arrays import LONGEST_NAME, PackedArrays, UnreadableArrays
from harmofl.sections import outside_text

Arrays = dict[str, np.ndarray]

_CODE, _REASON = "harmofl.code", "harmofl.reason"
_WEIGHTS, _BEST = "weights", "best"
_NUMBERS = "harmofl.numbers"
_ANSWERS = (DataKind.METRICS, DataKind.APP_DEFINED, DataKind.WEIGHT_DIFF, DataKind.WEIGHTS, DataKind.COLLECTION)
_MOST_KEYS, _MOST_VALUES, _DEEPEST = 1000, 1_000_000, 8  # of the numbers of one answer, far beyond any real ones
_ERROR_FORMS = {_CODE: r"\w{1,60}", _REASON: r".{1,2000}"}  # one line


@dataclass(frozen=True)
class ModelMessage:
    """A task's data: the global weights, the frozen amplitude and, for `evaluate`, the best weights as well."""

    weights: Arrays
    amplitude: AmplitudeStatistic | None = None
    best_weights: Arrays | None = None


@dataclass(frozen=True)
class UpdateMessage:
    """A site's answer: difference to the weights received, amplitude statistic, numbers about the round."""

    difference: Arrays | None = None
    amplitude: AmplitudeStatistic | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


Count = Annotated[int, Field(ge=0, strict=True)]
Scored = Literal["final", "best"]
Code = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]


class PooledScore(BaseModel):
    """A score over all images, as `harmofl.core.classification.Estimate` has it; patients are counts without names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    value: float
    low: float
    high: float
    n: Count
    patients: Count
    no_interval: Why | None
    by_patient: list[Annotated[tuple[Count, Count], Field(strict=False)]]  # a pair may arrive as a list


class ReleasedSummary(BaseModel):
    """Mean over the cases that have a score with its interval over patients, where the single scores do not leave."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    mean: float | None
    low: float | None
    high: float | None
    no_interval: Why | None
    cases: Count
    undefined: Count
    patients: Count


class SiteNumbers(BaseModel):
    """All numbers that may leave a site, by name; reasons are codes, so that no file name or path leaves with them.

    `patients` tells which cases of `test` are of one patient, by numbers counted from 0. `summaries` stand in place of
    `test` where the scores of single cases do not leave; `not_sent` names the scores that too few patients have;
    `limits` are those in force at the site. `releases` counts the site's amplitudes of this task over all jobs: that
    left for the first time, were sent again, were held back. `precision` is what the site's device computes the network
    in, `auto` resolved.
    """

    model_config = ConfigDict(extra="forbid", strict=True)  # strict: text that reads as a number is none

    cases: dict[Literal["training", "validation", "test"], Count] = {}
    skipped: dict[Code, Count] = {}
    warnings: dict[Code, Count] = {}
    demo: bool = False
    steps: Count = 0
    skipped_steps: Count = 0
    images: Annotated[int, Field(ge=1, strict=True)] | None = None
    loss: float | None = None
    validation: float | None = None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    received_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    test: dict[Scored, dict[Code, list[float]]] = {}
    patients: dict[Scored, list[Count]] = {}
    pooled: dict[Scored, dict[Code, PooledScore]] = {}
    summaries: dict[Scored, dict[Code, ReleasedSummary]] = {}
    not_sent: dict[Literal["validation", "final", "best"], list[Code]] = {}
    limits: dict[Code, StrictBool | Count | list[Code]] = {}
    releases: dict[Literal["new", "repeated", "withheld"], Count] = {}
    precision: Precision | None = None

    @model_validator(mode="after")
    def _a_patient_for_each_case(self) -> "SiteNumbers":
        for model, patients in self.patients.items():
            if any(len(scores) != len(patients) for scores in self.test.get(model, {}).values()):
                raise ValueError("not as many patients as cases")
        return self


def _check_numbers(numbers: Any) -> dict[str, Any]:
    if too_much := _too_much(numbers):
        raise MessageError(f"the answer's numbers cannot be used: {too_much}")
    try:
        SiteNumbers.model_validate(numbers)
    except ValidationError as error:
        problem = error.errors()[0]
        key = outside_text(".".join(str(part) for part in problem["loc"][:1]) or "numbers")
        raise MessageError(f"the answer's numbers cannot be used: {key}: {outside_text(problem['msg'])}") from None
    return dict(numbers)


def _too_much(numbers: Any) -> str:
    """Why numbers are more than an answer can have, before anything looks into them; empty where they are not."""
    level, held = [numbers], 0
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if len(value) > _MOST_KEYS or any(not isinstance(key, str) or len(key) > LONGEST_NAME for key in value):
                    return f"more than {_MOST_KEYS} keys in one place, or a key that is no short text"
                inner += value.values()
            elif isinstance(value, list | tuple):
                inner += value
        held += len(inner)
        if held > _MOST_VALUES:
            return f"more than {_MOST_VALUES} values"
        level = [value for value in inner if isinstance(value, dict | list | tuple)]
        if not level:
            return ""
    return f"nested in more than {_DEEPEST} levels"


def pack_model(message: ModelMessage) -> Shareable:
    """A task's data: plain weights, or a collection where an amplitude or a second model travels with them."""
    weights = DXO(DataKind.WEIGHTS, data=PackedArrays(message.weights))
    if message.amplitude is None and message.best_weights is None:
        return weights.to_shareable()
    parts = {_WEIGHTS: weights}
    if message.best_weights is not None:
        parts[_BEST] = DXO(DataKind.WEIGHTS, data=PackedArrays(message.best_weights))
    if message.amplitude is not None:
        parts[AMPLITUDE] = pack_amplitude(message.amplitude)
    return DXO(DataKind.COLLECTION, data=parts).to_shareable()


def unpack_model(shareable: Shareable) -> ModelMessage:
    """The reverse of `pack_model`.

    Raises:
        MessageError: no weights in it, or something that no task carries.
    """
    parts = _parts(shareable)
    if parts.keys() - {_WEIGHTS, _BEST, AMPLITUDE}:
        raise MessageError("the task carries a part that is neither weights nor an amplitude")
    if any(name in parts and parts[name].data_kind != DataKind.WEIGHTS for name in (_WEIGHTS, _BEST)):
        raise MessageError("the task carries something else than weights")
    if _WEIGHTS not in parts:
        raise MessageError("the task carries no weights")
    best, amplitude = parts.get(_BEST), read_amplitude(parts.get(AMPLITUDE), of_site=False)
    return ModelMessage(_arrays(parts[_WEIGHTS]), amplitude, _arrays(best) if best else None)


def pack_update(message: UpdateMessage) -> Shareable:
    """A site's answer: weight differences, statistics alone, or a collection of both; numbers in the outer meta.

    Raises:
        MessageError: the numbers hold something that must not leave a site, or the amplitude lacks its patients.
    """
    _check_numbers(message.numbers)
    if message.amplitude is not None:
        count_of(message.amplitude.patients, "patients")
    numbers = {_NUMBERS: message.numbers, MetaKey.NUM_STEPS_CURRENT_ROUND: message.numbers.get("steps", 0)}
    if message.difference is None and message.amplitude is None:
        return DXO(DataKind.METRICS, data={}, meta=numbers).to_shareable()
    if message.difference is None and message.amplitude is not None:
        dxo = pack_amplitude(message.amplitude)
        dxo.meta.update(numbers)
        return dxo.to_shareable()
    assert message.difference is not None
    weights = DXO(DataKind.WEIGHT_DIFF, data=PackedArrays(message.difference), meta=dict(numbers))
    if message.amplitude is None:
        return weights.to_shareable()
    parts = {_WEIGHTS: weights, AMPLITUDE: pack_amplitude(message.amplitude)}
    return DXO(DataKind.COLLECTION, data=parts, meta=numbers).to_shareable()


def unpack_update(shareable: Shareable) -> UpdateMessage:
    """The reverse of `pack_update`.

    Raises:
        MessageError: the answer has another form, or its weights are not differences.
    """
    outer = _outer(shareable)
    if outer.data_kind not in _ANSWERS:
        raise MessageError(f"the answer is of kind '{outside_text(outer.data_kind)}', which no task of HarmoFL has")
    parts = _parts(shareable)
    weights = parts.get(_WEIGHTS)
    if weights is not None and weights.data_kind != DataKind.WEIGHT_DIFF:
        raise MessageError(f"the answer holds {outside_text(weights.data_kind)}, not weight differences")
    amplitude = read_amplitude(parts.get(AMPLITUDE), of_site=True)
    told = outer.get_meta_prop(_NUMBERS)
    if told is None:
        raise MessageError(
            f"the answer carries no numbers ({_NUMBERS} in its meta); site and server need the same harmofl version, "
            "and the site's filters must leave them in"
        )
    numbers = _check_numbers(told)
    return UpdateMessage(_arrays(weights) if weights else None, amplitude, numbers)


def in_exchange_type(difference: Arrays, exchange: str, statistics: frozenset[str] = frozenset()) -> Arrays:
    """A difference as it travels: parameters rounded to `federation.exchange`, see `harmofl.core.exchange`.

    Raises:
        MessageError: a number lies beyond float16; names its entry.
    """
    try:
        return to_exchange_types(difference, exchange, statistics)
    except BeyondFloat16Error as error:
        raise MessageError(
            f"training changed {error.name} by {error.largest:.3g}, float16 ends at {LARGEST}; set federation.exchange "
            "to float32"
        ) from None


def error_reply(code: str, reason: str) -> Shareable:
    """An answer that says, by code and one line, why a site could not do a task."""
    return make_reply(ReturnCode.EXECUTION_EXCEPTION, headers={_CODE: code, _REASON: reason})


def pack_error(shareable: Shareable) -> Shareable:
    """An error answer anew: return code, code and line, and nothing else that may be in it.

    Raises:
        MessageError: code or line have another form.
    """
    returned = str(shareable.get_return_code())
    told = {key: shareable.get_header(key) for key in _ERROR_FORMS if shareable.get_header(key) is not None}
    fits = [isinstance(held, str) and re.fullmatch(_ERROR_FORMS[key], held) for key, held in told.items()]
    if not all(fits) or not re.fullmatch(_ERROR_FORMS[_CODE], returned):
        raise MessageError("the code or the line of an error answer has another form")
    return make_reply(returned, headers=told)


def read_error(shareable: Shareable) -> tuple[str, str]:
    """Code and line of an error answer, printable; FLARE's return code where the site sent none."""
    returned = shareable.get_return_code()
    filtered = returned == ReturnCode.TASK_RESULT_FILTER_ERROR
    unsaid = "a privacy filter of the site let nothing out" if filtered else "no reason was sent"
    reason = shareable.get_header(_REASON) or f"{unsaid}; see the site's log"
    return outside_text(shareable.get_header(_CODE) or returned), outside_text(reason)


def round_of(shareable: Shareable) -> int | None:
    """The round that an answer belongs to, from the cookie that FLARE returns unchanged; None where it is no number."""
    jar = shareable.get_cookie_jar()
    told = jar.get(AppConstants.CONTRIBUTION_ROUND) if isinstance(jar, dict) else None
    return told if type(told) is int else None


def payload_bytes(message: UpdateMessage) -> dict[str, int]:
    """Bytes of an answer by kind: arrays as they are, numbers as JSON."""
    difference = message.difference or {}
    return {
        "weights": sum(np.asarray(value).nbytes for value in difference.values()),
        "amplitude": np.asarray(message.amplitude.values).nbytes if message.amplitude else 0,
        "numbers": len(json.dumps(message.numbers, default=str)) if message.numbers else 0,
    }


def _outer(shareable: Shareable) -> DXO:
    """What a message holds.

    Raises:
        MessageError: it has another form.
    """
    try:
        dxo = from_shareable(shareable)
    except Exception as error:  # FLARE looks into headers and content before it checks what they are
        raise MessageError(f"the message cannot be read ({outside_text(str(error))})") from None
    if not isinstance(dxo.data_kind, str) or not isinstance(dxo.meta, dict):
        raise MessageError("the message cannot be read: its kind or its meta has another form")
    return dxo


def _parts(shareable: Shareable) -> dict[str, DXO]:
    dxo = _outer(shareable)
    if isinstance(dxo.data, UnreadableArrays):
        raise MessageError(f"the message's arrays cannot be used: {dxo.data.problem}")
    if dxo.data_kind == DataKind.COLLECTION:
        if not all(isinstance(part, DXO) and isinstance(part.data_kind, str) for part in dxo.data.values()):
            raise MessageError("a part of the message has another form")
        return dict(dxo.data)
    if dxo.data_kind in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF):
        return {_WEIGHTS: dxo}
    return {AMPLITUDE: dxo} if dxo.data_kind == DataKind.APP_DEFINED else {}


def _arrays(dxo: DXO) -> Arrays:
    """The entries of a model or a difference; to be converted later, text or a list could take gigabytes.

    Raises:
        MessageError: an entry is no array; names it.
    """
    if isinstance(dxo.data, UnreadableArrays):
        raise MessageError(f"the message's arrays cannot be used: {dxo.data.problem}")
    if not isinstance(dxo.data, dict):
        raise MessageError("the message's weights are not arrays by name")
    for name, value in dxo.data.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray | np.generic | int | float):
            raise MessageError(f"entry {outside_text(name)} is {outside_text(type(value).__name__)}, no array")
    return dict(dxo.data)
