"""One image without annotation, for each task: how it is read, cut for the network, answered and written."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from harmofl.data.findings import Finding, refusal
from harmofl.data.foreign_names import is_mask_beside_image
from harmofl.data.layout import IMAGE_NAME, MASK_STEM
from harmofl.data.library_messages import collect_messages
from harmofl.data.nuclei import MASK_FOLDER, NucleiImage
from harmofl.data.nuclei import MASK_STEM as PICTURE_MASK_STEM
from harmofl.data.patches import LABELS
from harmofl.data.rasters import read_rgb
from harmofl.data.tiles import NucleiTiles, image_tensor, whole_image_logits
from harmofl.data.unlabeled import FittedScan, labels_on_grid, read_fitted_scan, write_labels, wrote_labels
from harmofl.data.windows import background_where_blank, image_windows
from harmofl.tasks import Predict, reader_settings
from harmofl.tasks.nuclei import CLASSES, NucleiReader
from harmofl.tasks.prostate import volume_settings

if TYPE_CHECKING:
    from harmofl.experiment import Experiment

PICTURES = (".png", ".tif", ".tiff", ".jpg", ".jpeg", ".bmp", ".svs")
WRITER = "harmofl predict"  # stands in every PNG mask
AT_ONCE = 16  # inputs of one image held as tensors
# Colors of background and cell types: a picture of indices holds labels for programs and shows colors to people.
PALETTE = (0, 0, 0, 230, 25, 75, 60, 180, 75, 0, 130, 200, 255, 225, 25)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a model says about one image.

    Attributes:
        labels: (S, rows, columns) or (rows, columns) uint8 on the image's own grid, where the answer is a mask.
        probabilities: one a class, where the answer is about the image as a whole.
        summary: the answer in a few words, for a person.
        classes: highest label that a mask can hold.
    """

    labels: np.ndarray | None
    probabilities: tuple[float, ...]
    summary: str
    classes: int = 1


class SingleImage(Protocol):
    """One image as a task reads it.

    Attributes:
        findings: warnings and notices about the file.
    """

    findings: tuple[Finding, ...]

    def inputs(self) -> Iterator[Tensor]:
        """Network inputs (n, C, H, W) that cover the image as training cuts it."""

    def answer(self, predict: Predict) -> Answer:
        """What the model says."""


class ImageUse(Protocol):
    """How a task takes single images.

    Attributes:
        form: what files it takes, for messages.
        columns: names of the probabilities, where answers go into one table instead of a file each.
        shows_scanner: whether the amplitude profile of one image tells its scanner more than its content.
    """

    form: str
    columns: tuple[str, ...]
    shows_scanner: bool

    def takes(self, path: Path) -> bool:
        """Whether a file of this name can be an image of this task."""

    def is_annotation(self, path: Path) -> bool:
        """Whether the name of a file says that it is a mask."""

    def stem(self, path: Path) -> str:
        """The image's name without ending."""

    def result(self, path: Path) -> str:
        """Name of the file that receives the mask."""

    def is_answer(self, path: Path) -> bool:
        """Whether `write` left this file, and nobody drew it by hand."""

    def read(self, path: Path, experiment: "Experiment") -> SingleImage:
        """Read one file by the rules of training.

        Raises:
            CaseError: it cannot be used.
        """

    def write(self, answer: Answer, source: Path, target: Path) -> None:
        """Write a mask so that it appears under its name when it is complete."""


class _Scan:
    def __init__(self, scan: FittedScan) -> None:
        self.scan, self.findings = scan, scan.findings

    def inputs(self) -> Iterator[Tensor]:
        yield from image_windows(self.scan.image).split(AT_ONCE)

    def answer(self, predict: Predict) -> Answer:
        labels = scan_labels(self.scan, predict).numpy()
        milliliters = float(np.count_nonzero(labels) * self.scan.voxel_ml)
        slices = int(labels.any(axis=(1, 2)).sum())
        return Answer(labels, (), f"{milliliters:.1f} mL on {slices} of {len(labels)} slices")


def scan_image(scan: FittedScan) -> SingleImage:
    """A volume that was read beside its mask, as a single image."""
    return _Scan(scan)


def tissue_image(picture: np.ndarray, experiment: "Experiment") -> SingleImage:
    """A picture (H, W, 3) uint8 that was read beside its annotation, as a single image."""
    return _Tissue(picture, [], experiment.data.height)


def scan_labels(scan: FittedScan, predict: Predict) -> Tensor:
    """Labels of a volume on its own grid, (S, rows, columns) uint8."""
    _, rows, columns = scan.shape
    labels = labels_on_grid(predict(image_windows(scan.image)).softmax(1), rows, columns)
    return background_where_blank(labels, scan.image)


class _Scans:
    form = "a NIfTI volume (.nii, .nii.gz)"
    columns: tuple[str, ...] = ()
    shows_scanner = True

    def takes(self, path: Path) -> bool:
        return IMAGE_NAME.fullmatch(path.name) is not None

    def is_annotation(self, path: Path) -> bool:
        return MASK_STEM.fullmatch(self.stem(path)) is not None or is_mask_beside_image(path)

    def stem(self, path: Path) -> str:
        named = IMAGE_NAME.fullmatch(path.name)
        return named["stem"] if named else path.stem

    def result(self, path: Path) -> str:
        return f"{self.stem(path)}_segmentation.nii.gz"

    def is_answer(self, path: Path) -> bool:
        return wrote_labels(path)

    def read(self, path: Path, experiment: "Experiment") -> _Scan:
        return _Scan(read_fitted_scan(path, volume_settings(experiment)))

    def write(self, answer: Answer, source: Path, target: Path) -> None:
        assert answer.labels is not None, "a scan is answered by a mask"
        write_labels(answer.labels, source, target)


class _Tissue:
    def __init__(self, picture: np.ndarray, findings: list[Finding], size: int) -> None:
        nothing = np.zeros(picture.shape[:2], np.uint8)
        self._image, self._size = NucleiImage("", "", picture, nothing, ()), size
        self.findings = tuple(findings)

    def inputs(self) -> Iterator[Tensor]:
        tiles = NucleiTiles([self._image], self._size)
        for start in range(0, len(tiles), AT_ONCE):
            yield torch.stack([tiles[item][0] for item in range(start, min(start + AT_ONCE, len(tiles)))])

    def answer(self, predict: Predict) -> Answer:
        logits = whole_image_logits(predict, self._image, self._size)[0]
        labels = logits.argmax(0).to(torch.uint8).numpy()
        return Answer(labels, (), f"{100 * np.mean(labels > 0):.1f} % of the pixels in nuclei", len(logits) - 1)


class _Pictures:
    """What both tasks on pictures share."""

    form = "a picture (.png, .tif, .jpg, .bmp, .svs)"
    columns: tuple[str, ...] = ()
    shows_scanner = False

    def takes(self, path: Path) -> bool:
        return path.suffix.casefold() in PICTURES

    def stem(self, path: Path) -> str:
        return path.stem

    def is_annotation(self, path: Path) -> bool:
        masked = PICTURE_MASK_STEM.fullmatch(path.stem) or MASK_FOLDER.fullmatch(path.parent.name)
        return masked is not None or is_mask_beside_image(path)

    def result(self, path: Path) -> str:
        return f"{path.stem}_mask.png"

    def is_answer(self, path: Path) -> bool:
        try:
            # what Pillow warns about would stand on the console without the file's name
            with collect_messages(), Image.open(path, formats=("PNG",)) as picture:
                return picture.info.get("Software") == WRITER
        except Exception:  # whatever is no such file
            return False


class _Tissues(_Pictures):
    def read(self, path: Path, experiment: "Experiment") -> _Tissue:
        return _Tissue(*read_rgb(path, path.name), experiment.data.height)

    def write(self, answer: Answer, source: Path, target: Path) -> None:
        labels = answer.labels
        assert labels is not None, "tissue is answered by a mask"
        picture = Image.fromarray(labels * np.uint8(255 if answer.classes == 1 else 1))
        if answer.classes > 1:
            picture.putpalette(PALETTE)
        written = PngInfo()
        written.add_text("Software", WRITER)
        part = target.with_name(f".part-{target.name}")
        try:
            picture.save(part, format="PNG", pnginfo=written)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


class _Patch:
    def __init__(self, picture: np.ndarray, findings: list[Finding]) -> None:
        self._picture, self.findings = image_tensor(picture).unsqueeze(0), tuple(findings)

    def inputs(self) -> Iterator[Tensor]:
        yield self._picture

    def answer(self, predict: Predict) -> Answer:
        shares = predict(self._picture)[0].double().softmax(0)
        label = LABELS[int(shares.argmax())]
        return Answer(None, tuple(shares.tolist()), f"{label} ({float(shares.max()):.3f})")


class _Patches(_Pictures):
    columns: tuple[str, ...] = LABELS

    def read(self, path: Path, experiment: "Experiment") -> _Patch:
        picture, findings = read_rgb(path, path.name)
        wanted = (experiment.data.height, experiment.data.width)
        if picture.shape[:2] != wanted:
            sizes = " instead of ".join(f"{width} x {height}" for height, width in (picture.shape[:2], wanted))
            fix = "cut patches of the size and magnification of training"
            raise refusal("patch_size", path.name, f"the patch has {sizes} pixels (width x height)", fix)
        return _Patch(picture, findings)

    def write(self, answer: Answer, source: Path, target: Path) -> None:
        raise AssertionError("patches are answered in a table")


_USES: dict[str, ImageUse] = {"prostate": _Scans(), "camelyon17": _Patches(), "nuclei": _Tissues()}


def image_use(task: str) -> ImageUse:
    """How a task of the package takes single images."""
    return _USES[task]


def class_names(experiment: "Experiment") -> tuple[str, ...]:
    """Names of the classes in the order of the network's outputs."""
    if experiment.task == "camelyon17":
        return LABELS
    if experiment.task == "prostate":
        return "background", "prostate"
    return "background", *CLASSES[reader_settings(experiment, NucleiReader).classes]
