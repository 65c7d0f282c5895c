"""Tumor in lymph node patches (Camelyon17-WILDS): one RGB patch in, tumor or not out (HarmoFL, section 4.1)."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.utils.data import Subset

from harmofl.core.classification import accuracy_by_group, binary_scores, predicted_labels
from harmofl.core.clustered import numbered
from harmofl.core.training import batches
from harmofl.data.findings import DataRootError, Finding, count_text
from harmofl.data.layout import named_folder
from harmofl.data.patch_index import METADATA, PatchIndex, read_index
from harmofl.data.patches import LABELS, Patches, PatchSplit, Rows, split_by_slide, split_patches_as_published
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
    from harmofl.experiment import Experiment

SHOWN = 256  # patches that pictures are chosen from
AT_ONCE = 512  # patches decoded for one prediction; 57 MB at 96 x 96 pixels
Center = Annotated[int, Field(ge=0)]


class Camelyon17Reader(Section):
    """Which values of the column `center` are a site's, and what part of its patches may be unreadable.

    Outside simulation `centers` are the hospital's to say: see `harmofl.tasks.at_hospital`; none are the only one.
    """

    centers: dict[str, tuple[Center, ...]]
    bad_share: Annotated[float, Field(ge=0, lt=1)] = 0.01


class Camelyon17Demo(Section):
    """Synthetic patches of a site: slides (each of a patient of its own), patches, and the laboratory of each site."""

    slides: Annotated[int, Field(ge=3, le=20)] = 20
    patches: Annotated[int, Field(ge=6)] = 120
    laboratories: dict[str, str] = {}


class Camelyon17Task:
    """Reader, loss and scores of the breast histology job."""

    networks = ("densenet121",)
    in_channels = 3
    decodes_on_access = True
    key_score = "accuracy"
    score_note = (
        "share of the test patches whose class is found; the interval is over patients, since patches and slides of "
        "one patient are alike (jackknife over patients, logit scale)"
    )
    is_color = True
    labels = LABELS
    reader = Camelyon17Reader
    demo = Camelyon17Demo

    def check(self, experiment: "Experiment") -> None:
        """Refuse what does not fit.

        Raises:
            ExperimentError: norm layers that DenseNet121 cannot have, a site without a center, a rule for patients.
        """
        if experiment.network.norm == "batch_stats":
            raise ExperimentError(
                "network.norm: DenseNet121 cannot have 'batch_stats' norm layers, which the published presets ask for; "
                "set network.norm to 'batch' or 'instance' beside the preset"
            )
        data = experiment.data
        if data.height != data.width:
            raise ExperimentError(f"data.width: patches are square, so it must be {data.height} as data.height is")
        if data.patient_pattern is not None or data.patient_from != "name":
            key = "patient_from" if data.patient_pattern is None else "patient_pattern"
            raise ExperimentError(f"data.{key}: metadata.csv names the patients; leave it out")
        for site, centers in reader_settings(experiment, Camelyon17Reader).centers.items():
            if not centers:
                raise ExperimentError(f"reader.centers.{site}: names no center; list the values of the column center")

    def class_prior(self, experiment: "Experiment") -> tuple[float, ...]:
        """Half of the patches of a center hold tumor, by construction of the data set."""
        return 0.5, 0.5

    def bounds(self, experiment: "Experiment") -> TaskBounds:
        """A patch is a case; all scores are shares."""
        names = ("accuracy", "auroc", "sensitivity", "specificity", "accuracy_by_slide")
        return TaskBounds(1, 1, dict.fromkeys(names, 1.0), 1.0)

    def loss(self) -> nn.CrossEntropyLoss:
        """The training loss."""
        return nn.CrossEntropyLoss()

    def locate(self, root: Path, site: str, experiment: "Experiment") -> Path:
        """`<root>/<site or alias>` if it exists, else the root itself if it holds metadata.csv.

        Raises:
            DataRootError: neither; one line naming both.
        """
        if not root.is_dir():
            raise DataRootError(f"data root {root} is not a folder; set HARMOFL_DATA_ROOT to the folder of the patches")
        names = [site, *experiment.data.aliases.get(site, ())]
        folder = named_folder(root, names) or root
        if (folder / METADATA).is_file():
            return folder
        if folder != root:
            raise DataRootError(f"{folder} holds no {METADATA}; put it there, beside the folder patches")
        places = " or ".join(str(root / name) for name in names)
        raise DataRootError(
            f"no data for site {site}: neither the folder {places} exists, nor does {root} itself hold {METADATA}; "
            "put the patches there or correct HARMOFL_DATA_ROOT"
        )

    def part(self, folder: Path, site: str, experiment: "Experiment") -> frozenset[Hashable]:
        """A site's centers in a folder that holds those of several sites."""
        return frozenset(self._centers(site, experiment))

    def open_site(self, folder: Path, site: str, experiment: "Experiment", cache: Path) -> SiteData:
        """Read the index, split it and decode a sample; patches are decoded when asked for, nothing is cached."""
        index, split = self._split(folder, site, experiment)
        parts = {
            name: self._patches(index, rows, experiment)
            for name, rows in (("training", split.train), ("validation", split.val), ("test", split.test))
        }
        findings = [*index.findings, *split.findings]
        for part in parts.values():
            findings += _sampled(part, experiment.seed)

        known = {name: len(part.bad()) for name, part in parts.items()}

        def late() -> list[Finding]:
            grown = [part for name, part in parts.items() if len(part.bad()) > known[name]]
            return [finding for part in grown for finding in part.findings()]

        def skipped() -> dict[str, int]:
            found: dict[str, int] = {}
            for part in parts.values():
                for code, count in part.skipped().items():
                    found[code] = found.get(code, 0) + count
            return found

        return SiteData(
            training=parts["training"],
            validation=parts["validation"],
            test=parts["test"],
            findings=findings,
            cases={name: len(part) for name, part in parts.items()},
            skipped=skipped,
            training_patients=[index.patients[code] for code in index.patient[split.train].tolist()],
            late_findings=late,
            unreadable=lambda: parts["training"].bad().tolist(),
        )

    def inspect(self, folder: Path, site: str, experiment: "Experiment") -> FolderReport:
        """Count patches by center, label and the file's own split, and decode a sample of each part."""
        index, split = self._split(folder, site, experiment)
        findings: list[Finding] = [*index.findings, *split.findings]
        for part in (split.train, split.val, split.test):
            findings += _sampled(self._patches(index, part, experiment), experiment.seed)
        rows = [
            (str(center), LABELS[label], str(of_file), str(count))
            for (center, label, of_file), count in index.counts().items()
        ]
        return FolderReport(
            columns=("center", "label", "split in the file", "patches"),
            rows=tuple(rows),
            summary=f"{count_text(len(index), 'patch', 'patches')} on "
            f"{count_text(len(set(index.slide.tolist())), 'slide')} of "
            f"{count_text(len(set(index.patient.tolist())), 'patient')}: {len(split.train)} training, "
            f"{len(split.val)} validation, "
            f"{len(split.test)} test",
            findings=tuple(findings),
            training_images=len(split.train),
            validation_images=len(split.val),
            training_patients=len(set(index.patient[split.train].tolist())),
            bytes_held=0,
        )

    def evaluate(self, predict: Predict, split: Patches, *, workers: int) -> Evaluation:
        """Accuracy, AUROC, sensitivity and specificity over all readable patches; accuracy slide by slide.

        The independent unit is the patient: slides are lymph nodes, several of which are of one patient.
        """
        if not len(split):
            return Evaluation(None, {"accuracy_by_slide": []}, {})
        pairs = [(predict(images), labels) for images, labels in batches(split, AT_ONCE, None, workers)]
        logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        readable = torch.ones(len(labels), dtype=torch.bool)
        readable[torch.from_numpy(split.bad())] = False  # stand-ins would be scored twice
        index = split.index
        slides, patients = (torch.from_numpy(held[split.rows])[readable] for held in (index.slide, index.patient))
        logits, labels = logits[readable], labels[readable]
        pooled = binary_scores(logits, labels, patients)
        by_slide = accuracy_by_group(predicted_labels(logits), labels, slides)
        of_slides = numbered(index.slides[slide][0] for slide in slides.unique(sorted=True).tolist())
        return Evaluation(pooled["accuracy"].value, {"accuracy_by_slide": by_slide}, pooled, of_slides)

    illustrates = "probability that the model gives to the patch's true class; above 0.5 the patch is called right"

    def illustrate(self, predict: Predict, split: Patches, *, workers: int) -> Iterator[Illustration]:
        """At most SHOWN patches, spread evenly over the split."""
        positions = np.unique(np.linspace(0, len(split) - 1, min(SHOWN, len(split))).astype(int)).tolist()
        for images, labels in batches(Subset(split, positions), AT_ONCE, None, workers):
            chances = predict(images).softmax(1)
            for image, label, chance in zip(images, labels.tolist(), chances, strict=True):
                score = float(chance[label])
                note = f"{LABELS[label]}, called {LABELS[int(chance.argmax())]}"
                yield Illustration(image.permute(1, 2, 0).numpy(), score, note)

    def write_demo(self, folder: Path, site: str, experiment: "Experiment") -> None:
        """Write synthetic patches as the laboratory that the job's demo section gives this site stains them."""
        from harmofl.data.synthetic_histology import write_patches_site

        demo, centers = demo_settings(experiment, Camelyon17Demo), self._centers(site, experiment)
        if len(centers) > min(demo.slides, demo.patches):
            raise ExperimentError(
                f"demo.data.slides: {demo.slides}, with demo.data.patches {demo.patches}, is too few for centers "
                f"{', '.join(map(str, centers))} of site {site}; give each center one"
            )
        write_patches_site(
            folder,
            self._laboratory(site, experiment),
            centers,
            slides=demo.slides,
            patches=demo.patches,
            seed=experiment.seed,
            size=experiment.data.height,
        )

    def describe_demo(self, site: str, experiment: "Experiment") -> str:
        """Return the laboratory's name and properties."""
        from harmofl.data.stains import HOSPITALS

        name = self._laboratory(site, experiment)
        return f"{name}: {HOSPITALS[name]}"

    def _laboratory(self, site: str, experiment: "Experiment") -> str:
        from harmofl.data.stains import HOSPITALS

        given, center = demo_settings(experiment, Camelyon17Demo).laboratories, self._centers(site, experiment)[0]
        return demo_profile("laboratories", given, site, HOSPITALS, center)

    @staticmethod
    def _centers(site: str, experiment: "Experiment") -> tuple[int, ...]:
        centers = reader_settings(experiment, Camelyon17Reader).centers
        if site not in centers:
            raise ExperimentError(f"reader.centers: has no site {site}, only {', '.join(centers)}; add its centers")
        return centers[site]

    def _split(self, folder: Path, site: str, experiment: "Experiment") -> tuple[PatchIndex, PatchSplit]:
        index = read_index(folder, self._centers(site, experiment))
        if experiment.data.split == "as_published":
            return index, split_patches_as_published(index, experiment.seed)
        return index, split_by_slide(index, experiment.seed, experiment.data.fractions)

    @staticmethod
    def _patches(index: PatchIndex, rows: Rows, experiment: "Experiment") -> Patches:
        data, settings = experiment.data, reader_settings(experiment, Camelyon17Reader)
        return Patches(index, rows, data.height, data.width, settings.bad_share)


def _sampled(patches: Patches, seed: int) -> list[Finding]:
    """Decode a sample; returns what was converted and what cannot be read."""
    return [*patches.check(seed), *patches.findings()] if len(patches) else []


TASK = Camelyon17Task()
