"""What a site may claim: numbers and amplitude within what its cases, the experiment and earlier answers allow.

`harmofl.flare.wire` has checked the form of an answer before. What is beyond a bound refuses this one answer, by key.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from harmofl.core.amplitude_limits import amplitude_problem
from harmofl.core.gaussian_mechanism import calibrate_sigma, clipping_center
from harmofl.data.findings import count_text
from harmofl.evidence.results import NoiseStatement
from harmofl.experiment import Experiment
from harmofl.flare.server_run import ServerRun
from harmofl.flare.site_settings import MOST_CLIP, LimitSettings
from harmofl.flare.task_header import EVALUATE_TASK, TRAIN_TASK
from harmofl.flare.wire import AmplitudeStatistic, MessageError, PooledScore, SiteNumbers, UpdateMessage
from harmofl.tasks import TaskBounds, bounds_of, load_task

MOST_CASES = 10_000_000  # of one split, and of one code; Camelyon17-WILDS has 455,954 patches in all
MOST_NAMES = 100  # codes, and scores of a task that does not name its own
MOST_LIMIT = 2**63  # far beyond any limit; what shows it takes no number of thousands of digits
MOST_GROWTH, GROWTH_OF_FEW = 2, 10  # times what a site's first answer of the run said, and so many more at small sites
# A step reads and moves every weight twice. Beyond this a claim is no training, and many steps allow a long difference.
MOST_STEPS_A_SECOND = 10_000
CLOCKS_DIFFER, LAG = 1.01, 1.0  # two machines' clocks run apart; seconds are rounded
# Times the public scale: an amplitude under such noise is not seen any more. Five patients clipped at 0.8 of the scale
# have 9.8 at epsilon 0.1 and delta 1e-5, where 10,000 patients have 0.005.
MOST_NOISE = 20.0
AGREES = 1e-6  # relative, of a sigma that two machines calibrate


def check_numbers(site: str, update: UpdateMessage, run: ServerRun, task_name: str) -> None:
    """Refuse numbers that this site cannot have.

    Args:
        site: whose answer it is.
        update: the answer; its numbers have the form of `SiteNumbers`.
        run: knows what the site said before.
        task_name: what was asked.

    Raises:
        MessageError: one line that begins with the key.
    """
    told = SiteNumbers.model_validate(update.numbers)
    bounds = bounds_of(run.experiment)
    _check_counts(told, run.first_counts.get(site, {}))
    _check_seconds(told.seconds, time.monotonic() - run.task_begun)
    _check_site_settings(told)
    _check_precision(told, run.experiment)
    _check_not_sent(told, bounds)
    if task_name == TRAIN_TASK and run.trains(site):
        _check_training(told, site, run, bounds)
    elif told.steps or told.skipped_steps or told.images is not None:
        raise MessageError("steps: this answer is not of training")
    if told.validation is not None:
        _check_value("validation", told.validation, _largest(bounds, load_task(run.experiment).key_score, "validation"))
    if task_name == EVALUATE_TASK:
        _check_scores(told, bounds)
        _check_summaries(told.summaries, told, bounds)
    elif told.test or told.patients or told.pooled or told.summaries:
        raise MessageError("test: only the answer to the evaluation has test scores")


def check_amplitude(statistic: AmplitudeStatistic, update: UpdateMessage, run: ServerRun) -> None:
    """Refuse an amplitude that no images of the experiment's size and intensity step can have.

    Args:
        statistic: of the shape that the experiment's region has.
        update: the answer that it came with, whose numbers hold.
        run: with the experiment.

    Raises:
        MessageError: one line that begins with the key.
    """
    experiment, bounds, told = run.experiment, bounds_of(run.experiment), SiteNumbers.model_validate(update.numbers)
    cases = told.cases.get("training", 0)
    most = cases * bounds.most_images if told.images is None else told.images
    if statistic.noise is not None or told.releases.get("repeated") or told.releases.get("withheld"):
        # a site's ledger may send the amplitude of an earlier set again, of patients who do not train any more; the
        # filter that adds noise asks it after the numbers were counted
        cases = MOST_GROWTH * cases + GROWTH_OF_FEW
        most = cases * bounds.most_images
    if statistic.images > most:
        raise MessageError(f"amplitude: mean of {statistic.images} images, the site has at most {most}")
    if statistic.patients is not None and statistic.patients > cases:
        raise MessageError(f"amplitude: of {count_text(statistic.patients, 'patient')} and {cases} training cases")
    if statistic.noise is not None:
        _check_noise(statistic.noise, experiment, len(statistic.values))
    problem = amplitude_problem(
        statistic.values,
        experiment.amplitude.region,
        height=experiment.data.height,
        width=experiment.data.width,
        low_fraction=experiment.amplitude.low_fraction,
        intensity=experiment.amplitude.intensity,
        largest=bounds.intensity,
        sigma=0.0 if statistic.noise is None else statistic.noise.sigma,
    )
    if problem:
        raise MessageError(f"amplitude: {problem}")


def note_counts(site: str, update: UpdateMessage, run: ServerRun) -> None:
    """Keep what a site's first accepted answers of a run say, for bounds on later ones."""
    told, held = SiteNumbers.model_validate(update.numbers), run.first_counts.setdefault(site, {})
    counts: dict[str, int] = {str(part): count for part, count in told.cases.items()}
    if told.images is not None:
        counts["images"] = images_of_epoch(told, run.experiment)
    for name, count in counts.items():
        held.setdefault(name, count)


def images_of_epoch(told: SiteNumbers, experiment: Experiment) -> int:
    """Training images of a site, from those that it trained on in a round of several epochs.

    Raises:
        MessageError: it tells none, or no multiple of the epochs.
    """
    epochs = experiment.training.local_epochs
    if told.images is None or told.images % epochs:
        raise MessageError(f"images: {told.images} in {count_text(epochs, 'epoch')} of a round")
    return told.images // epochs


def _check_counts(told: SiteNumbers, first: Mapping[str, int]) -> None:
    for key, counts in (("cases", told.cases), ("skipped", told.skipped), ("warnings", told.warnings)):
        if len(counts) > MOST_NAMES:
            raise MessageError(f"{key}: {count_text(len(counts), 'code')}, at most {MOST_NAMES} are taken")
        for name, count in counts.items():
            if count > MOST_CASES:
                raise MessageError(f"{key}.{name}: {count}, at most {MOST_CASES} are taken")
    for name, count in told.cases.items():
        _check_growth(f"cases.{name}", count, first.get(name))


def _check_growth(key: str, count: int, first: int | None) -> None:
    if first is not None and count > MOST_GROWTH * first + GROWTH_OF_FEW:
        raise MessageError(
            f"{key}: {count}, {first} at first in this run; a site may grow to {MOST_GROWTH * first + GROWTH_OF_FEW} "
            "within a run, start a new one with more"
        )


def _check_seconds(seconds: float, age: float) -> None:
    if seconds > CLOCKS_DIFFER * age + LAG:
        raise MessageError(f"seconds: {seconds:g}, the task went out {age:.2f} s ago")


def _check_site_settings(told: SiteNumbers) -> None:
    """What a site says of its limits and of its ledger; the report shows both."""
    for outcome, times in told.releases.items():
        if times > MOST_CASES:
            raise MessageError(f"releases.{outcome}: more than {MOST_CASES}")
    try:
        LimitSettings.model_validate({name: held for name, held in told.limits.items() if name != "minimum_cases"})
    except ValidationError as error:
        # the names of limits are of the form of a code, their values may be anything
        raise MessageError(f"limits.{error.errors()[0]['loc'][0]}: no limit that a site can have") from None
    for name, value in told.limits.items():
        is_number = not isinstance(value, bool | list)
        if (is_number and not 1 <= value <= MOST_LIMIT) or (name == "minimum_cases" and not is_number):  # type: ignore[operator]
            raise MessageError(f"limits.{name}: no limit that a site can have")
        if isinstance(value, list):
            _check_number_of(f"limits.{name}", value, "names")


def _check_precision(told: SiteNumbers, experiment: Experiment) -> None:
    """What a site says it computes in; the job's setting leaves no choice but that of its device."""
    asked = experiment.training.precision
    possible = {"auto": ("float32", "tf32", "bfloat16"), "float32": ("float32", "tf32")}.get(asked, (asked,))
    if told.precision is not None and told.precision not in possible:
        raise MessageError(f"precision: {told.precision}, training.precision is {asked}")


def _check_not_sent(told: SiteNumbers, bounds: TaskBounds) -> None:
    """Scores that a site says it keeps: the task has them, and they are not sent all the same."""
    sent: tuple[Mapping[Any, Mapping[str, object]], ...] = (told.test, told.pooled, told.summaries)
    for part, names in told.not_sent.items():
        _check_number_of("not_sent", names)
        kept = set() if part == "validation" and told.validation is not None else set(names)
        for name in names:
            _largest(bounds, name, "not_sent")
        for held in sent:
            kept -= held.get(part, {}).keys()
        if others := set(names) - kept:
            raise MessageError(f"not_sent.{part}: {min(others)} is sent")


def _check_training(told: SiteNumbers, site: str, run: ServerRun, bounds: TaskBounds) -> None:
    experiment, cases = run.experiment, told.cases.get("training", 0)
    images = images_of_epoch(told, experiment)
    if cases < 1:
        raise MessageError("cases.training: a site that trains has one at least")
    most = cases * bounds.most_images
    if not experiment.federation.pooled_data and not cases * bounds.fewest_images <= images <= most:
        raise MessageError(
            f"images: {images} of {cases} training cases, of which task {experiment.task} makes "
            f"{cases * bounds.fewest_images} to {most}"
        )
    _check_growth("images", images, run.first_counts.get(site, {}).get("images"))
    before = run.numbers.get(site, {})
    if before.get("cases") == told.cases and before.get("images") not in (None, told.images):
        raise MessageError(
            f"images: {told.images}, {before['images']} in the round before with the same cases; start a new run"
        )
    batch, epochs = experiment.training.batch_size, experiment.training.local_epochs
    steps = epochs * math.ceil(images / batch)
    if told.steps != steps:
        trained = count_text(told.images or 0, "image")
        raise MessageError(f"steps: {told.steps}, {trained} in batches of {batch} make {steps}")
    age = time.monotonic() - run.task_begun
    if steps > MOST_STEPS_A_SECOND * (CLOCKS_DIFFER * age + LAG):
        raise MessageError(f"steps: {steps}, the task went out {age:.2f} s ago")
    if told.skipped_steps >= steps:
        raise MessageError(f"skipped_steps: {told.skipped_steps} of {steps}, no step moved the weights")
    if told.loss is None or not math.isfinite(told.loss):
        raise MessageError(f"loss: {told.loss} is not finite")


def _check_scores(told: SiteNumbers, bounds: TaskBounds) -> None:
    cases = told.cases.get("test", 0)
    for model, by_name in told.test.items():
        _check_number_of("test", by_name)
        for name, scores in by_name.items():
            largest = _largest(bounds, name, "test")
            _check_at_most(f"test.{model}.{name}", len(scores), cases, "scores", "test cases")
            for score in scores:
                _check_value(f"test.{model}.{name}", score, largest)
    for model, patients in told.patients.items():
        _check_at_most(f"patients.{model}", len(patients), cases, "numbers", "test cases")
        _check_at_most(f"patients.{model}", max(patients, default=-1) + 1, len(patients), "patients", "cases")
    for model, pooled in told.pooled.items():
        _check_number_of("pooled", pooled)
        for name, estimate in pooled.items():
            _check_pooled(f"pooled.{model}.{name}", estimate, cases, _largest(bounds, name, "pooled"))


def _check_pooled(key: str, score: PooledScore, cases: int, largest: float) -> None:
    _check_estimate(key, score.value, score.low, score.high, largest)
    _check_at_most(key, score.n, cases, "images", "test cases")
    _check_at_most(key, score.patients, score.n, "patients", "images")
    _check_at_most(key, len(score.by_patient), score.patients, "parts", "patients")
    _check_at_most(key, sum(of for _, of in score.by_patient), score.n, "images by patient", "images")
    if any(counted > of for counted, of in score.by_patient):
        raise MessageError(f"{key}: a patient of whom more images count than there are")


def _check_summaries(told: Mapping[Any, Mapping[str, Any]], numbers: SiteNumbers, bounds: TaskBounds) -> None:
    """Summaries that a site sends in the place of scores of single cases: by model and score."""
    cases = numbers.cases.get("test", 0)
    for model, by_name in told.items():
        _check_number_of("summaries", by_name)
        for name, held in by_name.items():
            key, largest = f"summaries.{model}.{name}", _largest(bounds, name, "summaries")
            _check_estimate(key, held.mean, held.low, held.high, largest)
            _check_at_most(key, held.cases, cases, "cases", "test cases")
            _check_at_most(key, held.patients, held.cases, "patients", "cases")


def _largest(bounds: TaskBounds, name: str, key: str) -> float:
    if bounds.scores is None:
        return math.inf
    if name not in bounds.scores:
        raise MessageError(f"{key}: this task has no score {name}, only {', '.join(bounds.scores)}")
    return bounds.scores[name]


def _check_number_of(key: str, names: Iterable[str], counted: str = "scores") -> None:
    if (count := len(list(names))) > MOST_NAMES:
        raise MessageError(f"{key}: {count} {counted}, at most {MOST_NAMES} are taken")


def _check_estimate(key: str, value: float | None, low: float | None, high: float | None, largest: float) -> None:
    """A score and its interval; None and NaN stand for what is not defined."""
    defined = [held for held in (low, value, high) if held is not None and not math.isnan(held)]
    for held in defined:
        _check_value(key, held, largest)
    if defined != sorted(defined):
        shown = ["undefined" if held is None else f"{held:g}" for held in (value, low, high)]
        raise MessageError(f"{key}: {shown[0]} does not lie in its interval, {shown[1]} to {shown[2]}")
    if (value is None or math.isnan(value)) and defined:
        raise MessageError(f"{key}: has an interval and is undefined")


def _check_value(key: str, value: float, largest: float) -> None:
    """A score; NaN is one that is not defined."""
    if math.isnan(value) or (0 <= value <= largest and math.isfinite(value)):
        return
    raise MessageError(f"{key}: {value:g} does not lie in 0 to {largest:g}")


def _check_at_most(key: str, count: int, most: int, counted: str, limit: str) -> None:
    if count > most:
        raise MessageError(f"{key}: {count} {counted}, the site says it has {most} {limit}")


def _check_noise(noise: NoiseStatement, experiment: Experiment, channels: int) -> None:
    """Noise is what epsilon, delta, clip and patients make it, or any amplitude could be called noise."""
    settings, data = experiment.amplitude, experiment.data
    scale = clipping_center(
        settings.region, channels, data.height, data.width, settings.low_fraction, intensity=settings.intensity
    ).scale
    if noise.clip > MOST_CLIP * scale * (1 + AGREES):
        raise MessageError(f"amplitude: clip {noise.clip:g} is more than {MOST_CLIP:g} times the scale {scale:g}")
    if noise.sigma > MOST_NOISE * scale:
        raise MessageError(
            f"amplitude: noise of sigma {noise.sigma:g} hides it, at most {MOST_NOISE:g} times the scale {scale:g} is "
            "taken; raise epsilon or delta in the site's local/privacy.json"
        )
    expected = calibrate_sigma(noise.epsilon, noise.delta, 2 * noise.clip / noise.patients)
    if not math.isclose(noise.sigma, expected, rel_tol=AGREES):
        raise MessageError(f"amplitude: noise of sigma {noise.sigma:g}, what it says of itself makes {expected:g}")
