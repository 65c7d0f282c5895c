"""Branches that only a GPU takes, on the CPU: its row of the table takes on what a GPU's says."""

from dataclasses import replace

import pytest
import torch
from torch import distributed
from toy_segmentation import dataset, equal, fitted, normalization

from harmofl.core.contrast import has_contrast
from harmofl.core.device_kinds import KINDS, DeviceKind, kind_of, precision_in_effect
from harmofl.core.loading import batches
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.spectra import amplitude_spectrum, replace_amplitude
from harmofl.core.training import _own_random_state, predict
from harmofl.flare import local_processes

CPU, CARD = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceKind:
    """From here on the CPU runs ahead, copies from pinned memory and has bfloat16, as the table says of a GPU."""
    kind = replace(
        KINDS["cuda"], own_generator=False, backend="gloo", has_bfloat16=lambda: True, has_tf32=lambda: False
    )
    monkeypatch.setitem(KINDS, "cpu", kind)
    return kind


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_round_as_on_a_gpu_is_the_round_on_the_cpu(name, request, monkeypatch):
    given = {"name": name, "clip_norm": 0.5, "epochs": 2, "precision": "float32"}
    plain, *_, expected = fitted(**given)
    request.getfixturevalue("like_a_gpu")
    steps = []
    inner = WeightPerturbation._step_on_device
    monkeypatch.setattr(WeightPerturbation, "_step_on_device", lambda *given: steps.append(1) or inner(*given))
    found, *_, result = fitted(**given)
    assert len(steps) == result.steps == expected.steps
    assert result.skipped_steps == expected.skipped_steps == 0
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    for mine, theirs in zip(found.parameters(), plain.parameters(), strict=True):
        # theta + a g is rounded once on the one path and twice on the other, 2^-24 of weights below 2 in 2 x 9 steps;
        # Adam divides by the root of its second moment, which makes up to 1e-3 of a step of what is nearly 0
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4 if name == "adam" else 2e-5)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_a_scaled_round_as_on_a_gpu_is_the_round_on_the_cpu(request, monkeypatch):
    """With a loss scaler numbers are read on the way, and weights ascend by a factor that is known."""
    plain, *_, expected = fitted(precision="float16", clip_norm=0.5)
    request.getfixturevalue("like_a_gpu")
    copied, inner = [], torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda *given, **more: copied.append(1) or inner(*given, **more))
    found, *_, result = fitted(precision="float16", clip_norm=0.5)
    assert len(copied) == result.steps == expected.steps and result.skipped_steps == 0
    for mine, theirs in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)  # a forward pass rounds to 11 bits


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_auto_trains_and_predicts_in_bfloat16_where_the_device_has_it(like_a_gpu):
    seen = set()

    def noting(logits, targets):
        seen.add(torch.get_autocast_dtype("cpu"))
        return torch.nn.functional.cross_entropy(logits, targets)

    model, layer, *_ = fitted(precision="auto", loss=noting)
    assert equal(model, fitted(precision="bfloat16")[0])
    assert not equal(model, fitted(precision="float32")[0])
    images = dataset().tensors[0]
    half = predict(model, layer, images, 4, "auto")
    assert torch.equal(half, predict(model, layer, images, 4, "bfloat16"))
    whole = predict(model, layer, images, 4, "float32")
    assert half.dtype == torch.float32 and not torch.equal(half, whole)
    # bfloat16 keeps 8 bits: 2^-8 a product, some layers of it
    torch.testing.assert_close(half, whole, rtol=0.1, atol=0.1)


def test_kernels_queued_ahead_give_the_same_spectra(request):
    images = torch.rand(9, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images[1, 0] = 0.25  # no contrast, and a spectrum of zeros but for one coefficient
    target = amplitude_spectrum(images, "full", 0.1).mean(0) + 0.1
    layer = normalization("full", "none", "before_training")
    layer.freeze(target, 9)

    def all_of_it():
        return [
            has_contrast(images).float(),
            amplitude_spectrum(images, "low", 0.1),
            replace_amplitude(images, target, "full", 0.1),
            layer(images),
        ]

    plain = all_of_it()
    request.getfixturevalue("like_a_gpu")
    for mine, theirs in zip(all_of_it(), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_batches_go_through_pinned_memory_where_the_kind_says_so(like_a_gpu):
    with pytest.warns(UserWarning, match="pin_memory"):  # what torch says where there is no accelerator
        pinned = [images for images, _ in batches(dataset(), 4, None)]
    assert torch.equal(torch.cat(pinned), dataset().tensors[0])


def test_the_generator_of_a_card_is_as_before_after_a_round(monkeypatch):
    held = {"state": torch.arange(16, dtype=torch.uint8)}
    before = held["state"].clone()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: held["state"].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: held.update(state=state))
    with _own_random_state(CARD, 1):
        held["state"] = torch.zeros(16, dtype=torch.uint8)
    assert torch.equal(held["state"], before)


@pytest.mark.parametrize(
    ("bfloat16", "tf32", "asked", "expected"),
    [
        (True, True, "auto", "bfloat16"),
        (False, False, "auto", "float32"),
        (True, True, "float32", "tf32"),
        (True, False, "float32", "float32"),
        (True, True, "float16", "float16"),
        (False, False, "bfloat16", "bfloat16"),
    ],
)
def test_a_precision_in_effect_is_that_of_the_card(monkeypatch, bfloat16, tf32, asked, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    assert precision_in_effect(CARD, asked) == expected


def test_a_cpu_computes_in_what_is_asked_for():
    assert [precision_in_effect(CPU, asked) for asked in ("auto", "float32", "bfloat16")] == [
        "float32", "float32", "bfloat16",
    ]  # fmt: skip
    assert kind_of(torch.device("meta")).runs_ahead


@pytest.mark.parametrize(
    ("devices", "backend", "card"), [(("cuda:0", "cuda:1"), "nccl", 1), (("cpu", "cpu"), "gloo", None)]
)
def test_processes_of_cards_join_by_nccl_each_on_its_own(tmp_path, monkeypatch, devices, backend, card):
    opened, chosen = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    monkeypatch.setattr(distributed, "init_process_group", lambda *given, **more: opened.append((*given, more["rank"])))
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: None)
    with local_processes._process_group(devices, 1, str(tmp_path / "store")) as group:
        assert (group.rank, group.size) == (1, 2)
    assert opened == [(backend, 1)]
    assert chosen == ([] if card is None else [card])
