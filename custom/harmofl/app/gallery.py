"""The arrays of the gallery: images of every site through the steps that a run would take them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harmofl.app.job import JobError
from harmofl.core.amplitude import AmplitudeNormalization, RunningAmplitude, amplitude_spectrum, zscore
from harmofl.core.contrast import has_contrast
from harmofl.core.loading import Numbered, batches
from harmofl.data.findings import DataRootError
from harmofl.data.imagescope import IGNORED
from harmofl.evidence.gallery import Example, Gallery, SiteExamples, Step
from harmofl.experiment import Experiment
from harmofl.flare.aggregator import AmplitudeGathering
from harmofl.flare.local_amplitude import build_normalization, patients_behind
from harmofl.flare.wire import AmplitudeStatistic
from harmofl.tasks import SiteData, Task, load_task

Layer = Callable[[Tensor], Tensor]

EXAMPLES = 3  # images a site
AT_ONCE = 64  # images in one batch
REGION_NOTES = {
    "dc": "the mean is replaced by that of all sites",
    "low": "low amplitudes are replaced by the mean of all sites, phases stay",
    "full": "amplitudes are replaced by the mean of all sites, phases stay",
    "site_gain": "one smooth gain a site and channel, toward the mean profile of all sites",
}


def collect_gallery(
    root: Path | Mapping[str, Path], sites: Sequence[str], experiment: Experiment, cache: Path | Mapping[str, Path]
) -> Gallery:
    """Read every site, measure its amplitude, average as the server would, and take examples through each step.

    Args:
        root: folder of the sites' folders, or that of each site.
        sites: names of the sites.
        experiment: resolved for the data in `root`.
        cache: for what a task keeps decoded, of all sites or of each site.

    Raises:
        DataRootError: a site's folder cannot be read or gives no training image.
        JobError: so few sites may send their amplitude that the job would fail.
    """
    task = load_task(experiment)
    roots = dict.fromkeys(sites, root) if isinstance(root, Path) else root
    caches = {site: cache / site for site in sites} if isinstance(cache, Path) else cache
    data = {site: _opened(roots[site], site, task, experiment, caches[site]) for site in sites}
    normalizations = _normalizations(data, task, experiment)
    rows = []
    for site, held in data.items():
        layers: list[Layer] = [_unchanged]
        layers += [zscore] if experiment.amplitude.intensity == "zscore" else []
        layers += [normalizations[site]] if site in normalizations else []
        examples = tuple(_example(held.training[index], layers, task) for index in _chosen(held.training, task))
        profiles = np.stack([mean_profile(held.training, layer) for layer in layers])
        rows.append(SiteExamples(site, task.describe_demo(site, experiment), len(held.training), examples, profiles))
    bins = rows[0].profiles.shape[1]
    frequencies = 2.0 ** (np.arange(bins) / 2 - (bins + 1) / 2)  # see harmofl.core.radial
    settings = experiment.amplitude
    said = (
        f"method {experiment.method}, preset {settings.preset}",
        f"{experiment.data.height} x {experiment.data.width} pixels, seed {experiment.seed}",
    )
    return Gallery(experiment.name, said, task.is_color, _steps(experiment), tuple(rows), frequencies)


def _opened(root: Path, site: str, task: Task, experiment: Experiment, cache: Path) -> SiteData:
    data = task.open_site(task.locate(root, site, experiment), site, experiment, cache)
    if not len(data.training):
        raise DataRootError(f"site {site} has no image to train on; run harmofl check {root}")
    return data


def _normalizations(data: dict[str, SiteData], task: Task, experiment: Experiment) -> dict[str, AmplitudeNormalization]:
    """The amplitude step of each site; none where the method has none.

    Raises:
        JobError: fewer sites than amplitude.minimum_sites may send their statistic.
    """
    settings = experiment.amplitude
    if settings.region == "off":
        return {}
    gathering, own = AmplitudeGathering(experiment), {}
    for site, held in data.items():
        exact = build_normalization(experiment, task.in_channels, estimation="before_training")
        for images, _, items in batches(Numbered(held.training), AT_ONCE, None):
            exact.observe(images, items_B=items)
        own[site] = exact.local.mean
        if patients_behind(exact.local, held) >= settings.minimum_cases:
            gathering.add(site, AmplitudeStatistic(own[site].numpy(), exact.local_images))
    if len(gathering.sites) < settings.minimum_sites:
        raise JobError(
            f"{len(gathering.sites)} of {len(data)} sites send an amplitude, amplitude.minimum_sites is "
            f"{settings.minimum_sites}; write more cases, or lower amplitude.minimum_cases or amplitude.minimum_sites"
        )
    mean, layers = gathering.result(), {}
    for site in data:
        layers[site] = build_normalization(experiment, task.in_channels)
        layers[site].freeze(torch.as_tensor(mean.values), mean.images)
        if settings.region == "site_gain":
            layers[site].set_own(own[site])
    return layers


def _steps(experiment: Experiment) -> tuple[Step, ...]:
    settings = experiment.amplitude
    window = settings.intensity == "window"
    steps = [Step("as read", "as the reader makes them" + (", which is the intensity step 'window'" if window else ""))]
    if settings.intensity == "zscore":
        steps.append(Step("after the intensity step", "zscore: every image and channel to mean 0 and deviation 1"))
    if settings.region != "off":
        note = f"{settings.region}: {REGION_NOTES[settings.region]}"
        if settings.estimation != "before_training":
            note += f" (here the exact mean over training images; a run estimates it by {settings.estimation})"
        steps.append(Step("after the amplitude step", note))
    return tuple(steps)


def _chosen(dataset: Any, task: Task) -> list[int]:
    """One image of each third of a training set: of the classes in turn, or with the largest foreground."""
    targets = [target for _, batch in batches(dataset, AT_ONCE, None) for target in batch]
    chosen = []
    for number, part in enumerate(np.array_split(np.arange(len(targets)), EXAMPLES)):
        if task.labels:
            wanted = number % len(task.labels)
            merits = [float(targets[index] == wanted) for index in part]
        else:
            merits = [float(_foreground(targets[index]).sum()) for index in part]
        if merits:
            chosen.append(int(part[int(np.argmax(merits))]))
    return chosen


def _example(item: tuple[Tensor, Tensor], layers: Sequence[Layer], task: Task) -> Example:
    image, target = item
    images = tuple(layer(image[None])[0].numpy() for layer in layers)
    if task.labels:
        return Example(images, label=task.labels[int(target)])
    return Example(images, mask=_foreground(target).numpy())


def _foreground(target: Tensor) -> Tensor:
    return (target > 0) & (target != IGNORED)


def mean_profile(dataset: Any, layer: Layer) -> NDArray[np.float64]:
    """Mean log amplitude by radial frequency over all channels and the images with contrast in each, (bins,)."""
    mean = RunningAmplitude("before_training", momentum=1)
    for images, _ in batches(dataset, AT_ONCE, None):
        mean.update(amplitude_spectrum(layer(images), "site_gain", 0.0), has_contrast(images))
    return mean.mean.double().nanmean(0).numpy()


def _unchanged(images: Tensor) -> Tensor:
    return images
