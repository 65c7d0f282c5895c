"""Predicting changes nothing; a network's state travels as arrays, and only into a network that it fits."""

import numpy as np
import pytest
import torch
from torch import nn
from toy_segmentation import BATCH, IMAGES, SIZE, dataset, equal, fitted, network, normalization

from harmofl.core.networks import build_network
from harmofl.core.training import NotFiniteError, TrainingError, load_arrays, predict, state_arrays


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_predicting_changes_nothing(training, norm):
    model, layer, *_ = fitted(norm=norm, layer=normalization("full"))
    model.train(training)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    statistics = {name: value.clone() for name, value in (layer.state_dict() | layer.local.state_dict()).items()}
    images = dataset().tensors[0]
    predict(model, layer, images, BATCH)
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    after = layer.state_dict() | layer.local.state_dict()
    assert all(torch.equal(value, statistics[name]) for name, value in after.items())
    assert torch.equal(images, dataset().tensors[0])


def test_predictions_are_those_of_the_network_in_evaluation_mode_on_normalized_images():
    model, layer, *_ = fitted(norm="batch", layer=normalization("full"))
    images = dataset().tensors[0]
    got = predict(model, layer, images, BATCH)
    model.eval()
    with torch.no_grad():
        expected = torch.cat([model(layer(image[None])) for image in images])
    assert (got.dtype, got.shape) == (torch.float32, (IMAGES, 2, SIZE, SIZE))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_failure_while_predicting_leaves_the_mode_as_it_was():
    model = network().train()
    with pytest.raises(RuntimeError):
        predict(model, normalization(), torch.zeros(2, 5, SIZE, SIZE), BATCH)  # five channels, not three
    assert model.training


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_no_answer(value):
    images = dataset().tensors[0]
    images[[1, 7], 0, 3, 3] = value
    with pytest.raises(NotFiniteError, match=f"the model's output is not finite for 2 of {IMAGES} images"):
        predict(network(), normalization(intensity="none"), images, BATCH)


@pytest.mark.parametrize("norm", ["instance", "batch", "batch_stats"])
def test_arrays_of_a_network_load_into_another(norm):
    first, second = (build_network("unet", 3, (0.5, 0.5), width=2, norm=norm, seed=seed) for seed in (0, 1))
    arrays = state_arrays(first)
    load_arrays(second, arrays)
    assert equal(first, second)
    assert {value.dtype for value in arrays.values()} <= {np.dtype(np.float32), np.dtype(np.int64)}


def test_arrays_are_copies():
    model = network()
    arrays = state_arrays(model)
    arrays["0.bias"] += 1
    assert equal(model, network())


def test_numpy_scalars_load_into_entries_without_dimensions():
    model = network("batch")
    load_arrays(model, state_arrays(model) | {"1.num_batches_tracked": np.int64(12)})
    tracked = model[1].num_batches_tracked
    assert (int(tracked), tracked.dtype, tracked.shape) == (12, torch.int64, ())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda arrays: arrays.pop("0.bias"), "0.bias"),
        (lambda arrays: arrays.update({"head.weight": np.zeros(1)}), "head.weight"),
        (lambda arrays: arrays.update({"0.bias": np.zeros(5, np.float32)}), "0.bias"),
        (lambda arrays: arrays.update({"0.bias": np.zeros(3, np.float32)}), "0.bias"),
        # as many numbers, which torch would lay out anew
        (lambda arrays: arrays.update({"0.bias": np.zeros((2, 2), np.float32)}), "0.bias"),
        (lambda arrays: arrays.update({"0.bias": np.zeros((4, 1), np.float32)}), "0.bias"),
        (lambda arrays: arrays.update({"3.bias": np.zeros((1, 2), np.float32)}), "3.bias"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(change, named):
    arrays = state_arrays(network())
    change(arrays)
    with pytest.raises(TrainingError, match=named):
        load_arrays(network(), arrays)


def test_a_transposed_entry_is_refused():
    arrays = state_arrays(network())
    arrays["3.weight"] = arrays["3.weight"].transpose(1, 0, 2, 3).copy()
    with pytest.raises(TrainingError, match="3.weight"):
        load_arrays(network(), arrays)


@pytest.mark.parametrize(
    ("norm", "size", "batches"),
    [
        # 2^18 pixels are 4 images of 256 x 256
        ("instance", 256, [4, 2]),
        ("batch", 256, [4, 2]),
        # one image of 1024 x 512 has more
        ("instance", 1024, [1] * 6),
        # never more than the job's batch, whatever fits
        ("instance", 64, [5, 1]),
        # a prediction depends on its batch
        ("batch_stats", 256, [5, 1]),
    ],
)
def test_a_cpu_predicts_as_many_images_at_once_as_its_caches_take(norm, size, batches):
    seen = []

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"instance": nn.InstanceNorm2d(1, affine=True), "batch": nn.BatchNorm2d(1)}
            self.norm = options.get(norm, nn.BatchNorm2d(1, track_running_stats=False))

        def forward(self, images):
            seen.append(len(images))
            return self.norm(images)

    images = torch.zeros(6, 1, size, min(size, 512))
    assert predict(Seen(), nn.Identity(), images, 5).shape == images.shape
    assert seen == batches
