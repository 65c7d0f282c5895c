"""Drills: a site that runs approved jobs only, and a run that another lead would resume."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.secure.conftest import SITES, Drill, Lead, Outcome
from tests.secure.consortium import LEAD, OTHER_LEAD, Consortium

pytestmark = pytest.mark.slow
SITE = "BIDMC"  # lets jobs bring code
SPY = """
import sys
from pathlib import Path
from nvflare.apis.fl_component import FLComponent

with (Path.home() / "imported.txt").open("a") as seen:
    seen.write(" ".join(sys.argv) + "\\n")


class Spy(FLComponent):
    pass
"""


@pytest.fixture
def asks(consortium: Consortium) -> Iterator[Path]:
    """The kit of a site that runs approved jobs only from now on, and takes any after the drill again."""
    path = consortium.kit(SITE) / "local" / "privacy.json"
    before = path.read_text()
    privacy = json.loads(before)
    privacy["scopes"][0]["properties"]["approval"] = "required"
    path.write_text(json.dumps(privacy))
    yield consortium.kit(SITE)
    path.write_text(before)


def test_only_an_approved_job_runs(lead: Lead, consortium: Consortium, asks: Path, drill: Drill) -> None:
    """A site that approves jobs, and a job that is new there, then approved, then changed by one byte, then rejected:
    the lead is told pending or rejected without detail, only the approved bytes run, the others train meanwhile.
    """
    bundle = lead.bundle()
    pending = lead.run(bundle)
    told = "BIDMC: NVFLARE_ERROR: approval_pending: site BIDMC has not approved this job yet"
    assert pending.code == 1 and told in pending.lines[-1], pending.lines
    assert f"from {LEAD} as job {pending.job_id}" in consortium.harmofl("approve", str(asks)).stdout
    consortium.harmofl("approve", str(asks), str(bundle), "--yes")
    approved = lead.run(bundle)
    assert approved.code == 0 and approved.rounds[-1].sites_accepted == list(SITES), approved.lines

    settings = bundle / "app" / "config" / "experiment.json"
    settings.write_text(settings.read_text().replace('"seed": 0', '"seed": 1'))
    changed = lead.run(bundle)
    assert changed.code == 1 and told in changed.lines[-1], changed.lines
    drill.saw(f"{pending.lines[-1]}; approved: {', '.join(SITES)} {approved.lines[-1].split()[-1]}; changed: {told}")

    bundle = lead.bundle({"federation.minimum_sites": 2, "amplitude.minimum_sites": 2})
    accept_sites(bundle, 2)
    consortium.harmofl("approve", str(asks), str(bundle), "--reject")
    rejected = lead.run(bundle)
    said = "runs without BIDMC: NVFLARE_ERROR: approval_rejected: site BIDMC has rejected this job"
    assert said in rejected.lines and rejected.rounds[-1].sites_accepted == ["HK", "UCL"], rejected.lines
    drill.saw(f"{said}; HK and UCL completed {len(rejected.rounds)} rounds")


def test_code_of_a_job_that_waits_is_not_imported(lead: Lead, consortium: Consortium, asks: Path, drill: Drill) -> None:
    """A job that brings code which runs as soon as it is imported, not approved at one site: it is imported at a site
    that takes any job, and never there.
    """
    bundle = lead.bundle({"federation.minimum_sites": 3}, code=True)
    (bundle / "app" / "custom" / "spy.py").write_text(SPY)
    path = bundle / "app" / "config" / "config_fed_client.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"components": [{"id": "spy", "path": "spy.Spy", "args": {}}]}))
    accept_sites(bundle, 1)
    outcome = lead.run(bundle)
    seen = (consortium.home / "imported.txt").read_text().splitlines()
    assert [any(f"-c {site} " in line for line in seen) for site in ("UCL", SITE)] == [True, False], seen
    assert outcome.code == 1 and "connected: 1 site (UCL)" in outcome.lines[-1], outcome.lines
    drill.saw(f"imported at UCL, not at {SITE}; {outcome.lines[-1]}")


def test_another_lead_resumes_nothing(lead: Lead, undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """A second lead submits a job that resumes a run of the first one: refused by name, he gets no model, and no byte
    of the run changes at the server or at a site.
    """
    before = kept_of(consortium, undisturbed)
    target = consortium.folder / "stolen"
    consortium.harmofl("resume", str(lead.bundle()), undisturbed.job_id, "-o", str(target))
    job_id = lead.submit(target / "job", OTHER_LEAD)
    outcome = lead.watch(job_id, OTHER_LEAD)
    assert outcome.code == 1 and f"was not submitted by {OTHER_LEAD} of hk" in outcome.lines[-1], outcome.lines
    assert not list(outcome.folder.rglob("*.pt")), "no model"
    assert kept_of(consortium, undisturbed) == before and len(before) > 6
    drill.saw(f"{outcome.lines[-1]}; {len(before)} files of the run as before")


def accept_sites(bundle: Path, count: int) -> None:
    """Let FLARE run the job where only so many sites take it in."""
    meta = json.loads((bundle / "meta.json").read_text())
    (bundle / "meta.json").write_text(json.dumps(meta | {"min_clients": count}))


def kept_of(consortium: Consortium, outcome: Outcome) -> dict[str, str]:
    """Hashes of all files that the server and the sites keep of a run."""
    run = outcome.job_id.replace("-", "")
    places = [consortium.kit(site) / "harmofl" / "state" / run for site in SITES]
    places.append(consortium.kit("server") / "harmofl" / "runs" / outcome.job_id)
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
