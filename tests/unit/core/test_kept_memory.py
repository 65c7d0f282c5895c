"""What is freed stays with the process inside, and goes back to the system at the end."""

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import pytest
import torch
from toy_segmentation import cross_entropy, dataset, network, normalization, settings

from harmofl.core import kept_memory as kept
from harmofl.core.kept_memory import kept_memory
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import build_optimizer, fit_round

CPU = torch.device("cpu")
VALUES = 16 * 2**20  # 64 MiB in float32, beyond the 32 MiB from which glibc maps a block of its own
TIMES = 6
# small objects that are made meanwhile may lie behind a block, so that the next one of its size needs another place
SETTLED = 20


def faults(times: int = TIMES) -> int:
    """Pages that the system had to hand out while tensors of 64 MiB were written and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        torch.ones(VALUES)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measured() -> dict[str, int]:
    """In a process of its own: what many tests leave behind in a heap changes what the C library does with it."""
    with kept_memory(CPU):
        found = {"first": faults(1)}
        faults(SETTLED)
        found["inside"] = faults()
    found["outside"] = faults()
    with kept_memory(CPU):
        with kept_memory(CPU):
            faults(SETTLED)
        found["after the inner end"] = faults()
    found["after the outer end"] = faults()
    with suppress(KeyError), kept_memory(CPU):
        raise KeyError
    found["outside after an error"] = faults()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured).result()


def test_pages_are_handed_out_once_inside_and_each_time_outside(found: dict[str, int]) -> None:
    assert found["first"] > found["outside"] / TIMES / 2
    assert found["inside"] < found["outside"] / TIMES / 2


def test_what_is_free_goes_back_at_the_outer_end_alone(found: dict[str, int]) -> None:
    assert found["after the inner end"] < found["outside"] / 2
    assert found["after the outer end"] > found["outside"] / 2


def test_an_error_ends_it_too(found: dict[str, int]) -> None:
    assert found["outside after an error"] > 2 * found["inside"]


def test_on_another_device_nothing_changes():
    with kept_memory(torch.device("meta")):
        assert kept._inside == []


def test_a_round_of_training_is_inside_and_ends_it():
    """Seen from a term of the loss, which is called between two passes."""
    seen = []

    def term(_):
        seen.append(len(kept._inside))
        return torch.zeros(())

    model = network()
    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), 0.05, model)
    fit_round(model, normalization(), optimizer, cross_entropy, dataset(), settings=settings(), seed=0, terms=[term])
    assert set(seen) == {1} and kept._inside == []
