"""Nuclei in H&E images (MoNuSAC, MoNuSeg, TNBC): tiles in, nucleus or cell type out (HarmoFL, section 4.1)."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator

from harmofl.core.clustered import numbered
from harmofl.core.losses import DiceLossIgnoring
from harmofl.core.scores import image_dice, predicted_classes, summarize
from harmofl.data.findings import Finding, count_text
from harmofl.data.imagescope import CELL_TYPES, IGNORED, NUCLEUS
from harmofl.data.nuclei import NucleiImage, read_nuclei, read_site_images, split_images
from harmofl.data.nuclei_cache import NucleiCache
from harmofl.data.rasters import MOST_PIXELS
from harmofl.data.sitemap import SiteMap, nuclei_folder, read_site_map, site_cases
from harmofl.data.splits import SITE, Part
from harmofl.data.tiles import NucleiTiles, most_tiles, tile_starts, whole_image_logits
from harmofl.sections import ExperimentError, Section
from harmofl.tasks import (
    Evaluation,
    FolderReport,
    Illustration,
    Predict,
    SiteData,
    TaskBounds,
    demo_profile,
    demo_settings,
    reader_settings,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harmofl.experiment import Experiment

SHOWN = 256  # pixels along the edge of a picture of an image
MAP_FILE = "sites.json"  # in the data root; written by the site, not by a job
Split = dict[Part, list[NucleiImage]]
CLASSES = {"nucleus": (NUCLEUS,), "cell_types": CELL_TYPES}


class NucleiReader(Section):
    """What is segmented: nuclei against the rest, or the four cell types of MoNuSAC."""

    classes: Literal["nucleus", "cell_types"] = "nucleus"


class NucleiDemo(Section):
    """Synthetic images of a site: patients, images, their edge in pixels, and the look of each site."""

    patients: Annotated[int, Field(ge=3)] = 20
    images: Annotated[int, Field(ge=3)] = 20
    size: Annotated[int, Field(ge=64)] = 96
    profiles: dict[str, str] = {}

    @field_validator("images")
    @classmethod
    def _one_image_a_patient(cls, images: int, settings: ValidationInfo) -> int:
        if images < settings.data.get("patients", 0):
            raise ValueError(f"{settings.data['patients']} patients need at least as many images")
        return images


class NucleiTask:
    """Reader, loss and scores of the nuclei job."""

    networks = ("unet",)
    in_channels = 3
    decodes_on_access = False
    key_score = "dice"
    score_note = (
        "foreground Dice of each image as a whole, ambiguous regions left out; the interval is over patients, since "
        "images of one patient are alike (jackknife over patients, logit scale). An image where neither prediction nor "
        "truth has a nucleus is undefined"
    )
    is_color = True
    labels = ()
    reader = NucleiReader
    demo = NucleiDemo

    def check(self, experiment: "Experiment") -> None:
        """Refuse what does not fit.

        Raises:
            ExperimentError: tiles that are not square.
        """
        data = experiment.data
        if data.height != data.width:
            raise ExperimentError(f"data.width: tiles are square, so it must be {data.height} as data.height is")
        if data.patient_pattern is not None or data.patient_from != "name":
            key = "patient_from" if data.patient_pattern is None else "patient_pattern"
            raise ExperimentError(f"data.{key}: folders and barcodes name the patients; leave it out")

    def class_prior(self, experiment: "Experiment") -> tuple[float, ...]:
        """Background, then nuclei (about a fifth of a tissue image) or the cell types in their order."""
        if reader_settings(experiment, NucleiReader).classes == "nucleus":
            return 0.8, 0.2
        return 0.8, 0.1, 0.08, 0.01, 0.01

    def bounds(self, experiment: "Experiment") -> TaskBounds:
        """A case is an image, which gives the tiles that cover it."""
        edge, classes = experiment.data.height, CLASSES[reader_settings(experiment, NucleiReader).classes]
        names = ["dice", *(f"dice_{name}" for name in classes if len(classes) > 1)]
        return TaskBounds(1, most_tiles(MOST_PIXELS, edge), dict.fromkeys(names, 1.0), 1.0)

    def loss(self) -> DiceLossIgnoring:
        """The training loss."""
        return DiceLossIgnoring(IGNORED)

    def locate(self, root: Path, site: str, experiment: "Experiment") -> Path:
        """The folder under `root` that holds this site's images, by the site's map, its name or an alias.

        Raises:
            DataRootError: no such folder; one line with the fix.
        """
        return nuclei_folder(root, site, experiment.data.aliases.get(site, ()), site_map_of(root))

    def part(self, folder: Path, site: str, experiment: "Experiment") -> frozenset[Hashable] | None:
        """With a map several sites share a folder: it tells whose an image is, and refuses what two claim."""
        return frozenset({site}) if site_map_of(folder) else None

    def open_site(self, folder: Path, site: str, experiment: "Experiment", cache: Path) -> SiteData:
        """Read, split and check a site's images; they are held decoded, 4 bytes a pixel."""
        images, findings = _read(folder, site, experiment, cache)
        split, more = _split(images, experiment)
        findings += more
        skipped: dict[str, int] = {}
        for finding in findings:
            if finding.severity == "error":
                skipped[finding.code] = skipped.get(finding.code, 0) + 1
        training = NucleiTiles(split["train"], experiment.data.height)
        return SiteData(
            training=training,
            validation=ScoredImages(split["val"], experiment),
            test=ScoredImages(split["test"], experiment),
            findings=findings,
            cases={"training": len(split["train"]), "validation": len(split["val"]), "test": len(split["test"])},
            skipped=lambda: skipped,
            training_patients=training.patients,
            training_cases=[name for name, _, _ in training.keys],
        )

    def inspect(self, folder: Path, site: str, experiment: "Experiment") -> FolderReport:
        """Read every image and annotation as training would."""
        images, findings = _read(folder, site, experiment)
        split, more = _split(images, experiment)
        parts = {image.name: part for part, held in split.items() for image in held}
        size = experiment.data.height
        return FolderReport(
            columns=("image", "patient", "columns x rows", "nuclei %", "ignored %", "split"),
            rows=tuple(_row(image, parts[image.name]) for image in images),
            summary=f"{count_text(len(images), 'image')} of "
            f"{count_text(len({image.patient for image in images}), 'patient')}: "
            f"{len(split['train'])} training, {len(split['val'])} validation, {len(split['test'])} test; "
            f"{count_text(len(NucleiTiles(images, size)), 'tile')} of {size} x {size}",
            findings=(*findings, *more),
            training_images=len(NucleiTiles(split["train"], size)),
            validation_images=len(NucleiTiles(split["val"], size)),
            training_patients=len({image.patient for image in split["train"]}),
            bytes_held=sum(image.image.nbytes + image.target.nbytes for image in images),
        )

    def evaluate(self, predict: Predict, split: "ScoredImages", *, workers: int) -> Evaluation:
        """Dice of the foreground and of each class, an image as a whole."""
        scores: dict[str, list[float]] = {"dice": []}
        scores |= {f"dice_{name}": [] for name in split.classes if len(split.classes) > 1}
        for image in split.images:
            predicted = predicted_classes(whole_image_logits(predict, image, split.size))[0]
            target = torch.from_numpy(image.target).long()
            scores["dice"].append(image_dice(predicted, target, ignored=IGNORED))
            for label, name in enumerate(split.classes, start=1):
                if f"dice_{name}" in scores:
                    scores[f"dice_{name}"].append(image_dice(predicted, target, ignored=IGNORED, label=label))
        patients = numbered(image.patient for image in split.images)
        return Evaluation(summarize(scores["dice"], patients).mean, scores, patients=patients)

    illustrates = "Dice of all nuclei of the whole image; shown is its part with the most nuclei"

    def illustrate(self, predict: Predict, split: "ScoredImages", *, workers: int) -> Iterator[Illustration]:
        """Each image by its part with the most nuclei."""
        for image in split.images:
            predicted = predicted_classes(whole_image_logits(predict, image, split.size))[0]
            target = torch.from_numpy(image.target).long()
            score = image_dice(predicted, target, ignored=IGNORED)
            counted = target != IGNORED
            reference = (counted & (target > 0)).numpy()
            part = _fullest(reference)
            yield Illustration(
                image.image[part] / np.float32(255),
                score,
                f"part of {target.shape[1]} x {target.shape[0]} pixels",
                reference=reference[part],
                predicted=(counted & (predicted > 0)).numpy()[part],
            )

    def write_demo(self, folder: Path, site: str, experiment: "Experiment") -> None:
        """Write synthetic images and outlines as the profile that the job's demo section gives this site has them."""
        from harmofl.data.synthetic_histology import write_nuclei_site

        demo = demo_settings(experiment, NucleiDemo)
        write_nuclei_site(
            folder,
            self._profile(site, experiment),
            patients=demo.patients,
            images=demo.images,
            seed=experiment.seed,
            size=demo.size,
        )

    def describe_demo(self, site: str, experiment: "Experiment") -> str:
        """Return organ and laboratory."""
        from harmofl.data.stains import ORGAN_LABORATORIES

        profile = self._profile(site, experiment)
        return f"{profile}: {ORGAN_LABORATORIES[profile]}"

    @staticmethod
    def _profile(site: str, experiment: "Experiment") -> str:
        from harmofl.data.synthetic_histology import NUCLEI_SITES

        given = demo_settings(experiment, NucleiDemo).profiles
        return demo_profile("profiles", given, site, NUCLEI_SITES, sum(site.encode()))


class ScoredImages:
    """Images to score, with the names of their classes and the edge of the tiles."""

    def __init__(self, images: list[NucleiImage], experiment: "Experiment") -> None:
        """Keep the images."""
        self.images, self.size = images, experiment.data.height
        self.classes = CLASSES[reader_settings(experiment, NucleiReader).classes]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)


def site_map_of(root: Path) -> SiteMap | None:
    """The map of a folder that several sites share, None for a site's own folder."""
    path = root / MAP_FILE
    return read_site_map(path) if path.is_file() else None


def _read(
    folder: Path, site: str, experiment: "Experiment", cache: Path | None = None
) -> tuple[list[NucleiImage], list[Finding]]:
    # only a data root that several sites share has a map in it; a folder of a site's own holds this site's images alone
    cases, findings = site_cases(folder, site, site_map_of(folder))
    read = read_nuclei if cache is None else NucleiCache(cache).read
    images, more = read_site_images(cases, CLASSES[reader_settings(experiment, NucleiReader).classes], read)
    # a hospital's own pattern; without one whom folder, barcode or name tell
    images = [replace(image, patient=experiment.data.patient_of(image.patient)) for image in images]
    return images, findings + more


def _split(images: list[NucleiImage], experiment: "Experiment") -> tuple[Split, list[Finding]]:
    if experiment.data.split == "patient":
        return split_images(images, experiment.seed, experiment.data.fractions)
    split, findings = split_images(images, experiment.seed, experiment.data.fractions, patient=lambda image: image.name)
    message = "images of one patient are in training and test (as published), test scores are too high"
    leak = Finding("warning", "image_leakage", SITE, message, "split by patient for results that count")
    return split, [leak, *findings]


def _fullest(mask: "NDArray[np.bool_]") -> tuple[slice, slice]:
    """The part of at most SHOWN pixels an edge that holds most of a mask."""
    starts = [(top, left) for top in tile_starts(len(mask), SHOWN) for left in tile_starts(mask.shape[1], SHOWN)]
    parts = [(slice(top, top + SHOWN), slice(left, left + SHOWN)) for top, left in starts]
    return max(parts, key=lambda part: int(mask[part].sum()))


def _row(image: NucleiImage, part: str) -> tuple[str, ...]:
    rows, columns = image.target.shape
    ignored = float(np.mean(image.target == IGNORED))
    nuclei = float(np.mean(image.target > 0)) - ignored
    return image.name, image.patient, f"{columns} x {rows}", f"{100 * nuclei:.1f}", f"{100 * ignored:.1f}", part


TASK = NucleiTask()
