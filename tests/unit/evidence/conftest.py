"""Results of a small run: one healthy site, one with undefined scores, one that never answered."""

from typing import Any

import pytest

from harmofl.evidence.results import FORMAT, Results, RoundRecord
from harmofl.experiment import resolve


def score(per_case: list[float | None]) -> dict[str, Any]:
    defined = [value for value in per_case if value is not None]
    mean = sum(defined) / len(defined) if defined else None
    return {
        "mean": mean,
        "low": min(defined) if len(defined) > 2 else None,
        "high": max(defined) if len(defined) > 2 else None,
        "no_interval": None if len(defined) > 2 else "too_few" if defined else "undefined",
        "patients": len(defined),
        "n": len(defined),
        "undefined": len(per_case) - len(defined),
        "per_case": per_case,
    }


def site(test: dict[str, Any]) -> dict[str, Any]:
    return {
        "cases_used": {"training": 6, "validation": 2, "test": 2},
        "cases_skipped": {"geometry": 1},
        "validation": 0.4,
        "test": test,
        "test_final_model": test,
        "bytes_sent": {"weights": 1_234_567, "amplitude": 132, "numbers": 900},
        "rounds_accepted": 2,
        "amplitude_sent": True,
        "amplitude_noise": None,
    }


@pytest.fixture
def results(written: dict[str, Any]) -> Results:
    """Sites HEALTHY, EMPTY (all cases undefined) and SILENT (no answer)."""
    experiment = resolve(written)
    return Results.model_validate(
        {
            "format": FORMAT,
            "experiment": experiment.model_dump(mode="json"),
            "experiment_hash": experiment.hash,
            "run_id": "0123abcd",
            "method": experiment.method,
            "demo": True,
            "seed": 0,
            "rounds": 2,
            "best_round": 1,
            "best_reason": "highest mean validation dice over sites: 0.400",
            "key_score": "dice",
            "score_note": "foreground Dice of each case",
            "sites": {
                "HEALTHY": site({"dice": score([0.75, 0.5]), "published_dice": score([0.875])}),
                "EMPTY": site({"dice": score([None, None]), "published_dice": score([None])}),
                "SILENT": site({}),
            },
            "mean_over_sites": {"dice": 0.625, "published_dice": 0.875},
            "mean_over_sites_final_model": {"dice": 0.625, "published_dice": 0.875},
            "worst_site": {"site": "HEALTHY", "mean": 0.625},
            "sites_expected": ["EMPTY", "HEALTHY", "SILENT"],
            "sites_accepted": [["HEALTHY", "EMPTY"], ["HEALTHY"]],
            "sites_without_test": ["EMPTY", "SILENT"],
            "warnings": ["no test score from EMPTY, SILENT"],
            "amplitude": {"sites": ["HEALTHY"], "images": 40},
            "privacy": "no formal guarantee",
            "model_sha256": {"FL_global_model.pt": "0" * 64},
            "versions": {"harmofl": "0.1.0", "python": "3.11"},
            "seconds": 12.5,
        }
    )


@pytest.fixture
def rounds() -> list[RoundRecord]:
    """Two rounds; in the second one EMPTY's answer was refused."""
    first = {
        "round": 0,
        "model_sha256": "a" * 64,
        "validation": {"HEALTHY": 0.3, "EMPTY": None},
        "validation_mean": 0.3,
        "loss": {"HEALTHY": 0.9, "EMPTY": 0.8},
        "steps": {"HEALTHY": 3, "EMPTY": 3},
        "skipped_steps": {"HEALTHY": 0, "EMPTY": 0},
        "seconds": {"HEALTHY": 1.5, "EMPTY": 2.25},
        "sites_accepted": ["HEALTHY", "EMPTY"],
        "sites_refused": {},
        "bytes_sent": {"HEALTHY": 100, "EMPTY": 100},
        "server_resident_mib": 200.0,
        "norm": {"HEALTHY": 0.25, "EMPTY": 4e29},
        "scaled": {"EMPTY": 2.5e-30},
        "outliers": {"EMPTY": "norm 4e+29 a step is above 1; scaled by 2.5e-30 (federation.norm_bound 10)"},
        "cosine": {"HEALTHY": 0.1, "EMPTY": 0.1},
    }
    second = first | {
        "round": 1,
        "validation": {"HEALTHY": None},
        "validation_mean": None,
        "loss": {"HEALTHY": None},
        "seconds": {},
        "sites_accepted": ["HEALTHY"],
        "sites_refused": {"EMPTY": "entry w holds values that are not finite"},
        "norm": {"HEALTHY": 0.25},
        "scaled": {},
        "outliers": {},
        "cosine": {},
        "fall": "validation fell from 0.300 to 0.100 with round 0: no site's difference points away from the rest",
    }
    return [RoundRecord.model_validate(record) for record in (first, second)]
