"""`federation.exchange: float16`: all sites receive one rounded model, which is scored, kept and hashed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from toy_rounds import SITES, HandRounds, ToyRounds, write_two_sites

from harmofl.core.server_rules import ServerRule
from harmofl.core.training import TrainingError, arrays_sha256, load_arrays, state_arrays
from harmofl.experiment import ExperimentError
from harmofl.flare.generator import HarmoFLShareableGenerator
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.persistor import (
    CheckpointPersistor,
    best_weights,
    save_at_the_end,
    save_model_file,
    server_weights,
)
from harmofl.flare.server_run import ServerRun
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.state import Checkpoint, StateError
from harmofl.flare.wire import Arrays, ModelMessage, unpack_model
from harmofl.tasks import resolve_experiment, untrained_network
from tests.rounded_mean import rounded_mean

HALF = {"federation.exchange": "float16"}
Start = Callable[..., ToyRounds]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_sites(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(written: dict[str, Any], root: Path, tmp_path: Path) -> Start:
    """A run of both sites by method, with batch norm and float16 both ways."""

    def begin(method: str, name: str = "run") -> ToyRounds:
        settings = {
            "method": method,
            "network": written["network"] | {"norm": "batch"},
            "federation": written["federation"] | {"exchange": "float16"},
        }
        return ToyRounds(resolve_experiment(written | settings), root, tmp_path / name, SITES)

    return begin


@pytest.fixture
def run(make_run: Callable[..., ServerRun]) -> ServerRun:
    """A server's run with float16 both ways."""
    return make_run(HALF | {"network.norm": "batch", "federation.rounds": 5})


def trained(run: ServerRun, seed: int = 0) -> Arrays:
    """Weights of the run's network that float16 has not, as training leaves them."""
    generator = np.random.default_rng(seed)
    weights = run.initial_weights()
    return {
        name: value + generator.normal(0, 1e-3, value.shape).astype(np.float32) if value.dtype.kind == "f" else value
        for name, value in weights.items()
    }


def rounded(weights: Arrays, statistics: Any = ()) -> Arrays:
    """By torch, entry by entry: what float16 keeps of parameters."""
    return {
        name: value if name in statistics or value.dtype.kind != "f" else torch.tensor(value).half().float().numpy()
        for name, value in weights.items()
    }


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(
        np.asarray(first[name]).tobytes() == np.asarray(second[name]).tobytes() for name in first
    )


def model_in(path: Path) -> Arrays:
    return {name: value.numpy() for name, value in torch.load(path, weights_only=True)["model"].items()}


def test_a_task_carries_the_rounded_model_and_its_hash(run, make_context, wire) -> None:
    weights = trained(run)
    expected = rounded(weights, run.partition.statistics)
    assert not same(expected, weights)
    task = HarmoFLShareableGenerator().learnable_to_shareable(make_model_learnable(weights, {}), make_context(run))
    came = unpack_model(wire(task)).weights
    kinds = {name.rpartition(".")[2]: value.dtype for name, value in came.items()}
    assert kinds["weight"] == kinds["bias"] == np.float16
    assert kinds["running_mean"] == kinds["running_var"] == np.float32 and kinds["num_batches_tracked"] == np.int64
    network = untrained_network(run.experiment)
    load_arrays(network, came)
    assert same(state_arrays(network), expected)
    assert run.model_sha256 == arrays_sha256(expected) == arrays_sha256(run.as_received(weights))


def test_the_server_s_own_model_moves_and_not_the_rounded_one(run, make_context, wire) -> None:
    """A change far below a step of float16 adds up at the server, by the plain sum in float32."""
    weights, context = trained(run), make_context(run)
    change = {name: np.full_like(value, 1e-6 if value.dtype.kind == "f" else 1) for name, value in weights.items()}
    on_grid = rounded_mean(run.as_received(weights), [change])
    moved = run.rule.next_model(weights, on_grid)
    assert same(moved, {name: value + on_grid[name] for name, value in weights.items()})
    generator = HarmoFLShareableGenerator()
    context.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(weights, {}), private=True, sticky=True)
    mean = run.rule.open_round(run.as_received(weights))
    mean.add(change, 1, 1)
    sent = wire(DXO(DataKind.WEIGHT_DIFF, data=mean.mean()).to_shareable())
    assert same(generator.shareable_to_learnable(sent, context)[ModelLearnableKey.WEIGHTS], moved)


def test_best_and_final_model_are_the_rounded_ones(run) -> None:
    """What a user loads is what was scored; what a resumed server needs lies beside the final one alone."""
    best, final = trained(run, 1), trained(run, 2)
    save_at_the_end(best, run, {"A": 0.5}, 5)
    save_model_file(final, run, 5, run.folder / FINAL_MODEL)
    statistics = run.partition.statistics
    assert run.best_round == 4
    assert same(model_in(run.folder / BEST_MODEL), rounded(best, statistics))
    assert same(model_in(run.folder / FINAL_MODEL), rounded(final, statistics))
    stored = {name: Checkpoint.load(run.folder / name).server_weights for name in (BEST_MODEL, FINAL_MODEL)}
    assert stored[BEST_MODEL] == {}
    held = {name: value.numpy() for name, value in stored[FINAL_MODEL].items()}
    assert same(held, {name: value for name, value in final.items() if name in run.partition.parameters})
    sent = best_weights(run)
    assert sent is not None and same(sent, run.for_sites(best)), "the best model goes down as it went down before"


def test_float32_keeps_no_second_copy_of_the_weights(make_run, weights) -> None:
    run = make_run()
    assert all(run.for_sites(weights)[name] is value for name, value in weights.items())
    save_model_file(weights, run, 1, run.folder / FINAL_MODEL)
    assert Checkpoint.load(run.folder / FINAL_MODEL).server_weights == {}


@pytest.mark.parametrize("beyond", [65520.0, -1e6])
def test_a_model_beyond_float16_is_neither_sent_nor_saved(run, make_context, beyond: float) -> None:
    weights = trained(run)
    save_model_file(weights, run, 3, run.folder / FINAL_MODEL)
    before = (run.folder / FINAL_MODEL).read_bytes()
    name = next(iter(weights))
    weights[name] = weights[name].copy()
    weights[name].flat[1] = beyond
    told = rf"global model is not sent: {name} reaches .*, float16 ends at 65504; set federation.exchange to float32"
    with pytest.raises(ValueError, match=told):
        HarmoFLShareableGenerator().learnable_to_shareable(make_model_learnable(weights, {}), make_context(run))
    with pytest.raises(ValueError, match=told):
        save_model_file(weights, run, 4, run.folder / FINAL_MODEL)
    assert (run.folder / FINAL_MODEL).read_bytes() == before
    statistic = next(iter(run.partition.statistics))
    large = trained(run) | {statistic: np.full_like(weights[statistic], 7e4)}
    assert float(run.for_sites(large)[statistic].max()) == 7e4, "a running statistic may lie beyond float16"


@pytest.mark.parametrize(
    "beyond",
    [
        ("float16", 7e4, "the global model is not sent: "),
        ("float32", np.inf, "the global model would not be finite in "),
    ],
)
def test_a_next_model_that_cannot_be_sent_ends_the_job_in_one_line(
    make_run, make_context, monkeypatch, beyond: tuple[str, float, str]
) -> None:
    exchange, change, told = beyond
    run = make_run({"federation.exchange": exchange})
    held, context, panics = run.initial_weights(), make_context(run), []
    context.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(held, {}), private=True, sticky=True)
    monkeypatch.setattr(HarmoFLShareableGenerator, "system_panic", lambda self, reason, context: panics.append(reason))
    mean = {name: np.full_like(value, change if value.dtype.kind == "f" else 1) for name, value in held.items()}
    sent = DXO(DataKind.WEIGHT_DIFF, data=mean).to_shareable()
    kept = HarmoFLShareableGenerator().shareable_to_learnable(sent, context)
    assert same(kept[ModelLearnableKey.WEIGHTS], held)
    (line,) = panics
    assert line.startswith(f"round 4: {told}{next(iter(held))}") and "\n" not in line


def damaged(held: dict[str, Any], how: str) -> None:
    own = held["harmofl"]["server_weights"]
    name = next(iter(own))
    if how == "missing":
        held["harmofl"]["server_weights"] = {}
    elif how == "one missing":
        del own[name]
    elif how == "unknown":
        own["other"] = own[name]
    elif how == "other shape":
        own[name] = own[name].reshape(-1)[:1]
    elif how == "other type":
        own[name] = own[name].double()
    else:  # another step of float16
        own[name] = own[name] + 0.25


@pytest.mark.parametrize("how", ["missing", "one missing", "unknown", "other shape", "other type", "other number"])
def test_server_weights_that_do_not_round_to_the_model_are_refused(run, how: str) -> None:
    path = run.folder / FINAL_MODEL
    weights = trained(run)
    save_model_file(weights, run, 3, path)
    assert same(server_weights(Checkpoint.load(path), run), weights)
    held = torch.load(path, weights_only=True)
    damaged(held, how)
    torch.save(held, path)
    with pytest.raises(StateError, match="holds other server weights than its model is rounded from; copy"):
        server_weights(Checkpoint.load(path), run)


def test_a_checkpoint_of_the_rule_that_rounded_differences_alone_is_refused_by_name(run) -> None:
    save_model_file(trained(run), run, 3, run.folder / FINAL_MODEL)
    held = Checkpoint.load(run.folder / FINAL_MODEL)
    held.rules["exchange"] = 1
    with pytest.raises(ExperimentError, match="exchange rule 1; this version of harmofl has exchange rule 2"):
        run.continue_from(held)


class HalfByHand(HandRounds):
    """Plain loops in torch: the server's model in float32, networks loaded with what float16 keeps of it."""

    def __init__(self, toy: ToyRounds) -> None:
        partition = toy.run.partition
        data = {site: toy.site(site).data.training for site in SITES}
        super().__init__(toy.experiment, data, partition.local)
        state = next(iter(self.networks.values())).state_dict()
        self.rounds_off = {name for name, _ in self.networks["HK"].named_parameters()} - self.local
        self.own = {name: value.clone() for name, value in state.items() if name not in self.local}

    def received(self) -> dict[str, torch.Tensor]:
        return {
            name: value.half().float() if name in self.rounds_off else value.clone() for name, value in self.own.items()
        }

    def round(self, number: int) -> None:
        before = self.received()
        differences: dict[str, list[torch.Tensor]] = {name: [] for name in before}
        for name, network in self.networks.items():
            network.load_state_dict({**network.state_dict(), **before})
            self._train(name, network, number)
            for key, value in network.state_dict().items():
                if key in before:
                    change = value - before[key]
                    differences[key].append(change.half().float() if key in self.rounds_off else change)
        of_sites = [{key: values[site].numpy() for key, values in differences.items()} for site in range(len(SITES))]
        mean = rounded_mean({key: value.numpy() for key, value in before.items()}, of_sites)
        for key, change in mean.items():
            self.own[key] = self.own[key] + torch.as_tensor(change)


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedbn", marks=pytest.mark.slow)])
def test_rounds_are_those_of_a_plain_loop(start: Start, method: str) -> None:
    toy = start(method)
    by_hand = HalfByHand(toy)
    for number in range(2):
        toy.round(number)
        by_hand.round(number)
    assert same(toy.weights, {name: value.numpy() for name, value in by_hand.own.items()})
    assert not same(toy.run.as_received(toy.weights), toy.weights)
    assert same(toy.run.as_received(toy.weights), {name: value.numpy() for name, value in by_hand.received().items()})
    told = {update.numbers["received_sha256"] for update in toy.updates.values()}
    assert told == {toy.run.model_sha256}, "all sites had the same bits"


@pytest.mark.parametrize(
    "method", ["fedadam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fednova", "fedbn"))]
)
def test_c11_a_resumed_run_goes_on_bit_for_bit(start: Start, method: str, make_context) -> None:
    """Two rounds, against one, a checkpoint and one by a new server; sites keep their state."""
    whole, broken = start(method, "whole"), start(method, "broken")
    whole.rounds(2)
    broken.rounds(1)
    save_model_file(broken.weights, broken.run, 1, broken.run.folder / FINAL_MODEL)
    checkpoint = Checkpoint.load(broken.run.folder / FINAL_MODEL)
    resumed = ServerRun(broken.experiment, False, broken.run.folder, sorted(SITES), run_id="toy")
    resumed.continue_from(checkpoint)
    broken.run, broken.weights = resumed, server_weights(checkpoint, resumed)
    broken.rounds(1, start=1)
    assert same(broken.weights, whole.weights)
    assert whole.run.model_sha256 == broken.run.model_sha256
    for site in SITES:
        assert same(broken.updates[site].difference, whole.updates[site].difference)


def test_a_server_takes_its_own_weights_from_the_checkpoint_that_a_job_names(run, make_context, tmp_path) -> None:
    weights = trained(run)
    save_model_file(weights, run, 2, tmp_path / FINAL_MODEL)
    named = run.experiment.federation.model_copy(update={"resume_from": str(tmp_path / FINAL_MODEL)})
    again = ServerRun(run.experiment.model_copy(update={"federation": named}), False, tmp_path, ["A", "B", "C"])
    loaded = CheckpointPersistor().load_model(make_context(again))
    assert same(loaded[ModelLearnableKey.WEIGHTS], weights)
    assert same(server_weights(Checkpoint.load(tmp_path / FINAL_MODEL), again), weights), "it can be resumed again"


@pytest.mark.parametrize(("exchange", "sent"), [("float16", "float32"), ("float32", "float16"), ("float16", "all")])
def test_a_site_takes_entries_of_the_type_of_its_experiment_alone(start: Start, exchange: str, sent: str) -> None:
    toy = start("fedavg")
    weights = toy.weights
    if exchange == "float32":
        federation = toy.experiment.federation.model_copy(update={"exchange": exchange})
        toy.experiment = toy.experiment.model_copy(update={"federation": federation})
    if sent != "float32":
        weights = toy.run.for_sites(weights)
    if sent == "all":  # running statistics as float16 as well
        weights = {
            name: value.astype(np.float16) if value.dtype.kind == "f" else value for name, value in weights.items()
        }
    for ask in (
        lambda message: toy.site("HK").train(0, message),
        lambda message: toy.site("HK").evaluate(message),
        lambda message: toy.site("HK").evaluate(ModelMessage(toy.run.for_sites(toy.weights), None, weights), 0),
    ):
        with pytest.raises(TrainingError, match="the model received does not fit this network: conv_0.conv_0"):
            ask(ModelMessage(weights))


def test_a_rounded_model_with_infinity_is_refused_at_the_site(start: Start) -> None:
    toy = start("fedavg")
    weights = toy.run.for_sites(toy.weights)
    name = next(name for name, value in weights.items() if value.dtype == np.float16)
    weights[name] = np.full_like(weights[name], np.inf)
    with pytest.raises(TrainingError, match=f"the model received is not finite in {name}"):
        toy.site("HK").train(0, ModelMessage(weights))


def test_norms_and_means_are_measured_by_the_model_that_was_sent(opened, answer, numbers, weights, monkeypatch) -> None:
    """The rule that bounds differences, and a grid by a model's largest value, must know what sites and relays know."""
    aggregator, run, context = opened(HALF)
    own = weights | {"w": weights["w"] + np.float32(1e-4)}
    context.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(own, {}), private=True, sticky=True)
    run.rule = ServerRule(run.experiment.federation, run.experiment.training, frozenset({"w", "scale"}))
    run.model_sha256 = arrays_sha256(run.as_received(own))
    seen: list[Arrays] = []
    honest = ServerRule.open_round

    def watched(rule: ServerRule, base: Arrays, *args: Any, **kwargs: Any) -> Any:
        seen.append(base)
        return honest(rule, base, *args, **kwargs)

    monkeypatch.setattr(ServerRule, "open_round", watched)
    sent = {"w": np.ones((2, 3), np.float16), "scale": np.array(1, np.float16), "count": np.array(1, np.int64)}
    assert aggregator.accept(answer("A", sent, received_sha256=run.model_sha256), context)
    (base,) = seen
    assert same(base, rounded(own)) and not same(base, own)
    refused = answer("B", sent, received_sha256=arrays_sha256(own))
    assert not aggregator.accept(refused, context)
    assert "did not train the model that was sent" in run.refused["B"]


@pytest.mark.slow
def test_the_federation_in_one_process_keeps_scores_and_hashes_the_rounded_model(
    written: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    federation = written["federation"] | {"exchange": "float16", "rounds": 2}
    experiment = resolve_experiment(written | {"method": "fedavg", "federation": federation})
    held = InProcessFederation(experiment, SITES, tmp_path, {site: root for site in SITES})
    finished = held.run()
    final = model_in(tmp_path / "run" / FINAL_MODEL)
    assert same(final, held.received_weights) and same(final, rounded(held.weights)) and not same(final, held.weights)
    assert held.run_state.rounds[0].model_sha256 == arrays_sha256(rounded(held.run_state.initial_weights()))
    assert held.run_state.rounds[1].model_sha256 == arrays_sha256(finished.trained_from)
    toy = ToyRounds(experiment, root, tmp_path / "toy", SITES)
    toy.rounds(2)
    assert same(toy.weights, held.weights)
    network = held.participants["HK"].network(held.received_weights)
    assert same(state_arrays(network), final)
