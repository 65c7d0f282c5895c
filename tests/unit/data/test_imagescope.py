"""ImageScope XML: what is read, dropped and counted, and which pixels an outline takes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from harmofl.data.findings import CaseError, Finding
from harmofl.data.imagescope import (
    CELL_TYPES,
    IGNORED,
    NUCLEUS,
    Drawing,
    Region,
    check_something_drawn,
    draw_regions,
    read_regions,
)

Points = Sequence[tuple[object, object]]
SQUARE = ((2, 3), (6, 3), (6, 5), (2, 5))  # x 2 to 6, y 3 to 5: columns 2..5, rows 3..4


def region(points: Points, hole: bool = False, kind: str | None = None) -> str:
    vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in points)
    form = "" if kind is None else f' Type="{kind}"'
    # a region has attributes of its own, which are not its class
    inner = '<Attributes><Attribute Name="Macrophage"/></Attributes>'
    return f'<Region Id="1"{form} NegativeROA="{int(hole)}">{inner}<Vertices>{vertices}</Vertices></Region>'


def annotation(*regions: str, name: str | None = None) -> str:
    attributes = "" if name is None else f'<Attribute Name="{name}" Id="0" Value=""/>'
    headers = '<RegionAttributeHeaders><AttributeHeader Id="1" Name="Epithelial"/></RegionAttributeHeaders>'
    return (
        f'<Annotation Id="1" Name=""><Attributes>{attributes}</Attributes>'
        f"<Regions>{headers}{''.join(regions)}</Regions></Annotation>"
    )


def document(*annotations: str) -> str:
    return f'<Annotations MicronsPerPixel="0.25">{"".join(annotations)}</Annotations>'


ReadText = Callable[[str], tuple[list[Region], list[Finding]]]


@pytest.fixture
def read(tmp_path: Path) -> ReadText:
    def read_text(text: str) -> tuple[list[Region], list[Finding]]:
        path = tmp_path / "a.xml"
        path.write_text(text, encoding="utf-8")
        return read_regions(path, path.name)

    return read_text


def outline(points: Points, layer: int = 0, kind: str = NUCLEUS, hole: bool = False) -> Region:
    return Region(layer, kind, np.array(points, np.float64), hole)


def draw(*regions: Region, shape: tuple[int, int] = (10, 12), classes: Sequence[str] = (NUCLEUS,)) -> Drawing:
    return draw_regions(regions, shape, classes, "a.xml")


def box(top: int, bottom: int, left: int, right: int, shape: tuple[int, int] = (10, 12)) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[top:bottom, left:right] = True
    return mask


def codes(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.code: finding.message for finding in findings}


@pytest.mark.parametrize("name", ["Epithelial", "epithelial", " EPITHELIAL ", "Epi thelial"])
def test_class_is_the_attribute_of_the_annotation_in_any_spelling(read: ReadText, name: str) -> None:
    regions, findings = read(document(annotation(region(SQUARE), name=name)))
    assert [item.kind for item in regions] == ["epithelial"]
    assert findings == []


def test_every_class_gets_its_number(read: ReadText) -> None:
    names = ("Epithelial", "Lymphocyte", "Neutrophil", "Macrophage", "Ambiguous")
    layers = [
        annotation(region([(2 * n, 0), (2 * n + 1, 0), (2 * n + 1, 1), (2 * n, 1)]), name=name)
        for n, name in enumerate(names)
    ]
    regions, _ = read(document(*layers))
    drawing = draw(*regions, classes=CELL_TYPES)
    assert drawing.target[0].tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 255, 0, 0, 0]
    assert not drawing.target[1:].any()
    assert drawing.target.dtype == np.uint8
    counts = "ambiguous 1, epithelial 1, lymphocyte 1, macrophage 1, neutrophil 1"
    assert codes(drawing.findings) == {"regions_read": counts}
    as_one = draw(*regions)
    assert as_one.target[0].tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 255, 0, 0, 0]


@pytest.mark.parametrize("name", [None, "", "Description"])
def test_a_file_without_classes_holds_nuclei(read: ReadText, name: str | None) -> None:
    regions, findings = read(document(annotation(region(SQUARE), name=name)))
    assert findings == []
    np.testing.assert_array_equal(draw(*regions).target, box(3, 5, 2, 6))


def test_an_unknown_class_is_named_and_ignored(read: ReadText) -> None:
    text = document(annotation(region(SQUARE), region(SQUARE), name="Plasma cell"), annotation(name="Empty"))
    regions, findings = read(text)
    [finding] = findings
    assert finding.code == "unknown_class"
    assert "'Plasma cell'" in finding.message
    assert "2 regions" in finding.message
    np.testing.assert_array_equal(draw(*regions).target, IGNORED * box(3, 5, 2, 6))


def test_two_classes_of_one_annotation_are_unknown(read: ReadText) -> None:
    both = annotation(region(SQUARE)).replace(
        "<Attributes></Attributes><Regions>",
        '<Attributes><Attribute Name="Epithelial"/><Attribute Name="Macrophage"/></Attributes><Regions>',
    )
    regions, findings = read(document(both))
    assert [item.kind for item in regions] == [""]
    assert "'Epithelial + Macrophage'" in codes(findings)["unknown_class"]


def test_numbers_in_any_writing(read: ReadText) -> None:
    points = [("2e0", "3.0"), ("6,0", "3"), ("0.6E+1", "5"), (" 2 ", "500e-2")]
    regions, findings = read(document(annotation(region(points))))
    assert findings == []
    np.testing.assert_array_equal(regions[0].outline, np.array(SQUARE))


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "fewer than 3 distinct vertices"),
        ([(1, 1)], "fewer than 3 distinct vertices"),
        ([(1, 1), (5, 5)], "fewer than 3 distinct vertices"),
        ([(1, 1), (5, 5), (1, 1), (5, 5)], "fewer than 3 distinct vertices"),
        ([*SQUARE, ("nan", 1)], "coordinates not finite or beyond any image"),
        ([*SQUARE, (1, "-inf")], "coordinates not finite or beyond any image"),
        ([*SQUARE, ("1e300", 1)], "coordinates not finite or beyond any image"),
        ([*SQUARE, ("", 1)], "coordinates missing or not numbers"),
        ([*SQUARE, ("left", 1)], "coordinates missing or not numbers"),
    ],
)
def test_a_region_that_is_no_outline_is_dropped_alone(read: ReadText, points: Points, reason: str) -> None:
    regions, findings = read(document(annotation(region(points), region(SQUARE), region(points))))
    assert len(regions) == 1
    assert codes(findings) == {"regions_dropped": f"2 regions dropped: {reason}"}


def test_a_missing_coordinate_is_no_zero(read: ReadText) -> None:
    regions, findings = read(document(annotation(region(SQUARE), region(SQUARE).replace('Y="5"', "", 1))))
    assert len(regions) == 1
    assert codes(findings)["regions_dropped"] == "1 region dropped: coordinates missing or not numbers"


@pytest.mark.parametrize(("kind", "kept"), [("0", 2), ("1", 2), ("2", 1), ("3", 1), ("4", 1)])
def test_ellipse_arrow_and_ruler_are_no_outlines(read: ReadText, kind: str, kept: int) -> None:
    regions, findings = read(document(annotation(region(SQUARE, kind=kind), region(SQUARE))))
    assert len(regions) == kept
    assert ("regions_dropped" in codes(findings)) == (kept == 1)


@pytest.mark.parametrize(
    "region_of",
    [
        lambda: region(SQUARE, kind="2"),
        lambda: region([(1, 1), (5, 5)]),
        lambda: region([*SQUARE, ("nan", 1)]),
        lambda: region(SQUARE).replace('X="2"', 'X="left"'),
    ],
)
def test_a_file_whose_regions_are_all_dropped_is_refused(read: ReadText, region_of: Callable[[], str]) -> None:
    """It says that there are nuclei and not where: background everywhere would be wrong."""
    with pytest.raises(CaseError) as caught:
        read(document(annotation(region_of(), region_of())))
    finding = caught.value.finding
    assert (finding.severity, finding.code, finding.subject) == ("error", "all_regions_dropped", "a.xml")
    assert "2 regions dropped: " in finding.message


def test_without_regions_a_person_should_look(read: ReadText) -> None:
    for text in (document(), document("<Annotation/>"), document("<Annotation><Attributes/></Annotation>")):
        regions, findings = read(text)
        assert regions == []
        assert [(finding.severity, finding.code) for finding in findings] == [("warning", "no_regions")]
        assert not draw().target.any()


BOMB = """<!DOCTYPE Annotations [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<Annotations><Annotation Name="&b;"/></Annotations>"""
OUTSIDE = """<!DOCTYPE Annotations [<!ENTITY a SYSTEM "file:///etc/hostname">]><Annotations>&a;</Annotations>"""


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "not_imagescope"),
        (b"<Annotations><Annotation>", "not_imagescope"),
        (b"<Regions/>", "not_imagescope"),
        (b"not xml", "not_imagescope"),
        (b'<?xml version="1.0" encoding="utf-8"?><Annotations Name="\xe9"/>', "not_imagescope"),
        (b'<?xml version="1.0" encoding="klingon"?><Annotations/>', "not_imagescope"),
        (BOMB.encode(), "xml_document_type"),
        (OUTSIDE.encode(), "xml_document_type"),
        (b"<!DOCTYPE Annotations><Annotations/>", "xml_document_type"),
    ],
)
def test_what_is_no_imagescope_file_is_refused_by_name(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "a.xml"
    path.write_bytes(content)
    with pytest.raises(CaseError) as caught:
        read_regions(path, "a.xml")
    assert (caught.value.finding.code, caught.value.finding.subject) == (code, "a.xml")
    assert str(tmp_path) not in str(caught.value)


def test_a_missing_or_enormous_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError) as caught:
        read_regions(tmp_path / "none.xml", "none.xml")
    assert caught.value.finding.code == "unreadable_annotation"
    path = tmp_path / "sparse.xml"
    with path.open("wb") as stream:
        stream.truncate(256 * 2**20 + 1)
    with pytest.raises(CaseError) as caught:
        read_regions(path, "sparse.xml")
    assert caught.value.finding.code == "annotation_too_large"


def test_pixels_lie_between_the_corners() -> None:
    np.testing.assert_array_equal(draw(outline(SQUARE)).target, box(3, 5, 2, 6))


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        # of the slide instead of the tile
        ([outline([(x + 24000, y + 31000) for x, y in SQUARE])] * 3, "3 outside, coordinates x 24002 to 24006"),  # type: ignore[operator]
        ([outline([(-5, 1), (0, 1), (0, 3), (-5, 3)])], "1 outside"),
        ([outline([(2.6, 2.6), (2.9, 2.6), (2.9, 2.9)])], "0 outside"),  # too small for any pixel
    ],
)
def test_regions_of_which_none_leaves_a_pixel_are_refused(regions: list[Region], said: str) -> None:
    with pytest.raises(CaseError) as caught:
        check_something_drawn(regions, draw(*regions).instances, "a.xml")
    finding = caught.value.finding
    assert (finding.severity, finding.code, finding.subject) == ("error", "no_region_drawn", "a.xml")
    assert said in finding.message and "12 x 10 (columns x rows)" in finding.message
    # the fix fits: what lies inside is not of the whole slide
    assert ("whole slide" in finding.fix) == ("0 outside" not in said)
    assert finding.message.startswith("its 1 region leaves no" if len(regions) == 1 else "none of its 3 regions leaves")


def test_holes_alone_are_said_to_be_that() -> None:
    holes = [outline(SQUARE, hole=True)] * 2
    with pytest.raises(CaseError) as caught:
        check_something_drawn(holes, draw(*holes).instances, "a.xml")
    finding = caught.value.finding
    assert finding.code == "no_region_drawn" and finding.message.startswith("all of its 2 regions are holes")
    assert "outlines" in finding.fix


def test_regions_that_share_an_edge_share_no_pixel() -> None:
    """A square of 8 cut along its diagonal, on which 8 pixel centers lie: each belongs to one half."""
    corners = [(1, 1), (9, 1), (9, 9), (1, 9)]
    for first, second in (((0, 1, 2), (0, 2, 3)), ((0, 1, 3), (1, 2, 3))):
        halves = [draw(outline([corners[n] for n in half])).target for half in (first, second)]
        np.testing.assert_array_equal(halves[0] + halves[1], box(1, 9, 1, 9))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_hole_is_cut_out_wherever_it_stands(read: ReadText, order: tuple[int, ...]) -> None:
    square, other = [(1, 1), (8, 1), (8, 8), (1, 8)], [(9, 1), (11, 1), (11, 3), (9, 3)]
    parts = [region(square), region([(3, 3), (5, 3), (5, 6), (3, 6)], hole=True), region(other)]
    regions, findings = read(document(annotation(*(parts[n] for n in order))))
    expected = (box(1, 8, 1, 8) & ~box(3, 6, 3, 5)) | box(1, 3, 9, 11)
    drawing = draw(*regions)
    np.testing.assert_array_equal(drawing.target, expected)
    assert findings == []
    assert codes(drawing.findings) == {"regions_read": "hole 1, nucleus 2"}


def test_a_hole_leaves_other_annotations_as_they_are() -> None:
    below = outline([(0, 0), (6, 0), (6, 6), (0, 6)], layer=0, kind="epithelial")
    above = outline([(2, 2), (8, 2), (8, 8), (2, 8)], layer=1, kind="lymphocyte")
    hole = outline([(3, 3), (5, 3), (5, 5), (3, 5)], layer=1, kind="lymphocyte", hole=True)
    expected = np.where(box(2, 8, 2, 8), 2, box(0, 6, 0, 6))
    expected[3:5, 3:5] = 1
    np.testing.assert_array_equal(draw(below, above, hole, classes=CELL_TYPES).target, expected)


def test_the_later_region_counts_and_the_ambiguous_one_above_all() -> None:
    first = outline([(0, 0), (4, 0), (4, 4), (0, 4)], layer=0, kind="ambiguous")
    second = outline([(2, 0), (6, 0), (6, 4), (2, 4)], layer=1, kind="epithelial")
    third = outline([(5, 0), (8, 0), (8, 4), (5, 4)], layer=2, kind="macrophage")
    row = draw(first, second, third, classes=CELL_TYPES).target[0]
    assert row.tolist() == [255, 255, 255, 255, 1, 4, 4, 4, 0, 0, 0, 0]


def test_a_crossing_outline_is_filled_by_even_and_odd(read: ReadText) -> None:
    """Around a square and then around a smaller one inside it: the inner square is inside twice, so out."""
    twice = [(1, 1), (9, 1), (9, 9), (1, 9), (1, 1), (3, 3), (7, 3), (7, 7), (3, 7), (3, 3)]
    bow = [(1, 1), (9, 9), (9, 1), (1, 9)]
    regions, findings = read(document(annotation(region(twice), region(bow), region(SQUARE))))
    assert codes(findings)["self_crossing"].startswith("1 region ")  # the first touches itself, the bow crosses
    np.testing.assert_array_equal(draw(regions[0]).target, box(1, 9, 1, 9) & ~box(3, 7, 3, 7))
    assert draw(regions[1]).target.sum() == pytest.approx(32, abs=8)  # two triangles of 16, cut along diagonals


def test_what_leaves_the_image_is_cut_and_counted() -> None:
    cut = [
        outline([(-5, -5), (2, -5), (2, 2), (-5, 2)]),
        outline([(10, 8), (15, 8), (15, 13), (10, 13)]),
        outline([(4, 4), (12, 4), (12, 5), (4, 5)]),  # ends at the edge
    ]
    out = [outline([(-5, 1), (0, 1), (0, 3), (-5, 3)]), outline([(12, 20), (13, 20), (13, 25)])]
    drawing = draw(*cut, *out)
    np.testing.assert_array_equal(drawing.target, box(0, 2, 0, 2) | box(8, 10, 10, 12) | box(4, 5, 4, 12))
    found = codes(drawing.findings)
    assert found["regions_clipped"] == "2 regions cut at the image's edge"
    assert found["regions_outside"] == "2 of 5 regions outside the image"


def test_regions_without_a_pixel_are_counted() -> None:
    covered, cover = outline(SQUARE), outline([(1, 1), (9, 1), (9, 9), (1, 9)])
    tiny = outline([(0.1, 0.1), (0.2, 0.1), (0.2, 0.2)])
    flat = outline([(1, 9), (5, 9), (9, 9)])
    drawing = draw(covered, cover, tiny, flat)
    assert codes(drawing.findings)["regions_hidden"].startswith("3 regions ")
    assert set(np.unique(drawing.instances).tolist()) == {0, 2}
