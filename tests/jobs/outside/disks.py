"""A task from outside the package, as jobs/README.md describes one: bright disks on noise, a case a .npz file."""

from pathlib import Path

import numpy as np
import torch
from monai.losses.dice import DiceCELoss
from torch.utils.data import TensorDataset

from harmofl.core.scores import image_dice, predicted_classes, summarize
from harmofl.data.findings import DataRootError
from harmofl.data.splits import split_cases
from harmofl.sections import Section
from harmofl.tasks import Evaluation, FolderReport, SiteData, demo_settings, reader_settings

NOTHING = -1  # no pixel is left out of a score


class DiskReader(Section):
    """Intensities are divided by `scale`."""

    scale: float = 1.0


class DiskDemo(Section):
    """Number of synthetic cases of a site."""

    cases: int = 10


class DiskLoss(torch.nn.Module):
    """(cross-entropy + Dice) / 2."""

    def __init__(self):
        super().__init__()
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True, lambda_dice=0.5, lambda_ce=0.5)

    def forward(self, logits, masks):
        return self.loss(logits, masks.unsqueeze(1))


class DiskTask:
    """Segment the disk."""

    networks, in_channels, key_score, decodes_on_access = ("unet",), 3, "dice", False
    score_note = "foreground Dice of each image; Student's interval over the images of one site"
    is_color, labels = False, ()
    reader, demo = DiskReader, DiskDemo

    def check(self, experiment):
        pass

    def class_prior(self, experiment):
        return 0.9, 0.1

    def loss(self):
        return DiskLoss()

    def locate(self, root, site, experiment):
        if not (root / site).is_dir():
            raise DataRootError(f"no data for site {site}: {root / site} does not exist")
        return root / site

    def part(self, folder, site, experiment):
        return None

    def open_site(self, folder, site, experiment, cache):
        split = self._split(folder, experiment)
        parts = [
            [self._read(folder / name, experiment) for name in names] for names in (split.train, split.val, split.test)
        ]
        images, masks = zip(*parts[0], strict=True)
        cases = dict(zip(("training", "validation", "test"), map(len, parts), strict=True))
        training = TensorDataset(torch.stack(images), torch.stack(masks))
        patients = split.train  # a case is a patient, with one image
        return SiteData(training, parts[1], parts[2], list(split.findings), cases, dict, patients)

    def inspect(self, folder, site, experiment):
        split = self._split(folder, experiment)
        rows = tuple((name,) for name in self._names(folder))
        counts = len(split.train), len(split.val), len(split.train)
        return FolderReport(("case",), rows, f"{len(rows)} cases", split.findings, *counts, 0)

    def evaluate(self, predict, split, *, workers):
        dice = [image_dice(predicted_classes(predict(image[None]))[0], mask, ignored=NOTHING) for image, mask in split]
        return Evaluation(summarize(dice).mean, {"dice": dice})

    def write_demo(self, folder, site, experiment):
        folder.mkdir(parents=True, exist_ok=True)
        height, width = experiment.data.height, experiment.data.width
        rows, columns = np.mgrid[:height, :width]
        for case in range(demo_settings(experiment, DiskDemo).cases):
            rng = np.random.default_rng([experiment.seed, sum(site.encode()), case])
            top, left = rng.uniform(0.3, 0.7, 2) * (height, width)
            mask = (rows - top) ** 2 + (columns - left) ** 2 < (rng.uniform(0.12, 0.22) * height) ** 2
            image = rng.normal(mask, 0.3, (3, height, width)).astype(np.float32)
            np.savez(folder / f"Case{case:02d}.npz", image=image, mask=mask)

    def describe_demo(self, site, experiment):
        return "bright disks on noise"

    def _names(self, folder):
        return sorted(path.name for path in Path(folder).glob("*.npz"))

    def _split(self, folder, experiment):
        return split_cases(self._names(folder), experiment.seed, experiment.data.fractions)

    def _read(self, path, experiment):
        with np.load(path) as held:
            image = torch.from_numpy(held["image"]) / reader_settings(experiment, DiskReader).scale
            return image, torch.from_numpy(held["mask"]).long()
