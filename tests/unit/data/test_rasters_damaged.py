"""Damaged, missing and monstrous picture files are refused in one line, never half read."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from harmofl.data import rasters
from harmofl.data.findings import CaseError
from harmofl.data.rasters import read_rgb
from tests.pictures import png_bytes, refused

NOISE = np.random.default_rng(0).integers(0, 255, (24, 24, 3), np.uint8)


def saved(folder: Path) -> Path:
    path = folder / "patch.png"
    Image.fromarray(NOISE).save(path)
    return path


def test_too_many_pixels_are_refused_before_decoding(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(png_bytes(struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0), (b"IDAT", zlib.compress(b""))))
    refused(bomb, "too_large")  # Pillow's own limit
    path = saved(tmp_path)
    monkeypatch.setattr(rasters, "MOST_PIXELS", 24 * 24 - 1)
    refused(path, "too_large")
    monkeypatch.setattr(rasters, "MOST_PIXELS", 24 * 24)
    read_rgb(path, "site/patch")[0]


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "lzw.tif", "jpeg2000.tif", "a.bmp", "a.gif"])
def test_a_file_cut_anywhere_is_refused_or_complete(tmp_path, name):
    path = tmp_path / name
    if name.startswith("a."):
        Image.fromarray(NOISE).save(path)
    else:
        tifffile.imwrite(path, NOISE, photometric="rgb", compression=path.stem)
    content, whole = path.read_bytes(), read_rgb(path, "site/patch")[0]
    refusals = 0
    for length in range(0, len(content), 37):
        path.write_bytes(content[:length])
        try:
            picture, _ = read_rgb(path, "site/patch")
        except CaseError as error:
            refusals += error.finding.code == "unreadable_image"
        else:
            assert np.array_equal(picture, whole)
    assert refusals >= len(content) // 37 - 1


def test_one_flipped_bit_of_a_png_is_found(tmp_path):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    refused(path, "unreadable_image")


def test_what_is_no_image_is_refused(tmp_path):
    path = tmp_path / "patch.png"
    refused(path, "missing_image")
    assert "is a folder" in refused(tmp_path, "not_a_file")
    path.write_bytes(b"")
    assert "empty" in refused(path, "unreadable_image")
    path.write_text("<html>not found</html>\n" * 9)
    refused(path, "unreadable_image")
    path.write_bytes(b"II*\x00" + b"\xff" * 40)
    refused(path, "unreadable_image")
    postscript = io.BytesIO()
    Image.fromarray(NOISE).save(postscript, "EPS")
    path.write_bytes(postscript.getvalue())  # would start an interpreter
    refused(path, "unreadable_image")


def test_a_pipe_does_not_hang_the_site(tmp_path):
    os.mkfifo(tmp_path / "patch.png")
    refused(tmp_path / "patch.png", "missing_image")
