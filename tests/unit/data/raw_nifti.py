"""NIfTI files whose header holds what a test says, not what nibabel would make of it."""

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np


def raw_nifti(
    path: Path,
    voxels: np.ndarray,
    *,
    sform: np.ndarray | None = None,
    qform: np.ndarray | None = None,
    codes: tuple[int, int] = (1, 0),
    pixdim: tuple[float, ...] | None = None,
    extension: bytes = b"",
    behind: bytes = b"",
    kind: Any = nibabel.Nifti1Header,
    **fields: Any,
) -> Path:
    """Write a single file.

    Args:
        path: ends in .nii or .nii.gz.
        voxels: (x, y, z) and more axes of one voxel.
        sform: its three rows; zeros where it is None.
        qform: from which quaternion, offsets and voxel sizes follow.
        codes: of sform and qform.
        pixdim: the three voxel sizes; those of the forms where it is None.
        extension: bytes between the header and the voxels, which begin with the flag of four bytes.
        behind: bytes after the last voxel.
        kind: of the header.
        fields: replace any field of the header.
    """
    header = kind()
    header.set_data_dtype(voxels.dtype)
    header.set_data_shape(voxels.shape)
    if qform is not None:
        header.set_qform(qform, 1)
    if sform is not None:
        header.set_sform(sform, 1)
        if qform is None:
            header["pixdim"][1:4] = np.linalg.norm(sform[:3, :3], axis=0)
    header["sform_code"], header["qform_code"] = codes
    if pixdim is not None:
        header["pixdim"][1:4] = pixdim
    between = extension or bytes(4)
    header["vox_offset"], header["magic"] = kind.sizeof_hdr + len(between), kind.single_magic
    header["scl_slope"], header["scl_inter"] = 1, 0
    for name, value in fields.items():
        header[name] = value
    content = header.binaryblock + between + voxels.tobytes(order="F") + behind
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path
