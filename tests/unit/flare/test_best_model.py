"""The best model is there after any run that has one. A29."""

import math

import pytest

from harmofl.flare.persistor import save_at_the_end
from harmofl.flare.record import close_round, mean_validation
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.state import Checkpoint


def test_a29_a_run_of_one_round_leaves_a_best_and_a_final_model(make_run, weights) -> None:
    """What the only round made is scored at the end, and nowhere else."""
    run = make_run({"federation.rounds": 1})
    save_at_the_end(weights, run, {"A": 0.4}, 1)
    assert (run.best_round, run.best_score) == (0, 0.4)
    best, final = (Checkpoint.load(run.folder / name) for name in (BEST_MODEL, FINAL_MODEL))
    assert best.next_round == final.next_round == 1


@pytest.mark.parametrize("score", [math.nan, math.inf, None])
def test_a29_one_site_without_a_finite_score_does_not_hide_the_best_round(make_run, weights, numbers, score) -> None:
    run = make_run({"federation.rounds": 1})
    run.model_sha256 = "f" * 64
    for site, told in (("A", 0.5), ("B", 0.75), ("C", score)):
        run.numbers[site] = dict(numbers) | {"validation": told}
    record = close_round(run, 0, ["A", "B", "C"])
    # (0.5 + 0.75) / 2
    told_by_site = {"A": 0.5, "B": 0.75, "C": score}
    assert record.validation_mean == 0.625 == mean_validation(told_by_site)
    save_at_the_end(weights, run, told_by_site, 1)
    assert (run.folder / BEST_MODEL).is_file()
