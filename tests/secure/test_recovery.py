"""Drills: processes that are killed, jobs that go on from their last round, and an abort."""

import re
import time
from pathlib import Path

import pytest

from tests.secure.conftest import SITES, Drill, Lead, Outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_for
from tests.secure.test_jobs_over_tls import equal_models

pytestmark = pytest.mark.slow
HOLDS = "misbehaving.Holds"


def test_a_killed_job_process_of_a_site(lead: Lead, undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """kill -9 of a site's job process in round 1: the job fails in bounded time naming the site; `harmofl resume`
    resumes it and ends with the undisturbed run's model.
    """
    bundle, job_id = hold(lead, consortium)
    wait_until_only_hk_is_missing(consortium, job_id)
    process = consortium.job_process("HK", job_id)
    assert process is not None
    process.kill()
    killed = time.monotonic()
    outcome = lead.watch(job_id)
    seconds = time.monotonic() - killed
    assert outcome.code == 1 and "HK" in outcome.lines[-1] and seconds < 90, outcome.lines
    resumed = resume(lead, consortium, bundle, job_id)
    assert resumed.code == 0, resumed.lines
    assert equal_models(resumed, undisturbed) and len(resumed.results.sites_accepted) == 3
    drill.saw(f"after {seconds:.0f} s: {outcome.lines[-1]}; then {resumed.lines[1]}, equal weights")


def test_a_killed_job_process_before_the_rounds(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """kill -9 of a site's job process before the first round: the job fails in bounded time naming the site."""
    _, job_id = hold(lead, consortium, "amplitude")
    for site in ("BIDMC", "UCL"):
        state = consortium.kit(site) / "harmofl" / "state" / job_id.replace("-", "") / "amplitude.pt"
        wait_for(state.is_file, 60, f"{site} has measured its amplitude")
    time.sleep(3)  # its answer is on the way
    process = consortium.job_process("HK", job_id)
    assert process is not None
    process.kill()
    killed = time.monotonic()
    outcome = lead.watch(job_id)
    (consortium.home / "hold").unlink()
    assert (
        outcome.code == 1 and "while the amplitude was gathered" in outcome.lines[-1] and "HK" in outcome.lines[-1]
    ), outcome.lines
    drill.saw(f"after {time.monotonic() - killed:.0f} s: {outcome.lines[-1]}")


def test_a_run_that_still_goes_is_not_resumed(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """`harmofl resume` of a job that is still running: refused, since its sites keep one state for both."""
    bundle, job_id = hold(lead, consortium)
    target = consortium.folder / "too_early"
    consortium.harmofl("resume", str(bundle), job_id, "-o", str(target))
    outcome = lead.run(target / "job")
    assert outcome.code == 1 and "still running in another job" in outcome.lines[-1], outcome.lines
    (consortium.home / "hold").unlink()
    assert lead.watch(job_id).code == 0
    drill.saw(f"{outcome.lines[-1]}; the first one completed")


def test_a_killed_server(lead: Lead, undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """kill -9 of the server in round 1, which two sites have finished: `harmofl resume` resumes from round 1 once it
    is up again, these sites step back, the model is the undisturbed run's.
    """
    bundle, job_id = hold(lead, consortium)
    wait_until_only_hk_is_missing(consortium, job_id)
    seen = (consortium.kit(SERVER) / "log.txt").stat().st_size
    consortium.kill_server(job_id)
    wait_for(lambda: registered_since(consortium, seen) == set(SITES), 90, "all sites are back at the server")
    resumed = resume(lead, consortium, bundle, job_id)
    assert resumed.code == 0, resumed.lines
    assert equal_models(resumed, undisturbed)
    assert resumed.results.best_round == undisturbed.results.best_round
    assert resumed.results.amplitude == undisturbed.results.amplitude
    assert resumed.results.run_id == job_id.replace("-", "")
    drill.saw(f"{resumed.lines[1]}; {resumed.lines[-1].split()[-1]}, equal weights, best round and amplitude")


def test_an_abort_stops_every_site(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """`nvflare job abort` while all sites train: no job process is left within 15 s."""
    job_id = lead.submit(lead.bundle({"training.local_epochs": 2000}))
    logs = [consortium.kit(site) / job_id / "log.txt" for site in SITES]
    wait_for(lambda: all(log.is_file() and "train" in log.read_text() for log in logs), 60, "all sites train")
    time.sleep(3)
    held = [consortium.job_process(site, job_id) for site in SITES]
    assert all(held)
    consortium.run("nvflare.cli", "job", "abort", job_id, "--startup-kit", str(consortium.kit(LEAD)), "--force")
    aborted = time.monotonic()
    wait_for(lambda: not any(process.is_running() for process in held if process), 15, "every site has stopped")
    drill.saw(f"all {len(held)} gone {time.monotonic() - aborted:.0f} s after the command had returned")


def hold(lead: Lead, consortium: Consortium, place: str = "train 1") -> tuple[Path, str]:
    """A job like the undisturbed one, submitted, in which HK stands still in round 1 or another task."""
    (consortium.home / "holding").unlink(missing_ok=True)
    (consortium.home / "hold").write_text(place)
    bundle = lead.bundle(executor=HOLDS)
    job_id = lead.submit(bundle)
    wait_for((consortium.home / "holding").exists, 120, f"HK holds in {place}")
    return bundle, job_id


def wait_until_only_hk_is_missing(consortium: Consortium, job_id: str) -> None:
    """The other sites have finished round 1, which the server has not closed."""
    for site in ("BIDMC", "UCL"):
        state = consortium.kit(site) / "harmofl" / "state" / job_id.replace("-", "") / "round_000001.pt"
        wait_for(state.is_file, 30, f"{site} has finished round 1")
    time.sleep(2)  # its answer is on the way


def resume(lead: Lead, consortium: Consortium, bundle: Path, job_id: str) -> Outcome:
    """Go on from a job's checkpoint, as a person does it, and watch the new job to its end."""
    (consortium.home / "hold").unlink()
    target = consortium.folder / f"resumed_{job_id[:8]}"
    said = consortium.harmofl(
        *("resume", str(bundle), job_id, "-o", str(target), "--kit", str(consortium.kit(LEAD)))
    ).stdout
    new_id = re.search(r"submitted as job (\S+)", said)
    assert new_id, said
    return lead.watch(new_id[1])


def registered_since(consortium: Consortium, size: int) -> set[str]:
    """Sites that have registered after the server's log had this size."""
    text = (consortium.kit(SERVER) / "log.txt").read_text()[size:]
    return set(re.findall(r"Re-activate the client: (\w+) ", text)) & set(SITES)
