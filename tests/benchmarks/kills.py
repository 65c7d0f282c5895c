"""Kills at random moments: does a run that was killed and resumed end with the model of an undisturbed one.

Usage: ``python -m tests.benchmarks.kills [--kills 20] [--seed 0]``. A server and three sites over mutual TLS run a job
of four rounds. In each run one process is killed by SIGKILL: the job's process of a site, or the server with the job's
process there. The seed decides which one and at which part of the undisturbed run's time. A person's next step
follows: `harmofl resume` where a round was saved, the same job again where none was. About a minute a kill.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.federation.conftest import make_job
from tests.secure.conftest import SITES, Lead, Outcome, prepare
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_for
from tests.secure.test_jobs_over_tls import equal_models
from tests.secure.test_recovery import registered_since

ROUNDS = 4
PATIENCE = 300  # seconds for what a busy machine does in a few


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it.

    Attributes:
        victim: whose process was killed.
        share: moment of the kill, as a part of the time that the undisturbed job's process lived there.
        ended: the last line that the lead saw of the killed job.
        recovery: what the lead did next.
        equal: whether every weight and the amplitude are those of the undisturbed run.
    """

    victim: str
    share: float
    ended: str
    recovery: str
    equal: bool


class KillDrill:
    """A running consortium, and the run that nothing happened to."""

    def __init__(self, consortium: Consortium) -> None:
        """Run the job undisturbed and time it."""
        self.consortium, self.lead = consortium, Lead(consortium)
        self.bundle = self.lead.bundle({"federation.rounds": ROUNDS})
        job_id = self.submit()
        began = time.monotonic()
        self.undisturbed = self.lead.watch(job_id)
        self.seconds = time.monotonic() - began
        if self.undisturbed.code:
            raise RuntimeError(f"the undisturbed run failed: {self.undisturbed.lines[-1]}")

    def submit(self) -> str:
        """Submit the job and wait until its process runs at the server."""
        job_id = self.lead.submit(self.bundle)
        wait_for(lambda: self.consortium.job_process(SERVER, job_id), PATIENCE, "the job starts at the server")
        return job_id

    def kill(self, victim: str, share: float) -> Kill:
        """Kill the victim's process at `share` of the undisturbed run's time, and bring the run to its end."""
        job_id = self.submit()
        time.sleep(share * self.seconds)
        process = self.consortium.job_process(victim, job_id)
        if process is None:
            outcome = self.lead.watch(job_id)
            return Kill(victim, share, outcome.lines[-1], "its process had ended", self.equal(outcome))
        if victim == SERVER:
            seen = (self.consortium.kit(SERVER) / "log.txt").stat().st_size
            self.consortium.kill_server(job_id)
            wait_for(lambda: registered_since(self.consortium, seen) == set(SITES), PATIENCE, "all sites are back")
            ended = "the server was killed"
        else:
            process.kill()
            outcome = self.lead.watch(job_id)
            ended = outcome.lines[-1]
            if outcome.code == 0:
                return Kill(victim, share, ended, "none was needed", self.equal(outcome))
        recovery, outcome = self.recover(job_id)
        return Kill(victim, share, ended, recovery, self.equal(outcome))

    def recover(self, job_id: str) -> tuple[str, Outcome]:
        """Resume the job from its last round; submit it again where no round was saved."""
        target = self.consortium.folder / f"resumed_{job_id[:8]}"
        kit = str(self.consortium.kit(LEAD))
        said = self.consortium.harmofl("resume", str(self.bundle), job_id, "-o", str(target), "--kit", kit).stdout
        new_id = re.search(r"submitted as job (\S+)", said)
        if not new_id:
            raise RuntimeError(said)
        outcome = self.lead.watch(new_id[1])
        if outcome.code and "left no checkpoint" in outcome.lines[-1]:
            return "submitted again, no round had been saved", self.lead.run(self.bundle)
        return next((line for line in outcome.lines if "resumed from" in line), outcome.lines[-1]), outcome

    def equal(self, outcome: Outcome) -> bool:
        """Whether a run ended well, with the undisturbed run's weights, amplitude and best round."""
        if outcome.code:
            return False
        results, expected = outcome.results, self.undisturbed.results
        same = results.amplitude == expected.amplitude and results.best_round == expected.best_round
        return same and equal_models(outcome, self.undisturbed)


def main() -> int:
    """Run the kills, print a line for each and the sum; 1 if a model differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    kills = []
    with tempfile.TemporaryDirectory() as name:
        consortium = Consortium(Path(name), SITES)
        try:
            start(consortium)
            drill = KillDrill(consortium)
            say(f"undisturbed: {ROUNDS} rounds of {len(SITES)} sites in {drill.seconds:.0f} s")
            for number in range(1, options.kills + 1):
                kills.append(drill.kill(draws.choice([*SITES, SERVER]), draws.random()))
                say(f"{number}: {kills[-1]}")
        finally:
            consortium.stop()
    equal = sum(kill.equal for kill in kills)
    say(f"{equal} of {len(kills)} kills (seed {options.seed}): the final model equals the undisturbed run's")
    return 0 if equal == len(kills) else 1


def start(consortium: Consortium) -> None:
    """Give the sites data and start all, until every site has registered."""
    job = make_job(consortium.folder, SITES, {})
    data = consortium.folder / "data"
    consortium.harmofl("demo-data", str(job), "-o", str(data), "--set", "demo.data.cases=8")
    prepare(consortium, SERVER)
    for site in SITES:
        prepare(consortium, site, data_root=data / site, preinstalled=True)
    consortium.start(SERVER, loop=True)
    consortium.start(*SITES)
    consortium.wait_until_registered(*SITES)


def say(line: str) -> None:
    """One line at once, also into a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
