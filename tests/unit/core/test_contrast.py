"""What has no contrast: one definition in tensors and in files, left out of every statistic, left as it is."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harmofl.core.amplitude import AmplitudeNormalization, RunningAmplitude
from harmofl.core.contrast import LEAST_CONTRAST, contrast_of_planes, has_contrast
from harmofl.data import voxels
from harmofl.data.findings import CaseError

SIZE = 64
STEPS = [("window", "dc"), ("window", "low"), ("window", "full"), ("zscore", "low"), ("zscore", "full")]
STEPS += [("window", "site_gain"), ("zscore", "site_gain")]


def layer_for(intensity: Any, region: Any, estimation: Any = "before_training") -> AmplitudeNormalization:
    return AmplitudeNormalization(
        intensity=intensity,
        region=region,
        low_fraction=0.1,
        estimation=estimation,
        momentum=0.3,
        channels=3,
        height=SIZE,
        width=SIZE,
    )


def images_of(count: int, seed: int = 0) -> Tensor:
    rough = torch.rand((count, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool2d(rough, 5, 1, 2)


def plane(low: float, high: float, place: tuple[int, int] = (3, 5)) -> Tensor:
    """All of one intensity but for one pixel."""
    made = torch.full((1, 1, SIZE, SIZE), low, dtype=torch.float32)
    made[0, 0, place[0], place[1]] = high
    return made


@pytest.mark.parametrize("scale", [1e-6, 1.0, 255.0, 3e4])
@pytest.mark.parametrize("place", [(3, 5), (16, 32)])  # between the pixels that are looked at first, one of them
def test_the_limit_is_a_hundred_thousandth_of_the_largest_intensity(scale: float, place: tuple[int, int]) -> None:
    assert LEAST_CONTRAST == 1e-5
    # float32 has steps of 6e-8 to 1.2e-7 of a number: 2 % of the limit
    for high, expected in ((1.0, False), (1 + 0.95e-5, False), (1 + 1.05e-5, True), (2.0, True)):
        assert bool(has_contrast(plane(scale, scale * high, place))) == expected
        assert bool(has_contrast(-plane(scale, scale * high, place))) == expected
    assert not bool(has_contrast(torch.zeros(1, 1, SIZE, SIZE)))
    assert bool(has_contrast(plane(0.0, 1e-30 * scale, place)))


@given(
    level=st.floats(-1e4, 1e4, width=32),
    spread=st.sampled_from([0.0, 0.5e-5, 0.9e-5, 1.1e-5, 2e-5, 1e-3, 1.0]),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
@settings(max_examples=60, deadline=None)
def test_tensors_and_files_have_one_definition(level: float, spread: float, seed: int, dtype: torch.dtype) -> None:
    offsets = torch.rand((1, 1, 40, 24), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    image = (level * (1 + spread * (offsets - offsets.min()) / (offsets.max() - offsets.min()))).to(dtype)
    found = bool(has_contrast(image))
    assert found == bool(contrast_of_planes(image))
    low, high = float(image.min()), float(image.max())
    near_the_limit = abs((high - low) - 1e-5 * max(abs(low), abs(high))) <= 1e-7 * max(abs(low), abs(high))
    if not near_the_limit:
        assert found == (high - low > 1e-5 * max(abs(low), abs(high)))
        assert list(voxels.blank_slices(image[0].numpy())) == ([] if found else [0])
    try:
        voxels.check_contrast(image[0].numpy(), "image.nii")
    except CaseError:
        assert not found or near_the_limit
    else:
        assert found or near_the_limit


def test_the_definition_looks_at_each_channel_of_each_image() -> None:
    images = images_of(4)
    images[1], images[2, 0], images[3, 2] = 0.7, 0.0, 1.0
    expected = [[True] * 3, [False] * 3, [False, True, True], [True, True, False]]
    assert has_contrast(images).tolist() == expected
    assert has_contrast(images.contiguous(memory_format=torch.channels_last)).tolist() == expected


@pytest.mark.parametrize(("intensity", "region"), STEPS)
@pytest.mark.parametrize("estimation", ["first_batch", "running_mean", "before_training"])
def test_a_statistic_is_that_of_the_images_with_contrast(intensity: str, region: str, estimation: str) -> None:
    layer, clean = layer_for(intensity, region, estimation), layer_for(intensity, region, estimation)
    images = images_of(6)
    blanked = torch.cat([images[:1] * 0, images[:3], images[:1] * 0 + 0.4, images[3:]])
    # batches of 4 and 5 images, of which 3 and 4 have contrast, and a batch in between in which none has
    for part in (blanked[:4], blanked[:1].expand(4, -1, -1, -1), blanked[4:]):
        layer.observe(part)
    for part in (images[:3], images[3:]):
        clean.observe(part)
    torch.testing.assert_close(layer.local_statistic, clean.local_statistic, rtol=1e-6, atol=1e-6)
    assert layer.local_images == clean.local_images
    assert layer.local.blank == (1 if estimation == "first_batch" else 6)


def test_a_blank_slice_is_left_out_of_the_channel_where_it_lies() -> None:
    volume = images_of(2).flatten(0, 1)  # six slices, of which slice 4 is blanked
    volume[4] = 0.0
    windows = torch.stack([volume[[max(at - 1, 0), at, min(at + 1, 5)]] for at in range(6)])
    layer = layer_for("zscore", "site_gain")
    layer.observe(windows)
    each = layer.statistics(windows)
    # windows 3 to 5 hold slice 4: window 5 in channel 0, window 4 in channel 1, window 3 in channel 2
    kept = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 4, 5]]
    expected = torch.stack([each[rows, channel].double().mean(0).float() for channel, rows in enumerate(kept)])
    torch.testing.assert_close(layer.local_statistic, expected, rtol=1e-6, atol=1e-6)
    assert (layer.local_images, layer.local.blank) == (6, 3)


@pytest.mark.parametrize(("intensity", "region"), [*STEPS, ("zscore", "off")])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_normalization_leaves_it_as_it_is(intensity: str, region: str, is_frozen: bool) -> None:
    layer = layer_for(intensity, region, "before_training" if is_frozen else "running_mean")
    images = images_of(5)
    layer.observe(images)
    if is_frozen and region != "off":
        layer.freeze(layer.local_statistic * 1.1, 5)
        if region == "site_gain":
            layer.set_own(layer.local_statistic)
    expected = layer(images)
    spoiled = images.clone()
    spoiled[1], spoiled[2, 0] = 0.4, 0.9
    found = layer(spoiled)
    assert torch.equal(found[1], torch.zeros_like(found[1]) if intensity == "zscore" else spoiled[1])
    assert (found[2, 0] == (0.0 if intensity == "zscore" else torch.tensor(0.9))).all()
    torch.testing.assert_close(found[[0, 3, 4]], expected[[0, 3, 4]])
    torch.testing.assert_close(found[2, 1:], expected[2, 1:])


def test_a_channel_that_no_image_shows_is_not_known_and_has_a_gain_of_1() -> None:
    layer = layer_for("zscore", "site_gain")
    images = images_of(3)
    images[:, 1] = 1.0
    layer.observe(images)
    own = layer.local_statistic
    assert own is not None and own[1].isnan().all() and own[[0, 2]].isfinite().all()
    layer.freeze(torch.nan_to_num(own) + 0.5, 3)
    layer.set_own(own)
    fresh = images_of(2, seed=1)
    alone = layer_for("zscore", "off")(fresh)
    torch.testing.assert_close(layer(fresh)[:, 1], alone[:, 1], rtol=0, atol=1e-5)
    assert not torch.allclose(layer(fresh)[:, 0], alone[:, 0], atol=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_intensities_are_still_an_error(value: float) -> None:
    images = images_of(2)
    images[1, 0, 0, 0] = value
    for region in ("dc", "full", "site_gain"):
        with pytest.raises(ValueError, match="NaN or infinite intensities"):
            layer_for("window", region).observe(images)


@given(
    estimation=st.sampled_from(["first_batch", "running_mean", "before_training"]),
    momentum=st.sampled_from([0.05, 0.5, 1.0]),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_the_kept_weights_are_those_of_the_mean(estimation: Any, momentum: float, sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    running = RunningAmplitude(estimation, momentum)
    each = rng.normal(0, 1, (8, 2, 3))
    for size in sizes:
        items = rng.permutation(8)[:size]
        contrast = rng.random((size, 2)) < 0.7
        running.update(torch.from_numpy(each[items]), torch.from_numpy(contrast), torch.from_numpy(items))
    state = running.state_dict()
    for channel in range(2):
        weights = np.zeros(8)
        weights[: state["weights"].shape[1]] = state["weights"][channel].numpy()
        if not weights.any():
            assert running.mean[channel].isnan().all()
            continue
        expected = (weights[:, None] * each[:, channel]).sum(0) / weights.sum()
        np.testing.assert_allclose(running.mean[channel].numpy(), expected, rtol=1e-5, atol=1e-6)
