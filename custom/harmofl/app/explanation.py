"""What explains a cell's scores: how far sites are apart in amplitude, and the loss around the models."""

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from harmofl.app.gallery import mean_profile
from harmofl.core.amplitude import zscore
from harmofl.core.drift import mean_distance
from harmofl.core.landscape import filter_normalized_direction, loss_along, sharpness
from harmofl.core.training import batches
from harmofl.evidence.comparison import Landscape, LocalCurves
from harmofl.flare.in_process import FinishedRun, InProcessFederation
from harmofl.flare.wire import Arrays
from harmofl.tasks import load_task

PROFILED = 256  # images a site: a mean log profile of that many moves by less than a hundredth of the sites' distance
LOSS_IMAGES = 8  # images a site that the landscape is taken over
# The plane is most of the cost: 49 places take about a quarter of the time that plain averaging trains on the demo, 81
# places, with all images for every local model, took more than half of it.
# Three eighths of a filter's length each way: beyond it the loss only shows that the model is destroyed.
RADIUS, POINTS = 0.375, 7
SHARPNESS_STEP = 2  # places of the grid from its center, a distance of 0.25


def amplitude_distances(federation: InProcessFederation) -> dict[str, float | None]:
    """Mean distance between sites of their mean log amplitude profiles: as read, after z-score, as trained on."""
    steps: dict[str, list[np.ndarray]] = {"as read": [], "after the intensity step": [], "as trained on": []}
    intensity = zscore if federation.experiment.amplitude.intensity == "zscore" else _unchanged
    for participant in federation.participants.values():
        images = _some(participant.data.training, PROFILED)
        layer = participant.normalization(federation.run_state.amplitude).cpu()
        for step, change in zip(steps, (_unchanged, intensity, layer), strict=True):
            steps[step].append(mean_profile(images, change))
    return {step: mean_distance(np.stack(profiles)) for step, profiles in steps.items()}


def landscape_of(federation: InProcessFederation, finished: FinishedRun) -> Landscape:
    """Losses around the last global model on a plane, and around each local model on a line.

    Both directions are drawn anew for no method, only scaled to its filters, so that methods are compared on equal
    terms; batches are whole, the same for every model.
    """
    losses = {site: _site_loss(federation, site) for site in federation.run_state.expected}
    offsets = [float(offset) for offset in np.linspace(-RADIUS, RADIUS, POINTS)]
    plane = [(row, column) for row in offsets for column in offsets]
    final = federation.received_weights
    mean = np.mean([_around(federation, site, final, loss, plane) for site, loss in losses.items()], axis=0)
    surface = [[_finite(value) for value in row] for row in mean.reshape(POINTS, POINTS)]
    line = [(offset, 0.0) for offset in offsets]
    local = {}
    for site, difference in finished.differences.items():
        weights = {name: value + difference[name] for name, value in finished.trained_from.items()}
        own = _around(federation, site, weights, losses[site], line)
        model = federation.participants[site].network(weights).eval()
        with torch.no_grad():
            elsewhere = np.mean([loss(model) for loss in losses.values()])
        local[site] = LocalCurves(own_images=[_finite(value) for value in own], all_images=_finite(float(elsewhere)))
    return Landscape(
        offsets=offsets,
        surface=surface,
        local=local,
        sharpness=sharpness(surface, SHARPNESS_STEP),
        sharpness_at=SHARPNESS_STEP * (offsets[1] - offsets[0]),
        images=LOSS_IMAGES,
    )


def _around(
    federation: InProcessFederation,
    site: str,
    weights: Arrays,
    loss: Callable[[nn.Module], float],
    places: Sequence[Sequence[float]],
) -> list[float]:
    """Loss of a site's model at all places."""
    network = federation.participants[site].network(weights).eval()
    seed = federation.experiment.seed
    directions = [filter_normalized_direction(network, 2 * seed + number) for number in range(2)]
    return loss_along(network, lambda: loss(network), directions, places)


def _site_loss(federation: InProcessFederation, site: str) -> Callable[[nn.Module], float]:
    participant = federation.participants[site]
    images, targets = next(batches(_some(participant.data.training, LOSS_IMAGES), LOSS_IMAGES, None))
    normalized = participant.normalization(federation.run_state.amplitude)(images.to(participant.device))
    criterion = load_task(federation.experiment).loss()
    wanted = targets.to(participant.device)

    def loss(network: nn.Module) -> float:
        return float(criterion(network(normalized).float(), wanted))

    return loss


def _some(dataset: "Dataset[tuple[Tensor, Tensor]]", count: int) -> "Dataset[tuple[Tensor, Tensor]]":
    """At most `count` items, evenly spread over a data set, so that no case has them all."""
    length = len(dataset)
    chosen = np.linspace(0, length - 1, min(count, length)).round().astype(int)
    return Subset(dataset, [int(index) for index in chosen])


def _unchanged(images: Tensor) -> Tensor:
    return images


def _finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None
