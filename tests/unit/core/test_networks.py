"""Networks: what can be built, how large it is, seeded weights, and what the norm layer means for one image alone."""

import pytest
import torch
from monai.networks.nets.densenet import DenseNet121
from torch import nn

from harmofl.core.networks import build_network

# Every name and norm layer: what comes of it.
TABLE = {
    ("unet", "instance"): (2, 2, 64, 64),
    ("unet", "batch"): (2, 2, 64, 64),
    ("unet", "batch_stats"): (2, 2, 64, 64),
    ("densenet121", "instance"): (2, 2),
    ("densenet121", "batch"): (2, 2),
    ("densenet121", "batch_stats"): None,
}
SUPPORTED = [pair for pair, shape in TABLE.items() if shape]


def small(name="unet", norm="instance", seed=0, class_prior=(0.5, 0.5)):
    return build_network(name, 3, class_prior, width=4, norm=norm, seed=seed)


def images(count, size=64, seed=0):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_the_full_setting_has_7_8_million_parameters():
    network = build_network("unet", 3, (0.5, 0.5), width=32, norm="instance", seed=0)
    assert sum(parameter.numel() for parameter in network.parameters()) == 7_783_458


def test_parameters_of_a_unet_by_hand():
    # Widths w, 2w, 4w, 8w, 16w down, then up to w. A 3 x 3 convolution from a to b channels has 9ab + b values, its
    # affine norm layer 2b; a block has two. Up: a transposed 2 x 2 convolution from a to its half, 4ac + c with
    # c = a / 2 (the last keeps its channels), then a block on both halves. Last: 1 x 1 to the classes.
    def block(a, b):
        return 9 * a * b + 3 * b + 9 * b * b + 3 * b

    def count(w):
        wide = [w, 2 * w, 4 * w, 8 * w, 16 * w]
        down = block(3, w) + sum(block(a, b) for a, b in zip(wide, wide[1:], strict=False))
        up = sum(4 * a * (a // 2) + a // 2 + block(a, a // 2) for a in wide[:1:-1])
        last = 4 * 2 * w * 2 * w + 2 * w + block(3 * w, w)
        return down + up + last + 2 * w + 2

    assert count(32) == 7_783_458
    assert sum(parameter.numel() for parameter in small().parameters()) == count(4)


def densenet(width, norm="batch"):
    return build_network("densenet121", 3, (0.5, 0.5), width=width, norm=norm, seed=0)


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_densenet121_of_width_32_is_the_published_one(norm):
    # Torchvision's has 7,978,856 with 1000 classes; two classes on 1024 features: less 1024 * 1000 + 1000 and plus
    # 1024 * 2 + 2. MONAI's own defaults give the same shapes.
    network = densenet(32, norm)
    assert sum(parameter.numel() for parameter in network.parameters()) == 7_978_856 - 1_025_000 + 2_050
    published = DenseNet121(2, 3, 2, norm=(norm, {"affine": True})).state_dict()
    assert {name: value.shape for name, value in network.state_dict().items()} == {
        name: value.shape for name, value in published.items()
    }


@pytest.mark.parametrize("width", [4, 5, 8])
def test_parameters_of_a_densenet_by_hand(width):
    # Growth rate k, 2k features from a 7 x 7 convolution of 3 channels and a norm layer. A dense layer on c channels:
    # norm 2c, 1 x 1 to 4k, norm 8k, 3 x 3 to k. After each block but the last, norm and 1 x 1 to half the channels.
    # Last: norm and a linear layer to 2 classes. No convolution has a bias. The channels after each block are
    # 8k, 16k, 32k, 32k, always even, so that any growth rate can be halved.
    k = width
    total, channels = 3 * 49 * 2 * k + 4 * k, 2 * k
    for layers in (6, 12, 24, 16):
        for _ in range(layers):
            total += 2 * channels + channels * 4 * k + 8 * k + 9 * 4 * k * k
            channels += k
        if layers != 16:
            total += 2 * channels + channels * channels // 2
            channels //= 2
    assert channels == 32 * k
    total += 2 * channels + 2 * channels + 2
    assert sum(parameter.numel() for parameter in densenet(width).parameters()) == total


@pytest.mark.parametrize(("name", "norm"), SUPPORTED)
def test_supported_combinations_train_on_64_pixels(name, norm):
    network = small(name, norm)
    network.train()
    logits = network(images(2))
    assert logits.shape == TABLE[name, norm]
    logits.square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None and bool(torch.isfinite(gradient).all()) for gradient in gradients)


@pytest.mark.parametrize("name", ["unet", "densenet121"])
def test_one_image_of_64_pixels_alone_can_be_trained_on(name):
    assert bool(torch.isfinite(small(name).train()(images(1))).all())


@pytest.mark.parametrize(("name", "size"), [("unet", 16), ("densenet121", 32)])
def test_smaller_images_shrink_to_one_pixel_which_has_no_spread(name, size):
    # 16 / 2^4 and 32 / 2^5 are 1: instance norm has nothing to divide by; 64 is the experiment's minimum
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        small(name).train()(images(2, size))


def test_the_combination_that_monai_cannot_build_is_refused_with_the_fix():
    with pytest.raises((RuntimeError, AttributeError)):  # its own initialization expects weights in every batch norm
        DenseNet121(2, 3, 2, norm=("batch", {"affine": False, "track_running_stats": False}))
    with pytest.raises(ValueError, match="network.norm.*use 'instance' or 'batch'"):
        small("densenet121", "batch_stats")


def test_unknown_names_and_widths_are_refused():
    with pytest.raises(ValueError, match="network.name: 'resnet' is none of unet, densenet121"):
        small("resnet")
    with pytest.raises(ValueError, match="network.width: DenseNet121 needs a growth rate of at least 4, not 3"):
        build_network("densenet121", 3, (0.5, 0.5), width=3, norm="batch", seed=0)


@pytest.mark.parametrize(
    ("norm", "affine", "tracked"), [("instance", True, False), ("batch", True, True), ("batch_stats", False, False)]
)
def test_norm_layers_are_what_their_names_say(norm, affine, tracked):
    kind = nn.InstanceNorm2d if norm == "instance" else nn.BatchNorm2d
    layers = [layer for layer in small(norm=norm).modules() if isinstance(layer, nn.BatchNorm2d | nn.InstanceNorm2d)]
    assert len(layers) == 18  # two in each of nine blocks
    assert all(isinstance(layer, kind) for layer in layers)
    assert {(layer.affine, layer.track_running_stats) for layer in layers} == {(affine, tracked)}


@pytest.mark.parametrize(("name", "norm"), SUPPORTED)
def test_one_seed_gives_one_set_of_weights(name, norm):
    first, again, other = (small(name, norm, seed).state_dict() for seed in (3, 3, 4))
    assert list(first) == list(again)
    assert all(torch.equal(value, again[entry]) for entry, value in first.items())
    convolutions = [entry for entry, value in first.items() if value.ndim == 4]
    assert convolutions
    assert not any(torch.equal(first[entry], other[entry]) for entry in convolutions)


@pytest.mark.parametrize("name", ["unet", "densenet121"])
def test_building_leaves_the_global_random_state_alone(name):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    small(name, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_building_does_not_depend_on_the_global_random_state():
    torch.manual_seed(1)
    first = small().state_dict()
    torch.manual_seed(2)
    assert all(torch.equal(value, first[entry]) for entry, value in small().state_dict().items())


def test_initialization_is_kaiming_with_zero_biases():
    network = build_network("unet", 3, (0.5, 0.5), width=32, norm="instance", seed=0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            # fan in: what enters a unit; PyTorch takes the second dimension of the weights for it, which for a
            # transposed convolution is its outputs. The gain of a ReLU is sqrt(2). Some 10^4 values know their
            # standard deviation to 1 / sqrt(2 * 10^4) = 0.7 %, the smallest layer (64 values) to 9 %.
            fan_in = module.weight[0].numel()
            deviations = 5 / (2 * module.weight.numel()) ** 0.5
            assert float(module.weight.detach().std()) == pytest.approx((2 / fan_in) ** 0.5, rel=deviations)
            assert not bool(module.bias.any())


@pytest.mark.parametrize("name", ["unet", "densenet121"])
@pytest.mark.parametrize("class_prior", [(0.95, 0.05), (0.7, 0.2, 0.1)])
def test_an_untrained_network_without_evidence_predicts_the_prior(name, class_prior):
    network = small(name, class_prior=class_prior)
    last = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)][-1]
    nn.init.zeros_(last.weight)  # no evidence: the softmax of the biases alone
    probability = network(images(2)).softmax(1).transpose(0, 1).flatten(1).mean(1)
    assert probability.tolist() == pytest.approx(class_prior, abs=1e-6)


def trained_statistics(norm):
    """A network whose running statistics, where it has them, are not the initial ones."""
    network = small(norm=norm)
    network.train()
    with torch.no_grad():
        for seed in range(3):
            network(2 + 3 * images(4, seed=seed))
    return network.eval()


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_one_image_alone_gets_the_answer_that_it_gets_in_a_batch(norm):
    network, batch = trained_statistics(norm), images(4, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(network(batch[:1]), network(batch)[:1], rtol=1e-4, atol=1e-4)


def test_batch_stats_lets_the_other_images_of_a_batch_decide():
    network, batch = trained_statistics("batch_stats"), images(4, seed=9)
    batch[1:] *= 5
    with torch.no_grad():
        difference = (network(batch[:1]) - network(batch)[:1]).abs().max()
        assert float(difference) > 0.1 * float(network(batch[:1]).std())
