"""The commands that use a model file: predict, evaluate, export."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harmofl.app.model_file import LoadedModel

KIT_HELP = "this hospital's startup kit: read the folder by its patient_pattern and centers, as its site does"
FORMATS = ("monai-bundle", "torchscript", "onnx")


def run_predict(options: argparse.Namespace) -> int:
    """`harmofl predict`."""
    from harmofl.app.predict import predict

    return predict(_model(options), options.images, options.output, profile_of=options.profile_of, force=options.force)


def run_evaluate(options: argparse.Namespace) -> int:
    """`harmofl evaluate`."""
    from harmofl.app.evaluate import evaluate

    model, data, site = _model(options), options.data, options.site
    if options.kit is not None:
        from dataclasses import replace

        from harmofl.app.hospital_names import read_hospital

        own = read_hospital(options.kit)
        model, data, site = replace(model, experiment=own.words_in(model.experiment)), own.own_folder(data), own.name
    return evaluate(
        model,
        data,
        options.output,
        site=site,
        profile_of=options.profile_of,
        force=options.force,
    )


def run_export(options: argparse.Namespace) -> int:
    """`harmofl export`."""
    from harmofl.app.export import export

    return export(_model(options), options.output, options.format, profile_of=options.profile_of, force=options.force)


def _model(options: argparse.Namespace) -> "LoadedModel":
    from harmofl.app.job import read_job
    from harmofl.app.model_file import load_model
    from harmofl.experiment import resolve

    expected = []
    if options.job is not None:
        job = read_job(options.job, [])
        # a demo may train a smaller network; only task and network count here, so the task need not be admitted
        expected = [resolve(job.settings, demo=demo) for demo in (False, True) if not demo or job.settings.get("demo")]
    return load_model(options.model, expected, options.device)


def add_model_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the three parsers."""
    _add_predict(commands)
    _add_evaluate(commands)
    _add_export(commands)


def _add_predict(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    predict = commands.add_parser(
        "predict",
        help="predict images with a trained model",
        description="Write a mask for each image (NIfTI on the image's own grid, or PNG of its size), or one table of "
        "class probabilities. Images are only read. Exit code 0, 1 where an image could not be used, 2 for a mistake.",
    )
    _add_model(predict)
    predict.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="files to predict, each for itself")
    predict.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="receives the answers")
    _add_profile(predict)


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="score a trained model on the images of a hospital",
        description="Score all cases of a folder, also of a hospital that took no part in training, with intervals. "
        "Exit code 0, 1 where a case could not be used, 2 for a mistake in the command.",
    )
    _add_model(evaluate)
    evaluate.add_argument("data", type=Path, metavar="DATA", help="folder of the cases, or with --site a data root")
    evaluate.add_argument(
        "--site", type=_name, metavar="NAME", help="the hospital's folder in DATA, or its centers in metadata.csv"
    )
    evaluate.add_argument("--kit", type=Path, metavar="KIT", help=KIT_HELP)
    evaluate.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="for evaluation.json, not in DATA (default: .)"
    )
    _add_profile(evaluate)


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser(
        "export",
        help="write a trained model for other programs, checked against this one",
        description="Write the model with its amplitude step. Exit code 0, 1 where the exported model answers "
        "otherwise by more than 0.0001, 2 for a mistake in the command.",
    )
    _add_model(export)
    export.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to make")
    export.add_argument("--format", required=True, choices=FORMATS, help="what to write")
    _add_profile(export)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, required=True, metavar="FILE", help="such as best_FL_global_model.pt")
    command.add_argument("--job", type=Path, metavar="JOB", help="refuse a model of another task or network than JOB's")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if any")


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile-of",
        type=Path,
        metavar="DIR",
        help="take the own profile of all images in this folder of the hospital, not of each case (region site_gain)",
    )
    command.add_argument("--force", action="store_true", help="replace what an earlier call left, nothing else")


def _name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a site")
    return text
