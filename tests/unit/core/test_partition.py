"""Which state entries travel: decided by the type of a module, whatever it is called."""

import pytest
import torch
from torch import nn

from harmofl.core.networks import build_network
from harmofl.core.partition import partition_of, select


class Misnamed(nn.Module):
    """Names that say the opposite of what they hold."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Conv2d(3, 4, 1)
        self.bn = nn.Linear(4, 2)
        self.conv = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4, affine=True), nn.RMSNorm(4))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mean", torch.zeros(2))


LOCAL = {
    "conv.weight",
    "conv.bias",
    "conv.running_mean",
    "conv.running_var",
    "conv.num_batches_tracked",
    "head.0.weight",
    "head.0.bias",
    "head.1.weight",
    "head.1.bias",
    "head.2.weight",
    "head.2.bias",
    "head.3.weight",
}


def test_norm_layers_are_known_by_their_type():
    partition = partition_of(Misnamed(), "norm")
    assert set(partition.local) == LOCAL
    assert set(partition.averaged) == {"norm.weight", "norm.bias", "bn.weight", "bn.bias", "mean"}
    assert partition.maximum == ("steps",)
    assert partition.parameters == {"norm.weight", "norm.bias", "bn.weight", "bn.bias"}
    assert partition.statistics == {"mean"}


def test_without_local_layers_integers_alone_are_not_averaged():
    network = Misnamed()
    partition = partition_of(network, "none")
    assert partition.local == ()
    assert set(partition.maximum) == {"steps", "conv.num_batches_tracked"}
    assert partition.shared == set(network.state_dict())
    assert partition.parameters == {name for name, _ in network.named_parameters()}
    assert partition.statistics == {"mean", "conv.running_mean", "conv.running_var"}


def test_all_local_shares_nothing():
    network = Misnamed()
    partition = partition_of(network, "all")
    assert (partition.shared, partition.parameters) == (frozenset(), frozenset())
    assert partition.local == tuple(network.state_dict())


@pytest.mark.parametrize("local_layers", ["none", "norm", "all"])
def test_every_entry_has_one_place(local_layers):
    network = Misnamed()
    partition = partition_of(network, local_layers)
    everything = [*partition.averaged, *partition.maximum, *partition.local]
    assert sorted(everything) == sorted(network.state_dict())


@pytest.mark.parametrize(("norm", "count"), [("batch", 121), ("instance", 0)])
def test_running_variances_are_known_by_the_type_of_their_module(norm, count):
    network = build_network("densenet121", 3, (0.5, 0.5), width=4, norm=norm, seed=0)
    variances = partition_of(network, "none").variances
    assert len(variances) == count and all(name.endswith(".running_var") for name in variances)
    assert partition_of(network, "norm").variances == frozenset()
    assert partition_of(nn.BatchNorm2d(3), "none").variances == {"running_var"}


# BasicUNet has 18 conv blocks with a norm layer, DenseNet121 has 121 norm layers (1 + 2 * 58 + 3 + 1).
@pytest.mark.parametrize(
    ("name", "norm", "entries"),
    [
        ("unet", "instance", 18 * 2),
        ("unet", "batch", 18 * 5),
        ("unet", "batch_stats", 0),
        ("densenet121", "batch", 121 * 5),
        ("densenet121", "instance", 121 * 2),
    ],
)
def test_the_norm_layers_of_monai_s_networks(name, norm, entries):
    network = build_network(name, 3, (0.5, 0.5), width=4, norm=norm, seed=0)
    assert len(partition_of(network, "norm").local) == entries


def test_a_network_that_is_a_norm_layer():
    assert partition_of(nn.LayerNorm(3), "norm").local == ("weight", "bias")


def test_entries_are_selected_in_the_state_s_order():
    assert list(select({"b": 1, "a": 2, "c": 3}, frozenset({"c", "b"}))) == ["b", "c"]
