"""Experiment: the one frozen, validated description of a run, read from a job's experiment.json."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from harmofl.methods import METHOD_DEFAULTS, PRESETS, method_overrides, method_problem
from harmofl.patient_names import FORMS, MOST_CHARACTERS, patient_in, pattern_problem
from harmofl.sections import ExperimentError, Section, fill, first_problem, nearest, parse_json, set_key

FILE_NAME = "experiment.json"
# By `section.key` the value at which a setting that came later leaves a run what it was before: there it does not enter
# the hash, so that the hashes of experiments from before it stay what they were.
LEFT_OUT_AT_DEFAULT: dict[str, Any] = {
    "data.patient_from": "name",
    "federation.norm_bound": None,
    "federation.aggregation": "mean",
    "federation.trimmed_share": 0.2,
    "federation.validate_every": 1,
}
# What settings do not say and yet decides what is learned, or from whom. Raise a number with every such change: it
# enters every hash, and a run, a checkpoint or a site's state of another number is refused by name. Whatever was made
# before the numbers has 1 of each.
RULES: dict[str, int] = {
    "split": 2,  # which patients train: 1 missed the shares at small sites; 2 keeps them within one patient
    "reading": 2,  # voxels, pixels and targets of files: 1 took MONAI's affines and guessed masks; 2 takes nibabel's
    "amplitude": 2,  # statistics of images: 1 had images without contrast in them; 2 leaves these out
    "sum": 2,  # the mean of the sites' differences: 1 summed without any rounding; 2 on a common grid
    # order, augmentation, steps: 1 drew all from one generator; 2 has one for each purpose; 3 rounds otherwise in
    # instance norm
    "training": 3,
    "exchange": 2,  # what float16 rounds: 1 rounded differences alone; 2 the model that goes down as well
}

# what a device computes a network in; a setting or a GPU decides it
Precision = Literal["float32", "tf32", "bfloat16", "float16"]

LONGEST_WAIT = 366 * 24 * 3600  # seconds
LARGEST_FILE = 1_000_000  # bytes of an experiment.json; those of the project have 2,000
# Percentiles of the window of volumes outside simulation: how many images are warned of, or lie within the window, is
# counted and leaves a site, and a percentile that a job may move at will would find out the intensities of single ones.
HOSPITAL_PERCENTILES = (95.0, 98.0, 99.0, 99.5, 99.9, 100.0)
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class DataSettings(Section):
    """What every task reads alike: image size in pixels and split; what is a task's own stands in `reader`.

    `patient_from` says what of a case's name is the patient: all of it (`name`), what stands before the first `_`, `.`
    or `-` (`before_separator`), or a number of characters. `patient_pattern` finds the patient by its first group or
    its whole match; where it does not match, a case is a patient.
    `patient_pattern`, `aliases` and `simulated_root` (which may hold {SITE_NAME}) count in simulation only: elsewhere a
    job chooses no path, folder or name at a site, whose own settings say.
    """

    height: Annotated[int, Field(ge=64)]
    width: Annotated[int, Field(ge=64)]
    split: Literal["patient", "as_published"] = "patient"
    fractions: tuple[Fraction, Fraction, Fraction] = Field(default=(0.64, 0.16, 0.20), strict=False)
    patient_from: Literal["name", "before_separator"] | int = "name"
    patient_pattern: str | None = None
    aliases: dict[str, list[str]] = {}
    simulated_root: str | None = None

    @model_validator(mode="after")
    def _fractions_fill_one(self) -> Self:
        if abs(sum(self.fractions) - 1) > 1e-9:
            raise ValueError(f"fractions of training, validation and test must add up to 1, not {sum(self.fractions)}")
        if any(abs(fraction * 25 - round(fraction * 25)) > 1e-6 for fraction in self.fractions):
            raise ValueError("fractions must be multiples of 0.04: cases are dealt to the splits in blocks of 25")
        return self

    @field_validator("patient_from", mode="before")
    @classmethod
    def _a_form_or_a_number(cls, form: Any) -> Any:
        number = isinstance(form, int) and not isinstance(form, bool) and 1 <= form <= MOST_CHARACTERS
        if not number and form not in FORMS:
            raise ValueError(f"must be {', '.join(map(repr, FORMS))} or a number of characters, 1 to {MOST_CHARACTERS}")
        return form

    @field_validator("patient_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None and (problem := pattern_problem(pattern)):
            raise ValueError(problem)
        return pattern

    @model_validator(mode="after")
    def _one_word_about_patients(self) -> Self:
        if self.patient_pattern is not None and self.patient_from != "name":
            raise ValueError("patient_from and patient_pattern both say whose a case is; leave one out")
        return self

    def patient_of(self, case: str) -> str:
        """The patient that a case belongs to."""
        return patient_in(case, self.patient_from, self.patient_pattern)


class NetworkSettings(Section):
    """Network by name, its base width in channels and its norm layer."""

    name: Literal["unet", "densenet121"]
    width: Annotated[int, Field(ge=1, le=512)] = 32
    norm: Literal["instance", "batch", "batch_stats"]


class AmplitudeSettings(Section):
    """Intensity step and amplitude step; the preset fills what is not set."""

    preset: Literal["robust", "as_described", "as_published"]
    intensity: Literal["window", "zscore", "none"]
    region: Literal["off", "dc", "low", "full", "site_gain"]
    low_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    estimation: Literal["first_batch", "running_mean", "before_training"]
    momentum: Fraction = 0.1
    average: Literal["sites", "images"] = "sites"
    minimum_cases: Count = 5
    minimum_sites: Count

    @model_validator(mode="after")
    def _mean_shift_needs_a_mean(self) -> Self:
        if self.region == "dc" and self.intensity == "zscore":
            raise ValueError(
                "region 'dc' does nothing after 'zscore', which sets every mean to 0; use intensity 'window'"
            )
        return self


class PerturbationSettings(Section):
    """Length alpha of the ascent step over all parameters (Eq 6); 0 switches it off."""

    alpha: NotNegative = 0.05


class TrainingSettings(Section):
    """Local training at a site; `proximal_mu` is FedProx's, the contrastive ones are MOON's mu and temperature."""

    optimizer: Literal["adam", "sgd"]
    learning_rate: Positive
    momentum: Share = 0.9
    weight_decay: NotNegative = 1e-4
    batch_size: Count
    local_epochs: Count = 1
    augmentation: Literal["none", "flip_rotate"] = "flip_rotate"
    clip_norm: Positive | None = None
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    keep_moments: bool = True
    proximal_mu: NotNegative = 0.0
    contrastive_weight: NotNegative = 0.0
    contrastive_temperature: Positive = 0.5


def is_scored(round_number: int, *, rounds: int, every: int) -> bool:
    """Whether the model that a round begins with is scored: see `FederationSettings.validates`."""
    return round_number % every == 0 or round_number >= rounds - 1


class FederationSettings(Section):
    """Rounds and rules of the federation; times in seconds.

    `server_betas` and `server_epsilon` are those of server optimizer `adam`. What `local_layers` names never leaves
    a site; `pooled_data` lets one simulated site train on the data of all. `exchange` is the type of parameters on
    their way down and of their differences on the way up; the server's own model is float32
    (`harmofl.core.exchange`). `norm_bound` scales a site's difference whose norm per step is beyond that multiple
    of the median of the round before down to this median; null scales nothing. `median` and `trimmed_mean`, which
    cuts `trimmed_share` of the sites off at each end, hold the differences of all sites. The mean of an entry is off
    by at most 2^-30 of its scale: the largest magnitude in the model that was sent, rounded up to a power of two, and
    at least `scale_floor`, a power of two. Of the default, 1, that is half of the last digit of a float32 of 1/64: no
    more than weights of that size are rounded by in any case. `validate_every` rounds the sites score the model that
    they receive; the last model is always scored, and the best one is among those.
    """

    rounds: Count
    minimum_sites: Count
    weights: Literal["uniform", "samples"] = "uniform"
    server_learning_rate: Positive = 1.0
    server_optimizer: Literal["average", "nova", "adam"] = "average"
    server_betas: tuple[Share, Share] = Field(default=(0.9, 0.99), strict=False)
    server_epsilon: Positive = 1e-3
    local_layers: Literal["none", "norm", "all"] = "none"
    pooled_data: bool = False
    norm_bound: Annotated[float, Field(gt=1)] | None = 10.0
    aggregation: Literal["mean", "median", "trimmed_mean"] = "mean"
    trimmed_share: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    scale_floor: Annotated[float, Field(ge=2.0**-40, le=2.0**40)] = 1.0
    exchange: Literal["float32", "float16"] = "float32"
    round_timeout: Annotated[int, Field(ge=60, le=LONGEST_WAIT)] = 24 * 3600
    straggler_wait: Annotated[int, Field(ge=0, le=LONGEST_WAIT)] = 600
    validate_every: Count = 1
    resume_from: str | None = None
    tracking: Literal["tensorboard", "mlflow", "none"] = "tensorboard"

    @field_validator("scale_floor")
    @classmethod
    def _a_power_of_two(cls, floor: float) -> float:
        if math.frexp(floor)[0] != 0.5:
            raise ValueError(f"must be a power of two, such as {2.0 ** math.floor(math.log2(floor)):g}")
        return floor

    def validates(self, round_number: int) -> bool:
        """Whether the sites score the model that a round begins with: every so many rounds, and in the last round.

        Round 0 has the untrained model, which is never the best one. The model that comes out of the last round is
        scored by the evaluation, whatever the number.
        """
        return is_scored(round_number, rounds=self.rounds, every=self.validate_every)

    @property
    def share_validated(self) -> float:
        """In which share of the rounds the sites score the model that they receive."""
        in_step = -(-self.rounds // self.validate_every)
        last_beside = (self.rounds - 1) % self.validate_every > 0
        return (in_step + last_beside) / self.rounds


class DemoSettings(Section):
    """What a simulated run without data uses: overrides of this experiment, and the task's synthetic data."""

    overrides: dict[str, Any] = {}
    data: dict[str, Any] = {}


class Experiment(Section):
    """The resolved settings of one run. Two sides that hold equal hashes run the same experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    task: Annotated[str, Field(max_length=200)]
    method: str = "harmofl"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # torch takes no larger one
    data: DataSettings
    reader: dict[str, Any] = {}
    network: NetworkSettings
    amplitude: AmplitudeSettings
    perturbation: PerturbationSettings = PerturbationSettings()
    training: TrainingSettings
    federation: FederationSettings
    demo: DemoSettings | None = None

    @model_validator(mode="after")
    def _a_first_batch_is_large_enough(self) -> Self:
        amplitude, batch = self.amplitude, self.training.batch_size
        if amplitude.region != "off" and amplitude.estimation == "first_batch" and batch < amplitude.minimum_cases:
            raise ValueError(
                f"training.batch_size {batch} is below amplitude.minimum_cases {amplitude.minimum_cases}, so that no "
                "amplitude of a first batch would be sent; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _methods_stand_together(self) -> Self:
        problem = method_problem(self)
        if problem:
            raise ValueError(problem)
        return self

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 over the settings that decide the result.

        Paths, time limits and where curves go do not; nor do the demo's overrides, which are in the other settings
        where they count. `RULES` do, and settings of `LEFT_OUT_AT_DEFAULT` where they have another value.
        """
        left_out = {
            "data": {"simulated_root"},
            "federation": {"resume_from", "round_timeout", "straggler_wait", "tracking"},
            "demo": {"overrides"},
        }
        settings = self.model_dump(mode="json", exclude=left_out) | {"rules": RULES}
        for key, default in LEFT_OUT_AT_DEFAULT.items():
            section, _, name = key.rpartition(".")
            place = settings[section] if section else settings
            if place[name] == default:
                del place[name]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def rules_problem(made: Mapping[str, int]) -> str:
    """How what was made by some rules differs from what this version makes, empty where it does not.

    Args:
        made: by name of the rule its number, as in `RULES`; 1 where none is given.
    """
    own = {name: RULES.get(name) for name in sorted(RULES.keys() | made.keys())}
    other = {name: made.get(name, 1) for name, number in own.items() if made.get(name, 1) != number}
    if not other:
        return ""
    has = {name: RULES.get(name, "none") for name in other}
    words = [", ".join(f"{name} rule {number}" for name, number in held.items()) for held in (other, has)]
    return f"made by {words[0]}; this version of harmofl has {words[1]}"


def read_settings(path: Path, shown: str | None = None) -> dict[str, Any]:
    """Read experiment.json as written, before presets, method and demo are applied.

    Args:
        path: the file.
        shown: how messages call it, where its path must not be told.

    Raises:
        ExperimentError: the file is missing or no JSON object; names the file and, for JSON, line and column.
    """
    shown = shown or str(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ExperimentError(f"{shown}: has more than {LARGEST_FILE} bytes; no experiment needs them")
        settings = parse_json(content.decode("utf-8"))
    except OSError as error:
        raise ExperimentError(f"{shown}: cannot be read ({error.strerror}); every job needs it in app/config") from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{shown}: is not UTF-8 text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ExperimentError(f"{shown}: line {error.lineno} column {error.colno}: {error.msg}") from None
    if not isinstance(settings, dict):
        raise ExperimentError(f"{shown}: must hold one JSON object, not a {type(settings).__name__}")
    return settings


def site_owned_problem(settings: Mapping[str, Any]) -> str:
    """Why hospitals refuse these settings of a job as written: they say what is a hospital's to say; else empty."""
    data, reader = settings.get("data"), settings.get("reader")
    percentile = reader.get("upper_percentile", 99.0) if isinstance(reader, Mapping) else 99.0
    if settings.get("task") == "prostate" and percentile not in HOSPITAL_PERCENTILES:
        known = ", ".join(f"{value:g}" for value in HOSPITAL_PERCENTILES)
        return f"reader.upper_percentile: hospitals take {known}, others in a simulated run only"
    if not isinstance(data, Mapping) or data.get("patient_pattern") is None:
        return ""
    return (
        "data.patient_pattern: hospitals run no pattern of a job on file names; choose data.patient_from, or let each "
        "hospital set patient_pattern in local/privacy.json"
    )


def resolve(settings: dict[str, Any], *, demo: bool = False, source: str = FILE_NAME) -> Experiment:
    """Apply, in this order, the demo overrides, the method and the amplitude preset, then validate.

    The demo's overrides make a run small; a method is a few overrides of what is written then; the method's own
    numbers and then the preset fill only what is still not set.

    Args:
        settings: experiment.json as read.
        demo: apply the overrides of its `demo` section.
        source: what the settings were read from, for messages.

    Raises:
        ExperimentError: one line with source, key, value and, for an unknown key, the nearest known name.
    """
    merged: dict[str, Any] = json.loads(json.dumps(settings))
    try:
        if demo:
            section = merged.get("demo")
            if not isinstance(section, dict):
                raise ExperimentError("demo: this job has no demo settings; give data (HARMOFL_DATA_ROOT or --data)")
            overrides = section.get("overrides", {})
            for key, value in overrides.items() if isinstance(overrides, dict) else ():
                set_key(merged, key, value)
        method = str(merged.get("method", "harmofl"))
        for key, value in method_overrides(method).items():
            set_key(merged, key, value)
        fill(merged, METHOD_DEFAULTS.get(method, {}))
        _fill_from_preset(merged)
        return Experiment.model_validate_json(json.dumps(merged))
    except ValidationError as error:
        raise ExperimentError(f"{source}: {first_problem(error, Experiment)}") from None
    except (ExperimentError, ValueError) as error:
        raise ExperimentError(f"{source}: {error}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `key=value` of the command line; the value is JSON where it parses as JSON, else a string.

    Raises:
        ExperimentError: no '=' or an empty key.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ExperimentError(f"--set {text}: write it as section.key=value, for example training.local_epochs=2")
    try:
        return key, parse_json(value)
    except json.JSONDecodeError:
        return key, value


def _fill_from_preset(settings: dict[str, Any]) -> None:
    """Let the amplitude preset set the intensity step, region, estimation and norm layer that are not set."""
    amplitude = settings.setdefault("amplitude", {})
    if not isinstance(amplitude, dict):
        raise ExperimentError(f"amplitude: must be a section, not {amplitude!r}")
    name = amplitude.setdefault("preset", "robust")
    if str(name) not in PRESETS:
        raise ExperimentError(f"amplitude.preset: {name!r} is none of {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    fill(settings, PRESETS[name])
