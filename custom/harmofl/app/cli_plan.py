"""The parser of `harmofl plan`."""

import argparse


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the command; whoever calls this adds --set."""
    command = commands.add_parser(
        "plan",
        help="what a round of many sites will take, from parts measured on this machine",
        description="Measure training, packing and averaging here for some seconds, and compute time, memory and bytes "
        "of a round of any number of sites. Exit code 0, 2 for a mistake in the command or the job.",
    )
    command.add_argument("--sites", type=_whole, required=True, metavar="N", help="how many sites take part")
    command.add_argument(
        "--bandwidth", type=_rate, required=True, metavar="RATE", help="the server's line, for example 100Mbit"
    )
    command.add_argument(
        "--site-bandwidth", type=_rate, metavar="RATE", help="a site's line (default: as fast as the server's)"
    )
    command.add_argument(
        "--model", required=True, metavar="JOB", help="job folder, or a network's name: unet, densenet121"
    )
    command.add_argument(
        "--relays",
        type=_whole,
        default=0,
        metavar="N",
        help="also say what the server and each of N relays carry that sum what their sites send",
    )
    command.add_argument(
        "--images", type=_whole, default=1000, metavar="N", help="training images of a site (default: 1000)"
    )
    return command


def run_plan(options: argparse.Namespace) -> int:
    """Do what the parsed command line asks for."""
    from harmofl.app.plan import Request, plan

    return plan(
        Request(
            model=options.model,
            assignments=options.assignments,
            sites=options.sites,
            server_rate=options.bandwidth,
            site_rate=options.site_bandwidth or options.bandwidth,
            images=options.images,
            relays=options.relays,
        )
    )


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 to 999999999")
    return int(text)


def _rate(text: str) -> float:
    from harmofl.app.plan import rate_of

    try:
        return rate_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
