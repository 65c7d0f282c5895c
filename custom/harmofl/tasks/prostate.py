"""Prostate segmentation on T2 MRI: three neighboring slices in, prostate or not out (HarmoFL, section 4.1)."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harmofl.core.scores import case_dice, predicted_classes, published_dice, summarize
from harmofl.data.layout import find_cases, site_folder
from harmofl.data.splits import Split, split_cases, split_slices_as_published
from harmofl.data.volumes import Volume, VolumeCache, VolumeSettings, read_site
from harmofl.data.windows import SliceWindows, volume_windows
from harmofl.tasks import Evaluation, Predict, SiteData

if TYPE_CHECKING:
    from harmofl.experiment import Experiment


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
    class_prior = (0.95, 0.05)  # about 4 to 8 % of the pixels in the published figure of the six sites
    key_score = "dice"

    def loss(self) -> SegmentationLoss:
        """The training loss."""
        return SegmentationLoss()

    def locate(self, root: Path, site: str, experiment: "Experiment") -> Path:
        """The folder under `root` that holds this site's cases, by its name or an alias.

        Raises:
            DataRootError: no such folder, or it holds DICOM; one line with the mend.
        """
        return site_folder(root, site, experiment.data.aliases.get(site, ()))

    def open_site(self, folder: Path, experiment: "Experiment", cache: Path) -> SiteData:
        """Read, split and check a site's cases; decoded volumes are kept under `cache`, never beside the data."""
        settings = volume_settings(experiment)
        cases, findings = find_cases(folder)
        volumes, more = read_site(cases, settings, VolumeCache(cache))
        findings += more
        if experiment.data.split == "as_published":
            training, validation, test, more = self._split_slices(volumes, experiment)
        else:
            training, validation, test, more = self._split_cases(volumes, experiment)
        findings += more
        used = {volume.name for volume in training.volumes} - set(training.without_window)
        counts = {"training": len(used), "validation": len(validation), "test": len(test)}
        patients = len({experiment.data.patient_of(name) for name in used})
        skipped = Counter(finding.code for finding in findings if finding.severity == "error")
        return SiteData(training, validation, test, findings, counts, dict(skipped), patients)

    def evaluate(self, predict: Predict, split: list["ScoredVolume"]) -> Evaluation:
        """Foreground Dice of each case as a volume; beside it the slice-wise two-class Dice of the released code."""
        dice, published = [], []
        for case in split:
            predicted = predicted_classes(predict(volume_windows(case.volume)))
            mask = torch.from_numpy(case.volume.mask)
            dice.append(case_dice(predicted[case.slices], mask[case.slices]))
            published.append(published_dice(predicted[case.published_slices], mask[case.published_slices]))
        return Evaluation(summarize(dice).mean, {"dice": dice, "published_dice": published})

    def write_demo(self, folder: Path, site: str, experiment: "Experiment") -> None:
        """Write synthetic volumes with the scanner that the job's demo section gives this site."""
        from harmofl.data.synthetic import SCANNERS, write_prostate_site

        demo = experiment.demo
        assert demo is not None, "resolved with demo, so the section is there"
        names = sorted(SCANNERS)
        scanner = demo.scanners.get(site) or names[sum(site.encode()) % len(names)]
        write_prostate_site(
            folder, scanner, cases=demo.cases, seed=experiment.seed, matrix=demo.matrix, slices=demo.slices
        )

    def _split_cases(self, volumes: list[Volume], experiment: "Experiment") -> Any:
        data = experiment.data
        split: Split[str] = split_cases(
            [volume.name for volume in volumes], experiment.seed, data.fractions, data.patient_of
        )
        part = {name: [v for v in volumes if v.name in set(getattr(split, name))] for name in ("train", "val", "test")}
        scored = [[ScoredVolume(volume) for volume in part[name]] for name in ("val", "test")]
        return SliceWindows(part["train"], data.slices), *scored, list(split.findings)

    def _split_slices(self, volumes: list[Volume], experiment: "Experiment") -> Any:
        keys = SliceWindows(volumes, "published").keys
        split = split_slices_as_published(keys, experiment.seed)
        scored = []
        for part in (split.val, split.test):
            slices = {volume.name: [index for name, index in part if name == volume.name] for volume in volumes}
            scored.append([ScoredVolume(v, sorted(slices[v.name])) for v in volumes if slices[v.name]])
        return SliceWindows(volumes, "published", only=split.train), *scored, list(split.findings)


class ScoredVolume:
    """A case to score, whole or, in a slice-wise split, some of its slices."""

    def __init__(self, volume: Volume, slices: list[int] | None = None) -> None:
        """Keep the volume and which of its slices count."""
        depth = len(volume.mask)
        self.volume = volume
        self.slices = list(range(depth)) if slices is None else slices
        # the released code never scores the outermost slices; a slice-wise split holds none of them
        self.published_slices = [index for index in self.slices if 0 < index < depth - 1]


def volume_settings(experiment: "Experiment") -> VolumeSettings:
    """Size and window of the reader; intensity `none` keeps raw intensities."""
    data = experiment.data
    percentile = None if experiment.amplitude.intensity == "none" else data.upper_percentile
    return VolumeSettings(data.height, data.width, percentile)


TASK = ProstateTask()
