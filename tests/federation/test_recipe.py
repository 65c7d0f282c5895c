"""A recipe in FLARE's simulation environment gives the weights of the job folder in FLARE's simulator."""

from pathlib import Path

import pytest
from nvflare.recipe import SimEnv

from harmofl.flare.recipe import HarmoFLRecipe
from tests.federation.conftest import Run, make_job, simulate
from tests.federation.test_invariants import assert_same_bits, saved_weights

SITES = ["BIDMC", "HK"]
CHANGES = {"federation.rounds": 1, "training.learning_rate": 0.002, "seed": 11}


@pytest.mark.slow
def test_recipe_and_job_folder_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, flares = tmp_path / "recipe", tmp_path / "folder"
    ours.mkdir()
    flares.mkdir()
    monkeypatch.setenv("HOME", str(ours))
    for variable in ("HARMOFL_DATA_ROOT", "HARMOFL_STATE_ROOT", "NVFLARE_SIMULATOR_WORKSPACE_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    original = make_job(ours, SITES, {})
    before = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    run = HarmoFLRecipe(original, CHANGES).execute(SimEnv(num_clients=2, workspace_root=str(ours / "workspaces")))
    assert run is not None
    by_recipe = Run(0, "", Path(str(run.get_result())))
    assert {path: path.read_bytes() for path in original.rglob("*") if path.is_file()} == before
    by_folder = simulate(make_job(flares, SITES, CHANGES), flares, len(SITES), {})
    assert by_folder.code == 0, by_folder.output
    assert by_recipe.results.experiment["seed"] == 11
    assert by_recipe.results.experiment_hash == by_folder.results.experiment_hash
    assert_same_bits(saved_weights(by_recipe), saved_weights(by_folder))
