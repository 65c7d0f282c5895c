"""The schema of results.json and of the lines of round_metrics.jsonl."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from harmofl.core.clustered import NO_INTERVAL, Why
from harmofl.experiment import Precision
from harmofl.sections import one_line, parse_json

FORMAT = 2
RESULTS_FILE, ROUNDS_FILE, REPORT_FILE = "results.json", "round_metrics.jsonl", "report.html"


TOO_FEW = "not sent: too few patients"


class ResultsError(ValueError):
    """A results file that does not follow the schema; one line with file and key."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Record(BaseModel):
    """A part of the evidence: unknown keys are refused, numbers are finite or null."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


Schema = TypeVar("Schema", bound=Record)


class ScoreSummary(Record):
    """A score over one split: mean, 95 % interval over patients, how many were scored.

    Attributes:
        mean: null where it is undefined.
        low: lower bound; null where there is no interval.
        high: upper bound; null where there is no interval.
        no_interval: why there is none.
        n: cases that have the score, or images.
        undefined: cases that do not have it.
        patients: independent units of the interval.
        per_case: of a mean over cases, each of them.
        patient_of_case: number of the patient of each of these; empty where each case is of a patient of its own.
        by_patient: of a share, for each patient the images that count for it and all its images.
    """

    mean: float | None
    low: float | None
    high: float | None
    no_interval: Why | None = None
    n: int
    undefined: int
    patients: int = 0
    per_case: list[float | None]
    patient_of_case: list[int] = []
    by_patient: list[tuple[int, int]] = []

    @property
    def points(self) -> list[float]:
        """What lies behind the mean: the scores of the cases, or of a share that of each patient."""
        cases = [score for score in self.per_case if score is not None]
        return cases or [counted / of for counted, of in self.by_patient if of]

    @property
    def interval_text(self) -> str:
        """`0.812 to 0.934`, or in words why there is none; empty for an undefined score."""
        if self.low is not None and self.high is not None:
            return f"{self.low:.3f} to {self.high:.3f}"
        return NO_INTERVAL[self.no_interval] if self.no_interval and self.mean is not None else ""


Positive = Annotated[float, Field(gt=0)]


class NoiseStatement(Record):
    """What a site says about the noise on the amplitude that it sent: one release, private per patient.

    `sigma` is the standard deviation of the noise, for a mean over `patients` whose parts were clipped to `clip`.
    """

    mechanism: Literal["analytic_gaussian"]
    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    clip: Positive
    patients: Annotated[int, Field(ge=1, strict=True)]
    sigma: Positive


class SiteResult(Record):
    """One site: what it used, skipped and warned of, by code; how the models score there; what left it.

    `amplitude_patients` are those behind the amplitude that it sent; None where it sent none, or a run did not tell.
    `not_sent` names the scores of too few patients, by `validation` and the models; `limits` are the site's own.
    `releases` counts amplitudes of the task over all jobs, as the site's ledger says: `new`, `repeated` and `withheld`;
    empty in simulation. `precision` is what its device computed the network in, None where a run did not tell.
    """

    cases_used: dict[str, int]
    cases_skipped: dict[str, int]
    data_warnings: dict[str, int] = {}
    validation: float | None
    test: dict[str, ScoreSummary]
    test_final_model: dict[str, ScoreSummary]
    bytes_sent: dict[str, int]
    rounds_accepted: int
    amplitude_sent: bool
    amplitude_patients: int | None = None
    amplitude_noise: NoiseStatement | None
    not_sent: dict[Literal["validation", "final", "best"], list[str]] = {}
    limits: dict[str, StrictBool | int | list[str]] = {}
    releases: dict[str, int] = {}
    precision: Precision | None = None

    def missing(self, score: str, model: str = "best") -> str:
        """In words, why a score that this site does not show is not there."""
        few = score in self.not_sent.get(model, [])  # type: ignore[call-overload]
        return TOO_FEW if few else "undefined"


class RoundRecord(Record):
    """One round: scores are of the model that the round began with, losses of its training.

    Attributes:
        norm: by site the L2 norm of what training changed of the parameters, by training step, as it was sent.
        scaled: by site what its difference was multiplied by before it was added, where `federation.norm_bound` asked.
        outliers: by site in one line why its difference stands out.
        cosine: by site the mean of the cosines between its difference and each of the others, estimated from random
            projections of 1024 numbers, within about 0.1; none where fewer than two sites changed anything.
        fall: in one line what is known where the validation score fell sharply with the round before; else empty.
    """

    round: int
    model_sha256: str
    validation: dict[str, float | None]
    validation_mean: float | None
    loss: dict[str, float | None]
    steps: dict[str, int]
    skipped_steps: dict[str, int]
    seconds: dict[str, float]
    sites_accepted: list[str]
    sites_refused: dict[str, str]
    bytes_sent: dict[str, int]
    server_resident_mib: float
    norm: dict[str, float] = {}
    scaled: dict[str, float] = {}
    outliers: dict[str, str] = {}
    cosine: dict[str, float] = {}
    fall: str = ""


class WorstSite(Record):
    """The site with the lowest mean of the key score."""

    site: str
    mean: float


class AmplitudeRecord(Record):
    """How the global amplitude came about."""

    sites: list[str]
    images: int


class Results(Record):
    """results.json."""

    format: int
    experiment: dict[str, Any]
    experiment_hash: str
    run_id: str
    method: str
    demo: bool
    seed: int
    rounds: int
    best_round: int
    best_reason: str
    best_sites: list[str] = []
    key_score: str
    score_note: str
    sites: dict[str, SiteResult]
    mean_over_sites: dict[str, float | None]
    mean_over_sites_final_model: dict[str, float | None]
    worst_site: WorstSite | None
    sites_expected: list[str]
    sites_accepted: list[list[str]]
    sites_without_test: list[str]
    warnings: list[str]
    amplitude: AmplitudeRecord | None
    privacy: str
    model_sha256: dict[str, str]
    versions: dict[str, str]
    seconds: float
    rules: dict[str, int] = {}


def privacy_sentence(senders: Sequence[str], noise: Mapping[str, NoiseStatement]) -> str:
    """What is guaranteed about what left the sites, and what is not.

    Args:
        senders: sites whose amplitude is in the global one.
        noise: by site, what was said about the noise on it.
    """
    private = [site for site in senders if site in noise]
    if not private:
        amplitude = " and one mean amplitude" if senders else ""
        return f"no formal guarantee: no noise is added; weight differences{amplitude} leave a site"
    by_terms: dict[str, list[str]] = {}
    for site in private:
        terms = f"epsilon {noise[site].epsilon:g}, delta {noise[site].delta:g}"
        by_terms.setdefault(terms, []).append(site)
    said = "; ".join(f"{terms}: {', '.join(sites)}" for terms, sites in by_terms.items())
    return (
        f"the amplitude of {len(private)} of the {len(senders)} sites that sent one is (epsilon, delta)-differentially "
        f"private per patient by clipping and the analytic Gaussian mechanism, one release a run ({said}); weight "
        "differences carry no noise, so the run as a whole has no formal guarantee"
    )


def read_results(path: Path) -> Results:
    """Read and validate results.json.

    Raises:
        ResultsError: the file is missing, no JSON, of another format, or does not follow the schema.
    """
    return read_record(path, Results, "; did the run finish?", _refuse_other_format)


def read_record(
    path: Path, schema: type[Schema], question: str = "", check: Callable[[Path, str], None] = lambda path, text: None
) -> Schema:
    """Read a part of the evidence and validate it.

    Args:
        path: a JSON file.
        schema: what it must follow.
        question: what to ask whoever has no such file.
        check: looks at the text first and says better what is wrong with a file of another kind.

    Raises:
        ResultsError: the file is missing, no JSON, or does not follow the schema; names file and key.
    """
    text = _text_of(path, question)
    try:
        check(path, text)
        return schema.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise ResultsError(f"{path}: {key}: {problem['msg']}") from None


def _text_of(path: Path, question: str = "") -> str:
    with _readable(path, question):
        return path.read_text(encoding="utf-8")


@contextmanager
def _readable(path: Path, question: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read ({error.strerror}){question}") from None
    except UnicodeDecodeError:
        raise ResultsError(f"{path}: is not UTF-8 text; take the file as the run left it") from None


def _refuse_other_format(path: Path, text: str) -> None:
    try:
        held = parse_json(text)
    except ValueError:  # said better where the schema is checked
        return
    found = held.get("format", FORMAT) if isinstance(held, dict) else FORMAT
    if found != FORMAT:
        raise ResultsError(f"{path}: is of format {found}, this harmofl reads {FORMAT}; use the version that wrote it")


def read_rounds(path: Path) -> list[RoundRecord]:
    """Read and validate round_metrics.jsonl.

    Raises:
        ResultsError: the file is missing or a line does not follow the schema; names the line.
    """
    return list(iterate_rounds(path))


def iterate_rounds(path: Path) -> Iterator[RoundRecord]:
    """The records of round_metrics.jsonl, one at a time, so that those of many rounds and sites need no memory.

    A last line without its end, behind others, was being written when the process was killed: no such round was closed.

    Raises:
        ResultsError: see `read_rounds`.
    """
    for number, line in enumerate(_lines_of(path), start=1):
        try:
            yield RoundRecord.model_validate_json(line)
        except ValidationError as error:
            if number > 1 and not line.endswith("\n"):
                return
            raise ResultsError(f"{path}: line {number}: {error.errors()[0]['msg']}") from None


def _lines_of(path: Path) -> Iterator[str]:
    with _readable(path), path.open(encoding="utf-8") as file:
        yield from file
