"""Real histology: patches of five sources in the WILDS layout, and every other image under histology."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from harmofl.data.findings import CaseError
from harmofl.data.patch_index import read_index
from harmofl.data.patches import Patches, split_by_slide, split_patches_as_published
from harmofl.data.rasters import read_rgb

TABLES = {"metadata.csv", "nuclei_fraction_and_source.csv", "colour_stats.csv"}
REFUSED = {"broken.svs"}  # no TIFF at all, by its row in SOURCES.md
SITES = {0: 18, 1: 18, 2: 18, 3: 9, 4: 9}  # patches of A7, AR, E2, AC, AO: 9 of each of 8 images


@pytest.fixture
def histology(realdata: Path) -> Path:
    folder = realdata / "histology"
    if not folder.is_dir():
        pytest.skip("the real images hold no histology")
    return folder


@pytest.fixture
def wilds(histology: Path) -> Path:
    return histology / "breast5sites_wilds_layout_by_nc_sa"


def test_every_image_is_read_or_refused_by_name_as_its_source_says(histology):
    files = [path for path in sorted(histology.rglob("*")) if path.is_file() and path.name not in TABLES]
    assert len(files) >= 126  # 9 + 1 + 44 + 72
    refused = set()
    for path in files:
        try:
            picture, findings = read_rgb(path, path.name)
        except CaseError as error:
            assert error.finding.subject == path.name
            assert "\n" not in str(error)
            refused.add(path.name)
        else:
            with Image.open(path) as image:
                assert image.mode in ("RGB", "RGBA")
                stored = np.asarray(image)
            assert np.array_equal(picture, stored[..., :3])  # each RGBA among them is opaque
            assert findings == []
    assert refused == REFUSED


@pytest.mark.parametrize("center", SITES)
def test_a_center_is_a_site(wilds, center):
    index = read_index(wilds, [center])
    assert len(index) == SITES[center]
    with (wilds / "metadata.csv").open(newline="") as stream:
        listed = [line for line in csv.DictReader(stream) if int(line["center"]) == center]
    assert index.tumor.tolist() == [int(line["tumor"]) for line in listed]
    assert sum(index.counts().values()) == len(listed)
    assert index.findings == ()
    assert all((wilds / index.name(row)).is_file() for row in range(len(index)))
    dataset = Patches(index, np.arange(len(index)), 96, 96)
    assert dataset.check(0) == []
    for images, labels in DataLoader(dataset, 9, num_workers=center % 2):
        assert images.shape == (9, 3, 96, 96)
        assert 0 <= images.min() < images.max() < 2
        assert labels.dtype == torch.int64
    assert dataset.skipped() == {}


def test_mean_colors_of_the_sites_are_those_of_the_source_table(wilds):
    """SOURCES.md: A7 165/140/175, AR 161/96/139, E2 195/150/185, AC 133/67/122, AO 126/90/139."""
    means = [[165, 140, 175], [161, 96, 139], [195, 150, 185], [133, 67, 122], [126, 90, 139]]
    for center, expected in enumerate(means):
        index = read_index(wilds, [center])
        images = torch.stack([image for image, _ in Patches(index, np.arange(len(index)), 96, 96)])
        # up to 1.5 off: patches leave out margins of the images; the sites are 9 and more apart
        assert (images.mean(dim=(0, 2, 3)) * 255 - torch.tensor(expected)).abs().max() < 2


def test_five_centers_are_enough_patients_for_a_split(wilds):
    index = read_index(wilds, range(5))
    assert len(index.patients) == len(index.slides) == 8
    split = split_by_slide(index, 0)
    parts = [set(index.patient[rows].tolist()) for rows in (split.train, split.val, split.test)]
    assert sum(map(len, parts)) == 8
    assert all(set(index.tumor[rows]) == {0, 1} for rows in (split.train, split.val, split.test))


def test_one_center_has_too_few_patients_so_that_only_the_published_split_trains(wilds):
    index = read_index(wilds, [0])
    assert [finding.code for finding in split_by_slide(index, 0).findings] == ["too_few_cases"]
    split = split_patches_as_published(index, 0)
    # 18 patches: 18 * 0.64 = 11.52, 18 * 0.8 = 14.4
    assert (len(split.train), len(split.val), len(split.test)) == (11, 3, 4)
