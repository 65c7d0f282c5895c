"""SiteSettings: what a hospital says in local/privacy.json about its data, its machine and its limits, in one model."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from harmofl.patient_names import costly_pattern, pattern_problem
from harmofl.sections import Section, first_problem, nearest

Whole = Annotated[int, Field(ge=1)]
Center = Annotated[int, Field(ge=0)]
Region = Literal["dc", "low", "full", "site_gain"]
Estimation = Literal["first_batch", "running_mean", "before_training"]


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
        task_seconds: longest that one task may compute.
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
    """Properties of the site's privacy scope that are this package's.

    Attributes:
        limits: what a job may ask for.
        patient_pattern: regular expression that finds the patient in a case's name; None where a job's closed form
            says.
        folder: name of this site's folder in the data root, in any letter case; None where that is the site's own name
            or the root itself.
        centers: values of the column `center` of metadata.csv whose rows are this site's; None where the file holds the
            rows of one center only.
        approval: whether a job runs only after somebody at this site has approved it.
    """

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


def read_site_settings(scope: Mapping[str, Any]) -> SiteSettings:
    """The site's settings from the properties of its privacy scope.

    Raises:
        ValueError: one line with the key, its value and, for an unknown key of a section, the nearest known one.
    """
    given = {key: value for key, value in scope.items() if key in SiteSettings.model_fields}
    limits = given.get("limits")
    for key in limits if isinstance(limits, Mapping) else ():
        if key not in LimitSettings.model_fields:
            raise ValueError(
                f"local/privacy.json: limits.{key}: unknown limit{nearest(key, LimitSettings.model_fields)}"
            )
    try:
        return SiteSettings.model_validate(given)
    except ValidationError as error:
        key, said = error.errors()[0]["loc"][0], first_problem(error, SiteSettings)
        if key in SECRET:
            said = f"{key}: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        raise ValueError(f"local/privacy.json: {said}") from None
