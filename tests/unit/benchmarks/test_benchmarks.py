"""The benchmarks' own code: their table, their interval, and the GPU's table on the CPU."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harmofl.core.spectra import amplitude_spectrum, replace_amplitude
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import gpu
from tests.benchmarks.rows import Row, interval, peak_allocated, ratio


def test_a_row_passes_up_to_its_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    part = type(sys)("tests.benchmarks.amplitude")
    part.__spec__ = benchmarks.__spec__
    part.measure = lambda: [Row("a", "b", 1.15, 1.15, 0.012), Row("c", "d", 1.151, 1.15)]
    monkeypatch.setitem(sys.modules, part.__name__, part)
    assert benchmarks.main(["--only", "amplitude", "--json", str(tmp_path / "rows.json")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| a | b | 1.15 | 1.15 | 1.2% | pass |",
        "| c | d | 1.151 | 1.15 |  | short |",
    ]
    assert [row["passed"] for row in json.loads((tmp_path / "rows.json").read_text())] == [True, False]


def test_a_ratio_is_that_of_the_clock() -> None:
    now = 0.0

    def takes(spent: float):
        def work() -> None:
            nonlocal now
            now += spent

        return work

    found = ratio(takes(3.0), takes(2.0), clock=lambda: now)
    assert (found.median, found.noise) == (1.5, 0.0)


def test_the_interval_holds_the_middle_of_the_order() -> None:
    # binomial(100, 1/2) has a standard deviation of 5: 1.96 of them reach from the 41st to the 60th value of 1..100
    assert interval([float(value) for value in range(1, 101)]) == pytest.approx((60 - 41) / 2 / 50.5)


def test_allocations_are_counted_at_their_peak() -> None:
    def work() -> torch.Tensor:
        first = torch.ones(1000)
        both = torch.cat([first, first])
        del first
        return both + 1  # 8000 bytes beside the 8000 of the sum; 4000 + 8000 before

    assert 16_000 <= peak_allocated(work) < 17_000


@pytest.mark.parametrize("width", [64, 65])
def test_the_reference_on_the_cpu_replaces_the_amplitude(width: int) -> None:
    images = torch.rand(2, 3, 64, width, generator=torch.Generator().manual_seed(0))
    target = amplitude_spectrum(images, "full", 0.1).mean(0)
    by_numpy = gpu.amplitude_on_cpu(images, target.numpy().astype(np.float64), torch.device("cpu"))
    torch.testing.assert_close(by_numpy, replace_amplitude(images, target, "full", 0.1), rtol=0, atol=1e-4)


def test_without_a_gpu_the_table_ends_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "no CUDA device" in err


def test_the_table_of_the_gpu_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--seconds", "0"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["device"], table["tiny"]) == ("CPU", True)
    assert [(row["job"], row["precision"]) for row in table["rows"]] == [
        (job, precision) for job in gpu.BATCHES for precision in gpu.PRECISIONS
    ]
    for row in table["rows"]:
        assert row["step_ms"] > 0 and row["images_per_second"] > 0 and row["peak_mib"] is None
        assert set(row["share"]) == {"two passes", "augmentation", "amplitude", "perturbation", "optimizer"}
