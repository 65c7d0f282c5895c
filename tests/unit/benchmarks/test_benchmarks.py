"""The benchmarks' own code: their table, their interval, and the GPU's table on the CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.app.job import read_job
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import device_clock, gpu
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


def test_without_a_gpu_the_table_ends_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "no CUDA device" in err


def check_figures(figures: dict[str, Any]) -> None:
    assert tuple(figures["steps"]) == gpu.PRECISIONS and figures["released_ms"] > 0
    for step in figures["steps"].values():
        assert step["step_ms"] > 0 and step["images_per_second"] > 0 and step["peak_mib"] > 0
        assert set(step["share"]) == {"two passes", "augmentation", "amplitude", "perturbation", "optimizer"}
        assert step["released_over_step"] > 0 and step["predict_over_bare_pass"] > 0
    in_effect = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16"}  # a CPU has no TF32
    assert {name: step["in_effect"] for name, step in figures["steps"].items()}.items() <= in_effect.items()
    assert set(figures["amplitude"]) == {"dc", "full", "site_gain"}
    assert figures["loader"]["round_over_its_steps"] > 0 and figures["server"]["sum_over_one_read"] > 0


def test_a_job_on_the_gpu_is_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PRECISIONS", ("bfloat16",))  # the slow test below has all
    experiment = read_job(gpu.JOBS / "harmofl_nuclei", list(gpu.TINY)).resolve(demo=False)
    figures = gpu.measured(experiment, torch.device("cpu"), 2, 0.0)
    check_figures(figures)
    assert dict(gpu.ratios({"a": {"b_over_c": 2, "ms": 1}, "d_over_e": None})) == {"a b_over_c": 2.0}


@pytest.mark.slow
def test_the_whole_table_of_the_gpu_runs_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--seconds", "0", "--json", str(tmp_path / "gpu.json")]) == 0
    table = json.loads((tmp_path / "gpu.json").read_text())
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :]) == table
    assert (table["device"], table["tiny"], list(table["jobs"])) == ("CPU", True, list(gpu.BATCHES))
    for figures in table["jobs"].values():
        check_figures(figures)
    both = table["two_processes"]
    assert both["two_over_one"] > 0 and both["devices_of_a_shared_round"] == ["cpu", "cpu"]
    assert both["shared_round_over_one_process"] > 0


def test_memory_and_waiting_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: said.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    assert device_clock.peak_mib(lambda: said.append("work"), torch.device("cuda")) == 3.0
    assert said == ["work", "reset_peak_memory_stats", "work"], "state that lasts is made before"
    said.clear()
    device_clock.medians_ms({"work": lambda: said.append("work")}, device=torch.device("cuda"), seconds=0)
    assert said == ["work", "synchronize", "work", "synchronize"]


def test_convolutions_round_to_tf32_for_as_long_as_it_is_measured() -> None:
    before = torch.backends.cudnn.allow_tf32
    for precision, allowed in (("float32", False), ("tf32", True), ("bfloat16", False)):
        with gpu.computing_in(precision) as asked:
            assert torch.backends.cudnn.allow_tf32 == allowed
            assert asked == ("bfloat16" if precision == "bfloat16" else "float32")
    assert torch.backends.cudnn.allow_tf32 == before
