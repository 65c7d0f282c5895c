"""What a site trains on, and what it says where that is missing or full. A4, A6."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

import harmofl
from harmofl.core.training import state_arrays
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import Experiment
from harmofl.flare.devices import (
    FullMemoryError,
    described,
    full_memory,
    is_out_of_memory,
    main_device,
    make_deterministic,
)
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.wire import ModelMessage, read_error
from harmofl.tasks import resolve_experiment, untrained_network
from tests.loose_limits import LOOSE

GIB = 2**30


@pytest.fixture
def experiment(written: dict[str, Any]) -> Experiment:
    return resolve_experiment(written | {"method": "fedavg"})


@pytest.fixture
def participant(experiment: Experiment, tmp_path: Path) -> Participant:
    """Site HK with three small cases."""
    write_prostate_site(tmp_path / "data/HK", "siemens_1.5t_endorectal", 3, 0, matrix=64, slices=3)
    site = SiteConfig("HK", False, tmp_path / "data", tmp_path, device="cpu", minimum_cases=1, settings=LOOSE)
    return Participant(experiment, site, "run", lambda: False, logging.getLogger("HK"))


def full_cpu() -> None:
    torch.empty(2**50)  # a pebibyte of bytes and more: no machine has it


def full_card() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def full_library() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def full_python() -> None:
    raise MemoryError


@pytest.mark.parametrize("fill", [full_cpu, full_card, full_library, full_python])
def test_a4_full_memory_names_sizes_and_a_smaller_value(
    participant: Participant, experiment: Experiment, monkeypatch: pytest.MonkeyPatch, fill: Callable[[], None]
) -> None:
    memory = SimpleNamespace(available=GIB, total=16 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("harmofl.flare.round_start.fit_round", lambda *_, **__: fill())
    with pytest.raises(FullMemoryError) as caught:
        participant.train(0, ModelMessage(state_arrays(untrained_network(experiment))))
    # the small experiment trains 4 images of 64 x 64 at a time
    assert str(caught.value) == (
        "site HK ran out of memory (1.0 of 16.0 GiB free) in a step of 4 images of 64 x 64; "
        "set training.batch_size to 2"
    )


def test_a4_a_full_card_says_what_is_free_on_it(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_cards(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 16 * GIB))
    line = str(full_memory(SiteConfig("HK", False, tmp_path, tmp_path), experiment))
    assert line.startswith("site HK ran out of GPU memory (0.5 of 16.0 GiB free) in a step of 4 images")


def test_a_card_is_asked_for_repeatable_kernels_and_a_cpu_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append((on, warn_only)))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    make_deterministic(torch.device("cpu"))
    assert torch.backends.cudnn.benchmark and not asked and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    make_deterministic(torch.device("cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and asked == [(True, True)]
    assert not torch.backends.cudnn.benchmark and not torch.utils.deterministic.fill_uninitialized_memory


def test_a4_the_server_gets_the_line_whichever_memory_ran_out() -> None:
    context = FLContextManager(None, "HK", "job", {}, {}).new_context()
    told = {}
    for error in (FullMemoryError("site HK ran out of memory (1.0 GiB"), RuntimeError("DefaultCPUAllocator: can't "
                  "allocate memory: you tried to allocate 9 bytes")):  # fmt: skip
        executor = HarmoFLExecutor()

        def perform(*_: Any, error: Exception = error) -> Shareable:
            raise error

        executor._perform = perform  # type: ignore[method-assign]
        told[type(error)] = read_error(executor.execute("train", Shareable(), context, Signal()))
    assert told[FullMemoryError] == ("out_of_memory", "site HK ran out of memory (1.0 GiB")
    assert told[RuntimeError][0] == "out_of_memory" and "lower training.batch_size" in told[RuntimeError][1]


def test_a4_other_errors_are_not_taken_for_a_full_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("device", "cards", "chosen"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda"), ("cuda:1", 2, "cuda:1")],
)
def test_a6_the_visible_gpu_unless_the_site_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, cards: int, chosen: str
) -> None:
    give_cards(monkeypatch, cards)
    assert str(main_device(SiteConfig("HK", False, tmp_path, tmp_path, device=device))) == chosen


@pytest.mark.parametrize(("device", "cards", "said"), [("cuda", 0, "has none"), ("cuda:1", 1, "cuda:1 and has 1 GPUs")])
def test_a6_a_card_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, cards: int, said: str
) -> None:
    give_cards(monkeypatch, cards)
    with pytest.raises(SiteError, match=said) as caught:
        main_device(SiteConfig("HK", False, tmp_path, tmp_path, device=device))
    assert caught.value.code == "no_gpu"


def test_a6_the_log_names_the_device_once(participant: Participant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert participant.device.type == "cpu"
    assert [record.getMessage() for record in caplog.records if record.name == "HK"] == ["HK: computes on cpu"]


def test_a6_a_card_is_named_as_the_machine_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that sees one card of many, number 0 says nothing."""
    card = SimpleNamespace(name="NVIDIA H200", uuid="5ce1bd21")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert described(torch.device("cuda", 0)) == "cuda:0 (NVIDIA H200, GPU-5ce1bd21)"


def give_cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a6_no_code_chooses_a_card_by_its_number() -> None:
    """FLARE gives each site's process one card, which is number 0 there; a number comes from the site alone."""
    package = Path(harmofl.__file__).parent
    calls = re.compile(r"(device|to|set_device|\.cuda)\(\s*f?[\"']?(cuda:)?\d")
    chosen = [path.name for path in package.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))]
    assert not chosen
    assert calls.search('torch.device("cuda:0")') and calls.search("network.cuda(1)")
