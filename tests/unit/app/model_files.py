"""Model files as a run leaves them, without a run: tiny networks on synthetic images of every task."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, batches, build_optimizer, fit_round
from harmofl.experiment import Experiment, set_key
from harmofl.flare.local_amplitude import build_normalization
from harmofl.flare.state import Checkpoint
from harmofl.tasks import SiteData, load_task, resolve_experiment, untrained_network

JOBS = Path(__file__).resolve().parents[3] / "jobs"
SMALL = {"data.height": 64, "data.width": 64, "network.width": 4, "training.batch_size": 4}


def small_experiment(task: str, changes: Mapping[str, Any] | None = None) -> Experiment:
    """The demo of a job with a network of width 4 on 64 x 64 pixels."""
    settings = json.loads((JOBS / f"harmofl_{task}" / "app" / "config" / "experiment.json").read_text())
    settings["demo"]["overrides"] |= SMALL | dict(changes or {})
    set_key(settings, "demo.data", settings["demo"]["data"] | DEMO[task])
    return resolve_experiment(settings, demo=True)


DEMO: dict[str, dict[str, Any]] = {
    "prostate": {"cases": 5, "matrix": 64, "slices": 6},
    "camelyon17": {"slides": 5, "patches": 20},
    "nuclei": {"patients": 4, "images": 4, "size": 96},
}


def write_site(experiment: Experiment, site: str, folder: Path) -> SiteData:
    """Write a site's synthetic images and read them as training does."""
    task = load_task(experiment)
    task.write_demo(folder, site, experiment)
    return task.open_site(folder, site, experiment, folder.with_name(f"{folder.name}-cache"))


def frozen(experiment: Experiment, data: SiteData) -> AmplitudeNormalization:
    """The normalization with the amplitude of a site's training images, which are then its own profile too."""
    normalization = build_normalization(experiment, 3)
    if experiment.amplitude.region == "off":
        return normalization
    measured = build_normalization(experiment, 3, estimation="before_training")
    for images, _ in batches(data.training, 4, None):
        measured.observe(images)
    assert measured.local_statistic is not None
    normalization.freeze(measured.local_statistic, measured.local_images)
    if experiment.amplitude.region == "site_gain":
        normalization.set_own(measured.local_statistic)
    return normalization


def write_model(path: Path, experiment: Experiment, data: SiteData, *, epochs: int = 0) -> Path:
    """A model file, trained at one site for some epochs or not at all."""
    network, normalization = untrained_network(experiment), frozen(experiment, data)
    if epochs:
        optimizer = WeightPerturbation(build_optimizer(network, "adam", 0.01, 0.9, 0.0), 0.0, network)
        settings = RoundSettings(4, epochs, "none", None, "float32")
        loss = load_task(experiment).loss()
        fit_round(network, normalization, optimizer, loss, data.training, settings=settings, seed=0)
    has_amplitude = experiment.amplitude.region != "off"
    Checkpoint(
        model={name: value.clone() for name, value in network.state_dict().items()},
        experiment=experiment.model_dump(mode="json"),
        experiment_hash=experiment.hash,
        run_id="a1b2c3",
        next_round=1,
        amplitude=normalization.target.clone() if has_amplitude else None,
        amplitude_images=len(data.training) if has_amplitude else 0,
        amplitude_sites=("A",) if has_amplitude else (),
        record={},
    ).save(path)
    return path


@dataclass(frozen=True)
class ModelOfTask:
    """A model file with the experiment that it is of, and the site whose images it saw."""

    path: Path
    experiment: Experiment
    site: str
    folder: Path
    data: SiteData

    @property
    def images(self) -> list[Path]:
        """The site's images without their annotations, in order."""
        endings = (".nii.gz", ".tif", ".png")
        files = [path for path in self.folder.rglob("*") if path.name.endswith(endings)]
        return sorted(path for path in files if "_segmentation" not in path.name)


def model_of_task(task: str, site: str, folder: Path, *, epochs: int) -> ModelOfTask:
    """Write a site's images into `folder`/<site> and a model of them beside it."""
    experiment = small_experiment(task)
    data = write_site(experiment, site, folder / site)
    path = write_model(folder / f"{task}.pt", experiment, data, epochs=epochs)
    return ModelOfTask(path, experiment, site, folder / site, data)


def altered(path: Path, target: Path, change: Any) -> Path:
    """A copy of a model file whose content `change` has altered in place."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, target)
    return target
