"""What lets a job be resumed and watched: the server's store, the checkpoint that a job names, progress, failure."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.model import make_model_learnable

from harmofl.experiment import ExperimentError
from harmofl.flare.live import FAILURE_FILE, note_failure, progress, seconds_left
from harmofl.flare.persistor import CheckpointPersistor, best_weights, keep_if_best, save_model_file
from harmofl.flare.record import close_round
from harmofl.flare.server_run import UNFINISHED_FILE, _take_best_model
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL, checkpoint_path, lock_run
from harmofl.flare.state import Checkpoint, StateError

JOB = "6f84c8d9-90d2-404a-9d40-a8408d110832"
OTHER = "11111111-2222-3333-4444-555555555555"


def validate(run, round_number, *scores) -> None:
    """Enter into the books what A, B and C scored the model that came out of a round; None where a site missed it."""
    told = {site: score for site, score in zip("ABC", scores, strict=False) if score is not None}
    for site, score in told.items():
        run.numbers[site] = {"validation": score}
    close_round(run, round_number + 1, sorted(told))


@pytest.fixture
def stored(make_run, tmp_path: Path):
    """A run at a real server, which keeps checkpoints below `runs`."""
    run = make_run({"federation.rounds": 5})
    run.store = tmp_path / "runs" / JOB
    return run


def test_every_model_file_is_kept_beyond_the_job(stored, weights) -> None:
    save_model_file(weights, stored, 3, stored.folder / FINAL_MODEL)
    validate(stored, 1, 0.5)
    keep_if_best(stored, 0.5, 1, weights)
    for name in (FINAL_MODEL, BEST_MODEL):
        assert (stored.store / name).read_bytes() == (stored.folder / name).read_bytes()
    assert sorted(path.name for path in stored.store.iterdir()) == sorted([FINAL_MODEL, BEST_MODEL])
    kept = Checkpoint.load(checkpoint_path(JOB, stored.store.with_name(OTHER)))
    assert kept.next_round == 3 and kept.run_id == stored.run_id


@pytest.mark.parametrize(("score", "kept"), [(0.6, True), (0.5, False), (0.4, False), (None, False)])
def test_only_a_better_score_replaces_the_best_model(stored, weights, score, kept) -> None:
    validate(stored, 1, 0.5)
    validate(stored, 2, score)
    keep_if_best(stored, 0.5, 1, weights)
    before = (stored.folder / BEST_MODEL).read_bytes()
    keep_if_best(stored, score, 2, {**weights, "w": weights["w"] + 1})
    assert (stored.best_round, stored.best_score) == ((2, score) if kept else (1, 0.5))
    assert ((stored.folder / BEST_MODEL).read_bytes() != before) == kept


def test_the_untrained_model_is_no_best_model(stored, weights) -> None:
    validate(stored, -1, 0.9)
    keep_if_best(stored, 0.9, -1, weights)
    assert stored.best_round is None and not (stored.folder / BEST_MODEL).exists()


def test_the_model_of_a_round_is_the_file_that_the_next_one_goes_on_from(stored, weights, make_context) -> None:
    CheckpointPersistor().save_model(make_model_learnable(weights, {}), make_context(stored))
    held = Checkpoint.load(stored.folder / FINAL_MODEL)
    assert held.next_round == 5  # the context is in round 4
    assert {name: value.tolist() for name, value in held.model.items()} == {
        name: value.tolist() for name, value in weights.items()
    }


def test_what_travels_of_the_best_model_are_its_shared_entries(make_run) -> None:
    run = make_run({"federation.rounds": 5})
    assert best_weights(run) is None, "no model was validated yet"
    best = run.initial_weights()
    validate(run, 1, 0.5)
    keep_if_best(run, 0.5, 1, {name: value + 1 for name, value in best.items()})
    sent = best_weights(run)
    assert sent is not None and sent.keys() == run.partition.shared
    assert all(np.array_equal(value, best[name] + 1) for name, value in sent.items())


def test_nothing_travels_of_the_best_round_where_sites_keep_their_models(make_run) -> None:
    run = make_run({"federation.rounds": 5, "method": "local_only"})
    assert best_weights(run) is None
    run.best_round = 1
    assert best_weights(run) == {}


def test_in_simulation_a_job_names_a_file_and_nothing_is_stored(make_run, weights, tmp_path: Path) -> None:
    run = make_run()
    save_model_file(weights, run, 1, run.folder / FINAL_MODEL)
    assert not (tmp_path / "runs").exists()
    assert checkpoint_path("/anywhere/FL_global_model.pt", None) == Path("/anywhere/FL_global_model.pt")


@pytest.mark.parametrize("name", ["/etc/passwd", "../../other", "FL_global_model.pt", "a b", ""])
def test_a_job_chooses_no_path_at_a_real_server(tmp_path: Path, name: str) -> None:
    with pytest.raises(ExperimentError, match="is not a job id"):
        checkpoint_path(name, tmp_path / "runs" / JOB)


def test_a_job_that_left_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=f"job {OTHER} left no checkpoint.*submit it as a new job"):
        checkpoint_path(OTHER, tmp_path / "runs" / JOB)


def test_progress_names_the_worst_site_and_only_rounds_of_this_job(stored, numbers) -> None:
    stored.start_round = 1
    for site, score in (("A", 0.5), ("B", 0.25), ("C", None)):
        stored.numbers[site] = {**numbers, "validation": score}
    close_round(stored, 0, ["A", "B", "C"])
    stored.refused["C"] = "internal_error: see its log"
    close_round(stored, 1, ["A", "B"])
    stored.waiting = {"B", "A"}
    told = progress(stored)
    assert [closed["round"] for closed in told["closed"]] == [1]
    assert told["closed"][0] == {
        "round": 1,
        "accepted": ["A", "B"],
        "refused": {"C": "internal_error: see its log"},
        "scored": True,
        "mean": 0.375,
        "worst": ["B", 0.25],
        "norms": None,
        "warnings": [],
    }
    assert told["waiting_for"] == ["A", "B"] and told["sites"] == ["A", "B", "C"]


def test_time_left_goes_by_the_pace_of_the_rounds_that_closed(stored) -> None:
    assert seconds_left(stored) is None
    now = time.monotonic()
    stored.started, stored.closed = now - 20, [now]
    # one round took 20 s with all that came before it, four are left
    assert seconds_left(stored) == pytest.approx(80, abs=1)
    # the second took 10 s, three are left; what came before the first comes once
    stored.started, stored.closed = now - 500, [now - 10, now]
    assert seconds_left(stored) == pytest.approx(30, abs=1)
    stored.start_round = 3  # then none is left
    assert seconds_left(stored) == 0


def test_time_left_forgets_a_load_that_has_passed(stored) -> None:
    now = time.monotonic()
    # of 20 rounds 14 have closed: after 3 beside other work, 100 s apart, 11 that are 4 s apart
    slow = [now - 340, now - 240, now - 140]
    stored.closed = [*slow, *(now - 40 + 4 * count for count in range(11))]
    stored.start_round = 5 - 20  # the experiment has 5
    assert seconds_left(stored) == pytest.approx(6 * 4, abs=1)


def test_the_first_reason_of_a_failure_is_kept(tmp_path: Path) -> None:
    note_failure(tmp_path, "round 1: 2 of 3 sites accepted")
    note_failure(tmp_path, "stopped")
    assert (tmp_path / FAILURE_FILE).read_text() == "round 1: 2 of 3 sites accepted\n"


def test_a_job_that_ends_hard_has_told_where_it_was(stored) -> None:
    told = stored.folder / UNFINISHED_FILE
    stored.begin("in round 1")
    assert told.read_text() == "the job ended in round 1, when A, B, C had not answered\n"
    stored.answered("B")
    assert told.read_text() == "the job ended in round 1, when A, C had not answered\n"
    for site in "AC":
        stored.answered(site)
    assert told.read_text() == "the job ended in round 1\n"
    stored.finish()
    assert not told.exists()


def test_two_jobs_never_go_on_with_one_run(tmp_path: Path) -> None:
    held = lock_run(tmp_path / "runs" / ".0123abcd")
    with pytest.raises(StateError, match="still running in another job"):
        lock_run(tmp_path / "runs" / ".0123abcd")
    held.close()  # as when its process has ended, however it ended
    lock_run(tmp_path / "runs" / ".0123abcd").close()


def test_a_copy_that_fails_leaves_the_old_checkpoint(stored, weights, monkeypatch) -> None:
    save_model_file(weights, stored, 1, stored.folder / FINAL_MODEL)
    before = (stored.store / FINAL_MODEL).read_bytes()

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harmofl.flare.state.shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        save_model_file({**weights, "w": weights["w"] + 1}, stored, 2, stored.folder / FINAL_MODEL)
    assert (stored.store / FINAL_MODEL).read_bytes() == before
    assert [path.name for path in stored.store.iterdir()] == [FINAL_MODEL]


def test_the_best_model_so_far_comes_along(stored, weights) -> None:
    validate(stored, 1, 0.5)
    keep_if_best(stored, 0.5, 1, weights)
    kept, best = stored.store / BEST_MODEL, (stored.store / BEST_MODEL).read_bytes()
    resumed = type(stored)(stored.experiment, False, stored.folder / "new", ["A"], stored.store.with_name(OTHER))
    resumed.folder.mkdir()
    _take_best_model(kept, resumed)
    assert not (resumed.folder / BEST_MODEL).exists(), "there is no best round yet"
    resumed.best_round = 1
    _take_best_model(kept, resumed)
    assert (resumed.folder / BEST_MODEL).read_bytes() == (resumed.store / BEST_MODEL).read_bytes() == best
    kept.write_bytes(best[: len(best) // 2])
    with pytest.raises(StateError, match=f"{BEST_MODEL} cannot be read"):
        _take_best_model(kept, resumed)
    assert (resumed.folder / BEST_MODEL).read_bytes() == best
    kept.unlink()
    with pytest.raises(StateError, match="must lie beside the checkpoint"):
        _take_best_model(kept, resumed)


def test_what_was_sent_adds_up_by_kind(stored) -> None:
    stored.count_bytes("A", {"weights": 100, "numbers": 7})
    stored.count_bytes("A", {"weights": 100, "amplitude": 8})
    assert stored.bytes_sent == {"A": {"weights": 200, "numbers": 7, "amplitude": 8}}
    assert stored.last_bytes == {"A": 108}


def test_a_checkpoint_hands_on_what_the_sites_said_about_noise(stored, weights) -> None:
    said = {"mechanism": "analytic_gaussian", "epsilon": 1.0, "delta": 1e-5, "clip": 5.0, "patients": 6, "sigma": 6.2}
    stored.amplitude_noise, stored.amplitude_patients = {"A": said}, {"A": 6, "B": 7}
    save_model_file(weights, stored, 1, stored.folder / FINAL_MODEL)
    resumed = type(stored)(stored.experiment, False, stored.folder, stored.expected)
    resumed.continue_from(Checkpoint.load(stored.folder / FINAL_MODEL))
    assert resumed.amplitude_patients == {"A": 6, "B": 7}
    assert resumed.amplitude_noise == {"A": said} and resumed.start_round == 1
    assert np.array_equal(Checkpoint.load(stored.folder / FINAL_MODEL).model["w"].numpy(), weights["w"])


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("record", "{}"),
        ("record", '{"best_round": null, "best_score": null, "rounds": [{"a": 1}], "bytes_sent": {}, "numbers": {}}'),
        ("record", '{"best_round": "x", "best_score": null, "rounds": [], "bytes_sent": {}, "numbers": {}}'),
        ("record", '{"best_round": 1, "best_score": null, "rounds": 7, "bytes_sent": {}, "numbers": {}}'),
        ("run_id", "../../elsewhere"),
    ],
)
def test_a_checkpoint_whose_record_has_another_form_is_one_line(stored, weights, key: str, held: str) -> None:
    path = stored.folder / FINAL_MODEL
    save_model_file(weights, stored, 1, path)
    content = torch.load(path, weights_only=True)
    content["harmofl"][key] = held
    torch.save(content, path)
    resumed = type(stored)(stored.experiment, False, stored.folder, stored.expected)
    with pytest.raises(StateError, match=r"^the record of the checkpoint that federation\.resume_from names"):
        resumed.continue_from(Checkpoint.load(path))


def test_a_checkpoint_of_another_experiment_is_refused(stored, weights) -> None:
    save_model_file(weights, stored, 1, stored.folder / FINAL_MODEL)
    other = type(stored)(
        stored.experiment.model_copy(update={"seed": stored.experiment.seed + 1}), False, stored.folder, ["A"]
    )
    with pytest.raises(ExperimentError, match="the checkpoint was made by experiment .* use equal settings"):
        other.continue_from(Checkpoint.load(stored.folder / FINAL_MODEL))
