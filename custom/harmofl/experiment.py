"""Experiment: the one frozen, validated description of a run, read from a job's experiment.json."""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from harmofl.methods import METHOD_DEFAULTS, PRESETS, method_overrides, method_problem
from harmofl.sections import ExperimentError, Section, fill, first_problem, nearest, parse_json, set_key

FILE_NAME = "experiment.json"
# Settings that came later, each with the value at which a run is what it was before: there it does not enter the hash.
LEFT_OUT_AT_DEFAULT: dict[str, Any] = {
    "federation.norm_bound": None,
    "federation.aggregation": "mean",
    "federation.trimmed_share": 0.2,
}


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class DataSettings(Section):
    """What every task reads alike: image size in pixels and split; what is a task's own stands in `reader`.

    `patient_pattern` finds the patient in a case's name, by its first group or its whole match; without it, or where
    it does not match, a case is a patient.
    `simulated_root` may hold {SITE_NAME} and counts in simulation only: elsewhere a job never chooses a path at a site.
    """

    height: Annotated[int, Field(ge=64)]
    width: Annotated[int, Field(ge=64)]
    split: Literal["patient", "as_published"] = "patient"
    fractions: tuple[Fraction, Fraction, Fraction] = Field(default=(0.64, 0.16, 0.20), strict=False)
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

    @field_validator("patient_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
        return pattern

    def patient_of(self, case: str) -> str:
        """The patient that a case belongs to."""
        found = re.search(self.patient_pattern, case) if self.patient_pattern else None
        part = (found.group(1) if found.re.groups else found.group()) if found else None
        return part or case  # an optional group may take no part, a pattern may match nothing


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


class FederationSettings(Section):
    """Rounds and rules of the federation; times in seconds.

    `server_betas` and `server_epsilon` are those of server optimizer `adam`. What `local_layers` names never leaves a
    site; `pooled_data` lets one simulated site train on the data of all. `exchange` is the type of differences on their
    way up; whatever goes down is float32. `norm_bound` scales a site's difference whose norm per step is beyond that
    multiple of the median of the round before down to this median; null scales nothing. `median` and `trimmed_mean`,
    which cuts `trimmed_share` of the sites off at each end, hold the differences of all sites.
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
    exchange: Literal["float32", "float16"] = "float32"
    round_timeout: Annotated[int, Field(ge=60)] = 24 * 3600
    straggler_wait: Annotated[int, Field(ge=0)] = 600
    resume_from: str | None = None
    tracking: Literal["tensorboard", "mlflow", "none"] = "tensorboard"


class DemoSettings(Section):
    """What a simulated run without data uses: overrides of this experiment, and the task's synthetic data."""

    overrides: dict[str, Any] = {}
    data: dict[str, Any] = {}


class Experiment(Section):
    """The resolved settings of one run. Two sides that hold equal hashes run the same experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    task: str
    method: str = "harmofl"
    seed: Annotated[int, Field(ge=0)] = 0
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
        where they count.
        """
        left_out = {
            "data": {"simulated_root"},
            "federation": {"resume_from", "round_timeout", "straggler_wait", "tracking"},
            "demo": {"overrides"},
        }
        settings = self.model_dump(mode="json", exclude=left_out)
        for key, default in LEFT_OUT_AT_DEFAULT.items():
            section, _, name = key.rpartition(".")
            held = settings[section] if section else settings
            if held[name] == default:
                del held[name]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


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
        settings = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"{shown}: cannot be read ({error.strerror}); every job needs it in app/config") from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{shown}: is not UTF-8 text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ExperimentError(f"{shown}: line {error.lineno} column {error.colno}: {error.msg}") from None
    if not isinstance(settings, dict):
        raise ExperimentError(f"{shown}: must hold one JSON object, not a {type(settings).__name__}")
    return settings


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
