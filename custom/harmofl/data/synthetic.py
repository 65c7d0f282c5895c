"""Multi-site demonstration data, written as real files in the layout of the six-site prostate collection."""

import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel.orientations import axcodes2ornt, ornt_transform
from numpy.typing import NDArray
from scipy import ndimage

from harmofl.data.phantom import Volume, paint_pelvis
from harmofl.data.scanners import SCANNERS, TISSUE, Scanner
from harmofl.data.whole_folder import write_whole

PEDESTAL = 2.0  # largest intercept of a slice, in units of the 99th percentile of the image without it


def write_prostate_site(
    folder: Path, scanner: str, cases: int, seed: int, *, first_case: int = 0, matrix: int = 96, slices: int = 12
) -> None:
    """Write the images and masks of one synthetic site.

    The folder appears under its name only when all files are in it; a folder that already holds these files is kept.
    A case depends on scanner, seed, case number and grid, not on the number of cases.

    Args:
        folder: receives CaseNN.nii.gz and the mask beside each; must be missing or empty.
        scanner: one of SCANNERS.
        cases: number of patients.
        seed: of the whole data set.
        first_case: number of the first case.
        matrix: pixels along both edges of a slice.
        slices: slices a volume.

    Raises:
        ValueError: an unknown scanner.
        FileExistsError: the folder holds something else.
    """
    if scanner not in SCANNERS:
        raise ValueError(f"scanner {scanner!r} is unknown; choose one of {', '.join(SCANNERS)}")
    profile = SCANNERS[scanner]
    numbers = range(first_case, first_case + cases)
    wanted = {f"Case{n:02d}{end}.nii.gz" for n in numbers for end in ("", profile.mask_suffix)}

    def write(part: Path) -> None:
        for number in numbers:
            rng = np.random.default_rng([seed, zlib.crc32(scanner.encode()), number])
            _write_case(part, f"Case{number:02d}", profile, rng, (matrix, slices))

    write_whole(folder, wanted, write)


def _write_case(folder: Path, name: str, scanner: Scanner, rng: np.random.Generator, grid: tuple[int, int]) -> None:
    matrix, slices = grid
    image, labels = simulate_case(scanner, rng, matrix, slices)
    spacing = np.array(_spacing(scanner, matrix, slices))
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    affine[:3, :3] = _oblique(rng.normal(0, 0.06)) @ affine[:3, :3]
    affine[:3, 3] = rng.normal(0, 15, 3) - affine[:3, :3] @ (np.array(image.shape) - 1) / 2
    turn = ornt_transform(axcodes2ornt("LPS"), axcodes2ornt(scanner.axis_codes))
    for array, suffix in ((image, ""), (labels, scanner.mask_suffix)):
        volume = nib.Nifti1Image(array, affine).as_reoriented(turn)
        volume.header.set_xyzt_units("mm")
        nib.save(volume, folder / f"{name}{suffix}.nii.gz")


def _oblique(angle: float) -> NDArray[np.float64]:
    """Tilt about the left-right axis, as slices are laid perpendicular to the rectal wall."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])


def _spacing(scanner: Scanner, matrix: int, slices: int) -> tuple[float, float, float]:
    return scanner.field_of_view / matrix, scanner.field_of_view / matrix, scanner.slab / slices


def simulate_case(
    scanner: Scanner, rng: np.random.Generator, matrix: int, slices: int
) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
    """Image one random patient: raw intensities and labels, (matrix, matrix, slices) on an LPS grid."""
    shape = (matrix, matrix, slices)
    spacing = _spacing(scanner, matrix, slices)
    patient, acquisition = rng.spawn(2)
    tissue = {**TISSUE, **scanner.tissue}
    tissue = {name: level * np.exp(acquisition.normal(0, 0.06)) for name, level in tissue.items()}
    signal, zones, rectum = paint_pelvis(patient, shape, spacing, tissue, scanner.coil == "endorectal")
    # blending of thin walls can undershoot
    signal = np.maximum(signal, 0) ** np.float32(scanner.echo * np.exp(acquisition.normal(0, 0.08)))
    signal *= _sensitivity(scanner, acquisition, shape, rectum)
    signal = ndimage.gaussian_filter(signal, [scanner.blur / spacing[0]] * 2 + [0], truncate=3)
    top = float(np.percentile(signal, 99))
    sigma = np.float32(scanner.noise * top * np.exp(acquisition.normal(0, 0.2)))
    noise = acquisition.standard_normal((2, *shape), dtype=np.float32) * sigma
    signal = np.hypot(signal + noise[0], noise[1])
    # Brightness varies from slice to slice, as where a conversion left out the intercept that a scanner stores with
    # each slice; the zero-filled corners of distortion correction let a window from minimum to percentile keep it.
    signal += (top * PEDESTAL * acquisition.random(slices)).astype(np.float32)
    signal[_zero_filled(shape)] = 0
    signal *= scanner.intensity / top * np.exp(acquisition.normal(0, 0.3))
    limit = np.iinfo(scanner.dtype).max
    labels = zones if scanner.zones else np.minimum(zones, 1)
    return np.clip(np.rint(signal), 0, limit).astype(scanner.dtype), labels.astype(np.uint8)


def _zero_filled(shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    """The corners of every slice, (W, H, S); about 0.5 % of its pixels."""
    x, y, _ = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij", sparse=True)
    return np.broadcast_to(np.abs(x) + np.abs(y) > 1.9, shape)


def _sensitivity(scanner: Scanner, rng: np.random.Generator, shape: tuple[int, int, int], rectum: Volume) -> Volume:
    """Receive field: the coil's own fall-off times a smooth random shading."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n, dtype=np.float32) for n in shape), indexing="ij", sparse=True)
    tilt = rng.normal(0, 0.12, 6).astype(np.float32)
    log_field = tilt[0] * x + tilt[1] * y + tilt[2] * z + tilt[3] * x * y + tilt[4] * x * x + tilt[5] * y * y
    strength = np.float32(scanner.coil_strength * np.exp(rng.normal(0, 0.25)))
    if scanner.coil == "endorectal":
        reach = np.float32(scanner.coil_reach * np.exp(rng.normal(0, 0.15)))
        log_field = log_field - strength * (1 - 1 / (1 + (rectum / reach) ** 2))
    else:
        log_field = log_field + strength * y * y
    return np.exp(log_field)
