"""Volumes of the size an experiment trains on, decoded once and kept in the site's own cache."""

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harmofl.data.findings import CaseError, DataRootError, Finding
from harmofl.data.layout import Case
from harmofl.data.pairs import ImagePair, read_pair

PIPELINE_VERSION = 1  # raise it whenever the same files would give other voxels or findings
UNREADABLE_ENTRY = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


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
        if not _window_is_open(image, upper):
            message = f"more than {upper:g} % of the voxels hold the smallest intensity, the window runs to the largest"
            findings.append(Finding("warning", "sparse_image", subject, message, "check the image"))
            upper = 100.0
        steps.append(ScaleIntensityRangePercentiles(lower=0, upper=upper, b_min=0, b_max=1, clip=True))
    steps.append(Resize((-1, settings.height, settings.width), mode="trilinear"))
    fitted = Compose(steps)(image[np.newaxis]).numpy()[0]
    return fitted.astype(np.float32 if settings.upper_percentile is None else np.float16), findings


def _window_is_open(image: np.ndarray, upper: float) -> bool:
    """Say whether the upper percentile lies above the minimum, so that no range of zero divides."""
    rank = int(np.ceil(upper / 100 * (image.size - 1)))
    return int(np.count_nonzero(image == image.min())) <= rank


class VolumeCache:
    """Decoded volumes of one site on its own disk, keyed by the content of the files.

    Stands in for MONAI's PersistentDataset, whose import takes longer than reading a site's cache, whose write is not
    atomic between file systems, and which stops at a truncated entry instead of decoding again.

    Args:
        folder: where entries are kept; only the owner may read it, for they are patient images.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, case: Case, settings: VolumeSettings) -> Volume:
        """Return the case from the cache, or decode and keep it.

        Raises:
            CaseError: if the case cannot be used; this too is remembered.
            DataRootError: if the cache lies in the folder of the case.
        """
        if self.folder.resolve().is_relative_to(case.image.parent.resolve()):
            raise DataRootError(f"the cache {self.folder} lies in the data folder, which is never written to; move it")
        try:
            entry = self.folder / f"{content_key(case, settings)}.npz"
        except OSError:  # no content, no key: decoding says what is wrong
            return read_volume(case, settings)
        stored = _load(entry, case.name)
        if isinstance(stored, Finding):
            raise CaseError(stored)
        return stored or self._decode(case, settings, entry)

    def _decode(self, case: Case, settings: VolumeSettings, entry: Path) -> Volume:
        try:
            volume = read_volume(case, settings)
        except CaseError as error:
            self._keep(entry, {}, {"refusal": asdict(error.finding)})
            raise
        about = {"spacing": volume.spacing, "findings": [asdict(finding) for finding in volume.findings]}
        problem = self._keep(entry, {"image": volume.image, "mask": volume.mask}, about)
        return replace(volume, findings=(*volume.findings, problem)) if problem else volume

    def _keep(self, entry: Path, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> Finding | None:
        """Write an entry under another name first, so that no reader ever sees half of one."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as stream:
                try:
                    np.savez(stream, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
                    stream.close()
                    os.replace(stream.name, entry)
                except BaseException:
                    Path(stream.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            message = f"decoded volumes cannot be kept ({error.strerror}), each process decodes again"
            return Finding("warning", "cache_not_written", self.folder.name, message, "free or open this folder")
        return None


def content_key(case: Case, settings: VolumeSettings) -> str:
    """Return the name of a cache entry: a hash of both files, their names, the settings and the pipeline's version."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(json.dumps([PIPELINE_VERSION, asdict(settings), case.image.name, case.mask.name]).encode())
    for path in (case.image, case.mask):
        content = path.read_bytes()
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


def _load(entry: Path, name: str) -> Volume | Finding | None:
    """Return what an entry holds, a volume or why the case was refused; None if it is missing or damaged."""
    try:
        with np.load(entry, allow_pickle=False) as stored:  # zip keeps a checksum of each array
            about = json.loads(str(stored["about"]))
            if "refusal" in about:
                return Finding(**about["refusal"])
            thickness, row, column = about["spacing"]
            findings = tuple(Finding(**finding) for finding in about["findings"])
            return Volume(name, stored["image"], stored["mask"], (thickness, row, column), findings)
    except UNREADABLE_ENTRY:
        return None


def read_site(
    cases: Sequence[Case], settings: VolumeSettings, cache: VolumeCache | None = None
) -> tuple[list[Volume], list[Finding]]:
    """Read all cases of a site; a case that cannot be used becomes a finding and is left out.

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
    return volumes, findings
