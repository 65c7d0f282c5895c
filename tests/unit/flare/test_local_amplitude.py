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

from harmofl.core.gaussian_mechanism import ClippingCenter, clipping_center
from harmofl.experiment import Experiment, set_key
from harmofl.flare.local_amplitude import LocalAmplitude, build_normalization
from harmofl.flare.site import SiteConfig
from harmofl.flare.site_settings import NoiseSettings
from harmofl.flare.state import SiteState
from harmofl.tasks import SiteData, resolve_experiment

SIZE = 64
PATIENTS = ["b", "a", "b", "c", "a", "d", "e", "b", "c"]  # five, not in a row
PRESETS = ["robust", "as_published", "as_described"]


@pytest.fixture
def images() -> Tensor:
    """Smooth images in 0..1, those of each patient of a contrast of their own."""
    rough = torch.rand(len(PATIENTS), 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.avg_pool2d(rough, 5, 1, 2, count_include_pad=False)
    contrast = torch.tensor(["abcde".index(patient) for patient in PATIENTS]) / 8 + 0.5
    return (0.5 + 3 * contrast[:, None, None, None] * (smooth - 0.5)).clamp(0, 1)


@pytest.fixture
def make(written: dict[str, Any], tmp_path: Path) -> Any:
    """A site's amplitude; `clip`, in multiples of the scale, switches noise on."""

    def local(
        images: Tensor,
        patients: Sequence[Hashable] = PATIENTS,
        clip: float | None = None,
        unreadable: Sequence[int] = (),
        least: int = 5,
        **changes: Any,
    ) -> tuple[LocalAmplitude, Experiment]:
        for key, value in ({"data.height": SIZE, "data.width": SIZE, "amplitude.minimum_cases": 1} | changes).items():
            set_key(written, key, value)
        experiment = resolve_experiment(written)
        noise = None if clip is None else NoiseSettings(relative_clip=clip, epsilon=1.0, delta=1e-5)
        site = SiteConfig("HK", False, tmp_path, tmp_path, minimum_cases=least, amplitude_noise=noise)
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


def center_of(experiment: Experiment) -> ClippingCenter:
    settings = experiment.amplitude
    return clipping_center(settings.region, 3, SIZE, SIZE, settings.low_fraction, intensity=settings.intensity)


def clip_of(clipped: int, images: Tensor, experiment: Experiment) -> float:
    """A relative clip at which so many of the five patients are clipped."""
    center, each = center_of(experiment), statistics(images, experiment)
    moves = [each[[name == patient for name in PATIENTS]].mean(0) - center.values.numpy() for patient in "abcde"]
    distances = sorted((float(np.linalg.norm(move)) / center.scale for move in moves), reverse=True)
    return 1.1 * distances[0] if not clipped else float(np.mean([*distances, 0.0][clipped - 1 : clipped + 1]))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("clipped", [0, 2, 4])
def test_with_noise_patients_are_clipped_whatever_the_estimation(
    make: Any, images: Tensor, preset: str, clipped: int
) -> None:
    _, experiment = make(images, **{"amplitude.preset": preset})
    clip = clip_of(clipped, images, experiment)
    local, experiment = make(images, clip=clip, **{"amplitude.preset": preset})
    if preset == "robust":
        sent = local.before_training()
    else:
        normalization = build_normalization(experiment, 3)
        normalization.observe(images[:2])  # what training has seen: fewer images than patients are needed
        sent = local.of_first_round(normalization)
    center = center_of(experiment)
    distance = clip * center.scale
    assert sent is not None and (sent.patients, sent.images, sent.relative_clip) == (5, 9, clip)
    assert sent.clip == distance
    expected = oracle(statistics(images, experiment), PATIENTS, center.values.numpy(), distance)
    assert sent.values.dtype == np.float64, "rounded once the noise is on it"
    np.testing.assert_allclose(sent.values, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("preset", PRESETS)
def test_one_patient_moves_what_is_sent_by_no_more_than_2_clip_over_n(make: Any, images: Tensor, preset: str) -> None:
    def sent(of: Tensor) -> np.ndarray:
        local, experiment = make(of, clip=clip, least=1, **{"amplitude.preset": preset})
        normalization = build_normalization(experiment, 3)
        normalization.observe(of)
        found = local.before_training() if preset == "robust" else local.of_first_round(normalization)
        assert found is not None and found.clip == clip * center_of(experiment).scale
        bounds.append(2 * found.clip / 5)
        return found.values

    clip = clip_of(2, images, make(images, **{"amplitude.preset": preset})[1])
    bounds: list[float] = []
    before = sent(images)
    for patient in "abcde":
        for other in (torch.linspace(-1, 1, SIZE).sin().expand(SIZE, SIZE), torch.zeros(SIZE, SIZE)):
            changed = images.clone()
            changed[[name == patient for name in PATIENTS]] = other
            assert 0 < np.linalg.norm(sent(changed) - before) <= bounds[-1] * (1 + 1e-9)


def test_a_sites_own_statistic_stays_exact(make: Any, images: Tensor) -> None:
    local, experiment = make(images, clip=clip_of(2, images, make(images)[1]))
    sent = local.before_training()
    exact = statistics(images, experiment).mean(0)
    np.testing.assert_allclose(local.own_profile().numpy(), exact, rtol=1e-5)
    assert np.abs(sent.values - exact).max() > 0.01


@pytest.mark.parametrize("estimation", ["first_batch", "running_mean", "before_training"])
def test_a_site_that_joins_late_has_the_exact_profile_whatever_the_estimation(
    make: Any, images: Tensor, estimation: str
) -> None:
    local, experiment = make(images, **{"amplitude.estimation": estimation})
    np.testing.assert_allclose(local.own_profile().numpy(), statistics(images, experiment).mean(0), rtol=1e-5)


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
    counted = "9 images of " if clip is None else ""
    assert f"amplitude not sent: {counted}4 training patients, 5 needed" in caplog.text
    assert local.own_profile().shape == (3, 11)


def test_noise_is_made_for_a_split_that_no_image_decides(
    make: Any, images: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    # as_published cuts the list of all images at 64 %: one patient's fifth image moves another's into validation, and
    # the mean moves by what two patients contribute, not one
    published = {"data.split": "as_published"}
    assert make(images, clip=0.8, **published)[0].before_training() is None
    assert "amplitude not sent: with data.split as_published the images of one patient decide" in caplog.text
    assert make(images, **published)[0].before_training() is not None, "without noise nothing is promised"
    assert make(images, clip=0.8, **{"data.split": "patient"})[0].before_training() is not None


@pytest.mark.parametrize("is_blank", [True, False])
def test_a_patient_who_shows_nothing_counts_as_the_center(make: Any, images: Tensor, is_blank: bool) -> None:
    # item 5 is all of patient d: blank, or another patient's image that stands in for one that cannot be read
    images[5] = 0.25 if is_blank else images[3]
    unreadable = [] if is_blank else [5]
    assert make(images, clip=0.8, unreadable=unreadable)[0].before_training() is None, "four patients are behind it"
    local, experiment = make(images, clip=0.8, unreadable=unreadable, least=4)
    sent = local.before_training()
    assert sent is not None and (sent.patients, sent.images) == (5, 8), "the noise is made for five"
    center = center_of(experiment)
    others = oracle(
        np.delete(statistics(images, experiment), 5, 0),
        [name for item, name in enumerate(PATIENTS) if item != 5],
        center.values.numpy(),
        0.8 * center.scale,
    )
    np.testing.assert_allclose(sent.values, (4 * others + center.values.numpy()) / 5, rtol=1e-5)


def test_the_site_is_told_how_many_patients_were_clipped(
    make: Any, images: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, experiment = make(images)
    for clipped, level in ((1, logging.INFO), (3, logging.WARNING), (5, logging.WARNING)):
        caplog.clear()
        clip = clip_of(clipped, images, experiment)
        sent = make(images, clip=clip)[0].before_training()
        [record] = caplog.records
        assert record.levelno == level and f"{clipped} of 5 patients were clipped at" in record.getMessage()
        assert (sent is None) == (clipped == 5)
        # the hospital's log alone: what is sent says no such number
        assert sent is None or not any(value == clipped for value in (sent.images, sent.patients, sent.clip))
    assert "amplitude not sent" in caplog.text and "raise relative_clip" in caplog.text


def test_with_noise_too_the_channel_with_the_fewest_patients_counts(make: Any, images: Tensor) -> None:
    images[6, 1] = 0.5  # all of patient e, in one channel: four patients show something there
    assert make(images, clip=0.8)[0].before_training() is None
    assert make(images, clip=0.8, least=4)[0].before_training().patients == 5, "the noise is made for five"


def test_a_patient_who_shows_nothing_is_not_among_those_that_could_be_clipped(
    make: Any, images: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    images[5] = 0.25  # all of patient d: of the four who show anything every one is clipped
    assert make(images, clip=1e-3, least=4)[0].before_training() is None
    assert "amplitude not sent: 4 of 4 patients were clipped at" in caplog.text


@pytest.mark.parametrize(("intensity", "region"), [("window", "dc"), ("window", "full"), ("window", "low")])
def test_one_setting_keeps_the_statistic_of_every_region(
    make: Any, images: Tensor, intensity: str, region: str
) -> None:
    # seen before: constant term exact 4441, sent 0.00, as the clip was a distance of 5 whatever the region
    local, experiment = make(images, clip=0.8, **{"amplitude.intensity": intensity, "amplitude.region": region})
    sent = local.before_training()
    exact = statistics(images, experiment)
    per_patient = [exact[[name == patient for name in PATIENTS]].mean(0) for patient in "abcde"]
    assert sent is not None
    np.testing.assert_allclose(sent.values, np.mean(per_patient, axis=0), rtol=1e-5, atol=0.01)


FIVE = [0, 1, 3, 5, 6]  # b, a, c, d, e


@pytest.mark.parametrize(
    "counted",
    [
        ([[0, 2, 7]], "first_batch", 0.1, 1),
        ([[0, 1, 3, 5]], "first_batch", 0.1, 4),
        ([FIVE], "first_batch", 0.1, 5),
        ([[0, 2, 7], FIVE], "first_batch", 0.1, 1),
        ([[0, 2, 7], FIVE], "running_mean", 0.1, 5),
        # an image of the first batch weighs 0.9 * 0.1 / 5, one of the second 0.1 / 2
        ([FIVE, [7, 8]], "running_mean", 0.1, 5),
        # 0.1 * 0.9 / 5 = 0.018 is below a tenth of 0.9 / 2: what is sent is the mean of two patients
        ([FIVE, [7, 8]], "running_mean", 0.9, 2),
        # 0.9^14 * 0.1 / 5 = 0.0046 in the first batch; images 7 and 8 have (1 - 0.9^14) / 2 = 0.39 each
        ([FIVE, *14 * [[7, 8]]], "running_mean", 0.1, 2),
    ],
)
def test_a_statistic_counts_the_patients_who_carry_weight_in_it(
    make: Any, images: Tensor, counted: tuple[list[list[int]], str, float, int]
) -> None:
    batches, estimation, momentum, patients = counted
    changes = {"amplitude.preset": "as_described", "amplitude.estimation": estimation, "amplitude.momentum": momentum}
    for least in (patients, patients + 1):
        local, experiment = make(images, least=least, **changes)
        normalization = build_normalization(experiment, 3)
        for batch in batches:
            normalization.observe(images[batch], items_B=torch.tensor(batch))
        sent = local.of_first_round(normalization)
        assert (sent is None) == (least > patients)
        assert sent is None or sent.patients == patients


def test_images_without_a_number_are_nobodys(make: Any, images: Tensor) -> None:
    local, experiment = make(images, least=1, **{"amplitude.preset": "as_published"})
    normalization = build_normalization(experiment, 3)
    normalization.observe(images)
    assert local.of_first_round(normalization) is None


@pytest.mark.parametrize("channels", [[0, 1, 2], [1]])
def test_a_patient_without_contrast_is_not_behind_the_statistic(
    make: Any, images: Tensor, channels: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    images[6, channels] = 0.5  # all of patient e
    local, experiment = make(images)
    assert local.before_training() is None and local.blank_images == 1
    images_left = 8 if len(channels) == 3 else 9
    assert f"amplitude not sent: {images_left} images of 4 training patients, 5 needed" in caplog.text
    assert "1 training images have no contrast in a channel" in caplog.text
    exact = statistics(images, experiment)
    expected = exact.mean(0)
    expected[channels] = np.delete(exact, 6, 0).mean(0)[channels]
    np.testing.assert_allclose(local.own_profile().numpy(), expected, rtol=1e-5)
    sent = make(images, least=4)[0].before_training()
    assert sent is not None and (sent.patients, sent.images) == (4, images_left)


def test_what_stands_in_for_an_unreadable_image_counts_for_nobody(make: Any, images: Tensor) -> None:
    assert make(images, unreadable=[5])[0].before_training() is None
    assert make(images, unreadable=[0])[0].before_training().patients == 5, "patient b has other images"


def test_a_site_that_shows_nothing_sends_nothing_and_filters_nothing(make: Any, images: Tensor) -> None:
    local, _ = make(torch.full_like(images, 0.3), least=1)
    assert local.before_training() is None
    assert local.own_profile().isnan().all()


def test_with_noise_the_filter_is_told_of_whom_the_mean_is(make: Any, images: Tensor) -> None:
    local, _ = make(images, clip=0.8, unreadable=[0])
    assert local.offer is None
    assert local.before_training() is not None
    offer = local.offer
    assert offer is not None and (offer.run, offer.task, offer.limit, offer.weighted) == ("run", "prostate", 5, False)
    assert [case for case, _, _ in offer.members] == ["a", "b", "c", "d", "e"], "whoever the noise hides"
    assert offer.statistic["noise"] == {"relative_clip": 0.8, "epsilon": 1.0, "delta": 1e-5}
    assert make(images)[0].before_training() is not None
    assert make(images)[0].offer is None, "without noise the ledger was asked here"
