"""Reading a job folder and applying --set."""

import json
from pathlib import Path

import pytest

from harmofl.app.job import read_job
from harmofl.experiment import ExperimentError


def test_sites_are_those_of_the_deploy_map_without_the_server(job: Path) -> None:
    assert read_job(job, []).sites == ("BIDMC", "HK")


def test_a_setting_reaches_the_experiment_and_the_copy_but_not_the_job(job: Path, tmp_path: Path) -> None:
    before = (job / "app/config/experiment.json").read_bytes()
    changed = read_job(job, ["training.local_epochs=3", "perturbation.alpha=0.1"])
    experiment = changed.resolve(demo=False)
    assert (experiment.training.local_epochs, experiment.perturbation.alpha) == (3, 0.1)
    copy = changed.copy_to(tmp_path / "copies")
    assert json.loads((copy / "app/config/experiment.json").read_text())["training"]["local_epochs"] == 3
    assert (copy / "app/custom/README.md").is_file()
    assert (job / "app/config/experiment.json").read_bytes() == before


def test_what_is_set_wins_over_the_demos_override(job: Path) -> None:
    # the small job's demo overrides federation.rounds with 1
    assert read_job(job, ["federation.rounds=5"]).resolve(demo=True).federation.rounds == 5


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("training.local_epoch=2", "did you mean 'training.local_epochs'?"),
        ("training.local_epochs=two", "training.local_epochs"),
        ("training.local_epochs", "section.key=value"),
        ("demo.overrides.federation.rounds=2", "wins over the demo's overrides"),
    ],
)
def test_a_wrong_assignment_is_named(job: Path, assignment: str, part: str) -> None:
    with pytest.raises(ExperimentError) as error:
        read_job(job, [assignment]).resolve(demo=True)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_setting_that_the_method_would_undo_is_refused(job: Path) -> None:
    # fedavg sets perturbation.alpha to 0
    with pytest.raises(ExperimentError, match=r"--set perturbation.alpha=0.1: method 'fedavg' makes it 0"):
        read_job(job, ["method=fedavg", "perturbation.alpha=0.1"]).resolve(demo=False)
