"""A finished run without a run: results and an untrained best model."""

import json
from pathlib import Path
from typing import Any

import torch

from harmofl.app.job import read_job
from harmofl.evidence.results import FORMAT
from harmofl.flare.server_run import BEST_MODEL
from harmofl.flare.state import Checkpoint
from harmofl.job_folder import sha256
from harmofl.tasks import untrained_network
from tests.small_job import SITES


def score(per_case: list[float]) -> dict[str, Any]:
    mean = sum(per_case) / len(per_case) if per_case else None
    return {"mean": mean, "low": None, "high": None, "n": len(per_case), "undefined": 0, "per_case": per_case}


def write_run(folder: Path, job: Path, *, demo: bool = False, **changes: Any) -> Path:
    """A finished run of a small job in a new folder, with an untrained best model."""
    folder.mkdir(parents=True)
    experiment = read_job(job, []).resolve(demo=demo)
    held = experiment.model_dump(mode="json")
    Checkpoint(
        model=untrained_network(experiment).state_dict(),
        experiment=held,
        experiment_hash=experiment.hash,
        run_id="0123abcd",
        next_round=1,
        amplitude=torch.zeros(3, 11),
        amplitude_images=9,
        amplitude_sites=SITES,
        record={},
    ).save(folder / BEST_MODEL)
    told: dict[str, Any] = {"cases_used": {}, "cases_skipped": {}, "validation": None, "bytes_sent": {}}
    told |= {"test": {"dice": score([0.5])}, "test_final_model": {}, "rounds_accepted": 1}
    told |= {"amplitude_sent": True, "amplitude_noise": None}
    content = {"format": FORMAT, "experiment": held, "experiment_hash": experiment.hash, "run_id": "0123abcd"}
    content |= {
        "method": "harmofl",
        "demo": demo,
        "seed": 0,
        "rounds": 1,
        "best_round": 0,
        "best_reason": "only one",
    }
    content |= {"key_score": "dice", "score_note": "Dice", "sites": dict.fromkeys(SITES, told)}
    content |= {"mean_over_sites": {"dice": 0.5}, "mean_over_sites_final_model": {"dice": 0.5}, "worst_site": None}
    content |= {"sites_expected": list(SITES), "sites_accepted": [list(SITES)], "sites_without_test": []}
    content |= {"warnings": [], "amplitude": None, "privacy": "none", "versions": {}, "seconds": 1.0}
    content |= {"model_sha256": {BEST_MODEL: sha256(folder / BEST_MODEL)}} | changes
    (folder / "results.json").write_text(json.dumps(content))
    (folder / "round_metrics.jsonl").write_text("")
    return folder
