"""Every part against its limit: ratios measured in one run, on this machine.

    OMP_NUM_THREADS=1 python -m tests.benchmarks [--only amplitude training] [--json FILE]

Prints what was measured, its target, the limit, the noise (half the 95 % interval of the median) and pass or short.
Exit status 1 where a row is short.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from tests.benchmarks.rows import Row

PARTS = ("amplitude", "training", "training_released", "federation", "bounds", "data", "start")
LONG = ("simulated_sites", "thousand_sites")  # a quarter of an hour, four minutes: only where they are named
HEAD = "| what | target | measured | limit | noise | |\n|---|---|---|---|---|---|"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS + LONG, default=PARTS, help="measure these parts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: its folder is not there; make it first")
    rows: list[Row] = []
    print(HEAD, flush=True)
    for part in options.only:
        measured = import_module(f"tests.benchmarks.{part}").measure()
        print(*map(line, measured), sep="\n", flush=True)
        rows += measured
    if options.json:
        told = [asdict(row) | {"passed": row.passed} for row in rows]
        options.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.passed for row in rows) else 1


def line(row: Row) -> str:
    verdict = "beside" if row.limit is None else "pass" if row.passed else "short"
    limit = "" if row.limit is None else f"{row.limit:.4g}"
    noise = "" if row.noise is None else f"{row.noise:.1%}"
    return f"| {row.what} | {row.target} | {row.measured:.4g} | {limit} | {noise} | {verdict} |"


if __name__ == "__main__":
    sys.exit(main())
