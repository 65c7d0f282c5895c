"""Where the time of a simulated run went, by the times in its own logs; nothing runs.

    nvflare simulator jobs/harmofl_prostate && python -m tests.benchmarks.demo_parts simulator_workspace

Each task of a site gives three parts: FLARE connects the process, imports (until the site says what it computes on),
and the work. Training holds the score of the model received. What no task covers: processes that start and end, FLARE's
waits between them, and the server. Where several sites run at a time, their seconds overlap, and their sum says so.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

MARKS = {
    "begun": re.compile(r"ClientTaskWorker started to run"),
    "given": re.compile(r"got task assignment: name=(\w+)"),
    "imported": re.compile(r"HarmoFLExecutor - INFO - .*: computes on "),
    "done": re.compile(r"Finished one task run for client"),
}
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ")


def stamped(lines: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Seconds and text of each line that has a time; traces have none."""
    for line in lines:
        if found := STAMP.match(line):
            yield datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp(), line


def task_parts(lines: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Part and seconds of all tasks in a site's log that came to an end."""
    seen: dict[str, float] = {}
    name = ""
    for second, line in stamped(lines):
        for mark, pattern in MARKS.items():
            if not (found := pattern.search(line)):
                continue
            if mark == "begun":
                seen = {}
            elif mark == "given":
                name = found[1]
            seen[mark] = second
            if mark == "done" and {"given", "imported"} <= seen.keys():
                if "begun" in seen:
                    yield "FLARE connects the process", seen["given"] - seen["begun"]
                yield "imports", seen["imported"] - seen["given"]
                yield name, second - seen["imported"]
                seen = {}  # a process that goes on has neither start nor imports for its next task


def run_parts(workspace: Path) -> tuple[float, Counter[str], Counter[str]]:
    """Seconds of the whole run by the server's log, and of each part the sum over sites and how many there are.

    Raises:
        OSError: the folder holds no run of FLARE's simulator.
    """
    times = [second for second, _ in stamped((workspace / "server" / "log.txt").read_text().splitlines())]
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for log in sorted(workspace.glob("*/log.txt")):
        if log.parent.name == "server":
            continue
        for part, seconds in task_parts(log.read_text().splitlines()):
            spent[part] += seconds  # type: ignore[assignment]
            count[part] += 1
    return times[-1] - times[0], spent, count


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.demo_parts", description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path, help="of FLARE's simulator")
    workspace = parser.parse_args().workspace
    try:
        whole, spent, count = run_parts(workspace)
    except OSError as error:
        parser.error(f"{workspace}: no run of FLARE's simulator ({error.strerror}); name the folder that -w named")
    print("| part | times | s in all | s each |\n|---|---|---|---|")
    for part, seconds in spent.items():
        print(f"| {part} | {count[part]} | {seconds:.1f} | {seconds / count[part]:.2f} |")
    sum_of_parts = sum(spent.values())
    if sum_of_parts <= whole:
        print(f"| start and end of processes, FLARE's waits, server | | {whole - sum_of_parts:.1f} | |")
    else:
        print(f"| (sites side by side: parts last {sum_of_parts / whole:.1f} times the run) | | | |")
    print(f"| whole run | | {whole:.1f} | |")


if __name__ == "__main__":
    main()
