"""The harmofl command."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harmofl.app.cli_compare import add_compare, run_compare
from harmofl.app.cli_evidence import add_report, run_report
from harmofl.app.cli_model import add_model_commands, run_evaluate, run_export, run_predict
from harmofl.app.cli_plan import add_plan, run_plan
from harmofl.app.cli_privacy import add_privacy, run_privacy


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments behind `harmofl`; those of the process where none are given.

    Returns:
        0, 1 where the data or the run failed, 2 for a mistake in the command or the job, 130 when interrupted.
    """
    options = _parser().parse_args(argv)
    # what a command needs is imported when it runs: `harmofl --help` answers at once
    from harmofl.app.job import JobError
    from harmofl.experiment import ExperimentError
    from harmofl.sections import one_line

    try:
        return COMMANDS[options.command](options)
    except (ExperimentError, JobError) as error:
        sys.stderr.write(f"harmofl {options.command}: {one_line(str(error))}\n")
        return 2
    except OSError as error:  # no rights, no space, a file where a folder belongs
        reason = error.strerror or str(error) or type(error).__name__
        line = f"{error.filename or 'a file'}: cannot be used ({reason})"
        sys.stderr.write(f"harmofl {options.command}: {one_line(line)}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"harmofl {options.command}: interrupted\n")
        return 130


def _check(options: argparse.Namespace) -> int:
    from harmofl.app.site_process import PASSIVE

    # before torch is loaded, which reads it then: a step's processor time must be that of its work
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
    from harmofl.app.check import check

    return check(
        options.data_root,
        options.job,
        options.assignments,
        options.site,
        kit=options.kit,
        allow_code=options.allow_code,
    )


def _simulate(options: argparse.Namespace) -> int:
    from harmofl.app.simulate import simulate

    return simulate(
        options.job,
        options.assignments,
        data=options.data,
        demo=options.demo,
        threads=options.threads,
        workspace=options.workspace,
    )


def _demo_data(options: argparse.Namespace) -> int:
    from harmofl.app.demo_data import demo_data

    return demo_data(
        options.job,
        options.assignments,
        output=options.output,
        gallery=options.gallery,
        allow_code=options.allow_code,
    )


def _bundle(options: argparse.Namespace) -> int:
    from harmofl.app.bundle import bundle

    return bundle(
        options.job,
        options.assignments,
        output=options.output,
        demo=options.demo,
        preinstalled=options.preinstalled,
        project=options.project,
    )


def _preflight(options: argparse.Namespace) -> int:
    from harmofl.app.preflight import preflight

    return preflight(options.kit, options.job, options.assignments)


def _watch(options: argparse.Namespace) -> int:
    from harmofl.app.watch import watch

    return watch(options.kit, options.job_id, options.output)


def _resume(options: argparse.Namespace) -> int:
    from harmofl.app.resume import resume

    return resume(options.job, options.job_id, output=options.output, kit=options.kit)


def _purge(options: argparse.Namespace) -> int:
    from harmofl.app.purge import purge

    return purge(options.kit, options.run, everything=options.everything, cache=options.cache)


def _approve(options: argparse.Namespace) -> int:
    from harmofl.app.approve import approve

    return approve(options.kit, options.job, yes=options.yes, reject=options.reject)


COMMANDS = {
    "check": _check,
    "simulate": _simulate,
    "demo-data": _demo_data,
    "bundle": _bundle,
    "preflight": _preflight,
    "approve": _approve,
    "watch": _watch,
    "resume": _resume,
    "purge": _purge,
    "compare": run_compare,
    "predict": run_predict,
    "evaluate": run_evaluate,
    "export": run_export,
    "report": run_report,
    "plan": run_plan,
    "privacy": run_privacy,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="harmofl", description="HarmoFL for hospitals, on NVIDIA FLARE.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_check(commands)
    _add_simulate(commands)
    _add_bundle(commands)
    _add_demo_data(commands)
    _add_preflight(commands)
    _add_approve(commands)
    _add_watch(commands)
    _add_resume(commands)
    _add_purge(commands)
    add_privacy(commands)
    _add_set(add_compare(commands))
    add_model_commands(commands)
    add_report(commands)
    _add_set(add_plan(commands))
    return parser


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    check = commands.add_parser(
        "check",
        help="look at the images of a site before any training",
        description="List what the folders of images hold, what is wrong with them and what training will cost. "
        "Exit code 0, 1 where something cannot be used, 2 for a mistake in the command or the job.",
    )
    check.add_argument("data_root", type=Path, metavar="DATA_ROOT", help="folder of the sites' folders, or of one site")
    check.add_argument("--job", type=Path, required=True, help="job folder, for example jobs/harmofl_prostate")
    check.add_argument("--site", metavar="NAME", help="check this site of the job only")
    check.add_argument("--kit", type=Path, metavar="KIT", help="check as the site of this startup kit reads its folder")
    _add_allow_code(check)
    _add_set(check)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run a job on this machine, one process a site",
        description="Run a job in FLARE's simulator and check that every site took part to the end. Exit code 0, 1 "
        "where a site failed (the last line names it), 2 for a mistake in the command or the job.",
    )
    simulate.add_argument("job", type=Path, metavar="JOB", help="job folder, for example jobs/harmofl_prostate")
    data = simulate.add_mutually_exclusive_group()
    data.add_argument("--data", type=Path, metavar="ROOT", help="folder of the sites' folders (HARMOFL_DATA_ROOT)")
    data.add_argument("--demo", action="store_true", help="synthetic data, whatever HARMOFL_DATA_ROOT says")
    simulate.add_argument(
        "--threads", type=_count, metavar="N", help="sites at a time (default: all that fit into memory)"
    )
    simulate.add_argument(
        "--workspace",
        type=Path,
        default=Path("simulator_workspace"),
        metavar="DIR",
        help="receives logs and results, replaced by every run (default: ./simulator_workspace)",
    )
    _add_set(simulate)


def _add_demo_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo_data = commands.add_parser(
        "demo-data",
        help="write the synthetic data of a job as files, with a page of example images",
        description="Write the synthetic data of every site of a job as real files. Exit code 0, 1 where data that was "
        "there already cannot be read, 2 for a mistake in the command or the job.",
    )
    demo_data.add_argument("job", type=Path, metavar="JOB", help="job folder, for example jobs/harmofl_prostate")
    demo_data.add_argument(
        "-o", dest="output", type=Path, required=True, metavar="DIR", help="receives a folder a site: a data root"
    )
    demo_data.add_argument(
        "--gallery",
        action="store_true",
        help="also write DIR/gallery.html: images of every site before and after each step of the normalization",
    )
    _add_allow_code(demo_data)
    _add_set(demo_data)


def _add_bundle(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bundle = commands.add_parser(
        "bundle",
        help="pack a job with its code for submission to sites",
        description="Write a job that needs nothing but its folder: the package as real files, the experiment with "
        "every default, and a manifest with the hash of each file. Exit code 0, 2 where the job would fail.",
    )
    bundle.add_argument("job", type=Path, metavar="JOB", help="job folder, for example jobs/harmofl_prostate")
    bundle.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="receives a folder of the job's name"
    )
    bundle.add_argument("--demo", action="store_true", help="train at the settings of the job's demo")
    bundle.add_argument(
        "--preinstalled", action="store_true", help="leave the code out: every site has the package installed"
    )
    bundle.add_argument("--project", type=Path, metavar="FILE", help="project.yml that must have every site of the job")
    _add_set(bundle)


def _add_preflight(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    preflight = commands.add_parser(
        "preflight",
        help="look at a startup kit and its machine before it starts",
        description="Check certificates, signature, server, data, disk, memory, GPU and policies of a kit; a running "
        "site is not disturbed. Exit code 0, 1 where something must be fixed, 2 for a mistake in the command.",
    )
    preflight.add_argument(
        "kit", type=Path, metavar="KIT", help="startup kit: the folder that holds startup/ and local/"
    )
    preflight.add_argument("--job", type=Path, metavar="JOB", help="job or bundle that is going to run")
    _add_set(preflight)


def _add_approve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    approve = commands.add_parser(
        "approve",
        help="decide at a site about a job that was handed over",
        description="Show what a job would do at a site: settings, code, classes, filters, what would leave. Then keep "
        'the decision: a site with "approval": "required" runs no other job. Without JOB list what was decided and '
        "what waits. Exit code 0, 1 where nothing was decided, 2 for a mistake in the command or the job.",
    )
    approve.add_argument("kit", type=Path, metavar="KIT", help="startup kit of the site")
    approve.add_argument("job", type=Path, nargs="?", metavar="JOB", help="job or bundle, as the lead handed it over")
    decision = approve.add_mutually_exclusive_group()
    decision.add_argument("--yes", action="store_true", help="approve without a question")
    decision.add_argument("--reject", action="store_true", help="reject the job, also one that was approved before")


def _add_watch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    watch = commands.add_parser(
        "watch",
        help="follow a submitted job, one line a round, and fetch its results",
        description="Follow a job to its end. Exit code 0 where it completed, else 1 with the reason in the last line.",
    )
    watch.add_argument("kit", type=Path, metavar="KIT", help="startup kit of the user who submitted the job")
    watch.add_argument("job_id", metavar="JOB_ID", help="as `nvflare job submit` printed it")
    watch.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="receives the results, in a folder of the job's id"
    )


def _add_resume(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    resume = commands.add_parser(
        "resume",
        help="make a job that resumes one that ended, from its last round",
        description="Copy a job so that it begins with the checkpoint that the server kept of JOB_ID: round, best "
        "score, amplitude; each site takes up the state that belongs to that round.",
    )
    resume.add_argument("job", type=Path, metavar="JOB", help="the job or bundle that was submitted")
    resume.add_argument("job_id", metavar="JOB_ID", help="the job that ended")
    resume.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="receives a folder of the job's name"
    )
    resume.add_argument("--kit", type=Path, metavar="KIT", help="submit it at once, with this user's startup kit")


def _add_purge(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    purge = commands.add_parser(
        "purge",
        help="remove what runs left at a site or at the server",
        description="Remove the state of a run below a startup kit; without RUN list what is there. Data, logs, "
        "results and the privacy ledger are not touched. Exit code 0, 1 where something could not be removed, 2 for a "
        "mistake.",
    )
    purge.add_argument("kit", type=Path, metavar="KIT", help="startup kit of the site or the server")
    purge.add_argument("run", nargs="?", metavar="RUN", help="job id, or run id of results.json")
    purge.add_argument("--all", dest="everything", action="store_true", help="remove the state of every run")
    purge.add_argument("--cache", action="store_true", help="remove the cache of decoded images as well")


def _add_allow_code(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow-code", action="store_true", help="run a task that the job brings along (read its code first)"
    )


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of experiment.json, for example training.local_epochs=2; may be repeated",
    )


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return number
