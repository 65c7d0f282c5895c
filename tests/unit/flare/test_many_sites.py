"""Forty sites and more: what a run holds, says and draws does not grow with their number."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harmofl.evidence.curves import MOST_LINES, MOST_ROWS, loss_figure
from harmofl.evidence.results import read_results
from harmofl.experiment import set_key
from harmofl.flare.in_process import InProcessFederation, OpenSites
from harmofl.flare.live import LEAST_ROUNDS, progress
from harmofl.flare.server_run import UNFINISHED_FILE, ServerRun
from harmofl.flare.state import SiteState
from harmofl.flare.tracking import MOST_CURVES, points
from harmofl.flare.wire import ModelMessage, UpdateMessage
from harmofl.sections import names_text
from harmofl.tasks import resolve_experiment
from tests.unit.flare.test_round_books import record

SITES = [f"site-{index:02d}" for index in range(40)]
CASES = {"training": 1, "validation": 1, "test": 1}


class Counted:
    """A site that keeps its round on disk, and notes which sites and answers are in memory."""

    sites: "weakref.WeakSet[Counted]"
    updates: "list[weakref.ref[UpdateMessage]]"
    most_sites = most_updates = opened = 0

    def __init__(self, name: str, state: SiteState) -> None:
        self.name, self.state = name, state
        type(self).opened += 1
        self.sites.add(self)

    def train(self, number: int, message: ModelMessage, best_round: int | None) -> UpdateMessage:
        held = self.state.load_round(number - 1) if number else {"rounds": 0}
        assert held == {"rounds": number}, "a site that is opened again goes on where it was"
        self.state.save_round(number, {"rounds": number + 1})
        type(self).most_sites = max(self.most_sites, len(self.sites))
        type(self).most_updates = max(self.most_updates, sum(update() is not None for update in self.updates))
        moved = 1.0 + SITES.index(self.name)
        difference = {name: np.full_like(value, moved) for name, value in message.weights.items()}
        counts = {"cases": CASES, "images": 4, "steps": 1, "loss": 0.5, "validation": 0.5}
        update = UpdateMessage(difference, None, counts)
        self.updates.append(weakref.ref(update))
        return update

    def evaluate(self, message: ModelMessage, best_round: int | None) -> UpdateMessage:
        return UpdateMessage(numbers={"cases": CASES, "validation": 0.5, "test": {"final": {}, "best": {}}})


@pytest.fixture
def finished(written: dict[str, Any], tmp_path: Path) -> Any:
    """A run of 40 such sites and 2 rounds."""
    for key, value in {"federation.rounds": 2, "method": "fedavg", "network.width": 2}.items():
        set_key(written, key, value)
    federation = InProcessFederation(resolve_experiment(written), SITES, tmp_path, dict.fromkeys(SITES, tmp_path))
    Counted.sites, Counted.updates = weakref.WeakSet(), []
    Counted.most_sites = Counted.most_updates = Counted.opened = 0
    assert not (tmp_path / "sites").exists()
    states = {site: SiteState(tmp_path / "sites" / site / "state", "run") for site in SITES}
    federation.participants = OpenSites(SITES, lambda site: Counted(site, states[site]))  # type: ignore[assignment]
    return federation, federation.run()


def test_a_run_of_many_sites_holds_few_of_them_and_none_of_their_answers(finished: Any) -> None:
    federation, run = finished
    assert Counted.most_sites == OpenSites.MOST == 16
    # 40 in each of 2 rounds and in the evaluation: none of the 16 that stay open is asked again before it is the oldest
    assert Counted.opened == 3 * len(SITES)
    assert federation.run_state.rounds[1].sites_accepted == SITES

    # answers are added as they come, and lie on disk in the end
    assert Counted.most_updates <= 1
    assert list(run.differences) == SITES
    name = sorted(federation.run_state.partition.parameters)[0]
    assert float(run.differences["site-07"][name].mean()) == 8.0
    # all pull one way: the updates are m_i = 1 ... 40 in each of n entries, mean 20.5, and (40^2 - 1) / 12 = 133.25
    assert run.drift[1].relative == pytest.approx(np.sqrt(133.25) / 20.5) and run.drift[1].cosine == pytest.approx(1)

    # results name all sites, figures as many as can be told apart
    results = read_results(federation.run_state.folder / "results.json")
    assert list(results.sites) == SITES and all(held.rounds_accepted == 2 for held in results.sites.values())
    page = (federation.run_state.folder / "report.html").read_text()
    assert "median" in page and len(SITES) > MOST_LINES


def test_a_figure_of_few_sites_has_a_line_each() -> None:
    few, many = loss_figure([record(0, sites=3), record(1, sites=3)]), loss_figure([record(0, sites=100)])
    assert "site-2" in few and "median" not in few
    assert "median" in many and "site-2" not in many
    assert MOST_ROWS > MOST_LINES


def test_curves_of_many_sites_are_lowest_median_and_highest() -> None:
    few, many = list(points(record(0, sites=3))), list(points(record(0, sites=MOST_CURVES + 1)))
    assert ("site-2", "loss", 0.5) in few
    assert {origin for origin, *_ in many} == {"lowest", "median", "highest", "server"}


def test_lines_name_twenty_sites() -> None:
    assert names_text(["A", "B"]) == "A, B" and names_text(SITES[:20]).endswith("site-18, site-19")
    assert names_text(SITES) == ", ".join(SITES[:20]) + " and 20 more"


def test_what_a_hard_end_leaves_behind_is_short(make_run: Any, tmp_path: Path) -> None:
    run: ServerRun = make_run()
    run.expected = SITES
    run.begin("in round 3")
    run.answered("site-00")
    said = (run.folder / UNFINISHED_FILE).read_text()
    assert said.startswith("the job ended in round 3, when site-01, site-02") and "site-20 and 19 more had not" in said


def test_whoever_watches_gets_the_newest_rounds_of_many_sites(make_run: Any) -> None:
    run: ServerRun = make_run()
    for number in range(LEAST_ROUNDS + 5):
        run.rounds.append(record(number))
    assert len(progress(run)["closed"]) == LEAST_ROUNDS + 5
    run.expected = [f"site-{index}" for index in range(1000)]  # 20,000 sites in the rounds that are told
    assert [closed["round"] for closed in progress(run)["closed"]] == list(range(5, LEAST_ROUNDS + 5))
