"""Parser and call of `harmofl privacy`."""

import argparse
from pathlib import Path


def add_privacy(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    privacy = commands.add_parser(
        "privacy",
        help="show what has left a site over all jobs, and the epsilon spent",
        description="Print a site's ledger: every amplitude that left, of how many patients, with what noise; epsilon "
        "and delta spent; what was held back; the split that every job trains by. Exit code 0, 1 where nothing was "
        "given up, 2 for a mistake or a ledger that cannot be used.",
    )
    privacy.add_argument("kit", type=Path, metavar="KIT", help="startup kit of the site")
    privacy.add_argument(
        "--reset-split", dest="reset", metavar="TASK", help="give up the split of a task's first job, after asking"
    )
    privacy.add_argument("--yes", action="store_true", help="do not ask")


def run_privacy(options: argparse.Namespace) -> int:
    """Run it."""
    from harmofl.app.privacy import privacy

    return privacy(options.kit, reset=options.reset, yes=options.yes)
