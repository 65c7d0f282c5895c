"""Which cases a page shows, and that it says where they are not those that the run scored."""

from math import nan

import numpy as np
import pytest

from harmofl.evidence.definitions import definition
from harmofl.evidence.examples import best_median_worst, disagreement
from harmofl.evidence.results import ScoreSummary
from harmofl.tasks.answers import Illustration


def case(score: float) -> Illustration:
    return Illustration(np.zeros((2, 2)), score, "")


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([0.5, 0.9, 0.1, 0.7, 0.3], {"best": 0.9, "median": 0.5, "worst": 0.1}),
        ([0.2, nan, 0.4], {"best": 0.4, "worst": 0.2}),
        ([nan, 0.6], {"the only one": 0.6}),
        ([nan], {}),
        ([], {}),
    ],
)
def test_best_median_and_worst(scores, shown):
    assert {title: held.score for title, held in best_median_worst([case(score) for score in scores])} == shown


@pytest.mark.parametrize(
    ("now", "then", "said"),
    [
        ([0.5, 0.7], [0.5, 0.7], ""),
        ([0.51, 0.7], [0.5, 0.7], ""),  # another device
        ([0.5, nan], [0.5, None], ""),
        ([0.6, 0.7], [0.5, 0.7], "of 2 cases 1 with another score than in the run (0.600 for 0.500)"),
        ([nan, 0.7], [0.5, 0.7], "of 2 cases 1 with another score"),
        ([0.5], [0.5, 0.7], "the run tested 2 cases here, this folder gives 1"),
        ([0.5], [], ""),  # scored over all images together
    ],
)
def test_other_scores_than_the_runs_are_said(now, then, said):
    recorded = ScoreSummary(mean=None, low=None, high=None, n=0, undefined=0, per_case=then)
    told = disagreement([case(score) for score in now], recorded)
    assert said in told if said else told == ""


def test_every_score_of_the_tasks_has_a_definition():
    names = ["dice", "published_dice", "accuracy", "accuracy_by_slide", "auroc", "sensitivity", "specificity"]
    assert not [name for name in names if definition(name) == "defined by the task"]
    assert definition("dice_epithelial") == "Dice of the class epithelial alone"
    assert definition("mine") == "defined by the task"
