"""Rounds that do not score the received model: which do, what is the best model then, and that nothing else changes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.core.norm_rule import SentDifference
from harmofl.evidence.curves import validation_points
from harmofl.evidence.results import ROUNDS_FILE, read_rounds
from harmofl.experiment import Experiment, FederationSettings, resolve, set_key
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.live import progress
from harmofl.flare.participant import Participant
from harmofl.flare.persistor import keep_received_if_best, save_at_the_end, save_model_file
from harmofl.flare.record import _results, close_round
from harmofl.flare.round_norms import fall_line
from harmofl.flare.server_run import ServerRun
from harmofl.flare.server_store import FINAL_MODEL
from harmofl.flare.state import Checkpoint
from harmofl.tasks import resolve_experiment


def federation(rounds: int, every: int) -> FederationSettings:
    return FederationSettings(rounds=rounds, minimum_sites=1, validate_every=every)


def model_of(round_number: int) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), round_number, np.float32)}


def answer_to(run: ServerRun, number: int, scores: dict[str, float]) -> None:
    """Every site of an honest version sends a score only where one is due."""
    due = run.experiment.federation.validates(number)
    run.numbers = {site: {"validation": score} if due else {} for site, score in scores.items()}
    record = close_round(run, number, sorted(scores))
    keep_received_if_best(run, record, model_of(number - 1))


def test_every_third_of_eight_rounds_and_the_last_one() -> None:
    settings = federation(8, 3)
    assert [number for number in range(8) if settings.validates(number)] == [0, 3, 6, 7]
    assert settings.share_validated == 4 / 8
    # the last one is in step: 0, 3, 6
    assert federation(7, 3).share_validated == 3 / 7
    # of one round, and of fewer rounds than the number
    assert federation(1, 5).share_validated == 1 and federation(4, 50).share_validated == 2 / 4


@given(rounds=st.integers(1, 200), every=st.integers(1, 250))
def test_the_share_counts_the_rounds_that_score(rounds: int, every: int) -> None:
    settings = federation(rounds, every)
    scored = [number for number in range(rounds) if settings.validates(number)]
    assert settings.share_validated == len(scored) / rounds
    assert scored[0] == 0 and scored[-1] == rounds - 1
    assert all(later - earlier <= every for earlier, later in zip(scored, scored[1:], strict=False))


def test_the_default_scores_every_round_and_leaves_the_hash_as_it_was(written: dict[str, Any]) -> None:
    plain = resolve(written)
    assert all(plain.federation.validates(number) for number in range(plain.federation.rounds))
    set_key(written, "federation.validate_every", 1)
    assert resolve(written).hash == plain.hash
    set_key(written, "federation.validate_every", 2)
    assert resolve(written).hash != plain.hash, "it decides which model can be the best one"


# the score of the model that came out of each round, the untrained one first
SCORES = [0.1, 0.5, 0.9, 0.3, 0.6, 0.4]


@pytest.mark.parametrize(
    ("every", "final", "best"),
    [
        # models 0 to 3 are scored in rounds 1 to 4, and the last one in the end
        (1, 0.4, 1),
        # round 2 scores the model of round 1, round 4 that of round 3
        (2, 0.4, 1),
        # round 3 scores the model of round 2 (0.3), round 4 that of round 3 (0.6): the best one, of round 1, is missed
        (3, 0.4, 3),
        # only the untrained model, that of round 3 and the last one
        (9, 0.4, 3),
        (9, 0.7, 4),
    ],
)
def test_the_best_model_is_one_of_those_that_were_scored(
    make_run: Callable[..., ServerRun], every: int, final: float, best: int
) -> None:
    run = make_run({"federation.rounds": 5, "federation.validate_every": every})
    for number in range(5):
        answer_to(run, number, {"A": SCORES[number], "B": SCORES[number]})
    save_at_the_end(model_of(4), run, {"A": final, "B": final}, 5)
    assert run.best_round == best
    told = _results(run, {site: {"validation": final} for site in "AB"})
    shown = f"over sites, of the models that were scored (federation.validate_every {every}): "
    assert (shown in told.best_reason) == (every > 1)
    assert told.experiment["federation"]["validate_every"] == every


def test_a_score_that_nobody_asked_for_decides_nothing(make_run: Callable[..., ServerRun]) -> None:
    """Else one site that sends scores in such a round alone would choose the best model."""
    run = make_run({"federation.rounds": 5, "federation.validate_every": 2})
    for number in range(4):
        answer_to(run, number, {"A": SCORES[number], "B": SCORES[number]})
        if number == 1:
            run.rounds.replace([run.rounds[0]])
            run.numbers["B"] = {"validation": 1.0}
            keep_received_if_best(run, close_round(run, 1, ["A", "B"]), model_of(0))
            assert run.best_round is None and run.rounds[1].validation == {"A": None, "B": None}
    assert run.best_round == 1


def test_a_fall_between_two_scores_names_all_rounds_between_them(make_run: Callable[..., ServerRun]) -> None:
    run = make_run({"federation.rounds": 9, "federation.validate_every": 3})
    away = {1: "C", 2: "B"}
    for number in range(4):
        if number == 3:
            run.best_round = 1
        for site in "ABC":
            held = np.array((-1.0, 0.0) if away.get(number) == site else (1.0, 0.0))
            note = "norm 9 a step" if (number, site) == (1, "C") else ""
            run.sent[site] = SentDifference(1.0, 1.0, note, held)
        # 0.6 in round 0; 0.1 in round 3, which is that of the model after rounds 0 to 2
        answer_to(run, number, dict.fromkeys("ABC", 0.6 if number == 0 else 0.1))
    assert [record.fall != "" for record in run.rounds] == [False, False, False, True]
    assert run.rounds[3].fall == (
        "validation fell from 0.600 to 0.100 with rounds 0 to 2: the differences of these sites point away from the "
        "rest: B (cosine -1.00 in round 2), C (cosine -1.00 in round 1); C in round 1: norm 9 a step; the best model, "
        "of round 1, stays"
    )
    # the next score is that of round 6, three rounds later
    assert fall_line(run, {"A": 0.1}) == "" and "with round 3:" in fall_line(run, dict.fromkeys("ABC", 0.01))


def test_a_resumed_run_scores_the_rounds_that_the_undisturbed_one_would(
    make_run: Callable[..., ServerRun], tmp_path: Path
) -> None:
    run = make_run({"federation.rounds": 7, "federation.validate_every": 3})
    for number in range(2):
        answer_to(run, number, {"A": SCORES[number], "B": SCORES[number]})
    save_model_file(model_of(1), run, 2, run.folder / FINAL_MODEL)
    again = ServerRun(run.experiment, False, tmp_path, run.expected)
    again.continue_from(Checkpoint.load(run.folder / FINAL_MODEL), run.folder / ROUNDS_FILE)
    assert again.start_round == 2 and again.best_round is None
    for number in range(2, 4):
        answer_to(again, number, {"A": SCORES[number], "B": SCORES[number]})
    assert [record.validation_mean for record in again.rounds] == [0.1, None, None, pytest.approx(0.3)]
    assert again.best_round == 2
    assert [told["scored"] for told in progress(again)["closed"]] == [False, True]


def test_a_curve_leads_over_the_rounds_that_did_not_score(make_run: Callable[..., ServerRun]) -> None:
    run = make_run({"federation.rounds": 5, "federation.validate_every": 2})
    for number in range(5):
        answer_to(run, number, {"A": SCORES[number]})
    save_at_the_end(model_of(4), run, {"A": 0.4}, 5)
    points = validation_points(
        _results(run, {"A": {"validation": 0.4}}), read_rounds(run.folder / "round_metrics.jsonl")
    )
    assert points["A"] == {0: 0.1, 2: 0.9, 4: 0.6, 5: 0.4}


@pytest.fixture
def small(written: dict[str, Any]) -> Callable[[int], Experiment]:
    written["demo"] = {"data": {"cases": 3, "matrix": 64, "slices": 3}}
    for key, value in {"federation.rounds": 4, "amplitude.minimum_cases": 1, "training.learning_rate": 0.5}.items():
        set_key(written, key, value)

    def make(every: int) -> Experiment:
        set_key(written, "federation.validate_every", every)
        return resolve_experiment(written, demo=True)

    return make


def test_training_is_that_of_a_run_that_scores_every_round(
    small: Callable[[int], Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    evaluate = Participant._evaluate

    def watched(self: Participant, network: Any, normalization: Any, split: Any, which: str) -> Any:
        scored.append(which if split == "validation" else split)
        return evaluate(self, network, normalization, split, which)

    monkeypatch.setattr(Participant, "_evaluate", watched)
    logging.getLogger("harmofl").setLevel(logging.WARNING)
    models = []
    for every in (1, 3):
        scored.clear()
        run = InProcessFederation(small(every), ["HK", "UCL"], tmp_path / str(every), shared_data=tmp_path / "shared")
        monkeypatch.setattr("harmofl.flare.in_process.write_evidence", lambda *_: None)
        run.run()
        models.append(run.weights)
        # rounds 0 and 3, of which the last one is in step; the last model is always scored
        assert scored.count("received") == 2 * (4 if every == 1 else 2) and scored.count("final") == 2
        records = read_rounds(tmp_path / str(every) / "run" / "round_metrics.jsonl")
        assert [record.validation_mean is not None for record in records] == (
            [True] * 4 if every == 1 else [True, False, False, True]
        )
    assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])
