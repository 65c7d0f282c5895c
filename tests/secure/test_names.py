"""A lead who asks hospitals about names by settings of a job, with a server that refuses and one that does not."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.secure.conftest import ROUNDS, SITES, Drill, Lead, Outcome, last_lines
from tests.secure.consortium import Consortium

pytestmark = pytest.mark.slow

HANGS = r"^(([A-Za-z0-9_-])+)+\.$"
REFUSAL = "data.patient_pattern: hospitals run no pattern of a job on file names"


def edited(bundle: Path, **config: Any) -> Path:
    """A bundle as a lead edits it by hand: `harmofl bundle` refuses to make it."""
    path = bundle / "app/config/experiment.json"
    settings = json.loads(path.read_text())
    settings["data"]["patient_pattern"] = HANGS
    path.write_text(json.dumps(settings))
    if config:
        path = path.with_name("config_fed_server.json")
        server = json.loads(path.read_text())
        server["workflows"][0] |= config
        path.write_text(json.dumps(server))
    return bundle


def refused(lead: Lead, bundle: Path) -> tuple[Outcome, float]:
    started = time.monotonic()
    outcome = lead.run(bundle)
    assert outcome.code == 1
    return outcome, time.monotonic() - started


def test_a_pattern_of_the_job_is_refused_by_the_server(lead: Lead, drill: Drill) -> None:
    """A job of settings alone with a `data.patient_pattern` that never ends: the server refuses it by name."""
    outcome, _ = refused(lead, edited(lead.bundle()))
    assert REFUSAL in " ".join(outcome.lines)
    drill.saw(outcome.lines[-1])


def test_a_pattern_of_the_job_is_refused_at_every_site(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """The same job, and a server that lets it pass: every site refuses it by name before a file is listed, nothing
    hangs, and another job goes on.
    """
    honest = lead.submit(lead.bundle())
    attack = edited(lead.bundle(), path="misbehaving_names.CuriousScatterAndGather")
    outcome, seconds = refused(lead, attack)
    told = [f"site {site}: {REFUSAL}" for site in SITES]
    log = "\n".join(path.read_text() for path in sorted(outcome.folder.glob("workspace/*.txt")))
    assert all(line in log for line in told)
    for site in SITES:
        folder = consortium.kit(site) / outcome.job_id
        assert told[SITES.index(site)] in (folder / "log.txt").read_text()
        assert not (folder / "findings.txt").exists() or not (folder / "findings.txt").read_text()
    drill.saw(last_lines(log, told[0]))
    other = lead.watch(honest)
    assert other.code == 0 and [sorted(record.sites_accepted) for record in other.rounds] == [sorted(SITES)] * ROUNDS
    drill.saw(f"over after {seconds:.0f} s; the other job meanwhile: all {len(SITES)} sites in all {ROUNDS} rounds")
