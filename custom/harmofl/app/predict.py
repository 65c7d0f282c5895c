"""`harmofl predict`: masks or class probabilities of images without annotation."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import Tensor

from harmofl.app.console import plain_console
from harmofl.app.job import JobError
from harmofl.app.model_file import LoadedModel
from harmofl.app.profile import hospital_profile
from harmofl.core.training import NotFiniteError
from harmofl.data.findings import CaseError, count_text, refusal
from harmofl.flare.state import write_text_atomically
from harmofl.tasks.single_images import Answer, ImageUse, SingleImage, image_use

TABLE = "predictions.csv"
Row = list[str]
DIGITS = 6  # of a probability; the rounding of float32 stays below


@dataclass(frozen=True)
class Prediction:
    """One image and where its answer goes; `target` is None where it is a row of the table."""

    source: Path
    target: Path | None


def predict(
    model: LoadedModel, images: Sequence[Path], output: Path, *, profile_of: Path | None = None, force: bool = False
) -> int:
    """Predict every image for itself, write the answers to `output` and tell of each in one line.

    Returns:
        1 where an image could not be used, else 0.

    Raises:
        JobError: a mistake in the command: nothing to predict, an answer that would overwrite something, two answers of
            one name.
    """
    console = plain_console()
    console.print(f"{model.label}, on {model.device.type}")
    use = image_use(model.experiment.task)
    wanted = [path for path in images if not use.is_annotation(path)]
    for path in images:
        if path not in wanted:
            console.print(f"passed over: {path.name} is a mask by its name")
    plan = _plan(use, wanted, output, force=force)
    own = hospital_profile(model, profile_of, console.print)
    output.mkdir(parents=True, exist_ok=True)
    rows, failed = [], 0
    for step in plan:
        try:
            row = _predict_one(model, use, step, own, console)
        except CaseError as error:
            console.print(str(error.finding))
            failed += 1
        else:
            rows += [row] if use.columns else []
    if rows:
        _write_table(use, rows, output / TABLE)
        console.print(f"probabilities -> {output / TABLE}")
    console.print(f"{len(plan) - failed} of {count_text(len(plan), 'image')} predicted")
    return int(failed > 0)


def _predict_one(model: LoadedModel, use: ImageUse, step: Prediction, own: Tensor | None, console: Console) -> Row:
    """Write the mask of an image where it has one, and return its row of the table."""
    image = _read(use, step.source, model)
    for finding in image.findings:
        console.print(str(finding))
    answer = _answer(model, image, step.source.name, own)
    if step.target is not None:
        use.write(answer, step.source, step.target)
    console.print(f"{step.source.name}: {answer.summary}{f' -> {step.target}' if step.target else ''}")
    return [step.source.name, *(f"{share:.{DIGITS}f}" for share in answer.probabilities)]


def _read(use: ImageUse, path: Path, model: LoadedModel) -> SingleImage:
    if path.is_dir():
        raise refusal("not_a_file", path.name, "is a folder", "name the files in it")
    if not use.takes(path):
        task = model.experiment.task
        raise refusal("other_format", path.name, f"the model is of task {task} and takes {use.form}", "convert it")
    return use.read(path, model.experiment)


def _answer(model: LoadedModel, image: SingleImage, name: str, own: Tensor | None) -> Answer:
    try:
        return image.answer(model.predictor(model.own_profile_of(image) if own is None else own))
    except NotFiniteError as error:
        message = f"{model.path.name} cannot be applied: {error}"
        raise refusal("not_finite_output", name, message, "take the model of another round") from None


def _plan(use: ImageUse, images: Sequence[Path], output: Path, *, force: bool) -> list[Prediction]:
    if not images:
        raise JobError("no image to predict: masks by their name are passed over")
    if output.exists() and not output.is_dir():
        raise JobError(f"-o {output}: is a file; name a folder")
    places = {path.parent.resolve() for path in images}
    if output.resolve() in places:
        raise JobError(f"-o {output}: holds the images, and their folder is never written to; name another folder")
    by_name: dict[str, Path] = {}
    for path in images:
        name = (path.name if use.columns else use.result(path)).casefold()
        if name in by_name:
            raise JobError(f"{by_name[name]} and {path} would have one answer, {name}; predict them into two folders")
        by_name[name] = path
    plan = [Prediction(path, None if use.columns else output / use.result(path)) for path in images]
    targets = dict.fromkeys(step.target or output / TABLE for step in plan)
    present = [target for target in targets if target.exists() or target.is_symlink()]
    if present and not force:
        more = f" and {len(present) - 1} more" if len(present) > 1 else ""
        raise JobError(f"{present[0]}{more} exists already; name another folder, or overwrite with --force")
    for target in present:
        if not (use.is_answer(target) if target.name != TABLE else _is_table(use, target)):
            raise JobError(
                f"{target}: --force replaces earlier predictions only, which this is not; name another folder"
            )
    return plan


def _is_table(use: ImageUse, path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().strip() == ",".join(["file", *use.columns])
    except (OSError, ValueError):
        return False


def _write_table(use: ImageUse, rows: Sequence[Sequence[str]], path: Path) -> None:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["file", *use.columns])
    table.writerows(rows)
    write_text_atomically(text.getvalue(), path)
