"""The tables of the study in jobs/README.md, from its runs in study.csv.

    python -m tests.benchmarks.study_table

Differences are in points to FedAvg on z-scored images with the same rounds, epochs and norm layer, and to that with the
same forward-backward passes; with a 95 % interval (Student's t over pairs) from three pairs on. Passes are a ratio.
"""

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from harmofl.core.paired import paired_difference

RUNS = Path(__file__).with_name("study.csv")
Row = Mapping[str, str]
Pair = tuple[str, str, str]  # task, seed, site that was left out
Key = tuple[str, str, str, str]  # a setting before it
SHAPE = re.compile(r"( R\d+)?( E\d+)?( 2x)?( averaged1)?( batch_stats)?$")
PUBLISHED = ("as_published", "as_described")  # they run on batch_stats


def references_of(setting: str) -> tuple[str, str]:
    """Plain FedAvg on z-scored images with the same rounds, epochs and norm layer, and that with the same passes."""
    shape = SHAPE.search(setting)
    assert shape is not None
    rounds, epochs, twice, _, norm = (part or "" for part in shape.groups())
    if setting.startswith(PUBLISHED):
        norm = " batch_stats"
    once = f"zscore+off a0{rounds}{epochs}{norm}"
    two_passes = twice or " a0 " not in f"{setting} "
    return once, f"zscore+off a0{rounds}{epochs} 2x{norm}" if two_passes else once


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of all tables."""
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = [row for row in rows if row["stage"] == stage]
        if stage == "variant":  # its references are those of the same seeds
            own += [row for row in rows if row["stage"] == "confirm" and row["setting"].startswith("zscore+off")]
        tasks = list(dict.fromkeys(row["task"] for row in rows if row["stage"] == stage))
        for task in tasks:
            yield from _table(f"{stage}, {task}", [row for row in own if row["task"] == task])
        if stage == "confirm":
            yield from _table("confirm, all tasks", own)


def _table(title: str, rows: Sequence[Row]) -> Iterator[str]:
    held = {(row["setting"], row["task"], row["seed"], row["left_out"]): row for row in rows}
    pairs = list(dict.fromkeys(key[1:] for key in held))
    yield f"\n{title}: {', '.join(' '.join(filter(None, pair[1:])) for pair in pairs)}\n"
    yield "| setting | scores | passes | to FedAvg, equal rounds | to FedAvg, equal passes |"
    yield "|---|---|---|---|---|"
    for setting in dict.fromkeys(row["setting"] for row in rows):
        rounds, passes = references_of(setting)
        own = [held[setting, *pair] for pair in pairs if (setting, *pair) in held]
        scores = " ".join(f"{float(row['value']):.3f}" for row in own)
        both = [pair for pair in pairs if (setting, *pair) in held and (rounds, *pair) in held]
        ratios = [int(held[setting, *pair]["passes"]) / int(held[rounds, *pair]["passes"]) for pair in both]
        differences = [_difference(held, pairs, setting, reference) for reference in (rounds, passes)]
        yield f"| {setting} | {scores} | {np.mean(ratios):.1f} | {' | '.join(differences)} |"


def _difference(held: Mapping[Key, Row], pairs: Sequence[Pair], setting: str, reference: str) -> str:
    """In points, with an interval from three pairs on; empty where there is nothing to compare it with."""
    both = [pair for pair in pairs if (setting, *pair) in held and (reference, *pair) in held]
    if not both or setting == reference:
        return ""
    ones, others = ([100 * float(held[name, *pair]["value"]) for pair in both] for name in (setting, reference))
    told = paired_difference(ones, others)
    sure = f" [{told.low:+.1f}, {told.high:+.1f}]" if len(both) > 2 else ""
    return f"{told.mean:+.1f}{sure}"


def main() -> None:
    """Print them."""
    with RUNS.open(encoding="utf-8") as file:
        sys.stdout.write("\n".join(tables(list(csv.DictReader(file)))) + "\n")


if __name__ == "__main__":
    main()
