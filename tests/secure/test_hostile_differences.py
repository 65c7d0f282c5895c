"""Drills: one site sends a difference that no training makes. The server names it in the round in which it comes."""

from typing import Any

import pytest

from tests.secure.conftest import Drill, Lead, Outcome, last_lines
from tests.secure.consortium import SERVER, Consortium

pytestmark = pytest.mark.slow
# enough training for a score that can fall
LEARNS: dict[str, Any] = {
    "federation.rounds": 4,
    "training.local_epochs": 4,
    "training.batch_size": 4,
    "network.width": 8,
    "demo.data.cases": 8,
}


@pytest.fixture(scope="module")
def honest(lead: Lead) -> Outcome:
    """The same job with honest sites."""
    return lead.run(lead.bundle(LEARNS))


def key_score(outcome: Outcome) -> float:
    """Mean test score over sites of the best model."""
    results = outcome.results
    return results.mean_over_sites[results.key_score] or 0.0


def after_round_1(outcome: Outcome) -> float:
    """Mean validation score of the model that came out of round 1."""
    return outcome.rounds[2].validation_mean or 0.0


def hostile(lead: Lead, name: str, bound: float | None) -> Outcome:
    """The job with HK hostile in round 1."""
    settings = {**LEARNS, "federation.norm_bound": bound}
    return lead.run(lead.bundle(settings, executor=f"misbehaving_norms.{name}"))


def said_by_server(consortium: Consortium, outcome: Outcome) -> str:
    """The server's log of a job."""
    logs = [*outcome.folder.rglob("log.txt"), consortium.kit(SERVER) / "log.txt"]
    return "".join(path.read_text(errors="replace") for path in logs)


def test_honest_sites_are_never_outliers(honest: Outcome, drill: Drill) -> None:
    """Honest sites: none is an outlier or scaled, and every round's norms are in the record and in watch's lines."""
    assert honest.code == 0, honest.lines
    assert all(not record.outliers and not record.scaled and not record.fall for record in honest.rounds)
    assert all(set(record.norm) == {"BIDMC", "HK", "UCL"} for record in honest.rounds)
    drill.saw("; ".join(line for line in honest.lines if "norms a step" in line))
    drill.saw(f"test Dice {key_score(honest):.3f}, validation after round 1 {after_round_1(honest):.3f}")


def test_1e30_is_bounded(lead: Lead, consortium: Consortium, honest: Outcome, drill: Drill) -> None:
    """A site sends 1e30 in each weight in round 1, norm_bound 10: the run finishes, the record names site and norm,
    the score stays near that of honest sites.
    """
    outcome = hostile(lead, "Huge", 10.0)
    assert outcome.code == 0, outcome.lines
    record = outcome.rounds[1]
    assert list(record.outliers) == list(record.scaled) == ["HK"] and record.norm["HK"] > 1e28
    assert "HK is an outlier in round 1" in said_by_server(consortium, outcome)
    assert any("HK: an outlier in 1 of 4 rounds" in warning for warning in outcome.results.warnings)
    assert key_score(outcome) > key_score(honest) - 0.1
    drill.saw(last_lines(said_by_server(consortium, outcome), "HK is an outlier"))
    drill.saw(f"test Dice {key_score(outcome):.3f}, validation after round 1 {after_round_1(outcome):.3f}")


def test_1e30_without_a_bound_is_refused_by_site_and_entry(lead: Lead, drill: Drill) -> None:
    """The same with norm_bound null: it does not fit into the sum, and the job ends with the name of HK."""
    outcome = hostile(lead, "Huge", None)
    assert outcome.code == 1
    assert len(outcome.rounds) == 1, "no model came out of round 1"
    failed = next(line for line in outcome.lines if line.startswith("failed"))
    assert "HK" in failed and "set federation.norm_bound" in failed
    drill.saw(failed)


@pytest.mark.parametrize("bound", [10.0, None], ids=["bounded", "unbounded"])
def test_a_reversed_difference(
    lead: Lead, consortium: Consortium, honest: Outcome, drill: Drill, bound: float | None
) -> None:
    """A site sends -10 times its difference in round 1, with norm_bound 10 and with null: the run finishes, the site
    is named as an outlier in round 1 and, as the score falls, as the one that points away; the best model stays.
    """
    outcome = hostile(lead, "Reversed", bound)
    assert outcome.code == 0, outcome.lines
    assert list(outcome.rounds[1].outliers) == ["HK"]
    assert outcome.rounds[1].cosine["HK"] < min(outcome.rounds[1].cosine[site] for site in ("BIDMC", "UCL"))
    assert "HK is an outlier in round 1" in said_by_server(consortium, outcome)
    if outcome.rounds[2].fall:
        assert "point away from the rest: HK (cosine" in outcome.rounds[2].fall
    # the model of round 0, which nobody has harmed, or a better one
    assert outcome.results.best_round != 1 and key_score(outcome) > key_score(honest) - 0.25
    drill.saw(last_lines(said_by_server(consortium, outcome), "HK is an outlier"))
    drill.saw(f"{outcome.rounds[2].fall or 'no sharp fall'}; test Dice {key_score(outcome):.3f}")
