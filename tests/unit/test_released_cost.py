"""The benchmark's stand-in for the released code has its layers and does to images what it does."""

import numpy as np
import torch

from tests.benchmarks.released import (
    DENSENET_PARAMETERS,
    UNET_PARAMETERS,
    ReleasedTraining,
    ReleasedUNet,
    aligned,
    released_densenet,
)


def test_networks_have_the_parameters_that_were_counted_in_the_released_ones():
    for network, expected in ((ReleasedUNet(), UNET_PARAMETERS), (released_densenet(), DENSENET_PARAMETERS)):
        assert sum(parameter.numel() for parameter in network.parameters()) == expected


def test_the_amplitude_step_is_a_shift_of_each_channel_to_the_target_mean():
    images = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(0))
    target = np.full((64, 48, 3), 64 * 48 * 0.25)  # the zero frequency is the sum over pixels
    expected = images - images.mean((2, 3), keepdim=True) + 0.25
    torch.testing.assert_close(aligned(images.clone(), target), expected, rtol=0, atol=2e-5)


def test_a_step_moves_the_weights_once_and_takes_the_perturbation_back():
    training = ReleasedTraining(ReleasedUNet(), (3, 64, 64), "adam", masks=True)
    before = [parameter.detach().clone() for parameter in training.network.parameters()]
    loss = training.step(torch.rand(2, 3, 64, 64), torch.randint(2, (2, 64, 64)))
    moved = max(float((a - b.detach()).abs().max()) for a, b in zip(before, training.network.parameters(), strict=True))
    # Adam's first step is the learning rate of 1e-4 at most; the perturbation of length 0.05 would be beyond it
    assert np.isfinite(loss) and 0 < moved < 1.1e-4
