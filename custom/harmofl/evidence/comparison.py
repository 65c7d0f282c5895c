"""The schema of a cell of a comparison (cell.json) and of comparison.json."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from harmofl.evidence.results import Record, ScoreSummary, read_record
from harmofl.evidence.time_spent import Part

CELL_FILE = "cell.json"
COMPARISON_FILE, TABLE_FILE, PAGE_FILE = "comparison.json", "comparison.csv", "comparison.html"

Seconds = Annotated[float, Field(ge=0)]
Verdict = Literal[
    "reference",
    "better",
    "worse",
    "unclear",
    "no_evidence",
    "no_spread",
    "same",
    "few_seeds",
    "no_scores",
    "no_model",
]


class CellKey(Record):
    """What decides a cell's numbers: a finished cell with an equal key is not run again."""

    experiment_hash: str
    version: str
    data: str
    sites: list[str]
    left_out: str | None
    rules: dict[str, int] = {}


class SiteScores(Record):
    """Test scores of one site by name, of the model that validation picked and of the last one."""

    best: dict[str, ScoreSummary]
    final: dict[str, ScoreSummary]


class DriftRecord(Record):
    """Client drift of one round, see `harmofl.core.drift.Drift`."""

    dispersion: float
    relative: float | None
    cosine: float | None


class LocalCurves(Record):
    """Loss of a site's model after the last round's training.

    Attributes:
        own_images: on the site's images, along the first direction.
        all_images: at the model itself, mean over the images of all sites.
    """

    own_images: list[float | None]
    all_images: float | None


class Landscape(Record):
    """Losses around the last global model and around the local ones that it was averaged from.

    Attributes:
        offsets: distances along a direction, in lengths of the filters.
        surface: mean loss over sites of the global model, rows along the first direction.
        local: by site along the first direction.
        sharpness: rise of the global model's loss at `sharpness_at`; see `harmofl.core.landscape.sharpness`.
        sharpness_at: distance from the model.
        images: images a site that the loss is taken over.
    """

    offsets: list[float]
    surface: list[list[float | None]]
    local: dict[str, LocalCurves]
    sharpness: float | None
    sharpness_at: float
    images: int


class CellRecord(Record):
    """cell.json: one run of the grid.

    Attributes:
        key: what decides its numbers.
        seen: sites that trained; `scores` has the site that was left out as well.
        validation: mean over sites by model: the untrained one, then after each round.
        amplitude_distance: mean distance between sites of their log amplitude profiles, by step of the normalization.
        test_over_training: mean over sites of test over training cases.
        passes: forward-backward passes over batches, all sites and rounds together.
        seconds: of training and evaluation, without reading the data and without what explains the run.
        spent: seconds by part, see `harmofl.evidence.time_spent`; empty where an earlier version made the cell.
    """

    format: Literal[2]
    key: CellKey
    experiment: dict[str, Any]
    method: str
    seed: int
    demo: bool
    key_score: str
    score_note: str
    seen: list[str]
    best_round: int
    scores: dict[str, SiteScores]
    validation: list[float | None]
    drift: list[DriftRecord]
    amplitude_distance: dict[str, float | None]
    landscape: Landscape | None
    test_over_training: float
    passes: int
    seconds: float
    spent: dict[Part, Seconds] = {}


class Use(Record):
    """Where a cell stands in the grid; methods that fix what a sweep changes share a cell."""

    cell: str
    method: str
    seed: int
    sweep: str | None
    value: Any
    left_out: str | None


class Spread(Record):
    """Mean and standard deviation over `n` seeds (or sites); null where undefined."""

    mean: float | None
    deviation: float | None
    n: int


class Difference(Record):
    """A method minus the reference: paired by seed, 95 % interval, p value alone and corrected for all comparisons.

    The interval and the p values take seeds for their units and are null for fewer than three. `patients_low` and
    `patients_high` are the interval over the patients of the test cases, for these trained models.
    """

    mean: float | None
    low: float | None
    high: float | None
    p_value: float | None
    p_corrected: float | None
    pairs: int
    patients_low: float | None
    patients_high: float | None


class Control(Record):
    """A method minus plain averaging on the same network, which is the row `name`."""

    name: str
    difference: Difference
    verdict: Verdict


class MethodSummary(Record):
    """One method over all seeds.

    Attributes:
        settings: by `section.key` where they differ from the reference's.
        sites: test score of the best model by site.
        mean: of the mean over sites.
        over_sites: spread of the sites' means.
        worst: of the lowest site of each seed; `worst_site` has the lowest mean.
        final_model: mean over sites of the last model instead of the best one.
        curve: validation score of the untrained model and after each round.
        drift, cosine: by round.
        amplitude_distance: by step of the normalization, over seeds.
        sharpness: of the cells with a landscape.
        control: of a method that needs another network than the reference.
    """

    method: str
    settings: dict[str, Any]
    sites: dict[str, Spread]
    mean: Spread
    over_sites: Spread
    worst: Spread
    worst_site: str | None
    final_model: Spread
    difference: Difference | None
    site_differences: dict[str, Difference]
    verdict: Verdict
    curve: list[Spread]
    drift: list[Spread]
    cosine: list[Spread]
    amplitude_distance: dict[str, Spread]
    sharpness: Spread
    passes: Spread
    seconds: Spread
    control: Control | None


class Sweep(Record):
    """Mean over sites for each value of one setting, by method; `fixed` methods set it themselves."""

    key: str
    values: list[Any]
    base: Any
    methods: dict[str, list[Spread]]
    fixed: list[str]


class LeftOut(Record):
    """One method on hospitals that took no part: by site, their mean, and the same sites where they took part.

    Verdict `no_model`: it keeps layers at its sites, so that there is nothing to score elsewhere.
    """

    method: str
    sites: dict[str, Spread]
    mean: Spread
    taking_part: Spread
    difference: Difference | None
    verdict: Verdict


class Comparison(Record):
    """comparison.json.

    Attributes:
        experiment_hash: of the job's experiment with the settings that all runs have in common; each run has its own.
        data: fingerprint of the files that were trained on, `demo` where there were none.
        seconds: that the last command took.
        spent: seconds of all processes by part: of every run, whenever it ran, and of the last command.
        share_beside: of these the share that is neither training nor scoring.
    """

    format: Literal[2]
    name: str
    task: str
    demo: bool
    headline: str
    findings: list[str]
    method_of_statistics: str
    key_score: str
    score_note: str
    reference: str
    seeds: list[int]
    sites: list[str]
    rounds: int
    assignments: list[str]
    methods: list[MethodSummary]
    sweeps: list[Sweep]
    left_out: list[LeftOut]
    landscapes: dict[str, Landscape]
    uses: list[Use]
    failed: dict[str, str]
    experiment: dict[str, Any]
    experiment_hash: str
    data: list[str]
    versions: dict[str, str]
    seconds: float
    spent: dict[Part, Seconds] = {}
    share_beside: float | None = None


def distinct(values: Iterable[Any]) -> list[Any]:
    """Every value once, in order; 1 and 1.0 are one value, true is another one, lists may be among them."""
    kept: list[Any] = []
    for value in values:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in kept):
            kept.append(value)
    return kept


def value_text(value: Any) -> str:
    """A value of a setting as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def read_cell(path: Path) -> CellRecord:
    """Read and validate a cell.json.

    Raises:
        ResultsError: it is missing, no JSON, or does not follow the schema.
    """
    return read_record(path, CellRecord)


def read_comparison(path: Path) -> Comparison:
    """Read and validate a comparison.json.

    Raises:
        ResultsError: it is missing, no JSON, or does not follow the schema.
    """
    return read_record(path, Comparison)
