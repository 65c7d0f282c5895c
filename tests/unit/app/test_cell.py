"""A cell's record: what the run cost, and what explains it, which is no part of the cost."""

from pathlib import Path

import pytest

from harmofl.app import cell, explanation
from harmofl.app.cell import CellPlan
from harmofl.evidence.comparison import CellKey
from harmofl.flare.participant import Participant
from tests.small_job import SITES


def test_seconds_are_the_methods_and_not_of_its_data_or_what_explains_it(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(cell.time, "monotonic", lambda: clock[0])
    measured = explanation.landscape_of

    def slow(*given: object) -> object:
        clock[0] += 1000
        return measured(*given)  # type: ignore[arg-type]

    opened, scored = Participant._open, Participant.evaluate

    def slowly_opened(*given: object) -> object:
        clock[0] += 100
        return opened(*given)  # type: ignore[arg-type]

    def slowly_scored(*given: object) -> object:
        clock[0] += 1
        return scored(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(explanation, "landscape_of", slow)
    monkeypatch.setattr(Participant, "_open", slowly_opened)
    monkeypatch.setattr(Participant, "evaluate", slowly_scored)
    key = CellKey(experiment_hash="0", version="0", data="demo", sites=list(SITES), left_out=None)
    overrides = {"method": "fedavg", "network.width": 2}
    record = cell._measure(CellPlan(tmp_path / "cell", job, overrides, key, None, 1, landscape=True, asked_at=-10))
    # two sites; the process was asked for 10 seconds before the clock began
    assert record.spent == {"start": 10, "reading": 200, "scoring": 2, "landscape": 1000}
    assert clock[0] == 1202 and record.seconds == 2
    told = record.landscape
    assert told is not None and len(told.surface) == len(told.offsets) == explanation.POINTS
    assert told.sharpness_at == pytest.approx(0.25) and set(told.local) == set(SITES)
    for local in told.local.values():
        assert len(local.own_images) == explanation.POINTS and local.all_images is not None
