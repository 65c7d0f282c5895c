"""Many sites in FLARE's simulator, one after the other on one machine: time of a site and round, memory of the server.

Takes a quarter of an hour, since the simulator starts a process for every task of every site.
"""

import tempfile
from pathlib import Path

from tests.benchmarks.rows import Row
from tests.federation.conftest import make_job, simulate
from tests.small_job import write_site

FEW, MANY = 6, 60
SETTINGS = {
    "method": "perturbation_only",
    "data.height": 64,
    "data.width": 64,
    "network.width": 4,
    "federation.rounds": 1,
    "federation.tracking": "none",
}


def measure() -> list[Row]:
    few, many = run(FEW), run(MANY)
    return [
        Row(
            f"FLARE's simulator, time per site and round with {MANY} sites", f"with {FEW} sites", many[0] / few[0], 1.2
        ),
        Row(f"FLARE's simulator, memory of the server, {MANY} sites", f"with {FEW}", many[1] / few[1], 1.05),
    ]


def run(sites: int) -> tuple[float, float]:
    """Seconds of the run by site and round, and MiB of the server's process after the last round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"site-{index}" for index in range(sites)]
        for site in names:
            write_site(folder / "data" / site, cases=3)
        changes = SETTINGS | {"data.simulated_root": str(folder / "data")}
        job = make_job(folder, names, changes, demo=False)
        done = simulate(job, folder, 1, {}, timeout=1800)
        if done.code:
            raise RuntimeError(done.output[-2000:])
        return done.results.seconds / sites / len(done.rounds), done.rounds[-1].server_resident_mib
