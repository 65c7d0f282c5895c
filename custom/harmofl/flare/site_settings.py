"""SiteSettings: what a hospital says in local/privacy.json about its data, its machine and its limits, in one model."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from harmofl.patient_names import costly_pattern, pattern_problem
from harmofl.sections import Section, first_problem, nearest, one_line

DEVICE = re.compile(r"auto|cpu(, ?cpu)*|cuda|cuda:\d+(, ?cuda:\d+)*")
MINIMUM_CASES = 5  # a mean amplitude of fewer patients does not leave a hospital that has not said otherwise
# Multiples of the scale: of regions dc, low and full no image of intensities 0 to 1 lies farther than 1 from the
# center, no z-scored one farther than 1.42.
MOST_CLIP = 2.0
# Rules of the properties that are no section, for messages: a value does not leave the site with them.
RULES = {
    "data_root": "text, an absolute path",
    "minimum_cases": "a whole number above 0",
    "device": "auto, cpu, cuda or, by number, cuda:1, or several such as cuda:0,cuda:1",
    "workers": "a whole number of 0 or more",
    "threads": "a whole number above 0",
    "compile": "true or false",
    "allowed_names": "a list of names of scores",
}
UNKNOWN, NOISE = "site_settings", "amplitude_noise"

Whole = Annotated[int, Field(ge=1)]
Center = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Region = Literal["dc", "low", "full", "site_gain"]
Estimation = Literal["first_batch", "running_mean", "before_training"]
LISTED = frozenset((*get_args(Region), *get_args(Estimation)))  # names that limits may list


class SettingsError(ValueError):
    """A property of the privacy scope that cannot be used; one line without its value, where that may be a name.

    Attributes:
        name: of the property; `site_settings` where it is not known.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(one_line(message))
        self.name = name


class NoiseSettings(Section):
    """A site's noise on its amplitude: to what distance a patient's part is clipped, epsilon and delta.

    The distance is in multiples of a scale that a job's settings give, so that one number fits every
    `amplitude.region`: see `harmofl.core.gaussian_mechanism.clipping_center`.
    """

    relative_clip: Annotated[float, Field(gt=0, le=MOST_CLIP)]
    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]


SECRET = ("patient_pattern", "folder")  # their values tell names, and a line about them may leave the site


class LimitSettings(Section):
    """What a job may ask of this hospital; the defaults are a careful hospital's, and hold outside simulation.

    Attributes:
        minimum_sites: fewest sites whose weights, and whose amplitudes, a job may average.
        training_patients: fewest patients behind weights that leave.
        scored_patients: fewest patients behind a score that leaves.
        case_scores: whether scores of single cases leave, or their mean and interval only.
        image_size: most pixels of height and of width.
        parameters: most parameters of a network, from which memory, disk and traffic follow.
        task_seconds: longest that one task may compute; asked between two batches.
        regions: `amplitude.region` that may leave.
        estimations: `amplitude.estimation` that is allowed.
    """

    minimum_sites: Whole = 3
    training_patients: Whole = 5
    scored_patients: Whole = 2
    case_scores: bool = False
    image_size: Whole = 1024
    batch_size: Whole = 256
    local_epochs: Whole = 20
    rounds: Whole = 1000
    parameters: Whole = 100_000_000
    task_seconds: Whole = 24 * 3600
    regions: tuple[Region, ...] = Field(default=("dc", "site_gain"), strict=False)
    estimations: tuple[Estimation, ...] = Field(default=("before_training", "running_mean"), strict=False)


class SiteSettings(Section):
    """Properties of the site's privacy scope that are this package's; FLARE's keys of the scope stand beside them.

    Attributes:
        data_root: absolute folder of the images; HARMOFL_DATA_ROOT comes before it.
        minimum_cases: fewest training patients behind an amplitude that leaves.
        device: what trains: auto, cpu, cuda, a card by its number, or several.
        workers: loader processes; None as the task needs.
        threads: of torch; None as torch has them.
        compile: whether training runs through torch.compile.
        allowed_names: scores and reasons of a task of one's own that may leave.
        amplitude_noise: noise on the amplitude; None for none.
        limits: what a job may ask for.
        patient_pattern: regular expression that finds the patient in a case's name; None where a job's closed form
            says.
        folder: name of this site's folder in the data root, in any letter case; None where that is the site's own name
            or the root itself.
        centers: values of the column `center` of metadata.csv whose rows are this site's; None where the file holds the
            rows of one center only.
        approval: whether a job runs only after somebody at this site has approved it.
    """

    data_root: str | None = None
    minimum_cases: Whole = MINIMUM_CASES
    device: str = "auto"
    workers: Annotated[int, Field(ge=0)] | None = None
    threads: Whole | None = None
    compile: bool = False
    allowed_names: tuple[str, ...] = Field(default=(), strict=False)
    amplitude_noise: NoiseSettings | None = None
    limits: LimitSettings = LimitSettings()
    patient_pattern: str | None = None
    folder: Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")] | None = None
    centers: Annotated[tuple[Center, ...], Field(min_length=1, strict=False)] | None = None
    approval: Literal["off", "required"] = "off"

    @field_validator("patient_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None and (problem := pattern_problem(pattern) or costly_pattern(pattern)):
            raise ValueError(problem)
        return pattern

    @field_validator("device")
    @classmethod
    def _names_devices_once(cls, device: str) -> str:
        cards = [int(number) for number in re.findall(r"\d+", device)]
        if not DEVICE.fullmatch(device) or len(set(cards)) < len(cards):
            raise ValueError("names no devices")
        return device

    @field_validator("workers", "threads", mode="before")
    @classmethod
    def _is_a_number_where_it_is_set(cls, given: Any) -> Any:
        if given is None:
            raise ValueError("is null")
        return given


def read_site_settings(scope: Mapping[str, Any]) -> SiteSettings:
    """The site's settings from the properties of its privacy scope.

    Raises:
        SettingsError: the first of `setting_problems`.
    """
    for problem in setting_problems(scope):
        raise problem
    return SiteSettings.model_validate(dict(scope))


def setting_problems(scope: Mapping[str, Any]) -> Iterator[SettingsError]:
    """Every property that cannot be used, each in one line; for an unknown one with the nearest known name."""
    known = SiteSettings.model_fields
    for name in scope:
        if name not in known:
            fix = nearest(name, known) or f"; known are {', '.join(known)}"
            yield SettingsError(UNKNOWN, f"local/privacy.json: unknown property {str(name)[:60]}{fix}")
    for name, value in scope.items():
        if name in known and (problem := _problem(name, value)):
            yield problem


def _problem(name: str, value: Any) -> SettingsError | None:
    sections: dict[str, type[Section]] = {"limits": LimitSettings, NOISE: NoiseSettings}
    section = sections.get(name)
    if section is not None and value is not None and (message := _misspelled(name, value, section)):
        return SettingsError(name, f"local/privacy.json: {message}")
    try:
        SiteSettings.model_validate({name: value})
    except ValidationError as error:
        if name in RULES:
            return SettingsError(name, f"{name} in local/privacy.json must be {RULES[name]}")
        if name in SECRET:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            return SettingsError(name, f"local/privacy.json: {name}: {reason}")
        return SettingsError(name, f"local/privacy.json: {_told(error)}")
    return None


def _misspelled(name: str, value: Any, section: type[Section]) -> str:
    """What is wrong with a section's keys: a misspelled one is better named than the one that it leaves missing."""
    if not isinstance(value, Mapping):
        *first, last = section.model_fields
        return f"{name} must hold {', '.join(first)} and {last}"
    if name == NOISE and "clip" in value:
        return (
            "amplitude_noise.clip was a distance in units that the job chooses, and is gone; write relative_clip, in "
            "multiples of a public scale, in its place (0.8 is a good start)"
        )
    unknown = next((key for key in value if key not in section.model_fields), None)
    if unknown is None:
        return ""
    fix = nearest(unknown, section.model_fields) or f"; known are {', '.join(section.model_fields)}"
    return f"{name}.{str(unknown)[:60]}: unknown setting{fix}"


def _told(error: ValidationError) -> str:
    """The first problem; of its value only a number is told, since the line leaves the site."""
    value = error.errors()[0]["input"]
    line = first_problem(error, SiteSettings)
    if value is None or isinstance(value, int | float | Mapping):
        return line
    return line.rpartition(", not ")[0] or line
