"""A site's state of a run: a job that resumes it and has not trained yet leaves every byte as it was."""

from pathlib import Path
from typing import Any

import pytest
from toy_rounds import ToyRounds

from harmofl.core.training import TrainingStoppedError
from harmofl.data.synthetic import write_prostate_site
from harmofl.flare.state import SiteState
from harmofl.flare.wire import ModelMessage
from harmofl.tasks import resolve_experiment


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def toy(written: dict[str, Any], tmp_path: Path) -> ToyRounds:
    """Three rounds of FedBN, whose sites keep layers of their own, with the best one before the last two."""
    write_prostate_site(tmp_path / "data" / "HK", "siemens_1.5t_endorectal", 4, 0, matrix=64, slices=3)
    held = ToyRounds(resolve_experiment(written | {"method": "fedbn"}), tmp_path / "data", tmp_path / "run", ("HK",))
    held.rounds(3)
    return held


def test_a_resumed_run_that_fails_before_it_has_trained_changes_nothing(toy: ToyRounds, tmp_path: Path) -> None:
    state = toy.folder / "HK" / "state" / "toy"
    for name in ("findings", "split"):  # as if the cases had changed, or an earlier version had not kept them
        (state / f"{name}.pt").unlink()
    (state / ".round_000002.pt.abc.part").write_bytes(b"left by a killed process")
    toy.run.best_round = 1  # of which a site that trains puts its layers aside
    before = files_of(state)
    site = toy.site("HK")
    site._should_stop = lambda: True
    with pytest.raises(TrainingStoppedError):
        site.train(3, ModelMessage(toy.weights), 1)
    assert files_of(state) == before
    toy.round(3)
    after = files_of(state)
    assert after.keys() == {
        "findings.pt", "split.pt", "rules.pt", "marked_000001.pt", "round_000002.pt", "round_000003.pt"
    }  # fmt: skip


def test_what_must_be_kept_before_it_leaves_is_kept_at_once(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "run")
    state.save_with_round("amplitude", {"images": 1})
    assert SiteState(tmp_path, "run").load_once("amplitude") == {"images": 1}, "no round is there yet to spoil"
    state.save_round(0, {})
    state.save_with_round("amplitude", {"images": 2})
    state.save_once("amplitude_sent", {"images": 2})
    assert state.load_once("amplitude") == {"images": 2}
    other = SiteState(tmp_path, "run")
    assert other.load_once("amplitude") == {"images": 1} and other.load_once("amplitude_sent") == {"images": 2}
    state.save_round(1, {})
    assert SiteState(tmp_path, "run").load_once("amplitude") == {"images": 2}
