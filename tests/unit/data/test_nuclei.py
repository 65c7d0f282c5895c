"""Which files are one image of nuclei, whose it is, and the pair as arrays."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harmofl.app.check import finding_lines
from harmofl.data.findings import CaseError, DataRootError, Finding
from harmofl.data.imagescope import CELL_TYPES
from harmofl.data.nuclei import (
    NucleiCase,
    NucleiImage,
    find_nuclei,
    read_nuclei,
    read_site_images,
    split_images,
)
from harmofl.data.rasters import ORIENTATION, read_rgb

SQUARE = "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in ((2, 3), (6, 3), (6, 5), (2, 5)))
Touch = Callable[..., Path]


def xml(name: str | None = None) -> str:
    attribute = f'<Attribute Name="{name}"/>' if name else ""
    return (
        f"<Annotations><Annotation><Attributes>{attribute}</Attributes><Regions><Region><Vertices>{SQUARE}</Vertices>"
        "</Region></Regions></Annotation></Annotations>"
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "lung"
    folder.mkdir()
    return folder


@pytest.fixture
def touch(site: Path) -> Touch:
    """Make files, which only their names count of."""

    def make(*names: str) -> Path:
        for name in names:
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).touch()
        return site

    return make


@pytest.fixture
def pair(site: Path) -> Callable[..., NucleiCase]:
    """Write one image of 10 rows and 12 columns with its annotation."""

    def write(annotation: str | np.ndarray, mode: str | None = None, picture: np.ndarray | None = None) -> NucleiCase:
        image = np.arange(360, dtype=np.uint8).reshape(10, 12, 3) if picture is None else picture
        Image.fromarray(image).save(site / "a.png")
        if isinstance(annotation, str):
            path = site / "a.xml"
            path.write_text(annotation, encoding="utf-8")
        else:
            path = site / "a_mask.png"
            mask = Image.fromarray(annotation)
            (mask.convert(mode) if mode else mask).save(path)
        return NucleiCase("a", "a", site / "a.png", path)

    return write


def square(value: int = 1, dtype: type = np.uint8) -> np.ndarray:
    mask: np.ndarray = np.zeros((10, 12), dtype)
    mask[3:5, 2:6] = value
    return mask


def named(findings: list[Finding]) -> dict[str, str]:
    return {finding.code: finding.subject for finding in findings}


def pairs(cases: list[NucleiCase], site: Path) -> dict[str, tuple[str, str, str]]:
    return {
        case.name: (
            case.patient,
            case.image.relative_to(site).as_posix(),
            case.annotation.relative_to(site).as_posix(),
        )
        for case in cases
    }


def test_a_folder_a_patient(touch: Touch) -> None:
    site = touch(
        "TCGA-55-1594-01Z-00-DX1/TCGA-55-1594-01Z-00-DX1_10.tif",
        "TCGA-55-1594-01Z-00-DX1/TCGA-55-1594-01Z-00-DX1_10.xml",
        "TCGA-55-1594-01Z-00-DX1/TCGA-55-1594-01Z-00-DX1_2.SVS",
        "TCGA-55-1594-01Z-00-DX1/TCGA-55-1594-01Z-00-DX1_2.XML",
        "TCGA-55-1594-01Z-00-DX1/.hidden.tif",
        "__MACOSX/x.tif",
        "readme.txt",
    )
    cases, findings = find_nuclei(site)
    assert findings == []
    assert [case.name[-2:] for case in cases] == ["_2", "10"]  # natural order
    assert {case.patient for case in cases} == {"TCGA-55-1594"}


def test_twins_count_once_and_tif_is_read(touch: Touch) -> None:
    site = touch("p/a.svs", "p/a.tif", "p/a.xml", "p/b.svs", "p/b.png", "p/b.xml")
    cases, findings = find_nuclei(site)
    assert pairs(cases, site) == {"a": ("p", "p/a.tif", "p/a.xml"), "b": ("p", "p/b.png", "p/b.xml")}
    assert [(finding.severity, finding.code, finding.subject) for finding in findings] == [
        ("notice", "twin_image", "p/a.tif, p/a.svs, p/a.xml"),
        ("notice", "twin_image", "p/b.png, p/b.svs, p/b.xml"),
    ]
    site = touch("p/c.svs", "p/c.tif", "p/c.xml")
    twins = [finding for finding in find_nuclei(site)[1] if "tif" in finding.subject]
    assert len(twins) == 2 and len(finding_lines(twins)) == 1  # all images of MoNuSAC are told of in one line


def test_flat_and_in_two_folders(touch: Touch) -> None:
    site = touch("one.tif", "one.xml", "Tissue Images/two.tif", "Annotations/two.xml")
    cases, findings = find_nuclei(site)
    assert findings == []
    assert pairs(cases, site) == {
        "one": ("one", "one.tif", "one.xml"),
        "two": ("two", "Tissue Images/two.tif", "Annotations/two.xml"),
    }


def test_pictures_with_masks(touch: Touch) -> None:
    site = touch(
        "Slide_01/01_1.png",
        "GT_01/01_1.png",
        "Slide_02/1.png",
        "GT_02/1.png",
        "Slide_03/1.png",
        "GT_03/1.png",
        "c.png",
        "c_mask.png",
    )
    cases, findings = find_nuclei(site)
    assert findings == []
    assert pairs(cases, site) == {
        "01_1": ("Slide_01", "Slide_01/01_1.png", "GT_01/01_1.png"),
        "Slide_02/1": ("Slide_02", "Slide_02/1.png", "GT_02/1.png"),
        "Slide_03/1": ("Slide_03", "Slide_03/1.png", "GT_03/1.png"),
        "c": ("c", "c.png", "c_mask.png"),
    }


def test_files_without_a_partner_are_named_with_what_is_wanted(touch: Touch) -> None:
    cases, findings = find_nuclei(touch("p/a.tif", "p/b.xml"))
    assert cases == []
    assert [(f.severity, f.code, f.subject) for f in findings] == [
        ("error", "image_without_annotation", "p/a.tif"),
        ("error", "annotation_without_image", "p/b.xml"),
    ]
    assert "a.xml" in findings[0].fix
    assert "b.tif" in findings[1].fix


@pytest.mark.parametrize("names", [("a.tif", "A.TIF", "a.xml"), ("a.tif", "a.xml", "a_mask.png")])
def test_several_claims_to_one_image(touch: Touch, names: tuple[str, ...]) -> None:
    cases, findings = find_nuclei(touch(*names))
    assert cases == []
    [finding] = findings
    assert finding.code == "duplicate_case"
    assert all(name in finding.subject for name in names)


def test_one_annotation_for_images_in_two_folders_is_given_to_neither(touch: Touch) -> None:
    cases, findings = find_nuclei(touch("p/a.tif", "q/a.tif", "x/a.xml"))
    assert cases == []
    assert sorted(finding.subject for finding in findings) == ["p/a.tif", "q/a.tif", "x/a.xml"]


def test_patients_in_both_lists_are_left_out(touch: Touch) -> None:
    site = touch(
        *(f"{p}/{p}_{n}.{e}" for p in ("TCGA-MP-A4T7-01Z", "TCGA-A2-A0ET-01Z") for n in "12" for e in ("tif", "xml"))
    )
    cases, findings = find_nuclei(site)
    assert {case.patient for case in cases} == {"TCGA-A2-A0ET"}
    assert len(cases) == 2
    [finding] = findings
    assert (finding.severity, finding.code, finding.subject) == ("notice", "excluded_patient", "TCGA-MP-A4T7")
    assert finding.message.startswith("2 images")


def test_other_formats_and_empty_folders(touch: Touch, tmp_path: Path) -> None:
    site = touch("a.mat", "b.jpg", "c.jpg")
    cases, findings = find_nuclei(site)
    assert cases == []
    assert [(f.code, f.subject) for f in findings] == [
        ("other_format", "b.jpg and other *.jpg"),
        ("other_format", "a.mat"),
        ("no_cases", "lung"),
    ]
    with pytest.raises(DataRootError, match="cannot be listed"):
        find_nuclei(tmp_path / "nowhere")


def test_a_link_to_itself_ends(touch: Touch) -> None:
    site = touch("a.tif", "a.xml")
    (site / "again").symlink_to(site)
    cases, _ = find_nuclei(site)
    assert "a" in {case.image.stem for case in cases}


def test_image_and_outlines_as_arrays(pair: Callable[..., NucleiCase]) -> None:
    image = read_nuclei(pair(xml()))
    assert (image.image.shape, image.image.dtype) == ((10, 12, 3), np.uint8)
    np.testing.assert_array_equal(image.image.reshape(-1), np.arange(360).astype(np.uint8))
    np.testing.assert_array_equal(image.target, square())
    assert image.target.dtype == np.uint8
    assert [finding.code for finding in image.findings] == ["regions_read"]


def test_cell_types_and_the_one_class(pair: Callable[..., NucleiCase]) -> None:
    case = pair(xml("Macrophage"))
    np.testing.assert_array_equal(read_nuclei(case, CELL_TYPES).target, square(4))
    np.testing.assert_array_equal(read_nuclei(case).target, square(1))
    np.testing.assert_array_equal(read_nuclei(pair(xml("Ambiguous"))).target, square(255))
    with pytest.raises(CaseError) as caught:
        read_nuclei(pair(xml()), CELL_TYPES)
    assert caught.value.finding.code == "no_cell_types"


@pytest.mark.parametrize(
    "mask",
    [
        square(1),
        square(255),
        square(1, bool),
        square(40000, np.uint16),
        np.stack([square(0), square(9), square(0)], axis=-1),  # colors of nuclei
        np.stack([square(0), square(9), square(0), np.full((10, 12), 255, np.uint8)], axis=-1),
    ],
)
def test_any_label_is_nucleus(pair: Callable[..., NucleiCase], mask: np.ndarray) -> None:
    np.testing.assert_array_equal(read_nuclei(pair(mask)).target, square())


def test_palettes_and_gray_with_alpha(pair: Callable[..., NucleiCase]) -> None:
    np.testing.assert_array_equal(read_nuclei(pair(square(9), "LA")).target, square())
    case = pair(square())
    palette = Image.fromarray(square(3)).convert("P")
    palette.putpalette([200, 0, 0] * 256)  # the colors do not count
    palette.save(case.annotation)
    np.testing.assert_array_equal(read_nuclei(case, CELL_TYPES).target, square(3))


def test_labels_of_cell_types(pair: Callable[..., NucleiCase]) -> None:
    mask = square(2)
    mask[8, 8:10] = (4, 255)
    np.testing.assert_array_equal(read_nuclei(pair(mask), CELL_TYPES).target, mask)
    with pytest.raises(CaseError) as caught:
        read_nuclei(pair(square(5)), CELL_TYPES)
    assert (caught.value.finding.code, caught.value.finding.subject) == ("mask_labels", "a_mask.png")
    assert "labels 5 " in caught.value.finding.message


def test_a_mask_of_another_size_is_refused(pair: Callable[..., NucleiCase]) -> None:
    with pytest.raises(CaseError) as caught:
        read_nuclei(pair(square().T.copy()))
    assert (caught.value.finding.code, caught.value.finding.subject) == ("size_mismatch", "a.png, a_mask.png")
    assert "12x10 against 10x12" in caught.value.finding.message


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_a_damaged_mask_is_refused(pair: Callable[..., NucleiCase], content: bytes | None) -> None:
    case = pair(square())
    case.annotation.write_bytes(case.annotation.read_bytes()[:50] if content is None else content)
    with pytest.raises(CaseError) as caught:
        read_nuclei(case)
    assert (caught.value.finding.code, caught.value.finding.subject) == ("unreadable_annotation", "a_mask.png")
    assert str(case.annotation.parent) not in str(caught.value)


@pytest.mark.parametrize("length", range(60, 200, 20))
def test_no_part_of_a_long_path_is_told(tmp_path: Path, length: int) -> None:
    """Pillow names the whole path, and messages of libraries are cut."""
    folder = tmp_path / ("Jane_Doe_" * 30)[:length]
    folder.mkdir()
    Image.fromarray(np.full((12, 10, 3), 200, np.uint8)).save(folder / "a.png")
    (folder / "a_mask.png").write_bytes(b"no picture")
    with pytest.raises(CaseError) as caught:
        read_nuclei(NucleiCase("a", "a", folder / "a.png", folder / "a_mask.png"))
    assert "Jane" not in str(caught.value) and "a_mask.png" in str(caught.value)
    with pytest.raises(CaseError) as caught:
        read_rgb(folder / "a_mask.png", "a_mask.png")
    assert "Jane" not in str(caught.value)


def test_a_site_goes_on_without_what_cannot_be_used(pair: Callable[..., NucleiCase], touch: Touch) -> None:
    good = pair(xml())
    site = touch("broken.tif", "broken.xml")
    cases, _ = find_nuclei(site)
    images, findings = read_site_images(cases)
    assert [image.name for image in images] == [good.name]
    assert named(findings) == {"regions_read": "a.xml", "unreadable_image": "broken.tif"}


def nuclei(size: int = 60) -> np.ndarray:
    """Nine round nuclei, 0 and 255, in a quarter of the pixels."""
    rows, columns = np.mgrid[:size, :size] % 20 - 9.5
    disks: np.ndarray = (np.hypot(rows, columns) < 5.6).astype(np.uint8) * 255
    return disks


@pytest.fixture
def case_of(site: Path) -> Callable[[str, np.ndarray | str], NucleiCase]:
    """Write one image of 60 x 60 pixels with its annotation under a name."""

    def write(name: str, annotation: np.ndarray | str) -> NucleiCase:
        Image.fromarray(np.full((60, 60, 3), 200, np.uint8)).save(site / f"{name}.png")
        path = site / (f"{name}.xml" if isinstance(annotation, str) else f"{name}_mask.png")
        if isinstance(annotation, str):
            path.write_text(annotation, encoding="utf-8")
        else:
            Image.fromarray(annotation).save(path)
        return NucleiCase(name, name, site / f"{name}.png", path)

    return write


CaseOf = Callable[[str, np.ndarray | str], NucleiCase]


def test_picture_and_mask_with_one_orientation_stay_together(site: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # the top row is the right column
    shown = np.zeros((12, 10), np.uint8)
    shown[1:4, 6:9] = 255
    stored = shown[:, ::-1].T.copy()
    for name, picture in (("a.png", np.repeat(stored[..., None], 3, axis=2)), ("a_mask.png", stored)):
        Image.fromarray(picture).save(site / name, exif=exif)
    image = read_nuclei(find_nuclei(site)[0][0])
    np.testing.assert_array_equal(image.image[..., 0], shown)
    np.testing.assert_array_equal(image.target, shown > 0)
    assert [(finding.code, finding.subject) for finding in image.findings] == [
        ("converted_image", "a.png"),
        ("converted_image", "a_mask.png"),
    ]


def test_annotations_that_were_all_dropped_are_an_error_and_none_at_all_is_background(case_of: CaseOf) -> None:
    far = "".join(f'<Vertex X="{x + 24000}" Y="{y}"/>' for x, y in ((2, 3), (6, 3), (6, 5)))
    cases = [
        case_of("ellipses", xml().replace("<Region>", '<Region Type="2">')),
        case_of("elsewhere", xml().replace(SQUARE, far)),
        case_of("none", "<Annotations><Annotation><Regions/></Annotation></Annotations>"),
        case_of("black", np.zeros((60, 60), np.uint8)),
        case_of("good", xml()),
    ]
    images, findings = read_site_images(cases)
    assert [image.name for image in images] == ["none", "black", "good"]
    assert [image.target.any() for image in images] == [False, False, True]
    found = {finding.code: (finding.severity, finding.subject) for finding in findings}
    assert found["all_regions_dropped"] == ("error", "ellipses.xml")
    assert found["no_region_drawn"] == ("error", "elsewhere.xml")
    assert found["no_regions"] == ("warning", "none.xml")
    assert found["empty_mask"] == ("warning", "black_mask.png")


def test_an_inverted_mask_is_warned_about_and_used(case_of: CaseOf) -> None:
    image = read_nuclei(case_of("a", 255 - nuclei()))
    np.testing.assert_array_equal(image.target, nuclei() == 0)  # a warning changes nothing
    [finding] = image.findings
    assert (finding.severity, finding.code, finding.subject) == ("warning", "implausible_share", "a_mask.png")
    assert finding.message.endswith("% of the pixels are marked, the mask may be inverted")
    assert read_nuclei(case_of("b", nuclei())).findings == ()


def test_an_image_unlike_the_others_of_its_site_is_warned_about_and_used(case_of: CaseOf) -> None:
    sparse = nuclei() * (np.arange(60) < 20) * (np.arange(60)[:, None] < 10)  # half a nucleus of nine
    cases = [case_of(name, nuclei()) for name in "abcde"] + [case_of("odd", sparse)]
    images, findings = read_site_images(cases)
    assert [image.name for image in images] == [*"abcde", "odd"]
    assert [(finding.severity, finding.code, finding.subject) for finding in findings] == [
        ("warning", "unlike_other_masks", "odd")
    ]
    assert read_site_images(cases[:3] + cases[-1:])[1] == []  # four are too few to tell


def test_a_smoothed_mask_of_cell_types_has_no_rings_of_other_types(case_of: CaseOf) -> None:
    """Between 0 and 4 lie 1, 2 and 3: epithelial cells, lymphocytes and neutrophils around every macrophage."""
    small = Image.fromarray((nuclei(40) > 0).astype(np.uint8) * 4)
    for how, refused in ((Image.Resampling.BILINEAR, True), (Image.Resampling.NEAREST, False)):
        case = case_of("a", np.asarray(small.resize((60, 60), how)))
        if not refused:
            assert set(np.unique(read_nuclei(case, CELL_TYPES).target)) == {0, 4}
            continue
        with pytest.raises(CaseError) as caught:
            read_nuclei(case, CELL_TYPES)
        assert caught.value.finding.code == "mask_ramps"


def blank(name: str, patient: str) -> NucleiImage:
    return NucleiImage(name, patient, np.zeros((1, 1, 3), np.uint8), np.zeros((1, 1), np.uint8), ())


def test_images_of_a_patient_stay_together() -> None:
    images = [blank(f"P{number}_{n}", f"P{number}") for number in range(25) for n in range(3)]
    parts, findings = split_images(images, seed=3)
    assert findings == []
    # 64, 16 and 20 % of 25 patients with 3 images each
    assert {part: len(members) for part, members in parts.items()} == {"train": 48, "val": 12, "test": 15}
    patients = [{image.patient for image in members} for members in parts.values()]
    assert sum(map(len, patients)) == len(set().union(*patients)) == 25
    more, _ = split_images([*images, blank("Q1", "Q1")], seed=3)
    assert {image.name for image in parts["test"]} <= {image.name for image in more["test"]}
