"""A site that answers what nobody can use: one contribution is refused, and the run of the others goes on."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import category

import psutil
import pytest

from tests.secure.conftest import SITES, Drill, Lead, Outcome, last_lines
from tests.secure.consortium import SERVER, Consortium
from tests.secure.installed.malformed import FORGED

pytestmark = pytest.mark.slow

HONEST = [site for site in SITES if site != "HK"]
ROUNDS = 6


@dataclass
class Watched:
    """A job that has ended, the server's own log of it, and the most memory that its process had."""

    outcome: Outcome
    log: str
    peak_mib: float = 0.0
    reasons: list[str] = field(default_factory=list)  # of HK, by round


@pytest.fixture(scope="module")
def spoilt(consortium: Consortium, lead: Lead) -> Watched:
    """HK spoils its answer to every task, each in another way."""
    bundle = lead.bundle(
        {"federation.rounds": ROUNDS, "federation.minimum_sites": 2, "amplitude.minimum_sites": 2},
        executor="malformed.Malformed",
    )
    job_id = lead.submit(bundle)
    peak: list[float] = []
    over = threading.Event()
    sampler = threading.Thread(target=_sample, args=(consortium, job_id, peak, over))
    sampler.start()
    try:
        outcome = lead.watch(job_id)
    finally:
        over.set()
        sampler.join()
    assert outcome.code == 0, outcome.lines
    log = (outcome.folder / "workspace" / "log.txt").read_text()
    reasons = [record.sites_refused.get("HK", "") for record in outcome.rounds]
    return Watched(outcome, log, max(peak), reasons)


def _sample(consortium: Consortium, job_id: str, peak: list[float], over: threading.Event) -> None:
    """The high-water mark of the resident memory of the server's process of a job, in MiB."""
    while not over.is_set():
        process = consortium.job_process(SERVER, job_id)
        try:
            status = Path(f"/proc/{process.pid}/status").read_text() if process else ""
        except (OSError, psutil.Error):
            status = ""
        peak += [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")]
        time.sleep(0.2)


def test_a_shape_of_gigabytes(spoilt: Watched, drill: Drill) -> None:
    """A site's answer names a shape of 3 GB of text in 300 bytes: one contribution is refused, nothing is allocated."""
    for told in (spoilt.reasons[0], spoilt.log, (spoilt.outcome.server / "report.html").read_text()):
        assert "has a shape that is no list of sizes" in told
    assert any("HK failed: " in line and "list of sizes" in line for line in spoilt.outcome.lines)
    assert spoilt.peak_mib < 1500  # the product of that shape alone is 2861 MiB
    assert spoilt.outcome.rounds[0].sites_accepted == HONEST
    drill.saw(f"round 0: HK: {spoilt.reasons[0]}; peak memory of the server's process {spoilt.peak_mib:.0f} MiB")


def test_answers_that_cannot_be_decoded(spoilt: Watched, drill: Drill) -> None:
    """A site's answers hold a class that the server lacks, then cut bytes: refused by site, the rounds go on."""
    for number in (1, 2):
        assert spoilt.reasons[number].startswith("undecodable_answer: the answer cannot be decoded")
        assert spoilt.outcome.rounds[number].sites_accepted == HONEST
        drill.saw(f"round {number}: HK: {spoilt.reasons[number]}")


def test_an_answer_larger_than_the_model(spoilt: Watched, drill: Drill) -> None:
    """A site's answer has 256 MiB where the model has one: refused before it is kept."""
    assert "MiB that an answer may have" in spoilt.reasons[3]
    assert spoilt.outcome.rounds[3].sites_accepted == HONEST
    assert spoilt.peak_mib < 1500
    drill.saw(f"round 3: HK: {spoilt.reasons[3]}")


def test_commands_and_codes_that_abort(spoilt: Watched, drill: Drill) -> None:
    """A site sends abort commands, a fatal event and a fatal return code: no site ends the job of others."""
    assert spoilt.outcome.rounds[4].sites_accepted == list(SITES)  # its answer itself was sound
    assert "event _fatal_system_error refused" in spoilt.log and "command abort refused" in spoilt.log
    assert spoilt.reasons[5].startswith("unusable_answer: the answer has return code UNSAFE_JOB")
    assert spoilt.outcome.rounds[5].sites_accepted == HONEST
    drill.saw(last_lines(spoilt.log, "event _fatal_system_error refused"))
    drill.saw(last_lines(spoilt.log, "command abort refused"))
    drill.saw(f"round 5: HK: {spoilt.reasons[5]}")


def test_a_site_that_leaves(spoilt: Watched, drill: Drill) -> None:
    """A site's process ends in the evaluation of a job that began with three sites and needs two: the others finish."""
    assert spoilt.outcome.results.sites_without_test == ["HK"]
    assert all(spoilt.outcome.results.sites[site].test for site in HONEST)
    drill.saw(last_lines(spoilt.log, "deemed disconnected"))
    drill.saw("; ".join(spoilt.outcome.results.warnings))


def test_a_forged_line(spoilt: Watched, drill: Drill) -> None:
    """A site's error has a line break, a forged record and terminal commands: one printable line everywhere."""
    report = (spoilt.outcome.server / "report.html").read_text()
    for text in (spoilt.log, "\n".join(spoilt.outcome.lines), report):
        assert not any(line.startswith(FORGED) for line in text.splitlines())
        assert not {letter for letter in text if category(letter) in ("Cc", "Cf", "Cs")} - {"\n", "\t"}
    told = next(line for line in spoilt.log.splitlines() if "HK failed: odd" in line)
    assert FORGED in told
    drill.saw(told[told.index("HK failed: ") :])
