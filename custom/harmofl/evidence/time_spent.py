"""What a comparison spends its time on, and how much of that is beside the runs themselves."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

# Of a run: its process and model, demo data and decoding, rounds with their validation, test scores, its own report,
# what explains it; of the command: what has to run, example images, tables and page.
Part = Literal[
    "start", "reading", "training", "scoring", "report", "explaining", "landscape", "planning", "pictures", "page"
]
PARTS: tuple[Part, ...] = get_args(Part)
OF_RUNS = ("training", "scoring")  # the others are beside


def added_up(spent: Iterable[Mapping[Part, float]]) -> dict[Part, float]:
    """Seconds by part over several runs, and of the command itself; parts that took none of them are left out."""
    total = dict.fromkeys(PARTS, 0.0)
    for held in spent:
        for part, seconds in held.items():
            total[part] += seconds
    return {part: round(seconds, 2) for part, seconds in total.items() if seconds > 0}


def share_beside(spent: Mapping[Part, float]) -> float | None:
    """Which share of the seconds went to anything but training and scoring; None where nothing is known."""
    total = sum(spent.values())
    return sum(seconds for part, seconds in spent.items() if part not in OF_RUNS) / total if total else None


def spent_line(spent: Mapping[Part, float]) -> str:
    """One line for whoever waited: the share beside training and scoring, and of each part, the largest first."""
    total, share = sum(spent.values()), share_beside(spent)
    if share is None:
        return "no run says what it spent its time on"
    # the two first, then what is beside them, the largest first
    parts = sorted((part for part in PARTS if part in spent), key=lambda part: (part not in OF_RUNS, -spent[part]))
    told = ", ".join(f"{part} {spent[part] / total:.1%}" for part in parts)
    return f"{share:.1%} of {total:.0f} s of all processes went to other things than training and scoring ({told})"
