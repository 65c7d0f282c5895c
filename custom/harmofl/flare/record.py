"""The run's books: one record a round, and results.json, model hashes and report at the end."""

import hashlib
import math
import platform
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harmofl.core.classification import Estimate
from harmofl.evidence.report import write_report
from harmofl.evidence.results import (
    FORMAT,
    REPORT_FILE,
    RESULTS_FILE,
    TOO_FEW,
    AmplitudeRecord,
    NoiseStatement,
    Results,
    RoundRecord,
    ScoreSummary,
    SiteResult,
    WorstSite,
    privacy_sentence,
)
from harmofl.evidence.score_summaries import summary_as_sent, summary_of_cases, summary_of_images
from harmofl.experiment import RULES
from harmofl.flare.method_notes import amplitude_notes, method_notes, privacy_note
from harmofl.flare.progress import PROGRESS
from harmofl.flare.round_norms import fall_line, norms_of_round, run_warnings
from harmofl.flare.server_run import ServerRun
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.state import write_text_atomically
from harmofl.sections import names_text
from harmofl.tasks import load_task

MOST_POINTS = 5  # on a line of the table
_PACKAGES = ("harmofl", "nvflare", "torch", "monai", "numpy", "nibabel")


def close_round(run: ServerRun, round_number: int, accepted: list[str]) -> RoundRecord:
    """Turn what the accepted sites reported into the round's record, the next line of round_metrics.jsonl."""
    numbers = {site: run.numbers[site] for site in accepted}
    # a site that scores where none was asked to would alone decide which model is the best
    asked = run.experiment.federation.validates(round_number)
    validation = {site: _finite(reported.get("validation")) if asked else None for site, reported in numbers.items()}
    record = RoundRecord(
        round=round_number,
        model_sha256=run.model_sha256,
        validation=validation,
        validation_mean=mean_validation(validation),
        loss={site: _finite(reported.get("loss")) for site, reported in numbers.items()},
        steps={site: int(reported.get("steps", 0)) for site, reported in numbers.items()},
        skipped_steps={site: int(reported.get("skipped_steps", 0)) for site, reported in numbers.items()},
        seconds={site: float(reported.get("seconds", 0)) for site, reported in numbers.items()},
        sites_accepted=accepted,
        sites_refused=dict(run.refused),
        bytes_sent={site: run.last_bytes.get(site, 0) for site in accepted},
        server_resident_mib=_resident_mib(),
        **norms_of_round(run, accepted, validation),
    )
    run.rounds.append(record)
    if run.tracking is not None:
        run.tracking.write(record)
    return record


def mean_validation(scores: Mapping[str, float | None]) -> float | None:
    """Mean over the sites whose score is defined and finite; None where there is none."""
    defined = [score for score in scores.values() if _finite(score) is not None]
    return sum(defined) / len(defined) if defined else None  # type: ignore[arg-type]


def end_books(run: ServerRun | None, closing_lines: list[str]) -> None:
    """Close the curves and show the last lines of a run; it has none where it failed."""
    if run is not None and run.tracking is not None:
        run.tracking.end(finished=bool(closing_lines))
    for line in closing_lines:
        PROGRESS.info(line)


def write_evidence(run: ServerRun, answers: dict[str, dict[str, Any]], failure: str = "") -> list[str]:
    """Write results.json and report.html.

    Args:
        run: the finished run.
        answers: per site what the evaluate task returned.
        failure: why the job fails all the same.

    Returns:
        Lines for the screen: a table of test scores by site, and where the files are.
    """
    results = _results(run, answers)
    write_text_atomically(results.model_dump_json(indent=2) + "\n", run.folder / RESULTS_FILE)
    write_report(results, run.rounds, run.folder / REPORT_FILE, failure=failure)
    return (
        _table(results)
        + [f"WARNING: {warning}" for warning in results.warnings]
        + [
            f"{label} {run.folder / name}"
            for label, name in (
                ("results:    ", RESULTS_FILE),
                ("report:     ", REPORT_FILE),
                ("best model: ", BEST_MODEL),
                ("final model:", FINAL_MODEL),
            )
            if name in (RESULTS_FILE, REPORT_FILE, *_model_files(run))
        ]
    )


def _results(run: ServerRun, answers: dict[str, dict[str, Any]]) -> Results:
    experiment, key = run.experiment, load_task(run.experiment).key_score
    best_is_final = run.best_round == experiment.federation.rounds - 1
    accepted = Counter(site for record in run.rounds for site in record.sites_accepted)
    sites = {site: _site_result(site, run, answers.get(site), best_is_final, accepted[site]) for site in run.expected}
    means = {site: result.test[key].mean for site, result in sites.items() if key in result.test}
    defined = {site: mean for site, mean in means.items() if mean is not None}
    worst = min(defined, key=lambda site: (defined[site], site)) if defined else None
    untested = [site for site in run.expected if site not in defined]
    return Results(
        format=FORMAT,
        experiment=experiment.model_dump(mode="json"),
        experiment_hash=experiment.hash,
        run_id=run.run_id,
        method=experiment.method,
        demo=run.demo,
        seed=experiment.seed,
        rounds=experiment.federation.rounds,
        best_round=run.best_round if run.best_round is not None else experiment.federation.rounds - 1,
        best_reason=_best_reason(run, key),
        best_sites=sorted(run.best_scores),
        key_score=key,
        score_note=load_task(experiment).score_note,
        sites=sites,
        mean_over_sites=_means([result.test for result in sites.values()]),
        mean_over_sites_final_model=_means([result.test_final_model for result in sites.values()]),
        worst_site=WorstSite(site=worst, mean=defined[worst]) if worst else None,
        sites_expected=run.expected,
        sites_accepted=[record.sites_accepted for record in run.rounds],
        sites_without_test=untested,
        warnings=_warnings(run, sites, key, untested),
        amplitude=AmplitudeRecord(sites=run.amplitude_sites, images=run.amplitude.images) if run.amplitude else None,
        privacy=privacy_note(run) or privacy_sentence(run.amplitude_sites, _noise(run)),
        model_sha256={name: _sha256(run.folder / name) for name in _model_files(run)},
        versions={**{name: _version(name) for name in _PACKAGES}, "python": platform.python_version()},
        seconds=round(time.monotonic() - run.started, 1),
        rules=dict(RULES),
    )


def _model_files(run: ServerRun) -> tuple[str, ...]:
    return (BEST_MODEL, FINAL_MODEL) if run.has_global_model else ()


def _warnings(run: ServerRun, sites: Mapping[str, SiteResult], key: str, sites_without_test: list[str]) -> list[str]:
    """What a reader of the scores must know."""
    warnings = [*method_notes(run), *amplitude_notes(run)]
    if run.experiment.data.split == "as_published":
        warnings.append(
            "split as_published: training and test share patients, so the test scores are higher than on new patients"
        )
    both = _best_and_untrained(run)
    if both is not None and both[0] <= both[1]:
        warnings.append(
            f"no model scores better on validation than the untrained one ({score_text(both[0])} against "
            f"{score_text(both[1])}); more rounds or another training.learning_rate may help"
        )
    warnings += run_warnings(run)
    if fall := fall_line(run, run.final_validation):
        warnings.append(fall)
    if sites_without_test:
        warnings.append(f"no test score from {names_text(sites_without_test)}")
    silent = {
        "test": [site for site, result in sites.items() if key in result.not_sent.get("best", [])],
        "validation": [site for site, result in sites.items() if result.not_sent.get("validation")],
    }
    for part, names in silent.items():
        if names:
            warnings.append(f"{part} {key} of {names_text(names)} {TOO_FEW}")
    return warnings


def _best_reason(run: ServerRun, key: str) -> str:
    """Why the best model is that, with its score and the untrained one's."""
    both, alone = _best_and_untrained(run), mean_validation(run.validation_of(-1))
    if run.best_score is None:
        return f"no model has a validation {key}, so the last one counts (untrained model: {score_text(alone)})"
    untrained = score_text(None if both is None else both[1])
    every = run.experiment.federation.validate_every
    among = "" if every == 1 else f", of the models that were scored (federation.validate_every {every})"
    return (
        f"highest mean validation {key} over sites{among}: {score_text(run.best_score)} at {len(run.best_scores)} of "
        f"{len(run.expected)} sites (untrained model: {untrained}); two models are compared at the sites that scored "
        "both"
    )


def _best_and_untrained(run: ServerRun) -> tuple[float, float] | None:
    """Mean scores of the best model and of the one of round 0 over the sites that scored both; None without any."""
    untrained = run.validation_of(-1)
    both = sorted(run.best_scores.keys() & untrained)
    means = [mean_validation({site: held[site] for site in both}) for held in (run.best_scores, untrained)]
    return None if means[0] is None or means[1] is None else (means[0], means[1])


def score_text(score: float | None) -> str:
    """A score for a line on the screen."""
    return "undefined" if score is None else f"{score:.3f}"


def _site_result(
    site: str, run: ServerRun, answer: dict[str, Any] | None, best_is_final: bool, rounds_accepted: int
) -> SiteResult:
    reported = answer or run.numbers.get(site, {})
    final = scores_of(reported, "final")
    best = final if best_is_final else scores_of(reported, "best")
    return SiteResult(
        cases_used=reported.get("cases", {}),
        cases_skipped=reported.get("skipped", {}),
        data_warnings=reported.get("warnings", {}),
        validation=_finite(reported.get("validation")),
        test=best,
        test_final_model=final,
        bytes_sent=run.bytes_sent.get(site, {"weights": 0, "amplitude": 0, "numbers": 0}),
        rounds_accepted=rounds_accepted,
        amplitude_sent=site in run.amplitude_sites,
        amplitude_patients=run.amplitude_patients.get(site) if site in run.amplitude_sites else None,
        amplitude_noise=_noise(run).get(site),
        not_sent=_not_sent(reported, best_is_final),
        limits=reported.get("limits", {}),
        releases=reported.get("releases", {}),
        precision=reported.get("precision"),
    )


def _not_sent(reported: dict[str, Any], best_is_final: bool) -> dict[Any, list[str]]:
    """By `validation` and the models the scores of too few patients; the best model may be the last one."""
    held = dict(reported.get("not_sent", {}))
    return held | {"best": held["final"]} if best_is_final and "final" in held else held


def _noise(run: ServerRun) -> dict[str, NoiseStatement]:
    """By site, what was said about the noise on the amplitude that went into the global one."""
    said = {site: NoiseStatement.model_validate(held) for site, held in run.amplitude_noise.items()}
    return {site: statement for site, statement in said.items() if site in run.amplitude_sites}


def scores_of(reported: dict[str, Any], model: str) -> dict[str, ScoreSummary]:
    """A site's test scores of one model: those over all images as they are, those by case summarized over patients."""
    pooled = reported.get("pooled", {}).get(model, {})
    by_case = reported.get("test", {}).get(model, {})
    patients = reported.get("patients", {}).get(model)
    summaries = reported.get("summaries", {}).get(model, {})
    return (
        {name: summary_of_images(Estimate(**told)) for name, told in pooled.items()}
        | {name: summary_of_cases([float(score) for score in scores], patients) for name, scores in by_case.items()}
        | {name: summary_as_sent(told) for name, told in summaries.items()}
    )


def _means(tests: list[dict[str, ScoreSummary]]) -> dict[str, float | None]:
    """Mean over sites of each score's mean; sites where it is undefined do not enter."""
    names = sorted({name for test in tests for name in test})
    return {
        name: mean_validation({str(index): test[name].mean for index, test in enumerate(tests) if name in test})
        for name in names
    }


def _table(results: Results) -> list[str]:
    key = results.key_score
    lines = [
        f"test {key} of the best model (round {results.best_round}) by site: "
        "mean, 95 % interval over patients, patients tested"
    ]
    for site, result in results.sites.items():
        score = result.test.get(key)
        if score is None or score.mean is None:
            lines.append(f"  {site:<12} {result.missing(key)}")
            continue
        lines.append(f"  {site:<12} {score.mean:.3f}  {_interval(score):<16} {score.patients}")
    mean = results.mean_over_sites.get(key)
    worst = results.worst_site
    lines.append(f"  {'mean':<12} {'undefined' if mean is None else f'{mean:.3f}'}")
    if worst:
        lines.append(f"  {'worst':<12} {worst.mean:.3f}  {worst.site}")
    return lines


def _interval(score: ScoreSummary) -> str:
    """The interval; where there is none the points, as far as there are any and they are few, and why."""
    if score.low is not None and score.high is not None:
        return f"[{score.low:.3f}, {score.high:.3f}]"
    points = score.points if len(score.points) <= MOST_POINTS else []
    return f"{' '.join(f'{point:.3f}' for point in points)} ({score.interval_text})".strip()


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _resident_mib() -> float:
    """Resident memory of this process, 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return round(pages * 4096 / 2**20, 1)
