"""The commands that make evidence readable."""

import argparse
from pathlib import Path


def run_report(options: argparse.Namespace) -> int:
    """`harmofl report`."""
    from harmofl.app.report import report

    return report(
        options.run,
        data=options.data,
        site=options.site,
        kit=options.kit,
        demo=options.demo,
        local_only=options.local_only,
        output=options.output,
    )


def add_report(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `harmofl report`."""
    parser = commands.add_parser(
        "report",
        help="write the report of a run again, with example pictures or a comparison with local-only",
        description="Write report.html from results.json and round_metrics.jsonl, which are not changed. Exit code 0, "
        "1 where a site's data cannot be used, 2 for a mistake in the command.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="simulator workspace, downloaded job, or a folder that holds results.json"
    )
    examples = parser.add_mutually_exclusive_group()
    examples.add_argument(
        "--data",
        type=Path,
        metavar="ROOT",
        help="add pictures of the best, median and worst test case of each site whose folder is found here; the page "
        "then holds images and must stay where they may be seen",
    )
    examples.add_argument(
        "--demo", action="store_true", help="add pictures of a demo: its synthetic data is made again"
    )
    parser.add_argument("--site", metavar="NAME", help="draw this site only; ROOT may then be its own folder")
    parser.add_argument(
        "--kit",
        type=Path,
        metavar="KIT",
        help="this hospital's startup kit: split by its patient_pattern, as the run did",
    )
    parser.add_argument(
        "--local-only", type=Path, metavar="RUN2", help="compare with a run of method local_only on the same data"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the page (default: report.html beside results.json)"
    )
