"""Instance norm on the CPU: torch's function and gradients in either layout, and networks that hold the same state."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from harmofl.core.instance_norm import InstanceNorm
from harmofl.core.layout import memory_format, placed
from harmofl.core.networks import build_network

LAYOUTS = {"last": torch.channels_last, "contiguous": torch.contiguous_format}


def maps(count=3, channels=4, dtype=torch.float64):
    made = torch.randn(count, channels, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (made * 3 + 2).to(dtype)


def layer(channels=4, dtype=torch.float64):
    made = InstanceNorm(channels, 1e-5)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1, 2, channels))
        made.bias.copy_(torch.linspace(3, -1, channels))
    return made.to(dtype)


def by_definition(inputs, norm):
    """Mean and biased variance of each channel of each image, by torch's reductions alone."""
    mean, variance = inputs.mean((2, 3), keepdim=True), inputs.var((2, 3), unbiased=False, keepdim=True)
    normal = (inputs - mean) / (variance + norm.eps).sqrt()
    return normal * norm.weight[:, None, None] + norm.bias[:, None, None]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_outputs_and_gradients_are_those_of_the_definition(layout, count):
    norm = layer()
    given = maps(count).contiguous(memory_format=layout)
    results = []
    for function in (norm, lambda inputs: by_definition(inputs, norm)):
        inputs = given.clone(memory_format=torch.preserve_format).requires_grad_()
        norm.zero_grad()
        # a curved function behind the norm: a sum of squares alone would hide an error in one of the two paths
        output = function(inputs)
        (functional.silu(output) * maps(count).flip(0)).sum().backward()
        results.append((output.detach(), inputs.grad, norm.weight.grad.clone(), norm.bias.grad.clone()))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert results[0][0].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_by_finite_differences(layout):
    norm = layer(2)
    inputs = maps(2, 2).contiguous(memory_format=layout).requires_grad_()
    assert torch.autograd.gradcheck(norm, (inputs,))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_gradient_in_the_other_layout_is_taken(layout):
    norm, (other,) = layer(), [value for value in LAYOUTS.values() if value is not layout]
    inputs = maps().contiguous(memory_format=layout).requires_grad_()
    above = maps().flip(0).contiguous(memory_format=other)
    (found,) = torch.autograd.grad(norm(inputs), inputs, above)
    (expected,) = torch.autograd.grad(by_definition(inputs, norm), inputs, above)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [1, 2])
def test_layers_before_it_get_the_gradients_of_the_other_layout(count):
    """With torch 2.13's own layer they do not: a batch of one image, channels_last, a curved function behind it."""
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, norm, last = nn.Conv2d(3, 4, 3).double(), layer(), nn.Conv2d(4, 2, 1).double()
    network = nn.Sequential(first, norm, nn.SiLU(), last)
    gradients = []
    for layout in LAYOUTS.values():
        network.to(memory_format=layout).zero_grad()
        network(images.contiguous(memory_format=layout)).square().sum().backward()
        gradients.append(first.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_image_alone_and_in_a_batch_has_the_same_bits(layout):
    norm = layer(dtype=torch.float32)
    inputs = maps(dtype=torch.float32).contiguous(memory_format=layout)
    with torch.no_grad():
        together = norm(inputs)
        for number in range(3):
            alone = norm(inputs[number : number + 1].contiguous(memory_format=layout))
            assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_lower_precision_keep_their_type_and_statistics_do_not(dtype, layout):
    norm = layer(dtype=torch.float32)
    inputs = maps(dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    output = norm(inputs)
    expected = by_definition(inputs.detach().double(), layer())
    # values of up to 8 rounded to 8 bits (bfloat16): half a step of 2^-7 relative, twice for the shift
    assert output.dtype == dtype and float((output.detach() - expected).detach().abs().max()) <= 8 * 2.0**-7
    output.sum().backward()
    assert inputs.grad.dtype == dtype and norm.weight.grad.dtype == torch.float32


def test_maps_of_one_pixel_are_refused_as_by_torch():
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        layer(dtype=torch.float32)(torch.ones(2, 4, 1, 1))


@pytest.mark.parametrize("name", ["unet", "densenet121"])
def test_networks_hold_the_state_of_monai_s_own_and_compute_the_same(name):
    """With torch's layers put back in a copy: both load each other's state and differ by rounding alone."""
    ours = placed(build_network(name, 3, (0.5, 0.5), width=4, norm="instance", seed=0, even=True), "cpu").train()
    theirs = copy.deepcopy(ours).to(memory_format=torch.contiguous_format)
    replaced = 0
    for module in list(theirs.modules()):
        for key, norm in list(module.named_children()):
            if type(norm) is InstanceNorm:
                setattr(module, key, nn.InstanceNorm2d(norm.num_features, eps=norm.eps, affine=True))
                replaced += 1
    assert replaced == {"unet": 18, "densenet121": 121}[name]
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours, theirs = ours.double(), theirs.double()  # in which rounding is far below what another function would differ
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for count in (1, 2):
        gradients = []
        for network in (ours, theirs):
            network.zero_grad()
            logits = network(images[:count].contiguous(memory_format=memory_format(network)))
            logits.square().sum().backward()
            gradients.append((logits.detach(), *(parameter.grad.clone() for parameter in network.parameters())))
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_what_is_traced_and_exported_holds_torch_s_own_operator():
    norm, inputs = layer(dtype=torch.float32), maps(dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    traced = torch.jit.trace(norm, inputs)
    assert "aten::instance_norm" in str(traced.graph)
    program = torch.export.export(norm, (inputs,))
    assert "instance_norm" in str(program.graph)
    for graph in (traced, program.module()):
        torch.testing.assert_close(graph(inputs), norm(inputs))


LAYOUT_OF = {
    ("unet", "instance"): torch.channels_last,
    ("unet", "batch"): torch.channels_last,
    ("unet", "batch_stats"): torch.channels_last,
    ("densenet121", "batch"): torch.channels_last,
    ("densenet121", "instance"): torch.contiguous_format,
}


@pytest.mark.parametrize(("name", "norm"), LAYOUT_OF)
def test_the_layout_is_that_of_the_measured_rule(name, norm):
    network = placed(build_network(name, 3, (0.5, 0.5), width=4, norm=norm, seed=0), "cpu")
    wide = next(weight for weight in network.parameters() if weight.dim() == 4 and weight.shape[-1] == 3)
    assert memory_format(network) is LAYOUT_OF[name, norm]
    assert wide.is_contiguous(memory_format=LAYOUT_OF[name, norm])
    assert memory_format(network, is_compiled=True) is torch.contiguous_format
    # not on a CPU torch's own layers run, which have kernels for channels_last
    assert memory_format(network.to("meta")) is torch.channels_last


def test_maps_of_the_unet_stay_in_channels_last_through_all_layers():
    network = placed(build_network("unet", 3, (0.5, 0.5), width=4, norm="instance", seed=0, even=True), "cpu")
    seen = []
    for module in network.modules():
        if isinstance(module, InstanceNorm):
            module.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    network(torch.rand(2, 3, 64, 64).contiguous(memory_format=torch.channels_last))
    assert len(seen) == 18
    for pair in seen:
        assert all(one.is_contiguous(memory_format=torch.channels_last) for one in pair)


def test_a_network_for_even_sizes_computes_what_one_with_padding_does():
    padded, plain = (
        build_network("unet", 3, (0.5, 0.5), width=4, norm="instance", seed=0, even=even) for even in (False, True)
    )
    images = torch.rand(2, 3, 64, 80, generator=torch.Generator().manual_seed(0))
    assert torch.equal(padded(images), plain(images))
    odd = torch.rand(2, 3, 70, 64)
    assert padded(odd).shape == (2, 2, 70, 64)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        plain(odd)
