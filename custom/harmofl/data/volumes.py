"""Volumes of the size an experiment trains on, decoded once and kept in the site's own cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.data.decoded import Decoded, DecodedCache
from harmofl.data.findings import CaseError, Finding
from harmofl.data.layout import Case
from harmofl.data.mask_meaning import unlike_the_others
from harmofl.data.pairs import ImagePair, read_pair
from harmofl.data.voxels import contrast_findings, sparse_findings

PIPELINE_VERSION = 2  # raise it whenever the same files would give other voxels or findings


@dataclass(frozen=True)
class VolumeSettings:
    """How a volume is brought to the size and intensity range of an experiment.

    Attributes:
        height: rows of a slice.
        width: columns of a slice.
        upper_percentile: intensity of the volume that becomes 1, as a percentile; None keeps raw intensities.
    """

    height: int
    width: int
    upper_percentile: float | None


@dataclass(frozen=True, eq=False)
class Volume:
    """One case as the training sees it.

    Attributes:
        name: the case; stays at the site.
        image: (S, H, W), float16 in [0, 1] if windowed, else float32 raw intensities.
        mask: (S, H, W) uint8, 1 inside the prostate.
        spacing: mm after the resize, order slice, row, column.
        findings: warnings and notices about this case.
    """

    name: str
    image: np.ndarray
    mask: np.ndarray
    spacing: tuple[float, float, float]
    findings: tuple[Finding, ...]


def read_volume(case: Case, settings: VolumeSettings) -> Volume:
    """Decode one case and bring it to the size and range of the experiment.

    Raises:
        CaseError: if the case cannot be used.
    """
    return fit_pair(case, read_pair(case), settings)


def fit_pair(case: Case, pair: ImagePair, settings: VolumeSettings) -> Volume:
    """Window the intensities of a pair and resize its slices; the number of slices stays."""
    from monai.transforms import Resize

    image, findings = fit_image(pair.image, settings, case.image.name)
    # nearest-exact has the pixel centers of trilinear; torch's plain nearest is half a pixel off
    mask = Resize((-1, settings.height, settings.width), mode="nearest-exact")(pair.mask[np.newaxis])
    _, rows, columns = pair.image.shape
    thickness, row, column = pair.spacing
    return Volume(
        name=case.name,
        image=image,
        mask=mask.numpy()[0].astype(np.uint8),
        spacing=(thickness, row * rows / settings.height, column * columns / settings.width),
        findings=(*pair.findings, *findings),
    )


def fit_image(image: np.ndarray, settings: VolumeSettings, subject: str) -> tuple[np.ndarray, list[Finding]]:
    """Window the intensities of a volume and resize its slices.

    The window runs from the volume's minimum to its upper percentile on the native grid (HarmoFL, released loader).

    Args:
        image: (S, rows, columns) float32, finite.
        settings: size and window.
        subject: file name for findings.

    Returns:
        (S, H, W), float16 in [0, 1] if windowed, else float32.
    """
    from monai.transforms import Compose, Resize, ScaleIntensityRangePercentiles

    findings: list[Finding] = []
    steps: list[Any] = []
    if settings.upper_percentile is not None:
        upper = settings.upper_percentile
        findings += sparse_findings(image, upper, subject)
        upper = 100.0 if findings else upper
        steps.append(ScaleIntensityRangePercentiles(lower=0, upper=upper, b_min=0, b_max=1, clip=True))
    steps.append(Resize((-1, settings.height, settings.width), mode="trilinear"))
    fitted = Compose(steps)(image[np.newaxis]).numpy()[0]
    kept = fitted.astype(np.float32 if settings.upper_percentile is None else np.float16)
    return kept, [*findings, *contrast_findings(kept, subject)]


class VolumeCache:
    """Volumes of one site at an experiment's size, each decoded once.

    Args:
        folder: of the site's cache of decoded files.
    """

    def __init__(self, folder: Path) -> None:
        self._decoded = DecodedCache(folder)

    def read(self, case: Case, settings: VolumeSettings) -> Volume:
        """Return the case from the cache, or decode and keep it.

        Raises:
            CaseError: if the case cannot be used; this too is remembered.
            DataRootError: if the cache lies in the folder of the case.
        """

        def decode() -> Decoded:
            volume = read_volume(case, settings)
            arrays = {"image": volume.image, "mask": volume.mask}
            return Decoded(arrays, {"spacing": list(volume.spacing)}, volume.findings)

        held = self._decoded.read(_recipe(case, settings), (case.image, case.mask), decode)
        thickness, row, column = held.about["spacing"]
        return Volume(case.name, held.arrays["image"], held.arrays["mask"], (thickness, row, column), held.findings)


def _recipe(case: Case, settings: VolumeSettings) -> list[Any]:
    """What decides a volume beside the content of its files; findings name the files."""
    return ["volume", PIPELINE_VERSION, asdict(settings), case.image.name, case.mask.name]


def read_site(
    cases: Sequence[Case], settings: VolumeSettings, cache: VolumeCache | None = None
) -> tuple[list[Volume], list[Finding]]:
    """Read all cases of a site; a case that cannot be used becomes a finding and is left out.

    A mask far larger or smaller than the others of the site gives a warning.

    Returns:
        The volumes in the order of the cases, and the findings of all cases.
    """
    volumes: list[Volume] = []
    findings: list[Finding] = []
    for case in cases:
        try:
            volume = cache.read(case, settings) if cache else read_volume(case, settings)
        except CaseError as error:
            findings.append(error.finding)
        else:
            volumes.append(volume)
            findings += volume.findings
    marked = {volume.name: np.count_nonzero(volume.mask) * float(np.prod(volume.spacing)) / 1000 for volume in volumes}
    return volumes, findings + unlike_the_others(marked, "mL")
