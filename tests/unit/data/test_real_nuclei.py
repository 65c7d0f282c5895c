"""Every real file of nuclei is read, or answered with a finding that names it (see SOURCES.md beside the images)."""

import io
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import loadmat
from skimage.measure import regionprops

from harmofl.data.findings import CaseError, Finding
from harmofl.data.imagescope import CELL_TYPES, NUCLEUS, Drawing, Region, draw_regions, read_regions
from harmofl.data.mask_meaning import mask_labels
from harmofl.data.nuclei import NucleiCase, find_nuclei, read_nuclei
from harmofl.data.rasters import read_rgb
from harmofl.data.tiles import NucleiTiles, whole_image_logits

MONUSEG, MONUSAC = "nuclei/monuseg_by_nc_sa", "nuclei/monusac_by_nc_sa"
# Image -> regions in the file, those with fewer than 3 vertices, those over the edge
PAIRS = {
    "TCGA-50-5931-01Z-00-DX1": (445, 1, 4),
    "TCGA-AO-A0J2-01A-01-BSA": (356, 0, 0),
    "TCGA-B0-5710-01Z-00-DX1": (359, 0, 9),
    "TCGA-HC-7209-01A-01-TS1": (325, 0, 1),
    "TCGA-NH-A8F7-01A-01-TS1": (363, 0, 0),
}
OTHERS = {
    "monusac_instances_b_n_ary_mask.mat",
    "monusac_rgba_1170x1090.tif",
    "monusac_tile512_classmask.png",
    "monusac_tile512_rgb.png",
}
SHAPE = (1000, 1000)


def shoelace(outline: np.ndarray) -> float:
    """The area that an outline encloses: half the sum of x_i y_i+1 - x_i+1 y_i."""
    (x, y), (next_x, next_y) = outline.T, np.roll(outline, -1, axis=0).T
    return abs(float((x * next_y - next_x * y).sum())) / 2


def outlines(path: Path) -> list[np.ndarray]:
    """All outlines of a file, without the reader."""
    return [
        np.array([[float(vertex.attrib["X"]), float(vertex.attrib["Y"])] for vertex in region.iter("Vertex")])
        for region in ElementTree.parse(path).iter("Region")
    ]


@cache
def drawing_of(path: Path) -> tuple[list[Region], list[Finding], Drawing]:
    regions, findings = read_regions(path, path.name)
    return regions, findings, draw_regions(regions, SHAPE, (NUCLEUS,), path.name)


def inside(outline: np.ndarray) -> bool:
    return len(outline) > 2 and outline.min() >= 0 and outline.max() <= 1000


def boundary(outline: np.ndarray) -> float:
    return float(np.hypot(*(np.roll(outline, -1, axis=0) - outline).T).sum())


def area_drawn(outline: np.ndarray) -> int:
    """Pixels of one outline, moved by whole pixels to a small picture of its own."""
    near = outline - np.floor(outline.min(axis=0)) + 1
    columns, rows = np.ceil(near.max(axis=0)).astype(int) + 1
    drawing = draw_regions([Region(0, NUCLEUS, near, False)], (rows, columns), (NUCLEUS,), "one.xml")
    return int(drawing.target.sum())


def test_the_tables_name_every_file(realdata: Path) -> None:
    present = {path.name for folder in (MONUSEG, MONUSAC) for path in (realdata / folder).iterdir()}
    assert present == OTHERS | {f"{name}{ending}" for name in PAIRS for ending in (".tif", ".xml")}
    assert present == {path.name for path in (realdata / "nuclei").rglob("*") if path.is_file()}


def test_pairs_are_found(realdata: Path) -> None:
    cases, findings = find_nuclei(realdata / MONUSEG)
    assert findings == []
    assert {case.name: case.patient for case in cases} == {name: name[:12] for name in PAIRS}


@pytest.mark.parametrize("name", PAIRS)
def test_counts_and_areas_match_the_outlines(realdata: Path, name: str) -> None:
    path = realdata / MONUSEG / f"{name}.xml"
    in_file, too_short, over_edge = PAIRS[name]
    given = outlines(path)
    assert len(given) == in_file
    regions, findings, drawing = drawing_of(path)
    assert len(regions) == in_file - too_short
    said = {finding.code: finding.message for finding in (*findings, *drawing.findings)}
    assert said["regions_read"] == f"nucleus {in_file - too_short}"
    assert said.get("regions_dropped", "0").split()[0] == str(too_short)
    assert said.get("regions_clipped", "0").split()[0] == str(over_edge)
    assert "regions_outside" not in said
    assert len(regionprops(drawing.instances)) == len(regions)  # each keeps pixels of its own

    whole = [outline for outline in given if inside(outline)]
    assert len(whole) == in_file - too_short - over_edge
    expected, drawn = map(np.array, ([shoelace(o) for o in whole], [area_drawn(o) for o in whole]))
    assert drawn.sum() == pytest.approx(expected.sum(), rel=0.005)
    off = np.abs(drawn - expected)
    assert np.mean(off <= 0.02 * expected) > 0.9
    # Each of the p pixels along an edge is off by at most 1/2, and by 0.29 (uniform) with either sign: sqrt(p) * 0.29
    # altogether, of which small nuclei may reach the sixfold where an edge runs along the pixels
    edge = np.sqrt([boundary(outline) for outline in whole])
    assert (off <= np.maximum(0.02 * expected, 2 * edge)).all()


@pytest.mark.parametrize("name", PAIRS)
def test_the_target_of_a_pair_is_the_union_of_its_outlines(realdata: Path, name: str) -> None:
    case = next(case for case in find_nuclei(realdata / MONUSEG)[0] if case.name == name)
    image = read_nuclei(case)
    with Image.open(case.image) as picture:
        np.testing.assert_array_equal(image.image, np.asarray(picture.convert("RGB")))
    assert set(np.unique(image.target).tolist()) == {0, 1}
    assert not {finding.code for finding in image.findings} & {"implausible_share", "unlike_other_masks"}
    # hematoxylin takes red out of the light: nuclei are darker there, unless rows and columns are swapped
    red = image.image[..., 0].astype(float)
    contrast = red[image.target == 0].mean() - red[image.target == 1].mean()
    swapped = red[image.target.T == 0].mean() - red[image.target.T == 1].mean()
    assert contrast > 20
    assert abs(swapped) < contrast / 4
    tiles = NucleiTiles([image], 256)
    assert len(tiles) == 16
    assert tiles.keys[-1] == (name, 744, 744)


def smoothed(mask: np.ndarray, factor: float) -> np.ndarray:
    rows, columns = (round(factor * size) for size in mask.shape)
    resized = Image.fromarray(mask.astype(np.float32)).resize((columns, rows), Image.Resampling.BILINEAR)
    return np.rint(np.asarray(resized)).astype(int)


def through_jpeg(mask: np.ndarray, quality: int) -> np.ndarray:
    stream = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8)).save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(stream))


@pytest.mark.parametrize("name", ["TCGA-50-5931-01Z-00-DX1", "TCGA-B0-5710-01Z-00-DX1"])  # crowded, sparse
def test_labels_of_real_nuclei_are_told_from_smoothed_ones(realdata: Path, name: str) -> None:
    """As drawn, and at a half, a quarter and an eighth of the resolution, where the smallest nuclei are pixels."""
    instances = drawing_of(realdata / MONUSEG / f"{name}.xml")[2].instances
    for step in (1, 2, 4, 8):
        labels = instances[::step, ::step]
        classes = np.where(labels > 0, labels % 4 + 1, 0)
        for mask in (labels, classes, (labels > 0) * 255):
            np.testing.assert_array_equal(mask_labels(mask, "a", "b"), mask)
        np.testing.assert_array_equal(mask_labels(classes, "a", "b", classes=True), classes)
    part = instances[:500, :500]
    binary = (part > 0) * 255
    smooth = [smoothed(part, 0.5), smoothed(binary, 0.5), smoothed(binary, 2)]
    for mask in (*smooth, through_jpeg(binary, 50), through_jpeg(binary, 98), through_jpeg(part / 2, 95)):
        with pytest.raises(CaseError) as caught:
            mask_labels(mask, "a", "b")
        assert caught.value.finding.code == "mask_ramps"
    with pytest.raises(CaseError):
        mask_labels(smoothed(np.where(part > 0, part % 4 + 1, 0), 0.5), "a", "b", classes=True)


def test_real_numbers_of_nuclei_in_a_matrix(realdata: Path) -> None:
    stored = loadmat(realdata / MONUSAC / "monusac_instances_b_n_ary_mask.mat")
    [matrix] = [value for key, value in stored.items() if not key.startswith("_")]
    assert len(np.unique(matrix)) > 4
    np.testing.assert_array_equal(mask_labels(matrix, "a", "b"), matrix)


def test_a_whole_image_is_scored_in_tiles(realdata: Path) -> None:
    case, *_ = find_nuclei(realdata / MONUSEG)[0]
    image = read_nuclei(case)
    logits = whole_image_logits(lambda batch: batch[:, :2], image, 256)
    assert logits.shape == (1, 2, 1000, 1000)
    red = torch.from_numpy(image.image[..., 0].astype(np.float32)) / 255
    torch.testing.assert_close(logits[0, 0], red, atol=1e-5, rtol=0)


def test_annotated_images_without_cell_types_do_not_train_cell_types(realdata: Path) -> None:
    case, *_ = find_nuclei(realdata / MONUSEG)[0]
    with pytest.raises(CaseError) as caught:
        read_nuclei(case, CELL_TYPES)
    assert (caught.value.finding.code, caught.value.finding.subject) == ("no_cell_types", case.annotation.name)


def test_images_without_outlines_and_other_formats_are_named(realdata: Path) -> None:
    cases, findings = find_nuclei(realdata / MONUSAC)
    assert cases == []
    assert {(finding.code, finding.subject) for finding in findings} == {
        ("other_format", "monusac_instances_b_n_ary_mask.mat"),
        ("image_without_annotation", "monusac_rgba_1170x1090.tif"),
        ("image_without_annotation", "monusac_tile512_classmask.png"),
        ("image_without_annotation", "monusac_tile512_rgb.png"),
    }


def test_a_real_picture_of_cell_types(realdata: Path) -> None:
    folder = realdata / MONUSAC
    case = NucleiCase("tile", "tile", folder / "monusac_tile512_rgb.png", folder / "monusac_tile512_classmask.png")
    image = read_nuclei(case, CELL_TYPES)
    assert image.image.shape == (512, 512, 3)
    assert np.unique(image.target).tolist() == [0, 2, 4]  # lymphocytes and macrophages
    np.testing.assert_array_equal(read_nuclei(case).target, image.target > 0)
    assert [finding for finding in image.findings if finding.severity != "notice"] == []


def test_a_real_picture_with_alpha(realdata: Path) -> None:
    path = realdata / MONUSAC / "monusac_rgba_1170x1090.tif"
    picture, _ = read_rgb(path, path.name)
    assert (picture.shape, picture.dtype) == ((1170, 1090, 3), np.uint8)
