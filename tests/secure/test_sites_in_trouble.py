"""Drills: sites that fail, come late, are slow or have no usable data."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.secure.conftest import Drill, Lead, sites_of
from tests.secure.consortium import Consortium

pytestmark = pytest.mark.slow
TWO_OF_THREE = {"federation.minimum_sites": 2, "amplitude.minimum_sites": 2}


def test_a_site_that_fails_and_comes_late_is_taken_back(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """A site's executor fails in round 1 and times out in round 2: the job goes on with the rest, the report says
    so, the site is back in the next round.
    """
    changes = {**TWO_OF_THREE, "federation.rounds": 5, "federation.straggler_wait": 12}
    outcome = lead.run(lead.bundle(changes, executor="misbehaving.FailsThenLate"))
    assert outcome.code == 0, outcome.lines
    both, three = ["BIDMC", "UCL"], ["BIDMC", "HK", "UCL"]
    entered = sites_of(outcome.rounds)  # in round 3 HK may still be at its answer to round 2
    assert entered[:3] == [three, both, both] and entered[4] == three
    page = (outcome.server / "report.html").read_text()
    assert "HK: internal_error: site HK failed in train (RuntimeError); see its log" in page
    told = [*outcome.server.glob("*.*"), *outcome.folder.glob("workspace/*.txt")]
    assert "Jane" not in "".join(path.read_text() for path in told if path.suffix != ".pt")
    assert "Jane" in (consortium.kit("HK") / outcome.job_id / "findings.txt").read_text(), "at the site it is known"
    drill.saw("; ".join(line for line in outcome.lines if line.startswith("round")))


def test_a_slow_site_is_waited_for(lead: Lead, drill: Drill) -> None:
    """A site takes ten times as long as the others for a round, at default time limits: it is waited for."""
    defaults = {
        **TWO_OF_THREE,
        "federation.rounds": 1,
        "federation.round_timeout": 86400,
    }
    outcome = lead.run(lead.bundle(defaults, executor="misbehaving.Slow"))
    assert outcome.code == 0, outcome.lines
    assert sites_of(outcome.rounds) == [["BIDMC", "HK", "UCL"]]
    drill.saw(next(line for line in outcome.lines if line.startswith("round 0")))


def test_sites_without_usable_data_are_named(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """A site with no data, another with a corrupt file: the first is named and left out, the second skips the file
    and counts it.
    """
    empty, corrupt = consortium.folder / "empty", consortium.folder / "corrupt"
    empty.mkdir()
    shutil.copytree(consortium.folder / "data" / "HK", corrupt)
    broken = sorted(corrupt.glob("*_segmentation.nii.gz"))[0]
    broken.write_bytes(broken.read_bytes()[:100])
    without, few = {"data_root": str(empty)}, {"data_root": str(corrupt), "minimum_cases": 4}
    with settings(consortium, "UCL", **without), settings(consortium, "HK", **few):
        outcome = lead.run(lead.bundle({**TWO_OF_THREE, "amplitude.minimum_cases": 4, "federation.rounds": 1}))
    assert outcome.code == 0, outcome.lines
    assert sites_of(outcome.rounds) == [["BIDMC", "HK"]]
    skipped = outcome.results.sites["HK"].cases_skipped
    assert sum(skipped.values()) == 1
    assert outcome.rounds[0].sites_refused["UCL"].startswith("data_root: site UCL")
    drill.saw(f"UCL: {outcome.rounds[0].sites_refused['UCL']}; HK skipped {skipped}; {outcome.lines[-1].split()[-1]}")


def test_what_a_hospital_lets_out(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """A site that adds noise to its amplitude, another whose limit is above its patients and that trains in two
    processes: the amplitude carries the noise, the other site sends none, both train, results and report say so.
    """
    noise = {"relative_clip": 0.8, "epsilon": 1.0, "delta": 1e-5}
    other = {"minimum_cases": 50, "device": "cpu,cpu"}
    with settings(consortium, "HK", amplitude_noise=noise), settings(consortium, "UCL", **other):
        outcome = lead.run(lead.bundle({**TWO_OF_THREE, "federation.rounds": 1}))
    assert outcome.code == 0, outcome.lines
    assert sites_of(outcome.rounds) == [["BIDMC", "HK", "UCL"]]
    sites = outcome.results.sites
    assert [site for site, result in sites.items() if result.amplitude_sent] == ["BIDMC", "HK"]
    assert sites["UCL"].bytes_sent["amplitude"] == 0 and sites["UCL"].bytes_sent["weights"] > 0
    assert "trains in 2 processes: cpu, cpu" in (consortium.kit("UCL") / outcome.job_id / "log.txt").read_text()
    said = sites["HK"].amplitude_noise
    # 3 channels x 11 bins at 64 pixels
    assert said is not None and (said.epsilon, said.delta, said.clip) == (1.0, 1e-5, pytest.approx(0.8 * 33**0.5))
    assert sites["BIDMC"].amplitude_noise is None
    assert "no formal guarantee" in outcome.results.privacy and "HK" in outcome.results.privacy
    assert "epsilon" in (outcome.server / "report.html").read_text()
    drill.saw(f"{outcome.results.privacy}; amplitude of {', '.join(outcome.results.amplitude.sites)}")  # type: ignore[union-attr]


def test_a_mistake_in_a_sites_settings(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """A site's privacy.json names a filter that is none: the job fails in bounded time and says where to
    look, preflight there says what is wrong.
    """
    path = consortium.kit("HK") / "local" / "privacy.json"
    before = path.read_text()
    path.write_text(before.replace("AmplitudeFilter", "AmplitudeFillter"))
    try:
        outcome = lead.run(lead.bundle({"federation.rounds": 1}))
        said = consortium.harmofl("preflight", str(consortium.kit("HK")), check=False).stdout
    finally:
        path.write_text(before)
    assert outcome.code == 1 and "preflight" in outcome.lines[-1], outcome.lines
    found = next(line for line in said.splitlines() if "error" in line and "AmplitudeFillter" in line)
    drill.saw(f"{outcome.lines[-1]}; {found}")


@contextmanager
def settings(consortium: Consortium, site: str, **properties: object) -> Iterator[None]:
    """Give a site other settings for a while; jobs read them when they start."""
    path = consortium.kit(site) / "local" / "privacy.json"
    before = path.read_text()
    held = json.loads(before)
    held["scopes"][0]["properties"].update(properties)
    path.write_text(json.dumps(held))
    try:
        yield
    finally:
        path.write_text(before)
