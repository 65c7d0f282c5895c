"""The parser of `harmofl compare`."""

import argparse
from pathlib import Path

DEFAULT_FOLDER = Path("comparison")


def add_compare(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> argparse.ArgumentParser:
    """Add the command; whoever calls this adds --set."""
    command = commands.add_parser(
        "compare",
        help="methods, seeds and settings side by side, with a page that says which is better and how sure that is",
        description="Run a grid of methods and seeds on one job, in one process a run, several at a time, and write "
        "comparison.html, .json and .csv. Finished runs are kept: the same command goes on after a stop. Exit code 0, "
        "1 where a run failed (it is named, the others are compared), 2 for a mistake in the command or the job.",
    )
    command.add_argument("job", type=Path, metavar="JOB", help="job folder, for example jobs/harmofl_prostate")
    command.add_argument("--methods", nargs="+", required=True, metavar="NAME", help="the first one is the baseline")
    command.add_argument(
        "--seeds", nargs="+", type=_seed, default=[0, 1, 2], metavar="N", help="repetitions (default: 0 1 2)"
    )
    command.add_argument(
        "--sweep",
        dest="sweeps",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="also try these values of a setting, for example perturbation.alpha=0,0.005,0.05; may be repeated",
    )
    command.add_argument(
        "--leave-one-site-out",
        action="store_true",
        help="also train without each site in turn and score on it, as a hospital that took no part",
    )
    _add_places(command)
    command.add_argument("--landscape", action="store_true", help="also show the loss around the models of each method")
    command.add_argument("--no-images", action="store_true", help="put no image of a site on the page")
    return command


def _add_places(command: argparse.ArgumentParser) -> None:
    data = command.add_mutually_exclusive_group()
    data.add_argument(
        "--data",
        type=Path,
        metavar="ROOT",
        help="folder of the sites' folders (HARMOFL_DATA_ROOT); without either and where the job names none, synthetic "
        "data as with --demo",
    )
    data.add_argument("--demo", action="store_true", help="synthetic data, whatever HARMOFL_DATA_ROOT says")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        default=DEFAULT_FOLDER,
        metavar="DIR",
        help="receives the page and a folder a run (default: ./comparison, resumed if it exists)",
    )
    command.add_argument(
        "--processes", type=_count, metavar="N", help="runs at a time (default: all that fit into cores and memory)"
    )


def run_compare(options: argparse.Namespace) -> int:
    """Do what the parsed command line asks for."""
    from harmofl.app.compare import compare
    from harmofl.app.grid_plan import Request

    return compare(
        Request(
            job=options.job,
            assignments=options.assignments,
            methods=list(dict.fromkeys(options.methods)),
            seeds=list(dict.fromkeys(options.seeds)),
            sweeps=options.sweeps,
            leave_one_site_out=options.leave_one_site_out,
            data=options.data,
            demo=options.demo,
            output=options.output,
            processes=options.processes,
            landscape=options.landscape,
            images=not options.no_images,
        )
    )


def _seed(text: str) -> int:
    return _whole(text, 0)


def _count(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return number
