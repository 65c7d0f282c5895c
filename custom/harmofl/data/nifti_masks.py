"""Labels written as NIfTI on the grid of the image that they belong to."""

from pathlib import Path

import numpy as np

from harmofl.data.geometry import as_stored
from harmofl.data.nifti import open_volume

WRITER = b"labels by harmofl"  # in the header of every mask that was predicted


def write_labels(labels_SHW: np.ndarray, source: Path, target: Path) -> None:
    """Write labels as NIfTI on the grid of the image that they belong to.

    The header is the image's: shape, sform, qform and their codes; voxels are uint8.

    Args:
        labels_SHW: (S, rows, columns) uint8 in the common frame.
        source: the image, which is only read.
        target: the file to write, which appears when it is complete.

    Raises:
        CaseError: the image cannot be read any more.
    """
    import nibabel

    volume = open_volume(source)
    image, affine = volume.image, volume.placement.affine
    header = image.header.copy()
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1, 0)
    header["cal_min"], header["cal_max"] = 0, 1
    header["descrip"] = WRITER
    header.extensions.clear()
    part = target.with_name(f".part-{target.name}")
    try:
        nibabel.save(type(image)(as_stored(labels_SHW, affine), affine, header), part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def wrote_labels(path: Path) -> bool:
    """Whether a file is one that `write_labels` left, and no mask drawn by hand."""
    try:
        held: bytes = open_volume(path).image.header["descrip"].item()
    except Exception:  # whatever is no such file
        return False
    return held == WRITER
