"""The best round: which model a round's scores belong to, which sites compare two models, what a resumed run keeps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.best_round import scores_higher
from harmofl.experiment import set_key
from harmofl.flare import controller as controller_module
from harmofl.flare import in_process as in_process_module
from harmofl.flare.controller import HarmoFLScatterAndGather
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.persistor import keep_received_if_best, save_at_the_end, save_model_file
from harmofl.flare.record import close_round, write_evidence
from harmofl.flare.server_run import ServerRun, _take_best_model
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.state import Checkpoint
from harmofl.flare.wire import ModelMessage, UpdateMessage
from harmofl.tasks import resolve_experiment

Scores = dict[str, float | None]
A, B, C = "A", "B", "C"
NAN = float("nan")
# one entry a round, of the model that the round received; each site's score rises, C misses a round
HARD_SITE_MISSES_ONE: list[Scores] = [
    {A: 0.10, B: 0.10, C: 0.10},
    {A: 0.80, B: 0.80, C: 0.40},
    {A: 0.82, B: 0.82},
    {A: 0.88, B: 0.88, C: 0.55},
]


def model_of(round_number: int) -> dict[str, np.ndarray]:
    """The model that came out of a round, told by its only entry; -1 is the untrained one."""
    return {"w": np.full((2, 3), round_number, np.float32)}


def answer_to(run: ServerRun, round_number: int, scores: Scores) -> None:
    """Close a round as controller and in-process run do, with these answers."""
    run.numbers |= {site: {"validation": score} for site, score in scores.items()}
    record = close_round(run, round_number, sorted(scores))
    keep_received_if_best(run, record, model_of(round_number - 1))


def best_file(run: ServerRun) -> float:
    """Which model lies in the file of the best one."""
    return float(Checkpoint.load(run.folder / BEST_MODEL).model["w"][0, 0])


@pytest.mark.parametrize(
    ("model", "best", "expected"),
    [
        ({A: 0.5}, {}, True),
        ({}, {}, False),
        ({}, {A: 0.1}, False),
        ({A: 0.5, B: 0.5}, {A: 0.5, B: 0.4}, True),
        ({A: 0.5, B: 0.5}, {A: 0.5, B: 0.5}, False),
        # on A and B: 0.4 against 0.5, whatever C says of either
        ({A: 0.4, B: 0.4, C: 0.9}, {A: 0.5, B: 0.5}, False),
        ({A: 0.6, B: 0.6}, {A: 0.5, B: 0.5, C: 0.9}, True),
        ({A: 0.5, B: 0.5}, {A: 0.5, B: 0.5, C: 0.1}, False),
        # no site scored both
        ({A: 0.9}, {B: 0.1}, False),
        # 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floats that are added one by one
        ({A: 0.1, B: 0.2, C: 0.3}, {C: 0.1, B: 0.2, A: 0.3}, False),
    ],
)
def test_two_models_are_compared_on_the_sites_that_scored_both(model: Scores, best: Scores, expected: bool) -> None:
    assert scores_higher(model, best) is expected  # type: ignore[arg-type]


def test_a_hard_site_that_misses_a_round_does_not_make_it_the_best(make_run: Callable[..., ServerRun]) -> None:
    run = make_run({"federation.rounds": 5})
    kept = []
    for number, scores in enumerate(HARD_SITE_MISSES_ONE):
        answer_to(run, number, scores)
        kept.append(run.best_round)
    # round 1's model is better than round 0's where both were scored: 0.82 against 0.80; round 2's is than round 1's
    assert kept == [None, 0, 1, 2]
    assert run.best_score == pytest.approx((0.88 + 0.88 + 0.55) / 3) and best_file(run) == 2
    # over all its sites this model scores 0.70, over A and B 0.87 where the best one has 0.88
    answer_to(run, 4, {A: 0.87, B: 0.87, C: 0.36})
    assert (run.best_round, best_file(run)) == (2, 2)


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        # a site that never scores has no say
        ([{A: 0.1, C: None}, {A: 0.5, C: None}, {A: 0.4, C: NAN}, {A: 0.6, C: None}], 2),
        # no round ever complete: B decides between the models of rounds 0 and 1, A between those of 1 and 2
        ([{A: 0.1}, {A: 0.9, B: 0.2}, {B: 0.3, C: 0.1}, {A: 0.9, C: 0.2}], 2),
        # no site scored the next model as well: the earlier one stays
        ([{A: 0.1}, {A: 0.2}, {B: 0.9}, {B: 0.95}], 0),
        # equal scores: the first stays
        ([{A: 0.1}, {A: 0.5, B: 0.5}, {A: 0.5, B: 0.5}, {A: 0.4, B: 0.6}], 0),
        # three models that each beat one other: 0 loses to 1 at B, 1 to 2 at C, 2 to 0 at A; the order decides
        ([{A: 0.1}, {A: 0.5, B: 0.6}, {B: 0.7, C: 0.3}, {C: 0.4, A: 0.4}], 2),
        ([{A: 0.1}, {C: 0.4, A: 0.4}, {B: 0.7, C: 0.3}, {A: 0.5, B: 0.6}], 2),
        ([{A: 0.1}, {B: 0.7, C: 0.3}, {A: 0.5, B: 0.6}, {C: 0.4, A: 0.4}], 2),
        ([{A: 0.1}, {B: 0.7, C: 0.3}, {A: 0.5, B: 0.6}, {A: 0.4}], 0),
        # nobody scored the first models at all
        ([{A: None}, {A: None}, {A: NAN}, {A: 0.0}], 2),
        ([{A: 0.3}, {A: float("inf")}, {A: 0.2}, {A: 0.1}], 1),
    ],
)
def test_sites_without_a_score_decide_nothing(
    make_run: Callable[..., ServerRun], rounds: list[Scores], best: int
) -> None:
    run = make_run({"federation.rounds": 5})
    for number, scores in enumerate(rounds):
        answer_to(run, number, scores)
    assert (run.best_round, best_file(run)) == (best, best)


def test_results_name_the_rule_and_the_sites(make_run: Callable[..., ServerRun]) -> None:
    run = make_run({"federation.rounds": 4})
    for number, scores in enumerate([*HARD_SITE_MISSES_ONE[:2], {A: 0.79, B: 0.79, C: 0.3}, {A: 0.9, B: 0.1}]):
        answer_to(run, number, scores)
    save_at_the_end(model_of(3), run, {A: 0.81, B: 0.81, C: None}, 4)
    assert (run.best_round, best_file(run)) == (3, 3)
    write_evidence(run, {})
    told = (run.folder / "results.json").read_text()
    # the untrained model scored 0.1 at A and B
    assert (
        '"best_reason": "highest mean validation dice over sites: 0.810 at 2 of 3 sites (untrained model: 0.100); '
        'two models are compared at the sites that scored both"' in told
    )
    assert '"best_sites": [\n    "A",\n    "B"\n  ]' in told


def test_the_untrained_model_is_compared_at_the_sites_of_the_best_one(make_run: Callable[..., ServerRun]) -> None:
    run = make_run({"federation.rounds": 2})
    # untrained: 0.3 at A, 0.9 at B, 0.6 on average; the best one was scored by A alone and is better there
    answer_to(run, 0, {A: 0.3, B: 0.9})
    answer_to(run, 1, {A: 0.5})
    save_at_the_end(model_of(1), run, {A: 0.4}, 2)
    assert not any("no model scores better" in line for line in write_evidence(run, {}))
    run.best_scores = {A: 0.3, C: 0.9}  # C joined later
    assert any("(0.300 against 0.300)" in line for line in write_evidence(run, {}))


class TestResume:
    def started(self, make_run: Callable[..., ServerRun]) -> ServerRun:
        run = make_run({"federation.rounds": 5})
        for number, scores in enumerate(HARD_SITE_MISSES_ONE):
            answer_to(run, number, scores)
        return run

    def resumed(self, run: ServerRun, checkpoint: Checkpoint) -> ServerRun:
        """A new job in a folder of its own that resumes from a checkpoint."""
        folder = run.folder / "resumed"
        folder.mkdir()
        again = ServerRun(run.experiment, False, folder, run.expected)
        again.continue_from(checkpoint)
        _take_best_model(run.folder / BEST_MODEL, again)
        return again

    @pytest.mark.parametrize("is_old", [False, True])
    def test_it_compares_as_the_undisturbed_run_would(self, make_run: Callable[..., ServerRun], is_old: bool) -> None:
        run = self.started(make_run)
        save_model_file(model_of(3), run, 4, run.folder / FINAL_MODEL)
        checkpoint = Checkpoint.load(run.folder / FINAL_MODEL)
        if is_old:  # a version that kept one number of the best model
            del checkpoint.record["best_scores"]
        again = self.resumed(run, checkpoint)
        assert again.best_scores == {A: 0.88, B: 0.88, C: 0.55}
        answer_to(again, 4, {A: 0.87, B: 0.87})
        assert again.best_round == 2
        answer_to(again, 4, {A: 0.89, B: 0.88})
        assert (again.best_round, best_file(again)) == (3, 3)

    def test_a_best_model_newer_than_the_checkpoint_keeps_its_round(self, make_run: Callable[..., ServerRun]) -> None:
        run = make_run({"federation.rounds": 5})
        for number, scores in enumerate(HARD_SITE_MISSES_ONE[:3]):
            answer_to(run, number, scores)
        save_model_file(model_of(2), run, 3, run.folder / FINAL_MODEL)
        checkpoint = Checkpoint.load(run.folder / FINAL_MODEL)
        answer_to(run, 3, HARD_SITE_MISSES_ONE[3])  # and the server ends before it has saved that round
        again = self.resumed(run, checkpoint)
        assert (again.best_round, best_file(again)) == (2, 2)
        assert again.best_scores == {A: 0.88, B: 0.88, C: 0.55} and again.best_score == run.best_score
        answer_to(again, 3, {A: 0.88, B: 0.88})  # the round once more, without C
        assert (again.best_round, best_file(again)) == (2, 2)


# The model that came out of round 1 is the best one: it is validated in round 2 and scores 0.9 there.
ROUND_SCORES = [0.1, 0.5, 0.9, 0.2]
PATHS = pytest.mark.parametrize(("final", "best"), [(0.3, 1), (0.95, 3)])


@PATHS
def test_the_controller_keeps_the_model_that_was_validated(
    make_run: Callable[..., ServerRun], make_context: Any, monkeypatch: pytest.MonkeyPatch, final: float, best: int
) -> None:
    run = make_run({"federation.rounds": 4, "method": "fedavg"})
    context = make_context(run)
    controller: Any = object.__new__(HarmoFLScatterAndGather)
    controller.run, controller._min_clients = run, 2
    controller.aggregator = SimpleNamespace(accepted=["A", "B", "C"], gathered_amplitude=lambda: None)
    for number, score in enumerate(ROUND_SCORES):
        controller._current_round = number
        run.numbers = {site: {"validation": score} for site in "ABC"}
        learnable = make_model_learnable(model_of(number - 1), {})
        context.set_prop(AppConstants.GLOBAL_MODEL, learnable, private=True, sticky=True)
        controller._before_aggregation(context)
    controller._current_round = 4  # as ScatterAndGather leaves it
    controller._global_weights = {ModelLearnableKey.WEIGHTS: model_of(3)}

    def ask(task: str, data: Any, signal: Any, fl_ctx: Any, *, needed: int, received: Any) -> None:
        for site in "ABC":
            received(site, UpdateMessage(numbers={"validation": final}))

    controller._ask = ask
    monkeypatch.setattr(controller_module, "write_evidence", lambda *_: [])
    controller._evaluate(SimpleNamespace(triggered=False), context)
    assert (run.best_round, best_file(run)) == (best, best)
    assert run.best_score == pytest.approx(final if best == 3 else 0.9)
    assert Checkpoint.load(run.folder / FINAL_MODEL).next_round == 4


class Scripted:
    """A site whose training adds 1 to every weight and whose validation scores are given."""

    def __init__(self, final: float) -> None:
        self.received: list[dict[str, np.ndarray]] = []
        self.told_best: list[int | None] = []
        self._final = final

    def train(self, number: int, message: ModelMessage, best_round: int | None) -> UpdateMessage:
        self.received.append({name: np.copy(value) for name, value in message.weights.items()})
        self.told_best.append(best_round)
        difference = {name: np.ones_like(value) for name, value in message.weights.items()}
        counts = {"cases": {"training": 1}, "images": 4, "steps": 1, "loss": 0.5}
        return UpdateMessage(difference, None, counts | {"validation": ROUND_SCORES[number]})

    def evaluate(self, message: ModelMessage, best_round: int | None) -> UpdateMessage:
        return UpdateMessage(numbers={"validation": self._final})


@PATHS
def test_a_run_in_one_process_keeps_the_model_that_was_validated(
    written: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, final: float, best: int
) -> None:
    for key, value in {"federation.rounds": 4, "method": "fedavg"}.items():
        set_key(written, key, value)
    federation = InProcessFederation(resolve_experiment(written), ["A", "B"], tmp_path, {A: tmp_path, B: tmp_path})
    sites = {site: Scripted(final) for site in "AB"}
    federation.participants = sites  # type: ignore[assignment]
    monkeypatch.setattr(in_process_module, "write_evidence", lambda *_: [])
    finished = federation.run()
    run = federation.run_state
    # received[n] came out of round n - 1; what came out of the last round is held by the federation
    expected = [*sites[A].received[1:], federation.weights][best]
    held = torch.load(run.folder / BEST_MODEL, weights_only=True)["model"]
    assert run.best_round == best and finished.final_validation == final
    assert all(np.array_equal(held[name].numpy(), value) for name, value in expected.items())
    # what a site is told of round 2 on: the model of round 0 was validated in round 1, that of round 1 in round 2
    assert sites[A].told_best == [None, None, 0, 1]
