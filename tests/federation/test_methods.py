"""Methods in FLARE's simulator: what travels, what stays, what a resumed run goes on with. C10, C11."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.app.simulator import Ending
from harmofl.app.verdict import judge
from tests.federation.conftest import RunJob
from tests.federation.drills import CONTROLLERS
from tests.federation.test_invariants import assert_same_bits, saved_weights

SITES = ["BIDMC", "HK"]


def site_state(root: Path, site: str, run_id: str, round_number: int) -> dict[str, Any]:
    path = root / site / "state" / run_id / f"round_{round_number:06d}.pt"
    held: dict[str, Any] = torch.load(path, weights_only=True)
    return held


@pytest.mark.slow
def test_a22_c10_c11_a_resumed_run_equals_an_undisturbed_one(run_job: RunJob, tmp_path: Path) -> None:
    """Both parts of the method, norm layers that stay at their site, and moments at the server.

    With one thread every task of every site is a new process, with two a site has one for the whole run: that changes
    nothing either. The server is lost after its second round.
    """
    changes = {
        "federation.rounds": 3,
        "federation.local_layers": "norm",
        "network.norm": "batch",
        "federation.server_optimizer": "adam",
        "federation.server_learning_rate": 0.01,
    }
    states = [tmp_path / name for name in ("first", "second")]
    environments = [{"HARMOFL_STATE_ROOT": str(path), "OMP_NUM_THREADS": "1"} for path in states]
    whole = run_job(SITES, changes, name="whole", threads=2, environment=environments[0])
    lost = run_job(
        SITES,
        changes,
        name="lost",
        threads=1,
        environment=environments[1],
        controller="drill.StopsAfterRoundOne",
        code=CONTROLLERS,
    )
    assert lost.code != 0 and "the server is lost" in lost.output
    checkpoint = {"federation.resume_from": str(lost.server / "FL_global_model.pt")}
    resumed = run_job(SITES, changes | checkpoint, name="resumed", threads=1, environment=environments[1])
    assert whole.code == resumed.code == 0, whole.output + resumed.output
    assert "resumed at round 2" in resumed.output
    for name in ("FL_global_model.pt", "best_FL_global_model.pt"):
        assert_same_bits(saved_weights(whole, name), saved_weights(resumed, name))
    assert whole.results.best_round == resumed.results.best_round
    assert [record.validation for record in whole.rounds] == [record.validation for record in resumed.rounds]
    assert {site: result.test for site, result in whole.results.sites.items()} == {
        site: result.test for site, result in resumed.results.sites.items()
    }
    local = [
        [site_state(root, site, run.results.run_id, 2)["local"] for site in SITES]
        for root, run in zip(states, (whole, resumed), strict=True)
    ]
    for one, other in zip(*local, strict=True):
        assert_same_bits({k: v.numpy() for k, v in one.items()}, {k: v.numpy() for k, v in other.items()})
    first, second = local[0]
    weights = [name for name in first if name.endswith(".weight")]
    assert weights and not any(torch.equal(first[name], second[name]) for name in weights)
    assert "no usable norm layers" in " ".join(whole.results.warnings)


@pytest.mark.slow
def test_local_only_sends_numbers_and_is_judged_complete(run_job: RunJob) -> None:
    run = run_job(SITES, {"method": "local_only"})
    assert run.code == 0 and judge(run.workspace, SITES, Ending(0)) is None, run.output
    results = run.results
    for result in results.sites.values():
        assert result.bytes_sent["weights"] == result.bytes_sent["amplitude"] == 0 < result.bytes_sent["numbers"]
        assert result.test["dice"].n > 0
    assert results.model_sha256 == {} and not (run.server / "best_FL_global_model.pt").exists()
    assert "only numbers leave a site" in results.privacy and "no global model" in " ".join(results.warnings)


@pytest.mark.slow
def test_central_trains_one_site_on_all_data_and_scores_every_site(run_job: RunJob) -> None:
    run = run_job(SITES, {"method": "central"})
    assert run.code == 0 and judge(run.workspace, SITES, Ending(0)) is None, run.output
    for record in run.rounds:
        assert record.sites_accepted == SITES and record.steps["HK"] == 0 < record.steps["BIDMC"]
        assert set(record.validation) == set(SITES)
    assert all(result.test["dice"].n > 0 for result in run.results.sites.values())
    assert run.results.sites["HK"].bytes_sent["weights"] == 0
    assert "only a simulation can" in " ".join(run.results.warnings)
