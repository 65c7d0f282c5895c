"""FedNova, FedAdam and pooled data in FLARE's components; what a checkpoint gives back to a resumed run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.app_common.abstract.model import ModelLearnableKey
from torch.utils.data import ConcatDataset
from toy_answers import aggregate, difference, refused
from toy_rounds import HandRounds, ToyRounds

from harmofl.core.server_rules import ServerRule, local_steps
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import ExperimentError, read_settings, set_key
from harmofl.flare import server_run
from harmofl.flare.generator import HarmoFLShareableGenerator
from harmofl.flare.method_notes import method_notes
from harmofl.flare.persistor import save_at_the_end
from harmofl.flare.server_run import ServerRun
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL
from harmofl.flare.state import Checkpoint
from harmofl.flare.task_header import read_header
from harmofl.flare.wire import ModelMessage
from harmofl.tasks import resolve_experiment

JOBS = Path(__file__).resolve().parents[3] / "jobs"
NOVA, ADAM = {"method": "fednova"}, {"method": "fedadam"}
CENTRAL = {"method": "central"}
BATCH_NORM = {"network.norm": "batch"}


def with_toy_parameters(run: ServerRun) -> ServerRun:
    """Tell the rule which entries of the toy model gradients move: the experiment's network is another."""
    run.rule = ServerRule(run.experiment.federation, run.experiment.training, frozenset({"w", "scale"}))
    return run


def test_fednova_normalizes_by_the_steps_that_were_taken(opened, answer):
    aggregator, run, context = opened(NOVA | {"federation.norm_bound": None})
    with_toy_parameters(run)
    assert aggregator.accept(answer("A", difference(2.0), images=16, skipped_steps=1), context)
    assert aggregator.accept(answer("B", difference(6.0, count=9), images=36), context)
    taus = [local_steps(3, 0.9), local_steps(9, 0.9)]  # SGD with its default momentum; a skipped step moves nothing
    expected = sum(taus) / 2 * (2.0 / taus[0] + 6.0 / taus[1]) / 2
    result = aggregate(aggregator, context)
    np.testing.assert_allclose(result["w"], np.full((2, 3), expected), rtol=1e-6)
    assert int(result["count"]) == 9


@pytest.mark.parametrize("optimizer", ["average", "nova", "adam"])
def test_every_rule_knows_the_parameters_of_the_network(make_run, optimizer):
    changes = {"federation.server_optimizer": optimizer, "federation.server_learning_rate": 2.0}
    run = make_run({**changes, **BATCH_NORM, "federation.norm_bound": None})
    weights = run.initial_weights()
    variances = [name for name in weights if name.endswith("running_var")]
    assert variances
    change = {name: np.full_like(value, -0.75 if name in variances else 1) for name, value in weights.items()}
    mean = run.rule.open_round(weights)
    mean.add(change, 1, 1)
    moved = run.rule.next_model(weights, mean.mean())
    # every variance begins at 1; twice the difference would leave -0.5
    assert all((moved[name] == 0.25).all() for name in variances)
    convolution = next(name for name in weights if name.endswith("conv.weight"))
    # twice the difference of 1; Adam's first step is its rate, whatever the gradient
    assert float((moved[convolution] - weights[convolution]).mean()) == pytest.approx(2, rel=1e-2)


@pytest.mark.parametrize("told", [{"steps": 0}, {"skipped_steps": 10}, {"steps": ...}])
def test_fednova_refuses_an_answer_without_steps(opened, answer, told):
    aggregator, run, context = opened(NOVA)
    with_toy_parameters(run)
    aggregator.accept(answer("A", difference(2.0)), context)
    assert "steps: " in refused(aggregator, run, context, answer("B", difference(9.0), **told))


def test_fedadam_takes_the_mean_difference_as_a_gradient(make_run, make_context, weights, wire):
    run = with_toy_parameters(make_run(ADAM))
    sent = wire(DXO(DataKind.WEIGHT_DIFF, data=difference(0.25)).to_shareable())
    moved = HarmoFLShareableGenerator().shareable_to_learnable(sent, make_context(run))[ModelLearnableKey.WEIGHTS]
    # the first corrected moments are g and g^2: a step of 0.01 * 0.25 / (0.25 + 0.001)
    np.testing.assert_allclose(moved["w"] - weights["w"], 0.01 * 0.25 / 0.251, rtol=1e-3)
    assert int(moved["count"]) == 10
    assert run.rule.moments.keys() == {"w", "scale"}


def test_c11_a_resumed_run_goes_on_with_the_server_s_moments(make_run, weights, tmp_path):
    whole, run = with_toy_parameters(make_run(ADAM)), with_toy_parameters(make_run())
    assert whole.experiment.hash == run.experiment.hash
    first = whole.rule.next_model(weights, difference(0.25))
    run.rule.next_model(weights, difference(0.25))
    save_at_the_end(first, run, {"A": 0.5}, 1)
    resumed = with_toy_parameters(make_run())
    checkpoint = Checkpoint.load(tmp_path / FINAL_MODEL)
    resumed.continue_from(checkpoint)
    assert resumed.rule.moments is not run.rule.moments
    held = {name: value.numpy() for name, value in checkpoint.model.items()}
    second, expected = (one.rule.next_model(base, difference(-1.0)) for one, base in ((resumed, held), (whole, first)))
    assert all(second[name].tobytes() == expected[name].tobytes() for name in weights)
    assert Checkpoint.load(tmp_path / BEST_MODEL).server_moments == {}, "a model to use needs none"


def test_a_checkpoint_of_a_version_without_moments_still_loads(make_run, weights, tmp_path):
    run = make_run()
    save_at_the_end(weights, run, {"A": 0.5}, 1)
    held = torch.load(tmp_path / FINAL_MODEL, weights_only=True)
    del held["harmofl"]["server_moments"]
    torch.save(held, tmp_path / FINAL_MODEL)
    assert Checkpoint.load(tmp_path / FINAL_MODEL).server_moments == {}


def test_every_task_tells_the_best_round_and_whose_data_is_pooled(make_run, make_context, weights, wire):
    run = make_run(CENTRAL)
    run.best_round = 2
    generator = HarmoFLShareableGenerator()
    learnable = generator.shareable_to_learnable(
        DXO(DataKind.WEIGHT_DIFF, data=difference()).to_shareable(), make_context(run)
    )
    header = read_header(wire(generator.learnable_to_shareable(learnable, make_context(run))))
    assert (header.best_round, header.pooled_sites) == (2, ("A", "B", "C"))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_site_s_moments_are_those_of_an_optimizer_that_lives_on(written, tmp_path, optimizer):
    write_prostate_site(tmp_path / "data" / "HK", "siemens_1.5t_endorectal", 4, 0, matrix=64, slices=4)
    results = {}
    for kept in (True, False):
        changes = {"method": "fedavg", "training.optimizer": optimizer, "training.keep_moments": kept}
        for key, value in (changes | {"training.learning_rate": 0.01, "training.momentum": 0.9}).items():
            set_key(written, key, value)
        experiment = resolve_experiment(written)
        # a new object for every task, as a new process would be: what lasts is in its state
        rounds = ToyRounds(experiment, tmp_path / "data", tmp_path / str(kept), ("HK",))
        rounds.rounds(2)
        results[kept] = rounds.weights
    living = HandRounds(experiment, {"HK": rounds.site("HK").data.training}, ())
    living.round(0)
    living.round(1)
    expected = {name: value.numpy() for name, value in living.networks["HK"].state_dict().items()}
    assert all(np.array_equal(results[True][name], value) for name, value in expected.items())
    assert any(not np.array_equal(results[False][name], value) for name, value in expected.items())


def test_on_pooled_data_the_first_site_trains_and_all_are_needed(opened, answer):
    aggregator, run, context = opened(CENTRAL)
    assert [site for site in run.expected if run.trains(site)] == ["A"]
    assert run.needed_sites(with_amplitude=False) == 3, "whatever federation.minimum_sites says"
    assert aggregator.accept(answer("B", None, steps=0, images=...), context)
    assert aggregate(aggregator, context) == {}
    assert aggregator.accept(answer("A", difference(2.0)), context)
    assert aggregator.accept(answer("C", None, steps=0, images=...), context)
    assert aggregate(aggregator, context)["w"].tolist() == [[2.0] * 3] * 2, "not a third of it"


@pytest.mark.parametrize(("site", "sent", "words"), [("A", None, "no weights"), ("B", difference(), "not to train")])
def test_on_pooled_data_weights_come_from_the_first_site_alone(opened, answer, site, sent, words):
    aggregator, run, context = opened(CENTRAL)
    assert words in refused(aggregator, run, context, answer(site, sent), site)


def test_pooled_data_is_refused_outside_simulation(make_run, monkeypatch):
    run = make_run(CENTRAL)
    monkeypatch.setattr(server_run, "read_job_settings", lambda context: {})
    monkeypatch.setattr(server_run, "server_wants_demo", lambda settings, context: False)
    monkeypatch.setattr(server_run, "resolve_job", lambda context, demo: run.experiment)
    monkeypatch.setattr(server_run, "is_simulated", lambda context: False)
    with pytest.raises(ExperimentError, match=r"method central\): the data of all sites in one place"):
        server_run.open_run(None, ["A"])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for site, scanner in (("BIDMC", "ge_3t_endorectal"), ("HK", "siemens_1.5t_endorectal")):
        write_prostate_site(folder / site, scanner, 4, 0, matrix=64, slices=3)
    return folder


def test_central_is_plain_training_on_all_data(written: dict[str, Any], root: Path, tmp_path: Path) -> None:
    toy = ToyRounds(resolve_experiment(written | CENTRAL), root, tmp_path / "run", ("HK", "BIDMC"))
    plain = ToyRounds(resolve_experiment(written | {"method": "fedavg"}), root, tmp_path / "own", ("HK", "BIDMC"))
    own = {site: plain.site(site).data for site in ("BIDMC", "HK")}
    together = ConcatDataset([own[site].training for site in ("BIDMC", "HK")])
    by_hand = HandRounds(toy.experiment, {"BIDMC": together}, ())
    for number in range(2):
        toy.round(number)
        by_hand.round(number)
    for name, value in by_hand.networks["BIDMC"].state_dict().items():
        assert np.array_equal(toy.weights[name], value.numpy())
    steps = {site: update.numbers.get("steps", 0) for site, update in toy.updates.items()}
    assert steps == {"BIDMC": -(-len(together) // 4), "HK": 0}  # batches of 4
    for site, data in own.items():
        # what is scored and counted is the site's own
        assert toy.updates[site].numbers["cases"] == data.cases
        numbers = toy.site(site).evaluate(ModelMessage(toy.weights)).numbers
        assert len(numbers["test"]["final"]["dice"]) == data.cases["test"]
    assert "BIDMC trained on the training data of all sites" in method_notes(toy.run)[0]


@pytest.fixture
def patches(tmp_path: Path) -> Callable[..., ToyRounds]:
    """A small run of the classification job on demo data, by method."""

    def begin(method: str, **changes: Any) -> ToyRounds:
        settings = read_settings(JOBS / "harmofl_camelyon17" / "app" / "config" / "experiment.json")
        settings["demo"]["data"] |= {"slides": 4, "patches": 16}
        small = {"network.width": 4, "training.local_epochs": 1, "training.batch_size": 8, "amplitude.minimum_sites": 2}
        settings["demo"]["overrides"] |= small | {"federation.minimum_sites": 2, "data.height": 64, "data.width": 64}
        for key, value in {"method": method, **changes}.items():
            set_key(settings, key, value)
        experiment = resolve_experiment(settings, demo=True)
        return ToyRounds(experiment, None, tmp_path / method, ("hospital1", "hospital2"))

    return begin


def test_moon_is_fedavg_until_a_site_has_a_local_model_to_stay_away_from(patches: Any) -> None:
    moon, plain = patches("moon"), patches("fedavg")
    moon.round(0)
    plain.round(0)
    assert all(np.array_equal(moon.weights[name], value) for name, value in plain.weights.items())
    trained = moon.state("hospital1", "round_000000.pt")["trained"]
    sent = moon.updates["hospital1"].difference
    initial = moon.run.initial_weights()
    # in float32: what was trained is what was received plus the difference, up to rounding
    assert all(np.allclose(initial[name] + sent[name], trained[name], atol=1e-5) for name in sent)
    moon.round(1)
    plain.round(1)
    assert moon.updates["hospital1"].numbers["loss"] > plain.updates["hospital1"].numbers["loss"]
    assert not all(np.array_equal(moon.weights[name], value) for name, value in plain.weights.items())
