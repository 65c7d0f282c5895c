"""One module a task: which reader, network, loss and scores."""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from pydantic import ValidationError
from torch import Tensor, nn

from harmofl.core.networks import build_network
from harmofl.experiment import FILE_NAME, Experiment, resolve
from harmofl.sections import ExperimentError, Section, first_problem
from harmofl.tasks.answers import Evaluation, FolderReport, Illustration, SiteData, TaskBounds

if TYPE_CHECKING:
    from harmofl.data.findings import DataRootError

Predict = Callable[[Tensor], Tensor]
Part = frozenset[Hashable] | None
Settings = TypeVar("Settings", bound=Section)

TASKS = ("prostate", "camelyon17", "nuclei")
_admitted: dict[str, "Task"] = {}


class Task(Protocol):
    """What a task offers.

    Attributes:
        networks: names of the networks that fit.
        in_channels: channels of an image.
        key_score: the score that picks the best round.
        decodes_on_access: whether items of the training set are decoded when asked for, so that loader processes pay.
        score_note: what that score and its interval are, one sentence for a report.
        is_color: the channels are red, green and blue; else the one in the middle is shown in gray.
        labels: names of the classes of an image as a whole; empty where targets are masks.
        reader: settings of the section `reader`.
        demo: settings of the section `demo.data`.
    """

    networks: tuple[str, ...]
    in_channels: int
    key_score: str
    score_note: str
    decodes_on_access: bool
    is_color: bool
    labels: tuple[str, ...]
    reader: type[Section]
    demo: type[Section]

    def check(self, experiment: Experiment) -> None:
        """Raise ExperimentError where settings do not fit this task."""

    def class_prior(self, experiment: Experiment) -> tuple[float, ...]:
        """Share of each class in the targets."""

    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The training loss of logits and targets."""

    def locate(self, root: Path, site: str, experiment: Experiment) -> Path:
        """The folder under `root` that holds this site's cases."""

    def part(self, folder: Path, site: str, experiment: Experiment) -> Part:
        """What is this site's in a folder that several share, None for all of it; parts must not overlap."""

    def open_site(self, folder: Path, site: str, experiment: Experiment, cache: Path) -> SiteData:
        """Read a site's folder."""

    def inspect(self, folder: Path, site: str, experiment: Experiment) -> FolderReport:
        """Look through a site's folder as training would, without training."""

    def evaluate(self, predict: Predict, split: Any, *, workers: int) -> Evaluation:
        """Score one split; `workers` processes may decode."""

    def write_demo(self, folder: Path, site: str, experiment: Experiment) -> None:
        """Write this site's synthetic data in the real file layout."""

    def describe_demo(self, site: str, experiment: Experiment) -> str:
        """What the synthetic data of this site imitates, for a caption."""


@runtime_checkable
class Illustrating(Protocol):
    """A task that can also show what it scored; one from outside the package need not."""

    illustrates: str  # what a picture's score is, for its caption

    def illustrate(self, predict: Predict, split: Any, *, workers: int) -> Iterator[Illustration]:
        """Each scored case in the order of its scores, or some images of a split that is scored as a whole."""


@runtime_checkable
class Bounding(Protocol):
    """A task that also says what an answer about it can hold; one from outside the package need not."""

    def bounds(self, experiment: Experiment) -> TaskBounds:
        """Images of a case, ranges of scores and intensities."""


def bounds_of(experiment: Experiment) -> TaskBounds:
    """What a site's answer about an experiment's task can hold; wide bounds where the task does not say."""
    task = load_task(experiment)
    return task.bounds(experiment) if isinstance(task, Bounding) else TaskBounds()


def admit(name: str, task: Task) -> None:
    """Let experiments name a task from outside the package; whoever calls this has decided that it may run here.

    Raises:
        ExperimentError: it lacks something that a task offers.
    """
    members = [
        *Task.__annotations__,
        *(name for name, value in vars(Task).items() if callable(value) and name[0] != "_"),
    ]
    missing = [name for name in members if not hasattr(task, name)]
    if missing:
        raise ExperimentError(f"task: {name} has no {', '.join(missing)}; see harmofl.tasks.Task")
    _admitted[name] = task


def is_outside(name: str) -> bool:
    """Whether a task is named by the path of a class, `module.Class`, and so comes from outside the package."""
    return name not in TASKS and "." in name


def load_task(experiment: Experiment) -> Task:
    """The task of an experiment.

    Raises:
        ExperimentError: no such task, or its loss cannot take what the experiment's network returns.
    """
    name, network = experiment.task, experiment.network.name
    if name in TASKS:
        task: Task = import_module(f"harmofl.tasks.{name}").TASK
    elif name in _admitted:
        task = _admitted[name]
    elif is_outside(name):
        raise ExperimentError(
            f"task: {name!r} comes from outside the package and was not admitted here; name its class as component "
            "'task' in config_fed_server.json and config_fed_client.json"
        )
    else:
        raise ExperimentError(f"task: {name!r} is none of {', '.join(TASKS)}, nor the path of a class")
    if network not in task.networks:
        raise ExperimentError(f"network.name: task {name} needs {' or '.join(task.networks)}, not {network!r}")
    return task


def resolve_experiment(settings: dict[str, Any], *, demo: bool = False, source: str = FILE_NAME) -> Experiment:
    """Resolve an experiment and let its task check its own sections and write out their defaults.

    Raises:
        ExperimentError: see `harmofl.experiment.resolve`; also for a key or value that the task does not take.
    """
    experiment = resolve(settings, demo=demo, source=source)
    try:
        task = load_task(experiment)
        changes: dict[str, Any] = {
            "reader": _validated(task.reader, experiment.reader, "reader").model_dump(mode="json")
        }
        if experiment.demo is not None:
            data = _validated(task.demo, experiment.demo.data, "demo.data").model_dump(mode="json")
            changes["demo"] = experiment.demo.model_copy(update={"data": data})
        task.check(experiment)
    except ExperimentError as error:
        raise ExperimentError(f"{source}: {error}") from None
    return experiment.model_copy(update=changes)


def reader_settings(experiment: Experiment, model: type[Settings]) -> Settings:
    """The section `reader` as a task's own settings.

    Raises:
        ExperimentError: one line with key, value and, for an unknown key, the nearest known name.
    """
    return _validated(model, experiment.reader, "reader")


def demo_settings(experiment: Experiment, model: type[Settings]) -> Settings:
    """The section `demo.data` as a task's own settings.

    Raises:
        ExperimentError: the experiment has no demo; else as `reader_settings`.
    """
    if experiment.demo is None:
        raise ExperimentError("demo: this job has no demo settings")
    return _validated(model, experiment.demo.data, "demo.data")


def demo_profile(key: str, given: Mapping[str, str], site: str, known: Iterable[str], otherwise: int) -> str:
    """The look of a site's synthetic data: the one that `demo.data` gives it, else the one of number `otherwise`.

    Raises:
        ExperimentError: `demo.data` gives one that is not known.
    """
    names = sorted(known)
    name = given.get(site, names[otherwise % len(names)])
    if name not in names:
        raise ExperimentError(f"demo.data.{key}.{site}: {name!r} is none of {', '.join(names)}")
    return name


def place_sites(experiment: Experiment, roots: Mapping[str, Path]) -> "dict[str, Path | DataRootError]":
    """The folder of each site on one machine, or why it has none; a folder that is another site's too is an error."""
    from harmofl.data.findings import DataRootError, SharedFolderError

    task = load_task(experiment)
    places: dict[str, Path | DataRootError] = {}
    taken: list[tuple[str, Path, Part]] = []
    for site, root in roots.items():
        try:
            folder = task.locate(root, site, experiment)
            part = task.part(folder, site, experiment)
        except DataRootError as error:
            places[site] = error
            continue
        place = folder.resolve()
        others = [other for other, held, theirs in taken if _both_read(place, part, held, theirs)]
        shared = (
            f"would read {folder}, where the data of {others[0]} lies; give each site a folder of its own"
            if others
            else ""
        )
        places[site] = SharedFolderError(shared) if others else folder
        taken.append((site, place, part))
    return places


def _both_read(one: Path, part: Part, other: Path, theirs: Part) -> bool:
    """Whether two sites would use one file: the same folder with parts that overlap, or a folder within all of one."""
    if one == other:
        return part is None or theirs is None or bool(part & theirs)
    return (one in other.parents and part is None) or (other in one.parents and theirs is None)


def untrained_network(experiment: Experiment) -> nn.Module:
    """The experiment's network with its initial weights, equal at every site and the server.

    Raises:
        ValueError: the experiment names a combination that cannot be built.
    """
    task, settings = load_task(experiment), experiment.network
    return build_network(
        settings.name,
        task.in_channels,
        task.class_prior(experiment),
        width=settings.width,
        norm=settings.norm,
        seed=experiment.seed,
        even=experiment.data.height % 16 == experiment.data.width % 16 == 0,
    )


def _validated(model: type[Settings], values: Mapping[str, Any], section: str) -> Settings:
    try:
        return model.model_validate_json(json.dumps(values))  # JSON: a strict section takes no list for a tuple
    except ValidationError as error:
        raise ExperimentError(first_problem(error, model, f"{section}.")) from None
