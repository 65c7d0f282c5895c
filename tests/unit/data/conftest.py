"""Small NIfTI files, written with nibabel alone."""

from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest

from harmofl.data.layout import Case

WriteNifti = Callable[..., Path]
WriteCase = Callable[..., Case]


@pytest.fixture
def write_nifti(tmp_path: Path) -> WriteNifti:
    """Write an array (x, y, z) with an affine; by default axial LPS with voxels of 0.5 x 0.5 x 3 mm."""

    def write(name: str, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        placed = np.diag([-0.5, -0.5, 3.0, 1.0]) if affine is None else affine
        image = nibabel.Nifti1Image(array, placed)
        image.header.set_data_dtype(array.dtype)
        nibabel.save(image, path)
        return path

    return write


@pytest.fixture
def gland() -> tuple[np.ndarray, np.ndarray]:
    """Image (20, 16, 6) int16 without symmetry and mask uint8, both (x, y, z) and aligned."""
    rng = np.random.default_rng(7)
    image = rng.integers(10, 200, (20, 16, 6)).astype(np.int16)
    mask = np.zeros(image.shape, np.uint8)
    mask[4:9, 6:13, 1:4] = 1
    image[mask > 0] += 800
    return image, mask


@pytest.fixture
def write_case(write_nifti: WriteNifti, gland: tuple[np.ndarray, np.ndarray]) -> WriteCase:
    """Write one case; image, mask and their affines can be replaced one by one."""

    def write(
        name: str = "Case00",
        *,
        image: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        affine: np.ndarray | None = None,
        mask_affine: np.ndarray | None = None,
        folder: str = "site",
    ) -> Case:
        voxels = gland[0] if image is None else image
        labels = gland[1] if mask is None else mask
        return Case(
            name,
            write_nifti(f"{folder}/{name}.nii.gz", voxels, affine),
            write_nifti(f"{folder}/{name}_segmentation.nii.gz", labels, affine if mask_affine is None else mask_affine),
        )

    return write
