"""What a site sends of its amplitude: patient by patient clipped where it adds noise, exact for itself."""

import logging
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from harmofl.core.gaussian_mechanism import clipping_center
from harmofl.experiment import Experiment, set_key
from harmofl.flare.local_amplitude import LocalAmplitude, build_normalization
from harmofl.flare.site import NoiseSettings, SiteConfig
from harmofl.flare.state import SiteState
from harmofl.tasks import SiteData, resolve_experiment

SIZE = 64
PATIENTS = ["b", "a", "b", "c", "a", "d", "e", "b", "c"]  # five, not in a row
PRESETS = ["robust", "as_published", "as_described"]


@pytest.fixture
def images() -> Tensor:
    return torch.rand(len(PATIENTS), 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 9


@pytest.fixture
def make(written: dict[str, Any], tmp_path: Path) -> Any:
    """A site's amplitude; `clip` switches noise on."""

    def local(
        images: Tensor,
        patients: Sequence[Hashable] = PATIENTS,
        clip: float | None = None,
        unreadable: Sequence[int] = (),
        **changes: Any,
    ) -> tuple[LocalAmplitude, Experiment]:
        for key, value in ({"data.height": SIZE, "data.width": SIZE, "amplitude.minimum_cases": 1} | changes).items():
            set_key(written, key, value)
        experiment = resolve_experiment(written)
        noise = None if clip is None else NoiseSettings(clip=clip, epsilon=1.0, delta=1e-5)
        site = SiteConfig("HK", False, tmp_path, tmp_path, minimum_cases=5, amplitude_noise=noise)
        data = SiteData(
            TensorDataset(images, torch.zeros(len(images))), None, None, [], {"training": len(images)}, dict, patients,
            unreadable=lambda: unreadable,
        )  # fmt: skip

        def in_batches(dataset: "Dataset[Any]") -> Iterator[Tensor]:
            return (batch for batch, _ in DataLoader(dataset, batch_size=2))

        state = SiteState(tmp_path / "state", "run")
        made = LocalAmplitude(
            experiment, 3, site=site, state=state, data=data, images=in_batches, logger=logging.getLogger("HK")
        )
        return made, experiment

    return local


def statistics(images: Tensor, experiment: Experiment) -> np.ndarray:
    return build_normalization(experiment, 3).statistics(images).double().numpy()


def oracle(each: np.ndarray, patients: Sequence[Hashable], center: np.ndarray, clip: float) -> np.ndarray:
    """Mean over patients of each one's clipped mean, written out in NumPy."""
    moved = []
    for patient in sorted(set(patients), key=str):
        move = each[[name == patient for name in patients]].mean(0) - center
        moved.append(center + move * min(1.0, clip / np.sqrt((move**2).sum())))
    return np.mean(moved, axis=0)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("clip", [0.5, 4e4, 1e9])
def test_with_noise_patients_are_clipped_whatever_the_estimation(
    make: Any, images: Tensor, preset: str, clip: float
) -> None:
    local, experiment = make(images, clip=clip, **{"amplitude.preset": preset})
    if preset == "robust":
        sent = local.before_training()
    else:
        normalization = build_normalization(experiment, 3)
        normalization.observe(images[:2])  # what training has seen: fewer images than patients are needed
        sent = local.of_first_round(normalization)
    assert sent is not None and (sent.patients, sent.images, sent.clip) == (5, 9, clip)
    region = experiment.amplitude.region
    center = clipping_center(region, 3, SIZE, SIZE, experiment.amplitude.low_fraction).numpy()
    expected = oracle(statistics(images, experiment), PATIENTS, center, clip)
    assert sent.values.dtype == np.float64, "rounded once the noise is on it"
    np.testing.assert_allclose(sent.values, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_one_patient_moves_what_is_sent_by_no_more_than_2_clip_over_n(make: Any, images: Tensor) -> None:
    clip = 1.5
    before = make(images, clip=clip)[0].before_training().values
    for patient in "abcde":
        other = images.clone()
        other[[name == patient for name in PATIENTS]] = torch.linspace(-1, 1, SIZE).sin()[None, None, None]
        after = make(other, clip=clip)[0].before_training().values
        assert 0 < np.linalg.norm(after - before) <= 2 * clip / 5 + 1e-9


def test_a_sites_own_statistic_stays_exact(make: Any, images: Tensor) -> None:
    local, experiment = make(images, clip=0.5)
    sent = local.before_training()
    exact = statistics(images, experiment).mean(0)
    np.testing.assert_allclose(local.own_profile().numpy(), exact, rtol=1e-5)
    assert np.abs(sent.values - exact).max() > 0.1


def test_without_noise_the_mean_over_images_leaves(make: Any, images: Tensor) -> None:
    local, experiment = make(images)
    sent = local.before_training()
    assert (sent.patients, sent.images, sent.clip, sent.noise) == (5, 9, None, None)
    np.testing.assert_allclose(sent.values, statistics(images, experiment).mean(0), rtol=1e-5)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_four_patients_are_too_few(
    make: Any, images: Tensor, clip: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    local, _ = make(images, patients=[*PATIENTS[:6], "d", *PATIENTS[7:]], clip=clip)
    assert local.before_training() is None
    assert "amplitude not sent: 9 images of 4 training patients, 5 needed" in caplog.text
    assert local.own_profile().shape == (3, 11)


def test_an_image_that_stands_in_for_an_unreadable_one_is_not_its_patients(make: Any, images: Tensor) -> None:
    # item 5 is all of patient d: it shows another patient's image, which must not enter twice
    images[5] = images[3]
    local, experiment = make(images, clip=2.0, unreadable=[5])
    sent = local.before_training()
    assert (sent.patients, sent.images) == (5, 8)
    center = clipping_center("site_gain", 3, SIZE, SIZE, experiment.amplitude.low_fraction).numpy()
    readable = [name for item, name in enumerate(PATIENTS) if item != 5]
    others = oracle(np.delete(statistics(images, experiment), 5, 0), readable, center, 2.0)
    np.testing.assert_allclose(sent.values, (4 * others + center) / 5, rtol=1e-5)
