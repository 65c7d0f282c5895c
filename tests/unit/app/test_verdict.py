"""Whether a run is judged by what it left."""

import hashlib
import json
from pathlib import Path
from typing import Any, get_origin

import pytest

from harmofl.app.simulator import Ending
from harmofl.app.verdict import Failure, judge, run_folder
from harmofl.evidence.results import FORMAT, Record, Results, RoundRecord, ScoreSummary, SiteResult

SITES = ("BIDMC", "HK")
GOOD = Ending(0)


def blank(record: type[Record]) -> dict[str, Any]:
    """An empty value of the right type for every field, whatever fields the schema has."""
    values: dict[str, Any] = {}
    for name, field in record.model_fields.items():
        kind = get_origin(field.annotation) or field.annotation
        values[name] = kind() if kind in (str, int, float, bool, dict, list) else None
    return values


def summary(mean: float | None) -> dict[str, Any]:
    counts = {"n": 0, "undefined": 1} if mean is None else {"n": 1, "undefined": 0}
    return blank(ScoreSummary) | counts | {"mean": mean, "per_case": [mean]}


def site_result(mean: float | None) -> dict[str, Any]:
    return blank(SiteResult) | {"test": {"dice": summary(mean)}}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """What a good run of one round leaves."""
    folder = run_folder(tmp_path)
    folder.mkdir(parents=True)
    for name in ("FL_global_model.pt", "best_FL_global_model.pt"):
        (folder / name).write_bytes(name.encode())
    change(
        folder / "results.json",
        **blank(Results)
        | {
            "format": FORMAT,
            "rounds": 1,
            "key_score": "dice",
            "sites": {site: site_result(0.5) for site in SITES},
            "sites_expected": list(SITES),
            "model_sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.pt")},
        },
    )
    change(folder / "round_metrics.jsonl", **blank(RoundRecord) | {"sites_accepted": list(SITES)})
    return tmp_path


def change(path: Path, **values: Any) -> None:
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(held | values) + "\n")


def log(workspace: Path, place: str, *lines: str) -> None:
    (workspace / place).mkdir(exist_ok=True)
    (workspace / place / "error_log.txt").write_text("".join(f"{line}\n" for line in lines))


def test_a_complete_run_is_good(workspace: Path) -> None:
    assert judge(workspace, SITES, GOOD) is None


def test_an_error_of_flare_alone_does_not_spoil_a_complete_run(workspace: Path) -> None:
    log(workspace, "server", "2026-01-01 10:00:01,000 - Cell - ERROR - [identity=server] - a message came late")
    assert judge(workspace, SITES, GOOD) is None


@pytest.mark.parametrize(
    "name", ["FL_global_model.pt", "best_FL_global_model.pt", "results.json", "round_metrics.jsonl"]
)
def test_a_missing_file_is_named(workspace: Path, name: str) -> None:
    (run_folder(workspace) / name).unlink()
    failure = judge(workspace, SITES, GOOD)
    assert failure is not None and failure.place == "server" and name in failure.reason


def test_a_model_that_is_not_the_one_of_the_results_is_named(workspace: Path) -> None:
    (run_folder(workspace) / "FL_global_model.pt").write_bytes(b"half")
    failure = judge(workspace, SITES, GOOD)
    assert failure is not None and "FL_global_model.pt is not the file" in failure.reason


def test_a_site_that_a_round_did_not_accept_is_named(workspace: Path) -> None:
    change(
        run_folder(workspace) / "round_metrics.jsonl", sites_accepted=["BIDMC"], sites_refused={"HK": "no_data: gone"}
    )
    failure = judge(workspace, SITES, GOOD)
    assert str(failure) == "site HK: not in the mean of round 0: no_data: gone"


def test_rounds_that_were_not_closed_are_a_failure(workspace: Path) -> None:
    change(run_folder(workspace) / "results.json", rounds=2)
    failure = judge(workspace, SITES, GOOD)
    assert str(failure) == "server: 1 of 2 rounds were closed"


def test_a_site_without_test_scores_is_named(workspace: Path) -> None:
    sites = {"BIDMC": site_result(0.5), "HK": site_result(0.5) | {"test": {}}}
    change(run_folder(workspace) / "results.json", sites=sites, sites_without_test=["HK"])
    assert str(judge(workspace, SITES, GOOD)) == "site HK: no test scores came back"


def test_an_undefined_test_score_is_no_failure(workspace: Path) -> None:
    sites = {"BIDMC": site_result(0.5), "HK": site_result(None)}
    change(run_folder(workspace) / "results.json", sites=sites, sites_without_test=["HK"])
    assert judge(workspace, SITES, GOOD) is None


@pytest.mark.parametrize(
    ("place", "line", "shown"),
    [
        ("server", "Controller - ERROR - [identity=server] - HK failed: no_data: nothing", "site HK: no_data: nothing"),
        ("server", "Aggregator - ERROR - [a] - HK: contribution refused: NaN", "site HK: contribution refused: NaN"),
        ("HK", "HarmoFLExecutor - ERROR - [identity=HK] - broken", "site HK: broken"),
        (
            "server",
            "SimulatorClientRunner - ERROR - Communication error with client HK: ",
            "site HK: its process ended before its work was done (Communication error with client HK)",
        ),
        (
            "server",
            "ServerRunner - ERROR - [a] - Aborting current RUN due to FATAL_SYSTEM_ERROR received: "
            "round 0: 1 of 2 sites accepted, 2 are needed (HK: no answer)",
            "site HK: round 0: 1 of 2 sites accepted, 2 are needed (HK: no answer)",
        ),
        (
            "server",
            "ServerRunner - ERROR - [a] - Aborting current RUN due to FATAL_SYSTEM_ERROR received: experiment.json: no",
            "server: experiment.json: no",
        ),
        (
            "server",
            "ServerRunner - ERROR - [a] - Aborting current RUN due to FATAL_SYSTEM_ERROR received: "
            "the amplitude of 0 sites arrived (BIDMC: sent none; HK: sent none)",
            "server: the amplitude of 0 sites arrived (BIDMC: sent none; HK: sent none)",
        ),
    ],
)
def test_the_first_error_of_a_failed_run_names_its_site(workspace: Path, place: str, line: str, shown: str) -> None:
    log(
        workspace,
        place,
        f"2026-01-01 10:00:01,000 - {line}",
        "2026-01-01 10:00:02,000 - Cell - ERROR - BIDMC failed: x",
    )
    assert str(judge(workspace, SITES, Ending(2))) == shown


def test_a_site_that_failed_once_fails_a_run_that_went_on(workspace: Path) -> None:
    log(workspace, "server", "2026-01-01 10:00:01,000 - Controller - ERROR - [a] - HK failed: out_of_memory: too big")
    assert judge(workspace, SITES, GOOD) == Failure("HK", "out_of_memory: too big")


def test_the_servers_words_about_the_first_site_carry_the_code(workspace: Path) -> None:
    log(workspace, "HK", "2026-01-01 10:00:01,000 - HarmoFLExecutor - ERROR - [a] - site HK has no case")
    log(
        workspace,
        "server",
        "2026-01-01 10:00:02,000 - Controller - ERROR - [a] - HK failed: no_data: site HK has no case",
    )
    assert str(judge(workspace, SITES, Ending(2))) == "site HK: no_data: site HK has no case"


def test_a_run_that_stood_still_names_the_stillest_site(tmp_path: Path) -> None:
    failure = judge(tmp_path, SITES, Ending(1, "HK", 720))
    assert failure is not None and failure.place == "HK" and "720 s" in failure.reason


def test_an_exit_code_without_any_reason_is_still_a_failure(workspace: Path) -> None:
    assert str(judge(workspace, SITES, Ending(-9))) == "server: FLARE exits with -9"
