"""Synthetic histology: real files in the real layouts, deterministic, and no easier than it should be."""

import csv
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from harmofl.data.nuclei import find_nuclei, read_nuclei
from harmofl.data.patch_index import read_index
from harmofl.data.specimens import ORGANS, organ_piece
from harmofl.data.stains import HOSPITALS
from harmofl.data.synthetic_histology import (
    NUCLEI_SITES,
    nuclei_mask,
    write_nuclei_site,
    write_patches_site,
)

# section 7 of the notes on the method: mean red, green and blue of five TCGA breast source sites
MEAN_COLORS = {
    "purple_gray": (165, 140, 175),
    "red_pink": (161, 96, 139),
    "pale_pink": (195, 150, 185),
    "crimson": (133, 67, 122),
    "dark_violet": (126, 90, 139),
}


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rows_of(folder):
    with (folder / "metadata.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def path_of(folder, row):
    case = f"patient_{row['patient']}_node_{row['node']}"
    return folder / "patches" / case / f"patch_{case}_x_{row['x_coord']}_y_{row['y_coord']}.png"


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    """Forty patches of every hospital: {profile: (folder, rows, pixels (40, 96, 96, 4))}."""
    root = tmp_path_factory.mktemp("hospitals")
    read = {}
    for center, profile in enumerate(HOSPITALS):
        write_patches_site(root / profile, profile, [center], slides=4, patches=40, seed=0)
        rows = rows_of(root / profile)
        pixels = np.stack([np.asarray(Image.open(path_of(root / profile, row))) for row in rows])
        read[profile] = (root / profile, rows, pixels)
    return read


def test_the_layout_is_that_of_the_public_patches(hospitals):
    for center, (folder, rows, pixels) in enumerate(hospitals.values()):
        header = (folder / "metadata.csv").read_text().splitlines()[0]
        assert header == ",patient,node,x_coord,y_coord,tumor,slide,center,split"
        assert pixels.shape == (40, 96, 96, 4) and pixels.dtype == np.uint8 and np.all(pixels[..., 3] == 255)
        assert {row["center"] for row in rows} == {str(center)}
        assert all(len(row["patient"]) == 3 and int(row["patient"]) // 20 == center for row in rows)
        assert {int(row["slide"]) for row in rows} == set(range(20 * center, 20 * center + 4))
        assert {row["split"] for row in rows} <= {"0", "1"}
        assert len({(row["slide"], row["x_coord"], row["y_coord"]) for row in rows}) == 40
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) == 41


def test_half_of_the_patches_of_each_slide_carry_tumor(hospitals):
    for _, rows, _ in hospitals.values():
        assert Counter((row["slide"], row["tumor"]) for row in rows) == Counter(
            {(row["slide"], tumor): 5 for row in rows for tumor in "01"}
        )


def test_the_index_is_read_without_a_finding(hospitals):
    for center, (folder, _, _) in enumerate(hospitals.values()):
        index = read_index(folder, [center])
        assert len(index) == 40 and not index.findings
        assert all((folder / index.name(row)).is_file() for row in range(40))


def test_hospitals_have_the_mean_colors_of_real_source_sites(hospitals):
    """Within 14 gray levels, the spread of real slides of one source site; the nearest hospital is its own."""
    means = {profile: pixels[..., :3].mean((0, 1, 2)) for profile, (_, _, pixels) in hospitals.items()}
    for profile, mean in means.items():
        distances = {name: np.abs(mean - color).max() for name, color in MEAN_COLORS.items()}
        assert distances[profile] < 14
        assert min(distances, key=distances.get) == profile


def accuracy_of_logistic_regression(features, labels):
    """Training accuracy of a ridge-penalized fit by Newton's method: no lower than that on new patches."""
    standard = (features - features.mean(0)) / features.std(0)
    design = np.c_[standard, np.ones(len(standard))]
    weights = np.zeros(design.shape[1])
    for _ in range(25):
        chance = 1 / (1 + np.exp(-design @ weights))
        hessian = (design.T * (chance * (1 - chance))) @ design + 1e-3 * np.eye(len(weights))
        weights += np.linalg.solve(hessian, design.T @ (labels - chance) - 1e-3 * weights)
    return np.mean((design @ weights > 0) == (labels > 0))


def test_the_mean_color_does_not_tell_tumor(hospitals):
    pixels = np.concatenate([pixels[..., :3] for _, _, pixels in hospitals.values()])
    labels = np.array([int(row["tumor"]) for _, rows, _ in hospitals.values() for row in rows])
    assert accuracy_of_logistic_regression(pixels.mean((1, 2)), labels) < 0.75
    middle = pixels[:, 32:64, 32:64].mean((1, 2))
    assert accuracy_of_logistic_regression(middle, labels) < 0.75


def test_the_mean_color_tells_the_hospital(hospitals):
    """What harmonization is for: leave one slide out, and the nearest mean names the hospital of most patches."""
    means = np.stack([pixels[..., :3].mean((1, 2)) for _, _, pixels in hospitals.values()])  # (5, 40, 3)
    slides = np.arange(40) // 10
    hits = 0
    for slide in range(4):
        known = means[:, slides != slide].mean(1)
        left = means[:, slides == slide]
        nearest = np.linalg.norm(left[:, :, None] - known, axis=-1).argmin(-1)
        hits += np.count_nonzero(nearest == np.arange(5)[:, None])
    assert hits / 200 > 0.5  # 0.2 by chance


def test_a_patch_depends_on_profile_seed_slide_and_number_alone(tmp_path):
    def written(name, profile="crimson", *, slides=2, patches=6, seed=3):
        write_patches_site(tmp_path / name, profile, [1], slides=slides, patches=patches, seed=seed, size=64)
        return {path: data for path, data in contents(tmp_path / name).items() if path.endswith(".png")}

    first, more = written("first"), written("more", patches=10)
    assert len(first) == 6 and first.items() <= more.items()
    assert first == written("again")
    # three slides share seven patches: three, two and two, of which slides 0 and 1 have three each above
    assert len(first.items() & written("slides", slides=3, patches=7).items()) == 5
    for other in (written("seed", seed=4), written("profile", "pale_pink")):
        assert not set(first.values()) & set(other.values())


@pytest.fixture(scope="module")
def nuclei_sites(tmp_path_factory):
    """Five images of three patients of every site."""
    root = tmp_path_factory.mktemp("nuclei")
    for profile in NUCLEI_SITES:
        write_nuclei_site(root / profile, profile, patients=3, images=5, seed=0, size=96)
    return root


@pytest.mark.parametrize("profile", sorted(NUCLEI_SITES))
def test_the_reader_finds_every_image_and_its_patient(nuclei_sites, profile):
    cases, findings = find_nuclei(nuclei_sites / profile)
    assert not findings and sorted(Counter(case.patient for case in cases).values()) == [1, 2, 2]
    for case in cases:
        image = read_nuclei(case)
        assert image.image.shape == (96, 96, 3) and not [f for f in image.findings if f.severity != "notice"]
        # nuclei fill about a fifth to a third of the tissue
        assert 0.03 < np.mean(image.target == 1) < 0.6


def test_the_annotation_is_the_one_that_was_drawn(nuclei_sites, monkeypatch):
    """Image 0 of patient 0, drawn anew from its generator: the reader's mask is that of the outlines."""
    pieces = []

    def remember(*args):
        pieces.append(organ_piece(*args))
        return pieces[-1]

    monkeypatch.setattr("harmofl.data.synthetic_histology.organ_piece", remember)
    for profile in NUCLEI_SITES:
        again = nuclei_sites / f"{profile}-again"
        write_nuclei_site(again, profile, patients=1, images=1, seed=0, size=96)
        expected = nuclei_mask(pieces[-1].nuclei, 96) > 0
        case = find_nuclei(again)[0][0]
        read = read_nuclei(case).target > 0
        # coordinates are written to 0.01 pixels: a center of a thousand may change sides
        assert np.count_nonzero(read != expected) <= 9
        assert contents(again).items() <= contents(nuclei_sites / profile).items()


def test_sites_come_in_the_file_formats_of_the_collections(nuclei_sites):
    modes, compressions = Counter(), set()
    for path in nuclei_sites.glob("*/*/*.tif"):
        if "again" not in str(path):
            with Image.open(path) as image:
                modes[image.mode] += 1
                compressions.add(image.info["compression"])
    assert modes == {"RGB": 20, "RGBA": 5}
    assert compressions == {"raw", "tiff_lzw", "packbits", "tiff_adobe_deflate"}
    masks = [np.asarray(Image.open(path)) for path in (nuclei_sites / "tnbc").glob("GT_*/*.png")]
    assert len(masks) == 5 and all(set(np.unique(mask)) == {0, 255} for mask in masks)


def test_cell_classes_stand_in_the_attribute_and_holes_are_negative(nuclei_sites):
    text = {p: "".join(f.read_text() for f in (nuclei_sites / p).rglob("*.xml")) for p in NUCLEI_SITES}
    for name in ("Epithelial", "Lymphocyte", "Macrophage", "Neutrophil", "Ambiguous"):
        assert f'<Attribute Name="{name}"' in text["lung"]
    assert "<Attribute " not in text["monuseg"] and 'Name="' in text["monuseg"]
    everything = "".join(text.values())
    assert 'NegativeROA="1"' in everything and 'X="-' in everything
    assert 10 * everything.count('NegativeROA="1"') < everything.count('NegativeROA="0"')


def test_vacuoles_are_holes_in_the_mask():
    for seed in range(20):
        piece = organ_piece(np.random.default_rng(seed), 96, 0.5, ORGANS["kidney"])
        hollow = [nucleus for nucleus in piece.nuclei if nucleus.hole is not None]
        if hollow:
            solid = [nucleus._replace(hole=None) for nucleus in piece.nuclei]
            missing = (nuclei_mask(solid, 96) > 0) & (nuclei_mask(piece.nuclei, 96) == 0)
            assert missing.sum() >= 1
            return
    pytest.fail("no vacuole in 20 pieces, where 3 of 10 have one")


WRITERS = {
    "patches": lambda folder, count: write_patches_site(
        folder, "crimson", [0], slides=2, patches=count, seed=0, size=64
    ),
    "nuclei": lambda folder, count: write_nuclei_site(folder, "breast", patients=2, images=count, seed=0, size=64),
}


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_a_finished_site_is_kept_and_other_files_are_not_overwritten(tmp_path, kind):
    WRITERS[kind](tmp_path / "site", 4)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "site").rglob("*")}
    WRITERS[kind](tmp_path / "site", 4)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "site").rglob("*")} == before
    with pytest.raises(FileExistsError, match="already holds other files"):
        WRITERS[kind](tmp_path / "site", 5)
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_an_interrupted_write_leaves_no_site(tmp_path, monkeypatch, kind):
    calls = []

    def fail_at_third(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise OSError("disk full")
        return original(*args, **options)

    original = Image.Image.save
    monkeypatch.setattr(Image.Image, "save", fail_at_third)
    with pytest.raises(OSError, match="disk full"):
        WRITERS[kind](tmp_path / "site", 4)
    assert list(tmp_path.iterdir()) == []


def test_wishes_that_cannot_be_met_are_refused(tmp_path):
    with pytest.raises(ValueError, match="choose one of purple_gray, red_pink"):
        write_patches_site(tmp_path / "site", "blue", [0], slides=1, patches=1, seed=0)
    with pytest.raises(ValueError, match="choose one of lung, kidney"):
        write_nuclei_site(tmp_path / "site", "brain", patients=1, images=1, seed=0, size=64)
    with pytest.raises(ValueError, match="at most 20 slides"):
        write_patches_site(tmp_path / "site", "crimson", [0], slides=21, patches=21, seed=0)
    with pytest.raises(ValueError, match="centers: 3, slides: 2, patches of each: 9; give each center one"):
        write_patches_site(tmp_path / "site", "crimson", [0, 1, 2], slides=2, patches=9, seed=0, size=64)
    with pytest.raises(ValueError, match="at least one image"):
        write_nuclei_site(tmp_path / "site", "lung", patients=3, images=2, seed=0, size=64)
    assert list(tmp_path.iterdir()) == []
