"""Prostate segmentation on T2 MRI: three neighboring slices in, prostate or not out (HarmoFL, section 4.1)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from harmofl.core.clustered import numbered
from harmofl.core.scores import case_dice, predicted_classes, published_dice, summarize
from harmofl.data.findings import count_text
from harmofl.data.layout import find_cases, site_folder
from harmofl.data.nifti import MOST_SLICES
from harmofl.data.scanners import SCANNERS
from harmofl.data.splits import SliceKey, Split, split_cases, split_slices_as_published
from harmofl.data.volumes import Volume, VolumeCache, VolumeSettings, read_site
from harmofl.data.windows import SliceChoice, SliceWindows, background_where_blank, slices_of, volume_windows
from harmofl.sections import Section
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
    from harmofl.data.checks import CaseReport, SiteReport
    from harmofl.experiment import Experiment


class ProstateReader(Section):
    """Which slices are trained on, and the intensity of the volume that becomes 1 (its minimum becomes 0)."""

    upper_percentile: Annotated[float, Field(gt=50, le=100)] = 99.0
    slices: SliceChoice = "foreground"


class ProstateDemo(Section):
    """Synthetic volumes: how many and how large, and the scanner of each site."""

    cases: Annotated[int, Field(ge=1)] = 20
    matrix: Annotated[int, Field(ge=64)] = 96
    slices: Annotated[int, Field(ge=3)] = 6
    scanners: dict[str, str] = {}


class SegmentationLoss(nn.Module):
    """(cross-entropy + Dice) / 2, the Dice over the whole batch, since single slices often hold no prostate."""

    def __init__(self) -> None:
        """Build MONAI's combined loss."""
        super().__init__()
        from monai.losses.dice import DiceCELoss

        self._loss = DiceCELoss(to_onehot_y=True, softmax=True, batch=True, lambda_dice=0.5, lambda_ce=0.5)

    def forward(self, logits_BCHW: Tensor, masks_BHW: Tensor) -> Tensor:
        """Scalar loss of logits (B, 2, H, W) and masks (B, H, W) int64."""
        return self._loss(logits_BCHW, masks_BHW.unsqueeze(1))


class ProstateTask:
    """Reader, loss and scores of the prostate job."""

    networks = ("unet",)
    in_channels = 3
    decodes_on_access = False
    key_score = "dice"
    score_note = (
        "foreground Dice of each case as a whole volume; the interval is over patients: each case is of one of its own "
        "unless data.patient_from or a hospital's own patient_pattern tells which cases are of one (jackknife over "
        "patients, logit scale). A case without prostate is undefined"
    )
    is_color = False
    labels = ()
    reader = ProstateReader
    demo = ProstateDemo

    def check(self, experiment: "Experiment") -> None:
        """Every setting fits."""

    def class_prior(self, experiment: "Experiment") -> tuple[float, ...]:
        """Background and prostate: about 4 to 8 % of the pixels in the published figure of the six sites."""
        return 0.95, 0.05

    def bounds(self, experiment: "Experiment") -> TaskBounds:
        """A case gives its slices; intensities are windowed to 0 to 1, or stay raw with intensity `none`."""
        raw = volume_settings(experiment).upper_percentile is None
        return TaskBounds(1, MOST_SLICES, {"dice": 1.0, "published_dice": 1.0}, None if raw else 1.0)

    def loss(self) -> SegmentationLoss:
        """The training loss."""
        return SegmentationLoss()

    def locate(self, root: Path, site: str, experiment: "Experiment") -> Path:
        """The folder under `root` that holds this site's cases, by its name or an alias.

        Raises:
            DataRootError: no such folder, or it holds DICOM; one line with the fix.
        """
        return site_folder(root, site, experiment.data.aliases.get(site, ()))

    def part(self, folder: Path, site: str, experiment: "Experiment") -> None:
        """A folder of volumes belongs to one site as a whole."""

    def open_site(self, folder: Path, site: str, experiment: "Experiment", cache: Path) -> SiteData:
        """Read, split and check a site's cases; decoded volumes are kept under `cache`, never beside the data."""
        settings = volume_settings(experiment)
        found, findings = find_cases(folder)
        volumes, more = read_site(found, settings, VolumeCache(cache))
        findings += more
        if experiment.data.split == "as_published":
            training, validation, test, more = self._split_slices(volumes, experiment)
        else:
            training, validation, test, more = self._split_cases(volumes, experiment)
        findings += more
        used = {volume.name for volume in training.volumes} - set(training.without_window)
        counts = {"training": len(used), "validation": len(validation), "test": len(test)}
        cases = [name for name, _ in training.keys]
        patients = [experiment.data.patient_of(name) for name in cases]
        skipped = Counter(finding.code for finding in findings if finding.severity == "error")
        return SiteData(
            training, validation, test, findings, counts, lambda: dict(skipped), patients, training_cases=cases
        )

    def inspect(self, folder: Path, site: str, experiment: "Experiment") -> FolderReport:
        """Read every case as training would and report on all of them."""
        from harmofl.data.checks import check_site

        data, settings = experiment.data, volume_settings(experiment)
        report = check_site(folder, settings, experiment.seed, data.fractions, data.patient_of)
        return _folder_report(report, experiment)

    def evaluate(self, predict: Predict, split: list["ScoredVolume"], *, workers: int) -> Evaluation:
        """Foreground Dice of each case as a volume; beside it the slice-wise two-class Dice of the released code."""
        dice, published = [], []
        for case in split:
            predicted = _predicted(predict, case.volume)
            mask = torch.from_numpy(case.volume.mask)
            dice.append(case_dice(predicted[case.slices], mask[case.slices]))
            published.append(published_dice(predicted[case.published_slices], mask[case.published_slices]))
        patients = numbered(case.patient for case in split)
        scores = {"dice": dice, "published_dice": published}
        return Evaluation(summarize(dice, patients).mean, scores, patients=patients)

    illustrates = "Dice of the whole case; shown is its slice with the most prostate"

    def illustrate(self, predict: Predict, split: list["ScoredVolume"], *, workers: int) -> Iterator[Illustration]:
        """Each case by its scored slice with the most prostate."""
        for case in split:
            predicted, mask = _predicted(predict, case.volume), torch.from_numpy(case.volume.mask)
            score = case_dice(predicted[case.slices], mask[case.slices])
            shown = max(case.slices, key=lambda index: int(mask[index].sum()))  # noqa: B023
            yield Illustration(
                case.volume.image[shown].astype("float32"),
                score,
                f"slice {shown + 1} of {len(mask)}",
                reference=mask[shown].numpy() > 0,
                predicted=predicted[shown].numpy() > 0,
            )

    def write_demo(self, folder: Path, site: str, experiment: "Experiment") -> None:
        """Write synthetic volumes with the scanner that the job's demo section gives this site."""
        from harmofl.data.synthetic import write_prostate_site

        demo, scanner = demo_settings(experiment, ProstateDemo), self._scanner(site, experiment)
        write_prostate_site(
            folder, scanner, cases=demo.cases, seed=experiment.seed, matrix=demo.matrix, slices=demo.slices
        )

    def describe_demo(self, site: str, experiment: "Experiment") -> str:
        """Return the scanner's name and properties."""
        scanner = self._scanner(site, experiment)
        return f"{scanner}: {SCANNERS[scanner]}"

    @staticmethod
    def _scanner(site: str, experiment: "Experiment") -> str:
        given = demo_settings(experiment, ProstateDemo).scanners
        return demo_profile("scanners", given, site, SCANNERS, sum(site.encode()))

    def _split_cases(self, volumes: list[Volume], experiment: "Experiment") -> Any:
        data = experiment.data
        split: Split[str] = split_cases(
            [volume.name for volume in volumes], experiment.seed, data.fractions, data.patient_of
        )
        part = {name: [v for v in volumes if v.name in set(getattr(split, name))] for name in ("train", "val", "test")}
        scored = [
            [ScoredVolume(volume, patient=data.patient_of(volume.name)) for volume in part[name]]
            for name in ("val", "test")
        ]
        slices = reader_settings(experiment, ProstateReader).slices
        return SliceWindows(part["train"], slices), *scored, list(split.findings)

    def _split_slices(self, volumes: list[Volume], experiment: "Experiment") -> Any:
        keys = SliceWindows(volumes, "published").keys
        split = split_slices_as_published(keys, experiment.seed)
        scored = []
        for part in (split.val, split.test):
            slices = {volume.name: [index for name, index in part if name == volume.name] for volume in volumes}
            held = [volume for volume in volumes if slices[volume.name]]
            patient_of = experiment.data.patient_of
            scored.append([ScoredVolume(v, sorted(slices[v.name]), patient=patient_of(v.name)) for v in held])
        return SliceWindows(volumes, "published", only=split.train), *scored, list(split.findings)


class ScoredVolume:
    """A case to score, whole or, in a slice-wise split, some of its slices."""

    def __init__(self, volume: Volume, slices: list[int] | None = None, *, patient: str = "") -> None:
        """Keep the volume, which of its slices count, and whose it is; without a name it is a patient of its own."""
        depth = len(volume.mask)
        self.volume, self.patient = volume, patient or volume.name
        self.slices = list(range(depth)) if slices is None else slices
        # the released code never scores the outermost slices; a slice-wise split holds none of them
        self.published_slices = [index for index in self.slices if 0 < index < depth - 1]


def _predicted(predict: Predict, volume: Volume) -> Tensor:
    """Labels of all slices of a volume, (S, H, W)."""
    return background_where_blank(predicted_classes(predict(volume_windows(volume))), volume.image)


def volume_settings(experiment: "Experiment") -> VolumeSettings:
    """Size and window of the reader; intensity `none` keeps raw intensities."""
    data = experiment.data
    percentile = None
    if experiment.amplitude.intensity != "none":
        percentile = reader_settings(experiment, ProstateReader).upper_percentile
    return VolumeSettings(data.height, data.width, percentile)


_COLUMNS = (
    "case",
    "slices x rows x columns",
    "spacing mm",
    "orientation",
    "labels",
    "with prostate",
    "gland mL",
    "split",
)
_PATIENT_SPLIT = {"too_few_cases", "split_filled"}  # findings that a split by slices does not have


def _folder_report(report: "SiteReport", experiment: "Experiment") -> FolderReport:
    split, by_slices = report.split, experiment.data.split == "as_published"
    parts = {case: part for part in ("train", "val", "test") for case in getattr(split, part)}
    findings = list(report.findings)
    if by_slices:
        slices = split_slices_as_published(_slice_keys(report, "published"), experiment.seed)
        findings = [finding for finding in findings if finding.code not in _PATIENT_SPLIT] + list(slices.findings)
        parts = dict.fromkeys(parts, "by slices")
        training, validation = list(slices.train), len(slices.val)
    else:
        keys = _slice_keys(report, reader_settings(experiment, ProstateReader).slices)
        training = [key for key in keys if parts[key[0]] == "train"]
        validation = sum(case.shape[0] for case in report.cases if parts[case.name] == "val")
    by_case = f"{len(split.train)} training, {len(split.val)} validation, {len(split.test)} test; "
    return FolderReport(
        columns=_COLUMNS,
        rows=tuple(_row(case, parts[case.name]) for case in report.cases),
        summary=f"{count_text(len(report.cases), 'case')}: {'' if by_slices else by_case}"
        f"{count_text(report.slices, 'slice')}, "
        f"{report.foreground_slices} with prostate",
        findings=tuple(findings),
        training_images=len(training),
        validation_images=validation,
        training_patients=len({experiment.data.patient_of(name) for name, _ in training}),
        bytes_held=report.cache_bytes,
        pixels={case.name: _pixel(case, experiment) for case in report.cases},
    )


def _slice_keys(report: "SiteReport", slices: SliceChoice) -> list[SliceKey]:
    """The (case, slice) of each window that training would make of all cases."""
    return [(case.name, index) for case in report.cases for index in slices_of(case.shape[0], case.foreground, slices)]


def _row(case: "CaseReport", part: str) -> tuple[str, ...]:
    return (
        case.name,
        " x ".join(map(str, case.shape)),
        " x ".join(f"{size:.3g}" for size in case.spacing),
        case.orientation,
        ", ".join(map(str, case.labels)) or "none",
        str(case.foreground_slices),
        f"{case.gland_ml:.1f}",
        part,
    )


def _pixel(case: "CaseReport", experiment: "Experiment") -> tuple[float, float]:
    """Height and width of a pixel in mm after the resize to the experiment's size."""
    _, row, column = case.spacing
    _, rows, columns = case.shape
    return row * rows / experiment.data.height, column * columns / experiment.data.width


TASK = ProstateTask()
