"""The schema of evaluation.json: how a model scores on the images of one hospital."""

from pathlib import Path
from typing import Literal

from harmofl.evidence.results import Record, ScoreSummary, read_record

EVALUATION_FILE = "evaluation.json"
FORMAT = 2


class ModelRecord(Record):
    """The model: its file and SHA-256, and the run that made it."""

    file: str
    sha256: str
    run_id: str
    experiment: str
    experiment_hash: str
    task: str
    network: str
    rounds: int


class FindingRecord(Record):
    """One finding about the folder; it names files."""

    severity: Literal["error", "warning", "notice"]
    code: str
    subject: str
    message: str
    fix: str


class Evaluation(Record):
    """evaluation.json; it holds names of cases and files, so it stays where the images are.

    `names` belong to the lists `per_case` of `scores`, in order.
    """

    format: int
    model: ModelRecord
    data: str
    site: str | None
    own_profile: str | None
    unit: str
    names: list[str]
    skipped: dict[str, int]
    scores: dict[str, ScoreSummary]
    rules: list[str]
    findings: list[FindingRecord]
    versions: dict[str, str]
    seconds: float


def read_evaluation(path: Path) -> Evaluation:
    """Read and validate evaluation.json.

    Raises:
        ResultsError: the file is missing, no JSON, or does not follow the schema.
    """
    return read_record(path, Evaluation)
