"""A new process that starts as a site's does in FLARE's simulator, and measures there.

What is measured in it is measured as a site finds it: with nothing loaded before, and with threads that sleep while
they wait for each other, so that their processor time is that of the work.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from harmofl.experiment import Experiment

Result = TypeVar("Result")

# FLARE's simulator waits for this much until it may talk to a site's process; the executor is imported after that.
LISTENS = ("nvflare.private.fed.app.simulator.simulator_worker",)
EXECUTOR = ("harmofl.flare.executor", "harmofl.flare.participant")
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class Start:
    """How a process of a site started.

    Attributes:
        listens: seconds of the processor until it listens to the simulator.
        ready: seconds of the processor until all that a task needs is imported.
        resident: bytes of it then.
    """

    listens: float
    ready: float
    resident: int


def in_site_process(measure: "Callable[[Experiment, Start], Result]", experiment: "Experiment") -> Result:
    """What a function of a module returns in a new process.

    Args:
        measure: called there with the experiment and how that process started.
        experiment: of a task of the package.

    Raises:
        Exception: what the function raised.
        ChildProcessError: the process ended by itself; one line with its exit code.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import answer; answer()"],
        input=pickle.dumps((measure, experiment)),
        capture_output=True,
        env={**os.environ, **PASSIVE, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        check=False,
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        memory = "; was there too little memory?" if done.returncode == -signal.SIGKILL else ""
        raise ChildProcessError(f"the process that measures ended with exit code {done.returncode}{memory}: {last}")
    result = pickle.loads(done.stdout)
    if isinstance(result, Exception):
        raise result
    return result


def answer() -> None:
    """Measure what the parent asks for on stdin, and answer on what was stdout; what libraries print is an error's."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked = sys.stdin.buffer.read()
    start = _started()
    measure, experiment = pickle.loads(asked)
    try:
        result = measure(experiment, start)
    except Exception as error:  # the parent's to explain
        result = error
    with out:
        out.write(pickle.dumps(result))


def _started() -> Start:
    """Import what a site's process imports, in its order."""
    for name in LISTENS:
        import_module(name)
    listens = time.process_time()
    for name in EXECUTOR:
        import_module(name)
    from harmofl.flare.lean_monai import import_lean_monai

    import_lean_monai()
    import psutil

    return Start(listens, time.process_time(), int(psutil.Process().memory_info().rss))
