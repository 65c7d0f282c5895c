"""In each preset the amplitude step changes what is trained: switching it off gives other weights."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.networks import build_network
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, build_optimizer, fit_round
from harmofl.experiment import Experiment, resolve
from harmofl.methods import PRESETS

SIZE, IMAGES = 64, 8


def blobs(contrast: float, blur: int, seed: int) -> TensorDataset:
    """Images of bright blobs on a textured ground in [0, 1], and the blobs as masks; blur is a box's width."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centers = torch.randint(16, 48, (IMAGES, 2), generator=generator)
    distance = (rows - centers[:, 0, None, None]).square() + (columns - centers[:, 1, None, None]).square()
    masks = (distance < 100).long()
    noise = torch.rand(IMAGES, 3, SIZE, SIZE, generator=generator)
    images = 0.3 * noise + 0.4 * masks[:, None]
    images = torch.nn.functional.avg_pool2d(images, blur, stride=1, padding=blur // 2)
    return TensorDataset((contrast * images).contiguous(), masks)


SITES = {"sharp": blobs(1.0, 1, seed=0), "blurred": blobs(0.6, 5, seed=1)}


def amplitude_step(experiment: Experiment, estimation: Any = None) -> AmplitudeNormalization:
    chosen = experiment.amplitude
    return AmplitudeNormalization(
        intensity=chosen.intensity,
        region=chosen.region,
        low_fraction=chosen.low_fraction,
        estimation=estimation or chosen.estimation,
        momentum=chosen.momentum,
        channels=3,
        height=experiment.data.height,
        width=experiment.data.width,
    )


def statistic_of(experiment: Experiment, data: TensorDataset) -> torch.Tensor:
    step = amplitude_step(experiment, "before_training")
    step.observe(data.tensors[0])
    statistic = step.local_statistic
    assert statistic is not None
    return statistic


def frozen_step(experiment: Experiment, site: str) -> AmplitudeNormalization:
    """The step as a site has it once the mean over both sites is frozen."""
    step = amplitude_step(experiment)
    if step.region != "off":
        statistics = {name: statistic_of(experiment, data) for name, data in SITES.items()}
        step.freeze(torch.stack(list(statistics.values())).mean(0), IMAGES * len(SITES))
        if step.region == "site_gain":
            step.set_own(statistics[site])
    return step


def update_of(experiment: Experiment, step: AmplitudeNormalization, site: str) -> torch.Tensor:
    """What one round changes, all parameters in one vector."""
    chosen, training = experiment.network, experiment.training
    network = build_network(chosen.name, 3, (0.5, 0.5), width=chosen.width, norm=chosen.norm, seed=0)
    before = torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    optimizer = WeightPerturbation(
        build_optimizer(network, training.optimizer, training.learning_rate, 0.0, 0.0),
        experiment.perturbation.alpha,
        network,
    )
    fit_round(
        network,
        step,
        optimizer,
        torch.nn.functional.cross_entropy,
        SITES[site],
        settings=RoundSettings(training.batch_size, 1, "none", None, "float32"),
        seed=1,
    )
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach() - before


def resolved(written: dict[str, Any], preset: str, **amplitude: Any) -> Experiment:
    return resolve(written | {"amplitude": written["amplitude"] | {"preset": preset} | amplitude})


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("preset", PRESETS)
def test_switching_the_amplitude_step_off_changes_the_trained_weights(preset, site, written):
    on, off = resolved(written, preset), resolved(written, preset, region="off")
    assert (on.amplitude.intensity, on.network) == (off.amplitude.intensity, off.network)
    with_step = update_of(on, frozen_step(on, site), site)
    without = update_of(off, frozen_step(off, site), site)
    # float32 rounding through a few layers leaves 1e-5 of an update; 0.02 is far beyond it
    assert distance(with_step, without) > 0.02


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "robust"])
def test_the_step_already_works_while_it_is_being_estimated(preset, written):
    on, off = resolved(written, preset), resolved(written, preset, region="off")
    assert distance(update_of(on, amplitude_step(on), "sharp"), update_of(off, amplitude_step(off), "sharp")) > 0.02


def test_a_shift_of_all_images_would_not_show(written):
    # The measure tells a real effect from none: zscore takes a constant away before the network sees it, so two sites
    # that differ by a constant alone train alike up to rounding.
    experiment = resolved(written, "robust", region="off")
    step = amplitude_step(experiment)
    images, masks = SITES["sharp"].tensors
    SITES["shifted"] = TensorDataset(images + 0.25, masks)
    try:
        first, second = (update_of(experiment, step, site) for site in ("shifted", "sharp"))
    finally:
        del SITES["shifted"]
    assert distance(first, second) < 1e-3


def test_the_gain_brings_the_sites_together(written):
    # robust: the mean log profiles of two sites are closer after each site's gain than before it
    experiment = resolved(written, "robust")
    profiles = {}
    for site, data in SITES.items():
        moved = frozen_step(experiment, site)(data.tensors[0])
        profiles[site] = statistic_of(resolved(written, "robust", intensity="none"), TensorDataset(moved))
    before = [statistic_of(experiment, data) for data in SITES.values()]
    after = list(profiles.values())
    assert float((after[0] - after[1]).abs().mean()) < 0.5 * float((before[0] - before[1]).abs().mean())
