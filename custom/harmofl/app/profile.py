"""The own profile that a `site_gain` model needs: that of each image, or of a folder of a hospital's images."""

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from harmofl.app.job import JobError
from harmofl.app.model_file import LoadedModel
from harmofl.data.findings import CaseError, count_text
from harmofl.data.layout import JUNK
from harmofl.tasks.single_images import image_use

Tell = Callable[[str], None]


def hospital_profile(model: LoadedModel, folder: Path | None, tell: Tell) -> Tensor | None:
    """Mean log profile of all images of a folder and the folders in it; annotations are neither needed nor read.

    Args:
        model: whose training defines what is measured.
        folder: of `--profile-of`; None where each image is to have its own.
        tell: receives one line for each image that is left out.

    Returns:
        (C, bins), or None without a folder.

    Raises:
        JobError: the model takes no profile, or no image of the folder can be read.
    """
    if folder is None:
        return None
    _check_folder(model, folder)
    count = 0

    def inputs() -> Iterator[Tensor]:
        nonlocal count
        for path in _images(model, folder):
            try:
                image = image_use(model.experiment.task).read(path, model.experiment)
            except CaseError as error:
                tell(f"left out of the profile: {error.finding}")
                continue
            count += 1
            yield from image.inputs()

    try:
        profile = model.profile(inputs())
    except ValueError:
        wanted = image_use(model.experiment.task).form
        raise JobError(f"--profile-of {folder}: holds no image that can be read; {wanted} is wanted") from None
    if profile is not None and bool(profile.isnan().any()):
        tell(f"in {folder} a channel of no image has contrast; it is not filtered")
    tell(f"profile of {count_text(count, 'image')} in {folder}")
    return profile


def _check_folder(model: LoadedModel, folder: Path) -> None:
    if not model.takes_profile:
        region = model.experiment.amplitude.region
        raise JobError(f"--profile-of: {model.path.name} has region {region}, which needs no profile; leave it out")
    if not folder.is_dir():
        raise JobError(f"--profile-of {folder}: is not a folder; name one with images of the hospital")


def _images(model: LoadedModel, folder: Path) -> list[Path]:
    use = image_use(model.experiment.task)
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and use.takes(path)
        and not use.is_annotation(path)
        and not any(part.startswith(".") or part.casefold() in JUNK for part in path.relative_to(folder).parts)
    ]
