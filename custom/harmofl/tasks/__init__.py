"""One module a task: which reader, network, loss and scores."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from harmofl.core.networks import build_network
from harmofl.experiment import Experiment, ExperimentError

if TYPE_CHECKING:
    from harmofl.data.findings import Finding

Predict = Callable[[Tensor], Tensor]

TASKS = ("prostate",)


@dataclass
class SiteData:
    """What a site's folder gives a task: a training set, what is scored, and what was found on the way."""

    training: "Dataset[Any]"
    validation: Any
    test: Any
    findings: "list[Finding]"
    cases: dict[str, int]
    skipped: dict[str, int]
    training_patients: int


@dataclass(frozen=True)
class Evaluation:
    """Scores of one split, by name of the score, one number a case and NaN where undefined; no case is named."""

    key_score: float | None
    scores: dict[str, list[float]]


class Task(Protocol):
    """What a task module offers."""

    networks: tuple[str, ...]
    in_channels: int
    class_prior: tuple[float, ...]
    key_score: str

    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The training loss of logits and targets."""

    def open_site(self, folder: Path, experiment: Experiment, cache: Path) -> SiteData:
        """Read a site's folder."""

    def locate(self, root: Path, site: str, experiment: Experiment) -> Path:
        """The folder under `root` that holds this site's cases."""

    def evaluate(self, predict: Predict, split: Any) -> Evaluation:
        """Score one split."""

    def write_demo(self, folder: Path, site: str, experiment: Experiment) -> None:
        """Write this site's synthetic data in the real file layout."""


def load_task(experiment: Experiment) -> Task:
    """The task of an experiment.

    Raises:
        ExperimentError: no such task, or its loss cannot take what the experiment's network returns.
    """
    name, network = experiment.task, experiment.network.name
    if name not in TASKS:
        raise ExperimentError(f"task: {name!r} is none of {', '.join(TASKS)}")
    task: Task = import_module(f"harmofl.tasks.{name}").TASK
    if network not in task.networks:
        raise ExperimentError(f"network.name: task {name} needs {' or '.join(task.networks)}, not {network!r}")
    return task


def untrained_network(experiment: Experiment) -> nn.Module:
    """The experiment's network with its initial weights, equal at every site and the server.

    Raises:
        ValueError: the experiment names a combination that cannot be built.
    """
    task, settings = load_task(experiment), experiment.network
    return build_network(
        settings.name,
        task.in_channels,
        task.class_prior,
        width=settings.width,
        norm=settings.norm,
        seed=experiment.seed,
    )
