"""A mean amplitude statistic as it travels, and what must be said beside one that a site sends."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from pydantic import ValidationError

from harmofl.data.findings import count_text
from harmofl.evidence.results import NoiseStatement
from harmofl.sections import one_line, outside_text

AMPLITUDE = "amplitude"


class MessageError(ValueError):
    """A message that does not follow the contract; one printable line, no paths or patient names."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@dataclass(frozen=True)
class AmplitudeStatistic:
    """Mean amplitude statistic of some images, float32, and how many images it is the mean of.

    A site's also says how many patients stand behind it, and what noise is on it. `clip` and `relative_clip` are set on
    its way to the site's filter only: patients were clipped to this distance, which is so many multiples of the public
    scale, the noise is still to come, the values are float64. Then and behind noise `patients` is the number that the
    noise is made for: all training patients.
    """

    values: np.ndarray
    images: int
    patients: int | None = None
    clip: float | None = None
    relative_clip: float | None = None
    noise: NoiseStatement | None = None


def pack_amplitude(statistic: AmplitudeStatistic) -> DXO:
    """A statistic of a kind of its own, which FLARE's stock filters leave alone."""
    kept = np.float32 if statistic.clip is None else np.float64  # rounded only once the noise is on it
    data: dict[str, Any] = {AMPLITUDE: np.asarray(statistic.values, kept), "images": statistic.images}
    if statistic.patients is not None:
        data["patients"] = statistic.patients
    if statistic.clip is not None:
        data["clip"], data["relative_clip"] = statistic.clip, statistic.relative_clip
    if statistic.noise is not None:
        data["noise"] = statistic.noise.model_dump()
    return DXO(DataKind.APP_DEFINED, data=data)


def read_amplitude(dxo: DXO | None, *, of_site: bool) -> AmplitudeStatistic | None:
    """The reverse of `pack_amplitude`; `of_site` where it is a site's, which must say of how many patients it is.

    Raises:
        MessageError: it has another form, or contradicts itself.
    """
    if dxo is None:
        return None
    try:
        clip, relative = dxo.data.get("clip"), dxo.data.get("relative_clip")
        sent, told = dxo.data[AMPLITUDE], dxo.data["images"]
        if not isinstance(sent, np.ndarray) or sent.dtype.kind not in "fiu":  # NumPy would convert text and lists
            raise TypeError
        values = np.asarray(sent, np.float32 if clip is None else np.float64)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise MessageError("the amplitude has another form") from None
    images = count_of(told, "images")
    if not of_site:
        return AmplitudeStatistic(values, images)
    patients = count_of(dxo.data.get("patients"), "patients")
    if clip is not None and not (_is_distance(clip) and _is_distance(relative)):
        raise MessageError("the amplitude was clipped, and does not say at what distance")
    noise = _read_noise(dxo.data.get("noise"), patients)
    if patients > images and clip is None and noise is None:  # a clipped mean counts patients without readable images
        raise MessageError(
            f"the amplitude is the mean of {count_text(images, 'image')} and {count_text(patients, 'patient')}"
        )
    return AmplitudeStatistic(values, images, patients, clip, relative, noise)


def count_of(number: Any, name: str) -> int:
    """A number of images or patients behind an amplitude.

    Raises:
        MessageError: no whole number above 0.
    """
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise MessageError(f"the amplitude is the mean of {outside_text(number)} {name}")
    return int(number)


def _is_distance(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _read_noise(statement: Any, patients: int) -> NoiseStatement | None:
    if statement is None:
        return None
    try:
        noise = NoiseStatement.model_validate(statement)
    except ValidationError as error:
        problem = error.errors()[0]
        key = outside_text(".".join(str(part) for part in problem["loc"][:1]) or "noise")
        raise MessageError(
            f"the amplitude's noise is not said in full: {key}: {outside_text(problem['msg'])}"
        ) from None
    if noise.patients != patients:
        raise MessageError(
            f"the amplitude is of {count_text(patients, 'patient')}, its noise was made for {noise.patients}"
        )
    return noise
