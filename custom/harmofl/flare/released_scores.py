"""Which of a site's scores leave it: of enough patients, and by case or summarized, as the site's limits say."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from harmofl.core.classification import Estimate
from harmofl.core.scores import summarize
from harmofl.flare.site_settings import LimitSettings
from harmofl.tasks import Evaluation


def released_validation(evaluation: Evaluation, key: str, limits: LimitSettings | None) -> dict[str, Any]:
    """The key score of the validation data as numbers of an answer; None, and said so, of too few patients.

    Args:
        evaluation: of the validation data.
        key: name of the key score.
        limits: the site's; None in simulation, where all scores leave.
    """
    if limits is not None and _patients(evaluation, key) < limits.scored_patients:
        return {"validation": None, "not_sent": {"validation": [key]}}
    return {"validation": evaluation.key_score}


def released_scores(evaluations: Mapping[str, Evaluation], limits: LimitSettings | None) -> dict[str, Any]:
    """The test scores as numbers of an answer.

    Args:
        evaluations: by model, `final` and `best`.
        limits: the site's; None in simulation, where all scores leave.

    Returns:
        `test` and `patients` with a number a case, or `summaries` with mean and interval where the scores of single
        cases may not leave; `pooled` with the scores over all images, then without each patient's part; `not_sent`
        with the names of scores that too few patients have.
    """
    fewest = limits.scored_patients if limits else 0
    names = {model: {*scored.scores, *scored.pooled} for model, scored in evaluations.items()}
    few = {
        model: sorted(name for name in names[model] if _patients(scored, name) < fewest)
        for model, scored in evaluations.items()
    }
    kept = {model: _without(scored, few[model]) for model, scored in evaluations.items()}
    by_patient = limits is None or limits.case_scores
    pooled = {
        model: {name: _plain(estimate, by_patient) for name, estimate in scored.pooled.items()}
        for model, scored in kept.items()
    }
    told: dict[str, Any] = {"pooled": pooled}
    if by_patient:
        told["test"] = {model: scored.scores for model, scored in kept.items()}
        told["patients"] = {
            model: list(scored.patients)
            for model, scored in kept.items()
            if scored.patients is not None and scored.scores
        }
    else:
        told["summaries"] = {model: _summaries(scored) for model, scored in kept.items()}
    if any(few.values()):
        told["not_sent"] = {model: held for model, held in few.items() if held}
    return told


def _without(scored: Evaluation, names: list[str]) -> Evaluation:
    return Evaluation(
        scored.key_score,
        {name: held for name, held in scored.scores.items() if name not in names},
        {name: held for name, held in scored.pooled.items() if name not in names},
        scored.patients,
    )


def _patients(scored: Evaluation, name: str) -> int:
    """How many patients have a score; one that is undefined for all tells of nobody, and has none."""
    if name in scored.pooled:
        return scored.pooled[name].patients
    return summarize(scored.scores.get(name, ()), scored.patients).patients


def _summaries(scored: Evaluation) -> dict[str, dict[str, Any]]:
    found = {name: summarize(_finite(scores), scored.patients) for name, scores in scored.scores.items()}
    return {
        name: {
            "mean": summary.mean,
            "low": summary.low,
            "high": summary.high,
            "no_interval": summary.no_interval,
            "cases": summary.n,
            "undefined": summary.undefined,
            "patients": summary.patients,
        }
        for name, summary in found.items()
    }


def _finite(scores: list[float]) -> list[float]:
    return [score if isfinite(score) else float("nan") for score in scores]


def _plain(estimate: Estimate, by_patient: bool) -> dict[str, Any]:
    """An estimate as numbers, a code and lists, as they travel."""
    parts = [list(part) for part in estimate.by_patient] if by_patient else []
    return asdict(estimate) | {"by_patient": parts}
