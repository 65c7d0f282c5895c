"""A run by parts: from logs in FLARE's form with times that were chosen by hand."""

from pathlib import Path

import pytest

from tests.benchmarks.demo_parts import run_parts

# start 10.0, task 10.5, imports until 12.5, amplitude until 13.0; a second process, whose task has no end; a third with
# 40.0, 41.0, 43.0, training until 50.0, and a task more in the same process: 52.0, 52.25, 53.25
SITE = """2026-12-01 00:00:10,000 - ClientTaskWorker - INFO - ClientTaskWorker started to run
2026-12-01 00:00:10,500 - ClientRunner - INFO - [identity=A] - got task assignment: name=amplitude, id=1
2026-12-01 00:00:12,500 - HarmoFLExecutor - INFO - A: computes on cpu
2026-12-01 00:00:13,000 - ClientTaskWorker - INFO - Finished one task run for client: A interval: 2
2026-12-01 00:00:20,000 - ClientTaskWorker - INFO - ClientTaskWorker started to run
2026-12-01 00:00:21,000 - ClientRunner - INFO - [identity=A] - got task assignment: name=train, id=2
Traceback (most recent call last):
2026-12-01 00:00:40,000 - ClientTaskWorker - INFO - ClientTaskWorker started to run
2026-12-01 00:00:41,000 - ClientRunner - INFO - [identity=A] - got task assignment: name=train, id=3
2026-12-01 00:00:43,000 - HarmoFLExecutor - INFO - A: computes on cpu
2026-12-01 00:00:50,000 - ClientTaskWorker - INFO - Finished one task run for client: A interval: 2
2026-12-01 00:00:52,000 - ClientRunner - INFO - [identity=A] - got task assignment: name=evaluate, id=4
2026-12-01 00:00:52,250 - HarmoFLExecutor - INFO - A: computes on cpu
2026-12-01 00:00:53,250 - ClientTaskWorker - INFO - Finished one task run for client: A interval: 2
"""
SERVER = "2026-12-01 00:00:05,000 - SimulatorRunner - INFO - first\n2026-12-01 00:01:10,000 - MPM - INFO - last\n"


def test_parts_of_a_run_are_those_of_its_logs(tmp_path: Path) -> None:
    for name, text in (("server", SERVER), ("A", SITE), ("B", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(text)
    whole, spent, count = run_parts(tmp_path)
    assert whole == pytest.approx(65)
    assert count == {"FLARE connects the process": 2, "imports": 3, "amplitude": 1, "train": 1, "evaluate": 1}
    expected = {"FLARE connects the process": 1.5, "imports": 4.25, "amplitude": 0.5, "train": 7.0, "evaluate": 1.0}
    assert dict(spent) == pytest.approx(expected)
