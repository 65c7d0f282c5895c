"""Everything a person should know about a site's folder before any training."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harmofl.data.findings import CaseError, Finding
from harmofl.data.layout import Case, find_cases
from harmofl.data.mask_meaning import unlike_the_others
from harmofl.data.pairs import ImagePair, read_pair
from harmofl.data.splits import FRACTIONS, Split, split_cases
from harmofl.data.volumes import Volume, VolumeSettings, fit_pair
from harmofl.data.windows import foreground_slices


@dataclass(frozen=True)
class CaseReport:
    """What one usable case holds, on its native grid.

    Attributes:
        name: the case; stays at the site.
        shape: slices, rows, columns.
        spacing: mm, order slice, row, column.
        orientation: axis codes of the image file as stored.
        labels: labels above 0 in the mask file.
        foreground_slices: slices that hold prostate.
        foreground: which slices do at the experiment's size, as training chooses them, counted from 0.
        gland_ml: volume of the gland in mL.
        image_digest: hash of the decoded image, equal for copies under other names or compressions.
    """

    name: str
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    orientation: str
    labels: tuple[int, ...]
    foreground_slices: int
    foreground: tuple[int, ...]
    gland_ml: float
    image_digest: str


@dataclass(frozen=True)
class SiteReport:
    """The folder of one site: its usable cases, all findings at once, the split, and what training will need.

    Attributes:
        cases: usable cases in natural order.
        findings: about files, cases and the split.
        split: of the usable cases.
        cache_bytes: size of the decoded volumes, on disk and in memory.
    """

    cases: tuple[CaseReport, ...]
    findings: tuple[Finding, ...]
    split: Split[str]
    cache_bytes: int

    @property
    def has_errors(self) -> bool:
        """Whether anything in the folder is not used, or the site cannot take part."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def slices(self) -> int:
        """Slices of all usable cases."""
        return sum(case.shape[0] for case in self.cases)

    @property
    def foreground_slices(self) -> int:
        """Slices of all usable cases that hold prostate."""
        return sum(case.foreground_slices for case in self.cases)


def check_site(
    folder: Path,
    settings: VolumeSettings,
    seed: int,
    fractions: tuple[float, float, float] = FRACTIONS,
    patient: Callable[[str], str] = str,
) -> SiteReport:
    """Read every case of a site's folder as training would, and report on all of them.

    Args:
        folder: the site's folder.
        settings: size and window of the experiment.
        seed: seed of the experiment, decides the split.
        fractions: of training, validation and test.
        patient: gives the patient of a case.

    Raises:
        DataRootError: if the folder cannot be listed.
    """
    cases, findings = find_cases(folder)
    reports: list[CaseReport] = []
    for case in cases:
        try:
            pair = read_pair(case)
            volume = fit_pair(case, pair, settings)
        except CaseError as error:
            findings.append(error.finding)
        else:
            findings += volume.findings
            reports.append(_case_report(case, pair, volume))
    findings += _duplicates(reports)
    findings += unlike_the_others({report.name: report.gland_ml for report in reports}, "mL")
    split = split_cases([report.name for report in reports], seed, fractions, patient)
    findings += split.findings
    per_voxel = 1 + (4 if settings.upper_percentile is None else 2)  # uint8 mask, float32 or float16 image
    size = sum(report.shape[0] for report in reports) * settings.height * settings.width * per_voxel
    return SiteReport(tuple(reports), tuple(findings), split, size)


def _case_report(case: Case, pair: ImagePair, volume: Volume) -> CaseReport:
    slices, rows, columns = pair.image.shape
    return CaseReport(
        name=case.name,
        shape=(slices, rows, columns),
        spacing=pair.spacing,
        orientation=pair.orientation,
        labels=pair.labels,
        foreground_slices=int(pair.mask.any(axis=(1, 2)).sum()),
        foreground=tuple(foreground_slices(volume)),
        gland_ml=float(np.count_nonzero(pair.mask) * pair.voxel_ml),
        image_digest=hashlib.blake2b(pair.image.tobytes(), digest_size=20).hexdigest(),
    )


def _duplicates(reports: Sequence[CaseReport]) -> list[Finding]:
    same: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        same[f"{report.image_digest} {report.shape}"].append(report.name)
    message = "these cases hold the same image, which may end up in training and in test"
    return [
        Finding("warning", "duplicate_image", ", ".join(names), message, "keep one of them")
        for names in same.values()
        if len(names) > 1
    ]
