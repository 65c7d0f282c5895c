"""What was made by other rules than this version's is refused by name; its model still serves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.app.grid import cells_of_other_rules
from harmofl.experiment import RULES, ExperimentError, rules_problem
from harmofl.flare.persistor import save_model_file
from harmofl.flare.rule_memory import keep_rules, refuse_other_rules
from harmofl.flare.site import SiteError
from harmofl.flare.state import Checkpoint, SiteState, save_atomically

BEFORE_NUMBERS = "amplitude rule 1, reading rule 1, split rule 1, sum rule 1, training rule 1"
NOW = ", ".join(f"{name} rule {RULES[name]}" for name in sorted(RULES))


@pytest.fixture
def saved(make_run, weights, tmp_path):
    """A run and the checkpoint that it left."""
    run = make_run()
    save_model_file(run.initial_weights(), run, 1, tmp_path / "FL_global_model.pt")
    return run, tmp_path / "FL_global_model.pt"


def without_rules(path: Path, rules: Any = ...) -> None:
    held = torch.load(path, weights_only=True)
    del held["harmofl"]["rules"]
    if rules is not ...:
        held["harmofl"]["rules"] = rules
    save_atomically(held, path)


def test_equal_rules_are_no_problem_and_others_are_named():
    assert rules_problem(dict(RULES)) == ""
    assert rules_problem({}) == f"made by {BEFORE_NUMBERS}; this version of harmofl has {NOW}"
    assert rules_problem(RULES | {"split": 1}) == "made by split rule 1; this version of harmofl has split rule 2"
    # of a later version
    assert (
        rules_problem(RULES | {"drawing": 2}) == "made by drawing rule 2; this version of harmofl has drawing rule none"
    )


def test_a_run_goes_on_from_a_checkpoint_of_its_own_rules(saved):
    run, path = saved
    run.continue_from(Checkpoint.load(path))
    assert run.start_round == 1


@pytest.mark.parametrize("rules", [..., RULES | {"split": 1}], ids=["before_numbers", "other_split"])
def test_no_run_goes_on_from_a_checkpoint_of_other_rules_but_the_model_loads(saved, rules):
    run, path = saved
    without_rules(path, rules)
    held = Checkpoint.load(path)
    assert held.model.keys() == run.initial_weights().keys()
    with pytest.raises(ExperimentError, match="checkpoint was made by .*split rule 1.*has .*split rule 2") as caught:
        run.continue_from(held)
    assert "start a new run, or use the harmofl version that made it" in str(caught.value)
    assert "\n" not in str(caught.value) and run.start_round == 0


def test_a_site_keeps_the_rules_with_the_first_state_of_a_run(tmp_path):
    refuse_other_rules(SiteState(tmp_path, "run1"))
    assert SiteState(tmp_path, "run1").is_empty, "looking writes nothing"
    keep_rules(SiteState(tmp_path, "run1"))
    SiteState(tmp_path, "run1").save_round(0, {"optimizer": {}})
    refuse_other_rules(SiteState(tmp_path, "run1"))


@pytest.mark.parametrize("rules", [None, RULES | {"split": 1}], ids=["before_numbers", "other_split"])
def test_a_site_s_state_of_other_rules_is_refused_by_name(tmp_path, rules):
    state = SiteState(tmp_path, "run1")
    state.save_round(0, {"optimizer": {}})
    if rules is not None:
        state.save_once("rules", rules)
    with pytest.raises(SiteError, match="this site's state of the run was made by .*split rule 1") as caught:
        refuse_other_rules(state)
    assert caught.value.code == "other_rules" and str(tmp_path) not in str(caught.value)
    assert state.load_round(0) == {"optimizer": {}}
    refuse_other_rules(SiteState(tmp_path, "run2"))


def test_cells_of_other_rules_are_counted_by_what_made_them(tmp_path, monkeypatch):
    class Held:
        def __init__(self, rules):
            self.key = self
            self.rules = rules

    made = {"a": RULES | {"split": 1}, "b": RULES | {"split": 1}, "c": dict(RULES), "d": {}}
    for name in made:
        (tmp_path / "cells" / name).mkdir(parents=True)
        (tmp_path / "cells" / name / "cell.json").touch()
    monkeypatch.setattr("harmofl.app.grid.read_cell", lambda path: Held(made[path.parent.name]))
    assert cells_of_other_rules(tmp_path) == [
        "2 cells here not used: made by split rule 1; this version of harmofl has split rule 2",
        f"1 cell here not used: made by {BEFORE_NUMBERS}; this version of harmofl has {NOW}",
    ]
    assert cells_of_other_rules(tmp_path / "new") == []
