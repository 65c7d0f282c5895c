"""The process that the cells of a comparison are forked from: it has all imports, and nothing that a fork breaks."""

import subprocess
import sys
from pathlib import Path

import pytest

# Forked from a process that has asked for a GPU, a cell could not use one; threads do not pass a fork.
WATCHED = """
import sys, threading
from pathlib import Path
import torch
asked = []
for name in ("is_available", "device_count", "current_device", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
import harmofl.app.cell_imports
threads = len(list(Path("/proc/self/task").iterdir()))
assert not asked, asked
assert threads == threading.active_count() == 1, threads
torch.cuda.is_available = lambda: False
known = set(sys.modules)
from harmofl.app.cell import CellPlan, _measure
from harmofl.evidence.comparison import CellKey
job, folder = map(Path, sys.argv[1:])
key = CellKey(experiment_hash="0", version="0", data="demo", sites=["BIDMC", "HK"], left_out=None)
_measure(CellPlan(folder, job, {"method": "fedavg", "network.width": 2}, key, None, 1, landscape=False))
print(len(set(sys.modules) - known), sorted(set(sys.modules) - known))
"""


@pytest.mark.slow
def test_a_cell_imports_next_to_nothing_itself_and_may_be_forked(job: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, str(job), str(tmp_path / "cell")]
    # one thread: libraries of linear algebra start theirs as they are loaded
    environment = {"OMP_NUM_THREADS": "1", "PATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    # 4,300 modules without the imports
    assert int(ran.stdout.split()[0]) < 100, ran.stdout
