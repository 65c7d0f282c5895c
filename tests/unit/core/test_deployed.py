"""The graph that is shipped computes what training computed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.deployed import DeployedModel, DeployedNormalization
from harmofl.core.radial import log_profile, profile_weights

SIZES = [(64, 64), (65, 78), (96, 80)]
STEPS = [("zscore", region) for region in ("off", "low", "full", "site_gain")]
STEPS += [("window", region) for region in ("off", "dc", "low", "full", "site_gain")]


def normalization(intensity: str, region: str, size: tuple[int, int] = (64, 64)) -> AmplitudeNormalization:
    """With the amplitude of some images frozen, and another profile as this site's own."""
    made = build(intensity, region, size)
    if region != "off":
        made.freeze(made.statistics(images(6, size, seed=1)).mean(0), 6)
    if region == "site_gain":
        made.set_own(made.statistics(images(6, size, seed=2) ** 3).mean(0))
    return made


def build(intensity: str, region: str, size: tuple[int, int] = (64, 64)) -> AmplitudeNormalization:
    """Before anything is frozen."""
    return AmplitudeNormalization(
        intensity=intensity,  # type: ignore[arg-type]
        region=region,  # type: ignore[arg-type]
        low_fraction=0.1,
        estimation="before_training",
        momentum=0.1,
        channels=3,
        height=size[0],
        width=size[1],
    )


def images(count: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Smooth structure with noise, in 0..1."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand((count, 3, *size), generator=generator)
    smooth = nn.functional.avg_pool2d(rough, 7, stride=1, padding=3, count_include_pad=False)
    return (smooth - smooth.amin()) / (smooth.amax() - smooth.amin()) * 0.9 + rough * 0.1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("intensity", "region"), STEPS)
def test_it_normalizes_as_training_does(intensity: str, region: str, size: tuple[int, int]) -> None:
    trained, batch = normalization(intensity, region, size), images(4, size)
    shipped = DeployedNormalization(trained, trained.own if region == "site_gain" else None)
    # float32 products over at most 96 terms on values up to about 3: 1e-5 leaves a factor of some ten
    assert torch.allclose(shipped(batch), trained(batch), atol=2e-5)


def test_a_profile_is_that_of_the_images_of_the_case() -> None:
    trained, case = normalization("zscore", "site_gain"), images(5, (64, 64), seed=3)
    shipped = DeployedNormalization(trained)
    trained.set_own(trained.statistics(case).mean(0))
    assert torch.allclose(shipped(case[:2], case), trained(case[:2]), atol=2e-5)


def test_one_image_is_a_case_of_its_own() -> None:
    trained, case = normalization("zscore", "site_gain"), images(1, (64, 64), seed=3)
    trained.set_own(trained.statistics(case)[0])
    assert torch.allclose(DeployedNormalization(trained)(case, case), trained(case), atol=2e-5)


@pytest.mark.parametrize(("apart", "gain"), [(10.0, 4.0), (-10.0, 0.25), (0.5, np.exp(0.5))])
@pytest.mark.parametrize("by_case", [True, False])
def test_the_gain_is_limited_to_a_factor_of_4(apart: float, gain: float, by_case: bool) -> None:
    case = images(3, (64, 64), seed=5)
    trained = normalization("zscore", "off")
    standardized = trained(case)  # mean 0: its zero frequency, which has a gain of 1, holds nothing
    trained = build("zscore", "site_gain")
    own = trained.statistics(case).mean(0)
    trained.freeze(own + apart, 6)  # every frequency is as far from the common amplitude, in logarithms
    shipped = DeployedNormalization(trained, None if by_case else own)
    found = shipped(case, case) if by_case else shipped(case)
    assert torch.allclose(found, gain * standardized, rtol=1e-4, atol=1e-4)


def test_the_profile_of_all_sites_together_filters_nothing() -> None:
    trained, batch = normalization("zscore", "site_gain"), images(2, (64, 64))
    shipped = DeployedNormalization(trained, trained.target.clone())
    assert isinstance(shipped.step, nn.Identity)
    trained.set_own(trained.target.clone())
    assert torch.allclose(shipped(batch), trained(batch), atol=2e-5)


@pytest.mark.parametrize(("intensity", "region"), STEPS)
def test_what_has_no_contrast_stays_as_in_training(intensity: str, region: str) -> None:
    trained, batch = normalization(intensity, region), images(3, (64, 64))
    batch[0], batch[1, 2] = 0.3, 0.0
    expected = batch if intensity == "window" else torch.zeros_like(batch)
    shipped = DeployedNormalization(trained, trained.own if region == "site_gain" else None)
    for layer in (trained, shipped):
        assert torch.equal(layer(batch)[0], expected[0]) and torch.equal(layer(batch)[1, 2], expected[1, 2])
    assert torch.allclose(shipped(batch), trained(batch), atol=2e-5)


def test_what_has_no_contrast_is_not_in_the_profile_of_a_case() -> None:
    trained, case = normalization("zscore", "site_gain"), images(5, (64, 64), seed=3)
    shipped, clean = DeployedNormalization(trained), case.clone()
    case[0], case[3, 1] = 1.0, 0.25
    profile = trained.statistics(clean)
    # channel 1 keeps images 1, 2 and 4, the others 1 to 4
    own = torch.stack([profile[1:, 0].mean(0), profile[[1, 2, 4], 1].mean(0), profile[1:, 2].mean(0)])
    trained.set_own(own)
    assert torch.allclose(shipped(case[1:3], case), trained(case[1:3]), atol=2e-5)
    case[:, 2] = 0.5  # no image shows channel 2: its gain is 1
    own[2] = torch.nan
    trained.set_own(own)
    fresh = images(2, (64, 64), seed=4)
    assert torch.allclose(shipped(fresh, case), trained(fresh), atol=2e-5)
    standard = DeployedNormalization(normalization("zscore", "off"))(fresh)
    assert torch.allclose(trained(fresh)[:, 2], standard[:, 2], atol=2e-5)


@given(st.integers(0, 2**16), st.sampled_from(STEPS))
@settings(max_examples=25, deadline=None)
def test_no_other_image_changes_an_answer(seed: int, step: tuple[str, str]) -> None:
    trained, batch = normalization(*step), images(3, (64, 64), seed=seed)
    shipped = DeployedNormalization(trained, trained.own if step[1] == "site_gain" else None)
    assert torch.allclose(shipped(batch)[1:2], shipped(batch[1:2]), atol=2e-6)


def test_a_model_is_its_network_behind_the_normalization() -> None:
    trained, batch = normalization("zscore", "site_gain"), images(2, (64, 64))
    network = nn.Conv2d(3, 2, 3)
    model = DeployedModel(DeployedNormalization(trained, trained.own), network).eval()
    assert torch.allclose(model(batch), network(trained(batch)), atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_the_weights_of_a_profile_sum_what_the_profile_sums(size: tuple[int, int]) -> None:
    amplitude = torch.fft.rfft2(images(2, size)).abs()
    by_product = (amplitude.double().flatten(-2) @ profile_weights(*size).double()).log()
    np.testing.assert_allclose(by_product, log_profile(amplitude, *size), atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    trained = normalization("zscore", "site_gain")
    with pytest.raises(ValueError, match=r"own profile of shape \(3, 2\)"):
        DeployedNormalization(trained, torch.zeros(3, 2))
    with pytest.raises(ValueError, match="does not fit region full"):
        DeployedNormalization(normalization("zscore", "full"), torch.zeros(3, 11))
    # only site_gain has profiles, whatever their shape
    for region in ("off", "dc", "low", "full"):
        trained = normalization("window", region)
        with pytest.raises(ValueError, match=f"does not fit region {region}"):
            DeployedNormalization(trained, trained.target.clone())
    unfrozen = AmplitudeNormalization(
        intensity="zscore",
        region="full",
        low_fraction=0.1,
        estimation="before_training",
        momentum=0.1,
        channels=3,
        height=64,
        width=64,
    )
    with pytest.raises(ValueError, match="no global amplitude was frozen"):
        DeployedNormalization(unfrozen)
