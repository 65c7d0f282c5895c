"""Layers that stay at a site: over rounds and restarts, in evaluation, for the best round. C10."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_rounds import SITES, HandRounds, ToyRounds, write_two_sites

from harmofl.core.training import TrainingError, load_arrays, state_arrays
from harmofl.flare.local_model import LocalModel
from harmofl.flare.method_notes import method_notes
from harmofl.flare.persistor import best_weights, keep_if_best, save_at_the_end
from harmofl.flare.record import close_round
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.state import Checkpoint, SiteState
from harmofl.flare.wire import ModelMessage, payload_bytes
from harmofl.tasks import resolve_experiment, untrained_network

Start = Callable[..., ToyRounds]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_sites(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(written: dict[str, Any], root: Path, tmp_path: Path) -> Start:
    """A run of both sites by method; further settings by section."""

    def begin(method: str, name: str = "run", **sections: dict[str, Any]) -> ToyRounds:
        settings = {key: written[key] | sections.get(key, {}) for key in written if isinstance(written[key], dict)}
        experiment = resolve_experiment(written | settings | {"method": method})
        return ToyRounds(experiment, root, tmp_path / name, SITES)

    return begin


def local_of(toy: ToyRounds, site: str, file: str) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = toy.state(site, file)["local"]  # type: ignore[assignment]
    return held


def same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def hand(toy: ToyRounds) -> HandRounds:
    data = {site: toy.site(site).data.training for site in SITES}
    return HandRounds(toy.experiment, data, toy.run.partition.local)


def test_c10_fedbn_over_3_rounds_and_as_many_restarts_is_never_overwriting_norm_layers(start: Start) -> None:
    toy = start("fedbn")
    by_hand = hand(toy)
    for number in range(3):
        toy.round(number)
        by_hand.round(number)
    local = toy.run.partition.local
    # 18 layers with weight, bias, mean, variance and a counter
    assert len(local) == 18 * 5
    for site in SITES:
        assert toy.updates[site].difference is not None
        assert not set(local) & toy.updates[site].difference.keys(), "no norm layer leaves the site"
        held, expected = local_of(toy, site, "round_000002.pt"), by_hand.networks[site].state_dict()
        assert held.keys() == set(local)
        assert all(torch.equal(value, expected[name]) for name, value in held.items())
    one, other = (local_of(toy, site, "round_000002.pt") for site in SITES)
    weights = [name for name in local if name.endswith((".weight", ".bias"))]
    assert len(weights) == 36 and not any(torch.equal(one[name], other[name]) for name in weights)
    shared = by_hand.networks["HK"].state_dict()
    assert toy.weights.keys() == set(shared) - set(local)
    assert all(np.array_equal(value, shared[name].numpy()) for name, value in toy.weights.items())


def test_c10_a_site_validates_and_tests_with_its_own_layers(start: Start) -> None:
    toy = start("fedbn")
    toy.rounds(2)
    participant = toy.site("HK")
    network = untrained_network(toy.experiment)
    own = {name: value.numpy() for name, value in local_of(toy, "HK", "round_000001.pt").items()}
    load_arrays(network, {**own, **toy.weights})
    normalization = participant._normalization(None)
    expected = participant._evaluate(participant._placed(network), normalization, "test", "the model")
    scored = toy.site("HK").evaluate(ModelMessage(toy.weights))
    np.testing.assert_equal(scored.numbers["test"]["final"], expected.scores)
    loaded = LocalModel(toy.experiment, participant._state, logging.getLogger("HK")).before_round(toy.weights, 2)
    assert same(state_arrays(loaded), state_arrays(network))


@pytest.mark.parametrize("best", [0, 1, 4, 5])
def test_the_best_round_s_layers_are_there_when_the_evaluation_comes(start: Start, best: int) -> None:
    """Round r is known as the best one when round r + 2 begins; the two newest rounds are held anyway."""
    toy = start("fedbn")
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(6):
        if number == best + 2:
            toy.run.best_round = best
        toy.round(number)
        if number == best:
            kept = {site: local_of(toy, site, f"round_{best:06d}.pt") for site in SITES}
    for site in SITES:
        model = LocalModel(toy.experiment, toy.site(site)._state, logging.getLogger(site))
        loaded = state_arrays(model.best(toy.weights, best))
        assert all(np.array_equal(loaded[name], value.numpy()) for name, value in kept[site].items())
        last = state_arrays(model.last(toy.weights))
        newest = local_of(toy, site, "round_000005.pt")
        assert all(np.array_equal(last[name], value.numpy()) for name, value in newest.items())


def test_a_site_that_steps_back_takes_the_layers_of_the_round_before(start: Start) -> None:
    toy = start("fedbn")
    toy.round(0)
    weights = dict(toy.weights)
    toy.round(1)
    expected = toy.updates["HK"].difference
    again = toy.site("HK").train(1, ModelMessage(weights)).difference  # the resumed server asks for round 1 anew
    assert expected is not None and again is not None and same(expected, again)


def test_what_was_kept_of_a_round_is_forgotten_when_the_round_is_done_anew(tmp_path: Path) -> None:
    state = SiteState(tmp_path, "toy")
    for number in range(4):
        state.save_round(number, {"number": number})
        state.keep_marked(number, {"marked": number})
    held = {number: state.load_marked(number) for number in range(4)}
    assert held == {0: None, 1: None, 2: {"marked": 2}, 3: {"marked": 3}}
    state.save_round(3, {"number": 3})
    assert state.load_marked(3) is None and state.load_marked(2) == {"marked": 2}
    assert state.latest_round() == {"number": 3} and state.latest_round(2) == {"number": 2}
    assert state.latest_round(1) is None


def test_a_site_that_joins_late_begins_with_the_initial_layers(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = start("fedbn")
    model = LocalModel(toy.experiment, SiteState(tmp_path / "new", "toy"), logging.getLogger("new"))
    assert same(state_arrays(model.before_round(toy.weights, 3)), state_arrays(untrained_network(toy.experiment)))
    assert "no local layers of an earlier round" in caplog.text
    caplog.clear()
    model.before_round(toy.weights, 0)
    assert caplog.text == "", "in round 0 that is as it should be"


@pytest.mark.parametrize("method", ["fedbn", "local_only"])
def test_what_a_late_site_has_not_trained_yet_is_not_scored(start: Start, method: str) -> None:
    """A score with initial layers would count against the round that it joins, and for nothing at the end."""
    toy = start(method)
    received = ModelMessage(toy.weights, best_weights=toy.weights)
    with pytest.raises(TrainingError, match="no model to score: federation.local_layers"):
        toy.site("HK").evaluate(received, 1)
    late = toy.site("HK").train(2, received, 0)
    assert late.numbers["validation"] is None and late.numbers["loss"] is not None
    assert toy.site("HK").train(3, received, 0).numbers["validation"] is not None
    # round 0 was the best one, when this site was not there: its last layers go with that model
    scores = toy.site("HK").evaluate(received, 0).numbers["test"]
    np.testing.assert_equal(scores["best"], scores["final"])


def test_in_round_0_every_site_scores_the_untrained_model(start: Start) -> None:
    toy = start("fedbn")
    assert toy.site("HK").train(0, ModelMessage(toy.weights)).numbers["validation"] is not None


def test_c10_the_global_file_loads_and_says_that_it_has_no_usable_norm_layers(start: Start) -> None:
    toy = start("fedbn")
    toy.round(0)
    save_at_the_end(toy.weights, toy.run, {site: 0.5 for site in SITES}, 1)
    initial = state_arrays(untrained_network(toy.experiment))
    for name in (BEST_MODEL, FINAL_MODEL):
        saved = {key: value.numpy() for key, value in Checkpoint.load(toy.run.folder / name).model.items()}
        load_arrays(untrained_network(toy.experiment), saved)
        assert all(np.array_equal(saved[key], initial[key]) for key in toy.run.partition.local)
        assert same({key: saved[key] for key in toy.weights}, toy.weights)
    assert same(best_weights(toy.run) or {}, toy.weights), "sites are sent what travels only"
    (note,) = method_notes(toy.run)
    assert "no usable norm layers" in note and BEST_MODEL in note


def test_c10_without_norm_entries_fedbn_is_fedavg_and_says_so(start: Start) -> None:
    network = {"norm": "batch_stats"}
    toy, plain = start("fedbn", "one", network=network), start("fedavg", "two", network=network)
    note, batches = method_notes(toy.run)
    assert "equals plain averaging (fedavg)" in note and "batch_stats" in note
    assert method_notes(plain.run) == [batches]
    toy.rounds(2)
    plain.rounds(2)
    assert same(toy.weights, plain.weights)


def test_c4_scores_with_batch_statistics_say_what_they_hold_for(start: Start) -> None:
    toy = start("fedavg", network={"norm": "batch_stats"}, training={"batch_size": 6})
    (note,) = method_notes(toy.run)
    assert "6 at a time (training.batch_size), so that a score holds for that number" in note
    assert method_notes(start("fedavg", "tracked", network={"norm": "batch"}).run) == []


def test_a_model_of_another_network_is_refused_by_entry(start: Start, tmp_path: Path) -> None:
    toy = start("fedbn")
    model = LocalModel(toy.experiment, SiteState(tmp_path / "site", "toy"), logging.getLogger("site"))
    with pytest.raises(TrainingError, match="does not fit this network: conv_0.conv_0.adn.N.bias"):
        model.before_round(state_arrays(untrained_network(toy.experiment)), 0)


def test_local_only_sends_numbers_alone_and_every_site_goes_on_with_its_own_model(start: Start) -> None:
    toy = start("local_only")
    by_hand = {site: HandRounds(toy.experiment, {site: toy.site(site).data.training}, ()) for site in SITES}
    assert toy.weights == {}
    for number in range(3):
        toy.round(number)
        for site in SITES:
            by_hand[site]._train(site, by_hand[site].networks[site], number)
            assert payload_bytes(toy.updates[site])["weights"] == 0 and toy.updates[site].difference == {}
    for site in SITES:
        expected = by_hand[site].networks[site].state_dict()
        held = local_of(toy, site, "round_000002.pt")
        assert held.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in held.items())


def test_local_only_leaves_no_global_model(start: Start) -> None:
    toy = start("local_only")
    toy.round(0)
    toy.run.numbers = {site: {"validation": 0.4} for site in toy.run.expected}
    close_round(toy.run, 1, toy.run.expected)
    keep_if_best(toy.run, 0.4, 0, toy.weights)
    save_at_the_end(toy.weights, toy.run, dict.fromkeys(toy.run.expected, 0.3), 2)
    assert toy.run.best_round == 0 and best_weights(toy.run) == {}
    assert not (toy.run.folder / BEST_MODEL).exists()
    checkpoint = Checkpoint.load(toy.run.folder / FINAL_MODEL)  # what a resumed run needs
    assert (checkpoint.model, checkpoint.next_round) == ({}, 2)
    (note,) = method_notes(toy.run)
    assert f"no {BEST_MODEL}" in note and "its own model" in note
    scores = toy.site("HK").evaluate(ModelMessage({}, best_weights={}), 0).numbers["test"]
    np.testing.assert_equal(scores["final"], scores["best"])


def test_nothing_is_kept_where_nothing_is_local(start: Start) -> None:
    toy = start("fedavg")
    toy.run.best_round = 0
    toy.rounds(2)
    files = sorted(path.name for path in (toy.folder / "HK" / "state" / "toy").iterdir())
    assert files == ["findings.pt", "round_000000.pt", "round_000001.pt", "rules.pt", "split.pt"]
    assert toy.state("HK", "round_000001.pt")["local"] == {}


def test_methods_are_other_experiments(start: Start) -> None:
    hashes = {start(name, name).experiment.hash for name in ("fedavg", "fedbn", "local_only", "fedprox", "central")}
    assert len(hashes) == 5
