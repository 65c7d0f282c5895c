"""Drills: a lead who subtracts what two jobs get, and a hospital where one more patient has come."""

import json
import shutil

import pytest

from harmofl.flare.state import Checkpoint
from tests.secure.conftest import SITES, Drill, Lead
from tests.secure.consortium import Consortium

pytestmark = pytest.mark.slow
ONE_ROUND = {"federation.rounds": 1}


def test_what_two_jobs_get_tells_no_patient_apart(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """A lead submits a job, one with other fractions, and the first again after one more patient has come to a
    hospital: the second is refused by the name of the reset, the third gets the first one's amplitude, bit for bit.
    """
    first = lead.run(lead.bundle(ONE_ROUND))
    assert first.code == 0, first.lines
    refused = lead.run(lead.bundle({**ONE_ROUND, "data.fractions": [0.68, 0.12, 0.2]}))
    assert refused.code == 1
    said = " ".join(refused.lines)
    assert "split_differs" in said and "harmofl privacy KIT --reset-split prostate" in said, refused.lines
    before = consortium.harmofl("privacy", str(consortium.kit("HK"))).stdout
    data = consortium.folder / "data" / "HK"
    job = lead.bundle(ONE_ROUND)
    one_more = consortium.folder / "one_more"
    consortium.harmofl("demo-data", str(job), "-o", str(one_more), "--set", "demo.data.cases=9")
    come = sorted(set(path.name for path in (one_more / "HK").iterdir()) - {path.name for path in data.iterdir()})
    assert len(come) == 2, "image and mask of a patient"
    try:
        for name in come:
            shutil.copy(one_more / "HK" / name, data / name)
        third = lead.run(job)
    finally:
        for name in come:
            (data / name).unlink(missing_ok=True)
    assert third.code == 0, third.lines
    models = [Checkpoint.load(outcome.server / "FL_global_model.pt").amplitude for outcome in (first, third)]
    assert models[0] is not None and models[1] is not None
    assert models[0].numpy().tobytes() == models[1].numpy().tobytes()
    sites = [outcome.results.sites for outcome in (first, third)]
    assert sites[1]["HK"].cases_used["training"] == sites[0]["HK"].cases_used["training"] + 1
    assert sites[1]["HK"].amplitude_patients == sites[0]["HK"].amplitude_patients
    for site in SITES:
        counts = [held[site].releases for held in sites]
        assert counts[1]["new"] == counts[0]["new"]
        assert counts[1]["withheld"] == counts[0]["withheld"] + (site == "HK")
    assert "held back" in (third.server / "report.html").read_text()
    after = consortium.harmofl("privacy", str(consortium.kit("HK"))).stdout
    assert "of 6 patients: no. " in after and "of 6 patients: no. " not in before
    line = next(line.strip() for line in after.splitlines() if "was sent in its place" in line)
    drill.saw(f"{refused.lines[-1]}; third job: {json.dumps(sites[1]['HK'].releases)}, HK's ledger: {line}")
