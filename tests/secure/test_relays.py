"""Drills: sites behind relays, each from a kit of its own, over mutual TLS."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.core.training import arrays_sha256
from harmofl.flare.in_process import InProcessFederation
from tests.federation.conftest import make_job
from tests.secure.conftest import Drill, Lead, Outcome, prepare
from tests.secure.consortium import SERVER, Consortium
from tests.secure.relays import participants
from tests.small_job import write_site

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "federation.rounds": 2,
    "federation.straggler_wait": 600,
    "federation.round_timeout": 240,
    "training.batch_size": 4,
    "amplitude.minimum_cases": 1,
}


class Behind:
    """A consortium whose sites are behind relays, and one job in it."""

    def __init__(self, folder: Path, relays: dict[str, list[str]], *, gathering: bool) -> None:
        self.sites = [site for sites in relays.values() for site in sites]
        self.sums = [f"{relay}-sum" for relay in relays] if gathering else []
        self.relays = list(relays)
        self.consortium = Consortium(folder, [], more=participants(relays, gathering=gathering))
        needed = dict.fromkeys(("federation.minimum_sites", "amplitude.minimum_sites"), len(self.sites))
        self.job = make_job(folder, [*self.sites, *self.sums], SETTINGS | needed, demo=False)
        prepare(self.consortium, SERVER)
        for number, site in enumerate(self.sites):
            # a hospital sends no amplitude of fewer than five patients, and three of eight are not trained on
            write_site(folder / "data" / site, cases=8 + number % 3)
            prepare(self.consortium, site, data_root=folder / "data" / site)
        for name in self.sums:
            prepare(self.consortium, name, limits=[], relay=True)

    def start(self) -> None:
        """Server and relays first: what connects to a relay needs it."""
        self.consortium.start(SERVER)
        self.consortium.start(*self.relays)
        self.consortium.start(*self.sums, *self.sites)
        self.consortium.wait_until_registered(*self.sums, *self.sites, seconds=300)

    def run(self) -> Outcome:
        """The job, to its end."""
        target = self.consortium.folder / "dist"
        self.consortium.harmofl("bundle", str(self.job), "-o", str(target), "--preinstalled")
        return Lead(self.consortium).run(target / "job")


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Any]:
    """Makes and starts such a consortium, and ends its processes."""
    made: list[Behind] = []

    def make(relays: dict[str, list[str]], *, gathering: bool) -> Behind:
        made.append(Behind(tmp_path / "consortium", relays, gathering=gathering))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.consortium.stop()


def flat_model(job: Path, sites: Sequence[str], data: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The final model of the same job with all sites in one process, without relays."""
    from harmofl.app.job import read_job

    experiment = read_job(job, []).resolve(demo=False)
    InProcessFederation(experiment, sites, folder, {site: data / site for site in sites}).run()
    held: dict[str, torch.Tensor] = torch.load(folder / "run" / "FL_global_model.pt", weights_only=True)["model"]
    return held


def hashed(model: dict[str, torch.Tensor]) -> str:
    return arrays_sha256({name: value.numpy() for name, value in model.items()})


@pytest.mark.parametrize(
    ("relays", "gathering"),
    [
        pytest.param({"north": ["N1"], "south": ["S1"]}, False, id="carry"),
        pytest.param({f"relay-{r}": [f"S{r}{n}" for n in range(4)] for r in range(3)}, True, id="sum"),
    ],
)
def test_the_model_behind_relays_is_that_of_the_flat_run(
    behind: Any, relays: dict[str, list[str]], gathering: bool, tmp_path: Path, drill: Drill
) -> None:
    """Sites behind relays: the job completes, and its final model is that of the run without relays, bit for bit."""
    held: Behind = behind(relays, gathering=gathering)
    outcome = held.run()
    assert outcome.code == 0, outcome.lines
    assert [sorted(record.sites_accepted) for record in outcome.rounds] == [sorted(held.sites)] * 2
    assert sorted(outcome.rounds[1].norm) == sorted(held.sites)
    tree = torch.load(outcome.server / "FL_global_model.pt", weights_only=True)["model"]
    flat = flat_model(held.job, held.sites, held.consortium.folder / "data", tmp_path / "flat")
    assert hashed(tree) == hashed(flat)
    took = "summed" if gathering else "carried messages"
    drill.saw(f"{len(relays)} relays {took} of {len(held.sites)} sites; model {hashed(tree)[:12]} as without relays")
