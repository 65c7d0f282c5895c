"""What must hold bit for bit between FLARE's run and mathematics done by hand."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harmofl.core.networks import build_network
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import RoundSettings, arrays_sha256, fit_round, load_arrays, seed_of, state_arrays
from harmofl.experiment import Experiment
from harmofl.flare.local_amplitude import build_normalization
from harmofl.flare.site import simulated_threads
from harmofl.tasks import SiteData, resolve_experiment
from harmofl.tasks.prostate import TASK
from tests.federation.conftest import Run, RunJob
from tests.federation.drills import EXECUTORS
from tests.rounded_mean import distance_to_float64, rounded_mean

Arrays = Mapping[str, np.ndarray]


def experiment_of(run: Run) -> Experiment:
    """The experiment that the run's server resolved."""
    path = run.server / "config" / "experiment.json"
    return resolve_experiment(json.loads(path.read_text()), demo=True)


def saved_weights(run: Run, name: str = "FL_global_model.pt") -> dict[str, np.ndarray]:
    content = torch.load(run.server / name, weights_only=True)
    return {key: value.numpy() for key, value in content["model"].items()}


def assert_same_bits(first: Arrays, second: Arrays) -> None:
    assert first.keys() == second.keys()
    differing = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    assert not differing, f"{len(differing)} entries differ, first {differing[:3]}"


def print_distance(model: Arrays, differences: Sequence[Arrays]) -> None:
    """How far the server's mean is from the one in float64: at most 2^-30 scales."""
    apart = distance_to_float64(model, differences)
    print(f"mean of {len(differences)}: at most {apart * 2**30:.2f} times 2^-30 scales from float64")
    assert apart <= 2.0**-30


class HandSite:
    """One site without FLARE, without state files: objects that live through all rounds."""

    def __init__(self, experiment: Experiment, name: str, folder: Path) -> None:
        self.experiment, self.name = experiment, name
        TASK.write_demo(folder / name, name, experiment)
        self.data: SiteData = TASK.open_site(folder / name, name, experiment, folder / "cache")
        settings = experiment.network
        self.network = build_network(
            settings.name,
            3,
            TASK.class_prior(experiment),
            width=settings.width,
            norm=settings.norm,
            seed=experiment.seed,
        ).to(memory_format=torch.channels_last)
        self.normalization = build_normalization(experiment, 3)
        adam = torch.optim.Adam(
            self.network.parameters(),
            lr=experiment.training.learning_rate,
            weight_decay=experiment.training.weight_decay,
            fused=True,
        )
        self.optimizer = WeightPerturbation(adam, experiment.perturbation.alpha, self.network)

    def difference(self, weights: dict[str, np.ndarray], round_number: int) -> dict[str, np.ndarray]:
        training = self.experiment.training
        load_arrays(self.network, weights)
        fit_round(
            self.network,
            self.normalization,
            self.optimizer,
            TASK.loss(),
            self.data.training,
            settings=RoundSettings(training.batch_size, training.local_epochs, training.augmentation, None, "float32"),
            seed=seed_of(self.experiment.seed, self.name, round_number),
        )
        after = state_arrays(self.network)
        return {name: after[name] - weights[name] for name in weights}

    def exact_statistic(self) -> torch.Tensor:
        images = torch.stack([image for image, _ in self.data.training])  # type: ignore[attr-defined]
        return self.normalization.statistics(images).double().mean(0).float()


@pytest.fixture(autouse=True)
def _as_many_threads_as_the_run() -> Any:
    held = torch.get_num_threads()
    torch.set_num_threads(simulated_threads())
    yield
    torch.set_num_threads(held)


def test_one_site_equals_a_plain_loop(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(["BIDMC"], {"federation.rounds": 3})
    assert run.code == 0, run.output
    experiment = experiment_of(run)
    site = HandSite(experiment, "BIDMC", tmp_path / "hand")
    own = site.exact_statistic()
    site.normalization.freeze(own, len(site.data.training))  # type: ignore[arg-type]
    site.normalization.set_own(own)
    weights = state_arrays(site.network)
    for round_number in range(3):
        difference = site.difference(weights, round_number)
        print_distance(weights, [difference])
        mean = rounded_mean(weights, [difference])
        weights = {name: weights[name] + mean[name] for name in weights}
    assert_same_bits(saved_weights(run), weights)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["as_published", "as_described"])
def test_an_amplitude_estimated_in_the_first_round_is_frozen_for_the_second(
    run_job: RunJob, tmp_path: Path, preset: str
) -> None:
    """The published presets send the statistic with the first weights; two sites are averaged 1/N."""
    run = run_job(["BIDMC", "HK"], {"amplitude.preset": preset})
    assert run.code == 0, run.output
    experiment = experiment_of(run)
    own: list[Arrays] = []
    for name in ("BIDMC", "HK"):
        site = HandSite(experiment, name, tmp_path / "hand")
        site.difference(state_arrays(site.network), 0)
        assert site.normalization.local_statistic is not None
        own.append({"amplitude": site.normalization.local_statistic.numpy()})
    mean = rounded_mean({"amplitude": np.zeros_like(own[0]["amplitude"])}, own)
    saved = torch.load(run.server / "FL_global_model.pt", weights_only=True)["harmofl"]
    assert torch.equal(saved["amplitude"], torch.as_tensor(mean["amplitude"]))
    assert all(sent["amplitude"] > 0 for sent in (run.results.sites[name].bytes_sent for name in ("BIDMC", "HK")))
    assert run.rounds[1].bytes_sent["HK"] < run.rounds[0].bytes_sent["HK"], "nothing extra goes up after the freeze"


def test_without_amplitude_and_perturbation_the_job_is_fedavg(run_job: RunJob, tmp_path: Path) -> None:
    run = run_job(["BIDMC", "HK"], {"method": "fedavg"}, demo=True)
    assert run.code == 0, run.output
    experiment = experiment_of(run)
    assert experiment.perturbation.alpha == 0 and experiment.amplitude.region == "off"
    sites = [HandSite(experiment, name, tmp_path / "hand") for name in ("BIDMC", "HK")]
    weights = state_arrays(sites[0].network)
    for round_number in range(2):
        parts = [site.difference(weights, round_number) for site in sites]
        print_distance(weights, parts)
        mean = rounded_mean(weights, parts)
        weights = {name: weights[name] + mean[name] for name in weights}
    assert_same_bits(saved_weights(run), weights)


@pytest.mark.slow
def test_order_of_arrival_changes_nothing(run_job: RunJob, tmp_path: Path) -> None:
    orders = (["BIDMC", "HK", "UCL"], ["UCL", "HK", "BIDMC"])
    for order in orders:
        (tmp_path / f"turns_of_{order[0]}").mkdir()
    runs = [
        run_job(
            ["BIDMC", "HK", "UCL"],
            {"federation.rounds": 1},
            executor="drill.AnswersInTurn",
            code=EXECUTORS,
            environment={"DRILL_ORDER": " ".join(order), "DRILL_FOLDER": str(tmp_path / f"turns_of_{order[0]}")},
            name=order[0],
        )
        for order in orders
    ]
    for run, order in zip(runs, orders, strict=True):
        assert run.code == 0, run.output
        log = (run.workspace / "server" / "log.txt").read_text()
        assert re.findall(r"Contribution from (\w+) ACCEPTED", log) == order
    assert_same_bits(*(saved_weights(run) for run in runs))


def test_each_round_starts_from_the_model_saved_in_the_round_before(run_job: RunJob) -> None:
    short = run_job(["BIDMC", "HK"], {"federation.rounds": 1}, name="short")
    longer = run_job(["BIDMC", "HK"], {"federation.rounds": 2}, name="longer")
    assert short.code == longer.code == 0, short.output + longer.output
    # every site reports the hash of what it received, and a contribution to another model is refused
    assert arrays_sha256(saved_weights(short)) == longer.rounds[1].model_sha256
    assert longer.rounds[1].sites_accepted == ["BIDMC", "HK"]
