"""Does any damaged or odd file do something else to a reader than be refused in one line?

    python -m tests.benchmarks.fuzz [--minutes 30] [--seed 0] [--only volumes images] [-o fuzz_finds]

Small valid files of each kind are changed by a generator and opened by the product's own function, in a process with a
limit on its memory. It may accept them or raise the project's own refusal of one line; anything else is a crash, an
answer that takes longer than HANG seconds a hang. Each such input is kept in the folder of -o beside what was raised,
and the exit code is 1. Input N of a target depends on seed, target and N alone.
"""

import argparse
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from tests.benchmarks.fuzz_mutations import one_of
from tests.benchmarks.fuzz_targets import TARGETS, Target, open_target

HANG = 20.0  # s for one input; on a busy machine the slowest seed takes a tenth
START = 180.0  # s for a process that imports torch and MONAI on a busy machine
MEMORY = 4 * 2**30  # bytes of address space for one input, above what the process has when it starts
KEPT = 3  # inputs of one and the same crash
MIB = 2**20
GONE = "gone"  # what a process that died says


@dataclass
class Tally:
    """What became of the inputs of a target."""

    outcomes: Counter[str] = field(default_factory=Counter)
    peak: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        """Crashes and hangs."""
        return self.outcomes["crash"] + self.outcomes["hang"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("-o", "--output", type=Path, default=Path("fuzz_finds"))
    options = parser.parse_args()
    print(
        "| target | inputs | refused | accepted | crashes | hangs | peak memory, MiB |\n|---|---|---|---|---|---|---|"
    )
    failed = 0
    for name in options.only:
        tally = run_target(name, options.seed, 60 * options.minutes / len(options.only), options.output)
        counts = [tally.outcomes[kind] for kind in ("refused", "accepted", "crash", "hang")]
        print(f"| {name} | {sum(counts)} | {' | '.join(map(str, counts))} | {tally.peak:.0f} |", flush=True)
        for kind, count in tally.kinds.most_common():
            print(f"  {count} x {kind}", file=sys.stderr)
        failed += tally.failed
    return int(failed > 0)


def run_target(name: str, seed: int, seconds: float, output: Path) -> Tally:
    """Fuzz one target; a process that hangs or dies is followed by another, which begins with the next input."""
    tally, number = Tally(), 0
    with tempfile.TemporaryDirectory() as place:
        end: float | None = None
        while end is None or time.monotonic() < end:
            with _worker(name, seed, number, Path(place), output) as (said, exit_code):
                if said(START) in (None, GONE):
                    raise RuntimeError(f"{name}: the process did not start (exit code {exit_code()})")
                end = end or time.monotonic() + seconds
                while time.monotonic() < end:
                    told = said(HANG)
                    if told in (None, GONE):
                        code, kind = exit_code(), "hang" if told is None else "crash"
                        _keep_current(Path(place), output, name, number, f"{kind}, exit code {code}\n")
                        told = (kind, f"{kind}, exit code {code}", 0.0)
                    outcome, kind, peak = told
                    number += 1
                    tally.outcomes[outcome] += 1
                    tally.peak = max(tally.peak, peak)
                    tally.kinds.update([kind] if outcome in ("crash", "hang") else [])
                    if kind.startswith(("hang", "crash, exit")):
                        break
    return tally


class _worker:  # noqa: N801 - a context manager
    """A process that reads one input after the other; gives what it says next, and its exit code."""

    def __init__(self, name: str, seed: int, first: int, place: Path, output: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._reports, theirs = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=work, args=(name, seed, first, (place, output), theirs), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> tuple[Callable[[float], Any], Callable[[], int | None]]:
        return self._said, self._exit_code

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def _said(self, patience: float) -> Any:
        try:
            return self._reports.recv() if self._reports.poll(patience) else None
        except EOFError:
            return GONE

    def _exit_code(self) -> int | None:
        self._process.join(5)
        return self._process.exitcode


def work(name: str, seed: int, first: int, places: tuple[Path, Path], reports: Connection) -> None:
    """Read input after input; tell the outcome, what was raised, and MiB at the highest above those at rest."""
    place, output = places
    _be_silent()
    shutil.rmtree(place / "held", ignore_errors=True)
    (place / "held").mkdir()
    target = open_target(name, place / "held")
    for suffix, content in target.seeds:  # what is imported late is there before memory is measured
        current = place / f"current{suffix}"
        current.write_bytes(content)
        outcome, kind, _ = outcome_of(target, current)
        assert outcome != "crash", kind
        current.unlink()
    held = _size("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    reports.send("ready")
    seen: Counter[str] = Counter()
    for number, current in _inputs(name, seed, first, place, target):
        rest = _rest()
        outcome, kind, told = outcome_of(target, current)
        if outcome == "crash":
            seen[kind] += 1
            if seen[kind] <= KEPT:
                _keep_current(place, output, name, number, told)
        reports.send((outcome, kind, (_size("VmHWM") - rest) / MIB))


def _inputs(name: str, seed: int, first: int, place: Path, target: Target) -> Iterator[tuple[int, Path]]:
    number = first
    while True:
        suffix, content = one_of(target.seeds, dict(target.mutations), Random(f"{seed}/{name}/{number}"))
        current = place / f"current{suffix}"
        current.write_bytes(content)
        yield number, current
        current.unlink(missing_ok=True)
        number += 1


def outcome_of(target: Target, path: Path) -> tuple[str, str, str]:
    """Read one file: refused, accepted or crash; what was raised where; the whole of it."""
    try:
        target.read(path)
    except target.refusals as error:
        told = str(error)
        if "\n" in told or not told:
            return "crash", f"{type(error).__name__} of several lines or none", told
        return "refused", "", ""
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "harmofl" in frame.filename]
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
        return "crash", f"{type(error).__name__} at {at}: {str(error)[:100]!r}", traceback.format_exc()
    return "accepted", "", ""


def _keep_current(place: Path, output: Path, name: str, number: int, told: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    stem = output / f"{name.replace(' ', '_')}_{number}"
    for path in place.glob("current*"):
        shutil.copyfile(path, Path(f"{stem}{path.name.removeprefix('current')}"))
    Path(f"{stem}.raised").write_text(told, encoding="utf-8", errors="replace")


def _be_silent() -> None:
    """Decoders say on the console what is wrong with each of millions of files."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    warnings.simplefilter("ignore")


def _size(key: str) -> int:
    """A size of this process in bytes: VmSize, VmRSS, or VmHWM since the last `_rest`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _rest() -> int:
    """Bytes in use now; the highest number counts anew from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _size("VmRSS")


if __name__ == "__main__":
    sys.exit(main())
