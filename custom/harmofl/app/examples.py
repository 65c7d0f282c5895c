"""Pictures of test cases for a report: the best model of a run, applied where the data lies."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from harmofl.app.hospital_names import read_hospital
from harmofl.app.job import JobError
from harmofl.app.model_file import LoadedModel, kept_at_sites, load_model
from harmofl.core.training import NotFiniteError, batches, predict
from harmofl.data.findings import CaseError, DataRootError, SharedFolderError
from harmofl.evidence.examples import best_median_worst, disagreement
from harmofl.evidence.report import Examples, SiteExamples
from harmofl.evidence.results import RESULTS_FILE, Results, ScoreSummary
from harmofl.experiment import Experiment
from harmofl.flare.server_run import BEST_MODEL
from harmofl.job_folder import sha256
from harmofl.tasks import Illustrating, Predict, SiteData, Task, load_task, place_sites, resolve_experiment

WRITTEN_AGAIN = "Pictures of the synthetic data of the demo, which was made again for this page."
NOTHING = "No pictures: the data that lies here cannot be used."
READ = "Pictures drawn by whoever holds the data, from the test cases of these sites. Names of cases are left out."


def collect_examples(
    folder: Path,
    results: Results,
    root: Path | None,
    place: Path,
    *,
    site: str | None = None,
    kit: Path | None = None,
) -> Examples:
    """Predict the test cases of every site found and choose the best, the median and the worst one.

    Args:
        folder: of the run, with its best model.
        results: of the run.
        root: data root; None for the synthetic data of a demo.
        place: for what is written and decoded on the way.
        site: the only site to look for; the root may then be its own folder.
        kit: startup kit of the only site to look for, whose own settings say whose a case is, and whose
            ledger which cases are for testing.

    Raises:
        JobError: the model is missing, damaged or not this run's, no one model is, or the task draws no pictures.
        DataRootError: no site is found below the root. One whose data cannot be used is among the examples, without
            pictures and with the reason.
    """
    experiment = resolve_experiment(results.experiment, source=RESULTS_FILE)
    task = load_task(experiment)
    if not isinstance(task, Illustrating):
        raise JobError(f"task {experiment.task} draws no pictures: it has no method illustrate")
    if problem := kept_at_sites(experiment):
        raise JobError(f"no pictures: {problem}")
    model = _best_model(folder, results)
    split: AbstractContextManager[None] = nullcontext()
    if kit is not None:
        own = read_hospital(kit)
        split = own.split_as_kept(experiment.task)
        site, root = own.name, own.own_folder(root) if root is not None else None
        experiment, model = own.words_in(experiment), replace(model, experiment=own.words_in(model.experiment))
    if site is not None and site not in results.sites:
        raise JobError(f"--site {site}: the run's sites are {', '.join(results.sites)}")
    names = list(results.sites) if site is None else [site]
    folders = _synthetic(task, names, experiment, place) if root is None else _found(root, names, experiment)
    with split:
        shown = tuple(
            _illustrated(name, held, place / "cache" / name, model, results.sites[name].test.get(results.key_score))
            for name, held in folders.items()
        )
    return Examples(shown, task.illustrates, WRITTEN_AGAIN if root is None else READ)


def _at_site(model: LoadedModel, data: SiteData) -> Predict:
    """Logits as a site with this data computes them; a gain has the profile of the site's training images."""
    settings, normalization = model.experiment.training, copy.deepcopy(model.normalization)
    own = model.profile(images for images, _ in batches(data.training, settings.batch_size, None))
    if own is not None:
        normalization.set_own(own)
    normalization.to(model.device)
    return lambda images: predict(model.network, normalization, images, settings.batch_size, settings.precision)


def _best_model(folder: Path, results: Results) -> LoadedModel:
    path = folder / BEST_MODEL
    model = load_model(path)
    if sha256(path) != results.model_sha256.get(BEST_MODEL):
        raise JobError(f"{path}: is not the file that {RESULTS_FILE} names; take both from the same run")
    return model


def _synthetic(task: Task, sites: Sequence[str], experiment: Experiment, place: Path) -> dict[str, Path]:
    folders = {site: place / "data" / site for site in sites}
    for site, folder in folders.items():
        task.write_demo(folder, site, experiment)
    return folders


def _found(root: Path, sites: Sequence[str], experiment: Experiment) -> dict[str, Path]:
    """The sites whose folder lies below the root: a hospital has its own, a simulation all."""
    places: Mapping[str, Path | DataRootError] = place_sites(experiment, dict.fromkeys(sites, root))
    found = {site: place for site, place in places.items() if isinstance(place, Path)}
    if not found:
        raise next(place for place in places.values() if isinstance(place, DataRootError))
    loose = [site for site, place in found.items() if place == root]
    if loose and any(isinstance(place, SharedFolderError) for place in places.values()):
        raise DataRootError(f"{root} holds cases itself, which any of the sites would take; say whose with --site")
    return found


def _illustrated(
    site: str, folder: Path, cache: Path, model: LoadedModel, recorded: ScoreSummary | None
) -> SiteExamples:
    """The pictures of one site, or why it has none: the others are drawn all the same."""
    task = model.task
    assert isinstance(task, Illustrating)
    try:
        data = task.open_site(folder, site, model.experiment, cache)
        if problem := _unusable(data, model):
            return SiteExamples(site, (), NOTHING, f"{folder} {problem}")
        cases = list(task.illustrate(_at_site(model, data), data.test, workers=0))
    except (DataRootError, CaseError) as error:
        return SiteExamples(site, (), NOTHING, str(error))
    except NotFiniteError as error:
        raise JobError(f"no pictures of {site}: {model.path.name}: {error}") from None
    note = disagreement(cases, recorded) or ("" if cases else "No test case.")
    return SiteExamples(site, best_median_worst(cases), note)


def _unusable(data: SiteData, model: LoadedModel) -> str:
    """Why nothing can be drawn of a site's data, empty where something can."""
    if not any(data.cases.values()):
        return "holds no case that can be used"
    if model.takes_profile and not len(data.training):
        return "holds no training case that can be used, and the amplitude step needs their profile"
    return ""
