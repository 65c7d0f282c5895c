"""A server that a site must not believe: forged headers, and jobs that ask for more than a site allows."""

from pathlib import Path

import pytest

from tests.secure.conftest import Drill, Lead, Outcome, last_lines, sites_of
from tests.secure.consortium import Consortium
from tests.secure.test_sites_in_trouble import TWO_OF_THREE

pytestmark = pytest.mark.slow


def files_around(consortium: Consortium) -> set[Path]:
    """What lies beside the kits, where a name that climbs out of one leads, and above them but for the lead's own."""
    own = {"results", "home"}
    above = {path for path in consortium.folder.iterdir() if path.name not in own and path.name[:4] != "job_"}
    return above | set(consortium.kits.iterdir()) | set(consortium.kits.parent.iterdir())


@pytest.mark.parametrize(
    "case",
    [
        ("ClimbsOut", "the task's header cannot be used: pooled_sites.0: String should match pattern"),
        ("PoolsPlainly", "the task's header names pooled_sites, which only a simulated run on pooled data has"),
        ("TakesAnotherRun", "the task names a run that is not of this job"),
    ],
)
def test_a_forged_header(consortium: Consortium, lead: Lead, drill: Drill, case: tuple[str, str]) -> None:
    """A server forges the header of HK's tasks from round 1 on: HK refuses each by name and writes nothing outside its
    kit, the others' run goes on to its end.
    """
    controller, said = case
    before = files_around(consortium)
    outcome = lead.run(lead.bundle(TWO_OF_THREE, controller=f"misbehaving_headers.{controller}"))
    assert outcome.code == 0, outcome.lines
    assert sites_of(outcome.rounds) == [["BIDMC", "HK", "UCL"], ["BIDMC", "UCL"], ["BIDMC", "UCL"]]
    refusal = outcome.rounds[1].sites_refused["HK"]
    assert refusal.startswith("MessageError: site HK: ") and said in refusal
    assert outcome.results.sites["HK"].test == {}, "the forged evaluation was refused too"
    assert outcome.results.worst_site is not None and outcome.results.worst_site.site in ("BIDMC", "UCL")
    ended = last_lines("\n".join(outcome.lines), "completed")
    drill.saw(f"{controller}: {refusal}; rounds 1 and 2 of BIDMC and UCL, {ended}")
    assert files_around(consortium) - before == set()
    states = {path.name for path in (consortium.kit("HK") / "harmofl" / "state").iterdir()}
    assert "f" * 32 not in states and outcome.job_id.replace("-", "") in states, "round 0 was honest"
    assert not list((consortium.kit("HK") / "harmofl").rglob("demo_data"))


def test_a_job_for_one_hospital_alone(consortium: Consortium, lead: Lead, drill: Drill) -> None:
    """A job may average the weights of one site alone: bundle warns, preflight and every site name the limit, no data
    is read.
    """
    bundle = lead.bundle({"federation.minimum_sites": 1, "amplitude.minimum_sites": 1})
    checked = consortium.harmofl("preflight", str(consortium.kit("HK")), "--job", str(bundle), check=False)
    assert "error: federation.minimum_sites: is 1, limits.minimum_sites is 2; raise it to 2" in checked.stdout
    assert "in force: minimum_sites 2, training_patients 1" in checked.stdout
    outcome = lead.run(bundle)
    said = "does not run this job: federation.minimum_sites is 1, limits.minimum_sites is 2"
    assert outcome.code == 1 and any("limits: site HK" in line and said in line for line in outcome.lines)
    folder = consortium.kit("HK") / outcome.job_id
    assert not (folder / "findings.txt").is_file() or not (folder / "findings.txt").read_text()
    assert not (consortium.kit("HK") / "harmofl" / "state" / outcome.job_id.replace("-", "")).exists()
    drill.saw(last_lines("\n".join(outcome.lines), said))


def test_scores_leave_as_means(undisturbed: Outcome, drill: Drill) -> None:
    """Sites that keep the scores of single cases: mean and numbers leave, results and report name the limits."""
    for result in undisturbed.results.sites.values():
        score = result.test["dice"]
        assert score.mean is not None and score.per_case == [] and score.n > 0
        assert result.limits["minimum_sites"] == 2 and result.limits["case_scores"] is False
    assert "Limits in force at each site" in (undisturbed.server / "report.html").read_text()
    drill.saw(f"HK: {undisturbed.results.sites['HK'].test['dice'].mean:.3f}, no score of a single case")
