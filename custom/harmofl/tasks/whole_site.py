"""All cases of a hospital's folder scored against its annotations, for each task; nothing is split off."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from harmofl.core.classification import Estimate
from harmofl.core.clustered import numbered
from harmofl.core.distances import surface_distances
from harmofl.core.scores import case_dice
from harmofl.data.findings import CaseError, DataRootError, Finding
from harmofl.data.layout import find_cases, named_folder
from harmofl.data.nuclei import read_nuclei
from harmofl.data.pairs import read_pair
from harmofl.data.patch_index import METADATA, centers_of, read_index
from harmofl.data.patches import Patches
from harmofl.data.sitemap import site_cases
from harmofl.data.unlabeled import fit_pair_image
from harmofl.tasks import Predict, load_task, reader_settings
from harmofl.tasks.camelyon17 import Camelyon17Reader
from harmofl.tasks.nuclei import CLASSES, NucleiReader, ScoredImages, site_map_of
from harmofl.tasks.prostate import volume_settings
from harmofl.tasks.single_images import SingleImage, scan_image, scan_labels, tissue_image

if TYPE_CHECKING:
    from harmofl.experiment import Experiment

# The predictor of one case: a model may look at the case as a whole before it predicts a part of it.
PredictorOf = Callable[[SingleImage], Predict]
Progress = Callable[[str], None]


@dataclass
class SiteScores:
    """Scores of a folder.

    Attributes:
        unit: what a case is.
        names: of the cases; they stay at the site.
        by_case: by score one number a case, NaN where undefined.
        largest: by score the largest value that it can have.
        pooled: by score one number over all images, where a score is no mean over cases.
        patients: whose each case is, by a number counted from 0.
        findings: about files and cases.
        rules: what the scores are and where they are undefined, one sentence each.
    """

    unit: str
    names: list[str] = field(default_factory=list)
    by_case: dict[str, list[float]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    pooled: dict[str, Estimate] = field(default_factory=dict)
    patients: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    rules: tuple[str, ...] = ()

    def add(self, name: str, scores: dict[str, float]) -> None:
        """Take in one case."""
        self.names.append(name)
        for score, value in scores.items():
            self.by_case.setdefault(score, []).append(value)


def score_prostate(
    data: Path, site: str | None, experiment: "Experiment", predictor_of: PredictorOf, tell: Progress
) -> SiteScores:
    """Dice, HD95 and ASD of each case as a volume on the image's own grid, as `harmofl predict` writes the mask."""
    folder = data if site is None else load_task(experiment).locate(data, site, experiment)
    settings = volume_settings(experiment)
    cases, findings = find_cases(folder)
    found = SiteScores(
        "case",
        largest={"dice": 1.0, "hd95_mm": inf, "asd_mm": inf},
        rules=(
            "Dice, HD95 and ASD of the whole volume on the image's own grid",
            "intervals are over patients: each case is of one of its own unless data.patient_from of the model's "
            "experiment, or the hospital's own patient_pattern (--kit), tells which cases are of one",
            "a case without prostate in its mask is undefined in all scores",
            "a case whose prediction is empty has Dice 0 and no distance: HD95 and ASD are then means over fewer cases",
        ),
    )
    for case in cases:
        try:
            pair = read_pair(case)
        except CaseError as error:
            findings.append(error.finding)
            continue
        scan = fit_pair_image(pair, settings, case.image.name)
        findings += scan.findings
        labels, mask = scan_labels(scan, predictor_of(scan_image(scan))), torch.from_numpy(pair.mask)
        hd95, asd = surface_distances(labels, mask, pair.spacing)
        found.add(case.name, {"dice": case_dice(labels, mask), "hd95_mm": hd95, "asd_mm": asd})
        tell(case.name)
    found.patients = numbered(map(experiment.data.patient_of, found.names))
    found.findings = findings
    return found


def score_nuclei(
    data: Path, site: str | None, experiment: "Experiment", predictor_of: PredictorOf, tell: Progress
) -> SiteScores:
    """Dice of the foreground and of each cell type, an image as a whole."""
    task = load_task(experiment)
    folder = data if site is None else task.locate(data, site, experiment)
    cases, findings = site_cases(folder, site or folder.name, site_map_of(folder))
    classes = CLASSES[reader_settings(experiment, NucleiReader).classes]
    found = SiteScores(
        "image",
        rules=(
            "Dice of each image as a whole, ambiguous regions left out",
            "intervals are over patients, since images of one patient are alike",
            "an image where neither prediction nor truth holds the class is undefined",
        ),
    )
    patients = []
    for case in cases:
        try:
            image = read_nuclei(case, classes)
        except CaseError as error:
            findings.append(error.finding)
            continue
        findings += image.findings
        predict = predictor_of(tissue_image(image.image, experiment))
        scored = task.evaluate(predict, ScoredImages([image], experiment), workers=0)
        found.add(image.name, {score: values[0] for score, values in scored.scores.items()})
        patients.append(experiment.data.patient_of(image.patient))
        tell(image.name)
    found.patients = numbered(patients)
    found.findings = findings
    return found


def score_camelyon17(
    data: Path, site: str | None, experiment: "Experiment", predict: Predict, workers: int
) -> SiteScores:
    """Accuracy, AUROC, sensitivity and specificity over all readable patches, and accuracy slide by slide."""
    folder, centers = _patch_folder(data, site, experiment)
    index = read_index(folder, centers)
    size, settings = experiment.data, reader_settings(experiment, Camelyon17Reader)
    patches = Patches(index, np.arange(len(index)), size.height, size.width, settings.bad_share)
    scored = load_task(experiment).evaluate(predict, patches, workers=workers)
    readable = np.delete(index.slide, patches.bad())
    names = ["patient {} slide {}".format(*index.slides[slide]) for slide in np.unique(readable)]
    return SiteScores(
        "slide",
        names=names,
        by_case=scored.scores,
        pooled=scored.pooled,
        patients=list(scored.patients or ()),
        findings=[*index.findings, *patches.findings()],
        rules=(
            "over all patches that can be read; tumor is the class to be found",
            "intervals are over patients, since patches and slides of one patient are alike; for AUROC the patients of "
            "the class that fewer have are counted",
            "AUROC is undefined where a class is missing",
        ),
    )


def _patch_folder(data: Path, site: str | None, experiment: "Experiment") -> tuple[Path, tuple[int, ...]]:
    """The folder of the patches, and the centers in it that make up the site."""
    known = reader_settings(experiment, Camelyon17Reader).centers
    names: Iterable[str] = () if site is None else (site, *experiment.data.aliases.get(site, ()))
    folder = (named_folder(data, list(names)) if data.is_dir() else None) or data
    present = centers_of(folder)
    if site is not None and site in known:
        return folder, known[site]
    if site is not None and site.isdecimal() and int(site) in present:
        return folder, (int(site),)
    if len(present) == 1 and (site is None or folder != data):
        return folder, (present[0],)
    listed = ", ".join(map(str, present)) or "none"
    raise DataRootError(
        f"{folder / METADATA} has rows of the centers {listed}; name the hospital with --site: "
        f"{', '.join(known)}, or the number of a center"
    )
