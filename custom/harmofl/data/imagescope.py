"""Outlines of nuclei from Aperio ImageScope XML (MoNuSAC, MoNuSeg), and the masks they draw."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree.ElementTree import Element, ParseError

import numpy as np
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import iterparse
from numpy.typing import NDArray

from harmofl.data.findings import CaseError, Finding, count_text, refusal

IGNORED = 255  # pixels that count in neither loss nor score
CELL_TYPES = ("epithelial", "lymphocyte", "neutrophil", "macrophage")  # MoNuSAC 2020
NUCLEUS = "nucleus"  # of a file without cell types, and any cell type where an experiment has this one class
AMBIGUOUS = "ambiguous"
NO_CLASS_NAMES = ("", "description")  # ImageScope writes an attribute Description of its own accord
OUTLINE_TYPES = ("0", "1")  # free hand or polygon, rectangle; ellipse, arrow and ruler are no lists of corners
LARGEST_FILE = 256 * 2**20  # bytes
LARGEST_COORDINATE = 1e6  # pixels; whole slides stay below
FEWEST_VERTICES = 3
MOST_VERTICES = 2000  # of an outline that is looked at for crossings: the table of its pairs of edges takes 32 MB
# From ImageScope's coordinates, 0 at the corner of the first pixel, to those of pixel centers. Not exactly half a
# pixel: a center on an edge (traced edges run along pixels or across their diagonals) then lies on one side of it,
# of two nuclei that share an edge in one only. Counting such centers in adds up to 2 % to the area of a nucleus.
TO_CENTERS = np.array([0.5 - 1e-4, 0.5 - 2e-4])
Outline = tuple[NDArray[np.float64], bool]  # (N, 2) x and y, and whether it is a hole


@dataclass(frozen=True, eq=False)
class Region:
    """One outline.

    Attributes:
        layer: number of the Annotation element that it belongs to.
        kind: ``nucleus``, one of CELL_TYPES, ``ambiguous``, or empty if its class is not known.
        outline: (N, 2) float64, x and y in pixels, 0 at the outer corner of the first pixel.
        hole: whether it is cut out of the other regions of its layer.
    """

    layer: int
    kind: str
    outline: NDArray[np.float64]
    hole: bool


@dataclass(frozen=True, eq=False)
class Drawing:
    """The regions of one image as pixels.

    Attributes:
        target: (H, W) uint8, 0 background, 1..K classes, 255 where the class is ambiguous or not known.
        instances: (H, W) int32, 0 background, else 1 + position of the region.
        findings: what was clipped, hidden or outside, and how many regions of each kind there are.
    """

    target: NDArray[np.uint8]
    instances: NDArray[np.int32]
    findings: tuple[Finding, ...]


def read_regions(path: Path, subject: str) -> tuple[list[Region], list[Finding]]:
    """Read the regions of an ImageScope file, in the order of the file.

    The class of a region is the name of an Attribute of its Annotation, in any letter case and spacing; without one
    it is ``nucleus``. Regions with a coordinate that is missing, not finite or beyond a million pixels, with fewer
    than three distinct vertices, or of another form than an outline are dropped and counted. Numbers may be in
    scientific notation, with a decimal point or comma.

    Args:
        path: the file.
        subject: its name in findings.

    Raises:
        CaseError: if it cannot be read, is no ImageScope file, is larger than 256 MiB, declares a document type,
            and with it entities that grow without bound, or holds regions of which all are dropped.
    """
    regions: list[Region] = []
    dropped: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    try:
        _check_size(path, subject)
        with path.open("rb") as stream:
            for layer, (names, read) in enumerate(_annotations(stream)):
                kind, problem = _kind(names)
                drawn = [item for item in read if not isinstance(item, str)]
                regions += [Region(layer, kind, outline, hole) for outline, hole in drawn]
                dropped.update(item for item in read if isinstance(item, str))
                if problem and drawn:
                    unknown[problem] += len(drawn)
    except CaseError:
        raise
    except OSError as error:
        message = f"the annotation cannot be read ({error.strerror})"
        raise refusal("unreadable_annotation", subject, message, "check the file and its permissions") from error
    except DefusedXmlException as error:
        raise refusal("xml_document_type", subject, "the XML has a DOCTYPE", "export it again without") from error
    except (ParseError, LookupError, ValueError) as error:
        message = f"the file is not ImageScope XML ({error})"
        raise refusal("not_imagescope", subject, message, "export the annotation from ImageScope again") from error
    findings = _reading_findings(subject, regions, dropped, unknown)
    if dropped and not regions:
        reasons = ", ".join(f"{_counted(count)} dropped: {reason}" for reason, count in sorted(dropped.items()))
        raise refusal("all_regions_dropped", subject, f"no region can be used ({reasons})", "draw outlines of nuclei")
    return regions, findings


def draw_regions(regions: Sequence[Region], shape: tuple[int, int], classes: Sequence[str], subject: str) -> Drawing:
    """Draw regions as a mask of classes.

    A pixel belongs to a region if its center does; of an outline that crosses itself, where a ray from the center
    crosses it an odd number of times (even-odd rule). Holes are cut out after all other regions of their Annotation
    are drawn, wherever they stand, and out of these only. Of regions that overlap the later one counts, except that
    ambiguous ones and those of unknown class lie over all others. What leaves the image is cut off. Outlines of more
    than 2000 vertices are not searched for crossings.

    Args:
        regions: of one image.
        shape: rows and columns of the image.
        classes: names of classes 1..K: (NUCLEUS,), which takes in every cell type, or CELL_TYPES.
        subject: name of the annotation in findings.
    """
    from skimage.draw import polygon

    codes = np.array([0, *(_code(region.kind, classes) for region in regions)], np.uint8)
    instances = np.zeros(shape, np.int32)
    idle = 0
    for layer in sorted({region.layer for region in regions}, key=lambda layer: _height(regions, layer, classes)):
        plane = np.zeros(shape, np.int32)
        numbered = [(number, region) for number, region in enumerate(regions, start=1) if region.layer == layer]
        for number, region in sorted(numbered, key=lambda item: item[1].hole):
            columns, rows = (region.outline - TO_CENTERS).T
            inside = polygon(rows, columns, shape)
            idle += int(region.hole and not plane[inside].any())
            plane[inside] = 0 if region.hole else number
        np.copyto(instances, plane, where=plane > 0)
    findings = _drawing_findings(regions, instances, subject)
    if idle:
        message = f"{count_text(idle, 'hole')} (negative regions) in no region of their own Annotation, cutting nothing"
        findings.append(Finding("warning", "idle_hole", subject, message, "draw a hole in the layer of its nucleus"))
    return Drawing(codes[instances], instances, tuple(findings))


def check_something_drawn(regions: Sequence[Region], instances: NDArray[np.int32], subject: str) -> None:
    """Refuse regions of which none leaves a pixel: they say that there are nuclei, and background would be wrong.

    Args:
        regions: of one image.
        instances: (H, W), as drawn.
        subject: name of the annotation.

    Raises:
        CaseError: code ``no_region_drawn``, with where they lie.
    """
    if not regions or instances.any():
        return
    rows, columns = instances.shape
    holes = sum(region.hole for region in regions)
    if holes == len(regions):
        message = f"all of its {_counted(holes)} are holes (NegativeROA), in no region of their own Annotation"
        raise refusal("no_region_drawn", subject, message, "draw the outlines of nuclei beside the holes in them")
    outside = sum(_is_outside(region, np.array([columns, rows])) for region in regions)
    points = np.concatenate([region.outline for region in regions])
    (left, top), (right, bottom) = points.min(axis=0), points.max(axis=0)
    who = "its 1 region leaves no" if len(regions) == 1 else f"none of its {_counted(len(regions))} leaves a"
    message = (
        f"{who} pixel in the image of {columns} x {rows} (columns x rows): {outside} outside, coordinates "
        f"x {_coordinate(left)} to {_coordinate(right)}, y {_coordinate(top)} to {_coordinate(bottom)}"
    )
    fix = "count coordinates from this image's upper left corner, not from that of the whole slide"
    if outside < len(regions) / 2:  # holes and outlines smaller than a pixel leave none either
        fix = "give coordinates in pixels of this image, not in other units or as parts of its size"
    raise refusal("no_region_drawn", subject, message, fix)


def _check_size(path: Path, subject: str) -> None:
    if path.stat().st_size > LARGEST_FILE:
        message = f"the file is larger than {LARGEST_FILE // 2**20} MiB"
        raise refusal("annotation_too_large", subject, message, "export the outlines of this image alone")


def _annotations(stream: IO[bytes]) -> Iterator[tuple[list[str], list[Outline | str]]]:
    """Yield the attribute names and the regions of each Annotation; elements are freed as soon as they are read."""
    read: list[Outline | str] = []
    tag = ""
    for _, element in iterparse(stream, forbid_dtd=True):
        tag = element.tag
        if tag == "Region":
            read.append(_read_region(element))
            element.clear()
        elif tag == "Annotation":
            yield [attribute.get("Name", "") for attribute in element.findall("Attributes/Attribute")], read
            read = []
            element.clear()
    if tag != "Annotations":  # the root ends last
        raise ValueError(f"its root is {tag[:40]!r}, not 'Annotations'")


def _kind(names: Sequence[str]) -> tuple[str, str]:
    """Return the class that attribute names give, empty if not known, and then the names."""
    given = {"".join(name.split()).casefold() for name in names} - set(NO_CLASS_NAMES)
    if not given:
        return NUCLEUS, ""
    kind = min(given)
    if len(given) == 1 and kind in (*CELL_TYPES, AMBIGUOUS, NUCLEUS):
        return kind, ""
    return "", " + ".join(sorted(" ".join(name.split()) for name in names))


def _read_region(element: Element) -> Outline | str:
    """Return the outline of a region and whether it is a hole, or why it is dropped."""
    if element.get("Type", "0") not in OUTLINE_TYPES:
        return "no outline (ellipse, arrow or ruler)"
    try:
        points = [[_number(vertex.get(axis)) for axis in ("X", "Y")] for vertex in element.iter("Vertex")]
    except ValueError:
        return "coordinates missing or not numbers"
    outline = np.array(points, np.float64).reshape(-1, 2)
    if not (np.abs(outline) <= LARGEST_COORDINATE).all():  # false for NaN too
        return "coordinates not finite or beyond any image"
    if len(np.unique(outline, axis=0)) < FEWEST_VERTICES:
        return f"fewer than {FEWEST_VERTICES} distinct vertices"
    return outline, element.get("NegativeROA", "0").strip().casefold() not in ("0", "false", "")


def _number(text: str | None) -> float:
    if text is None:
        raise ValueError("no coordinate")
    return float(text.replace(",", "."))


def _code(kind: str, classes: Sequence[str]) -> int:
    if kind in classes:
        return classes.index(kind) + 1
    return 1 if tuple(classes) == (NUCLEUS,) and kind in CELL_TYPES else IGNORED


def _height(regions: Sequence[Region], layer: int, classes: Sequence[str]) -> tuple[bool, int]:
    kind = next(region.kind for region in regions if region.layer == layer)
    return _code(kind, classes) == IGNORED, layer


def _crosses_itself(outline: NDArray[np.float64]) -> bool:
    """Say whether two edges cross; edges that touch do not."""
    if len(outline) > MOST_VERTICES:
        return False
    x, y = outline.T
    along_x, along_y = np.roll(x, -1) - x, np.roll(y, -1) - y
    side = along_x[:, None] * (y - y[:, None]) - along_y[:, None] * (x - x[:, None])  # of edge (row), of vertex
    parted = np.sign(side) * np.sign(np.roll(side, -1, axis=1)) < 0  # edge (column) starts and ends on two sides
    return bool((parted & parted.T).any())


def _reading_findings(
    subject: str, regions: Sequence[Region], dropped: Counter[str], unknown: Counter[str]
) -> list[Finding]:
    findings = [
        Finding("warning", "regions_dropped", subject, f"{_counted(count)} dropped: {reason}", "redraw or delete")
        for reason, count in sorted(dropped.items())
    ]
    findings += [
        Finding(
            "warning",
            "unknown_class",
            subject,
            f"class {name!r:.80} is not known, its {_counted(count)} left out of loss and score",
            f"use {', '.join(CELL_TYPES)} or {AMBIGUOUS}",
        )
        for name, count in sorted(unknown.items())
    ]
    if not regions:
        fix = "make sure that the image holds no nucleus"
        findings.append(Finding("warning", "no_regions", subject, "the annotation holds no region", fix))
    crossing = sum(_crosses_itself(region.outline) for region in regions)
    if crossing:
        message = f"{_counted(crossing)} with an outline that crosses itself, filled by the even-odd rule"
        findings.append(Finding("notice", "self_crossing", subject, message))
    return findings


def _drawing_findings(regions: Sequence[Region], instances: NDArray[np.int32], subject: str) -> list[Finding]:
    from skimage.measure import regionprops

    size = np.array(instances.shape[::-1])
    outside = [_is_outside(region, size) for region in regions]
    leaving = [bool(((r.outline < 0) | (r.outline > size)).any()) for r in regions]
    visible = {shown.label for shown in regionprops(instances)}
    hidden = [
        number not in visible and not region.hole and not out
        for number, (region, out) in enumerate(zip(regions, outside, strict=True), start=1)
    ]
    findings = []
    if sum(outside):
        message = f"{sum(outside)} of {_counted(len(regions))} outside the image"
        fix = "check that both belong together"
        findings.append(Finding("warning", "regions_outside", subject, message, fix))
    clipped = sum(leaving) - sum(out and leaves for out, leaves in zip(outside, leaving, strict=True))
    if clipped:
        findings.append(Finding("notice", "regions_clipped", subject, f"{_counted(clipped)} cut at the image's edge"))
    if sum(hidden):
        message = f"{_counted(sum(hidden))} without a pixel of their own: under later ones, cut out, or too small"
        findings.append(Finding("notice", "regions_hidden", subject, message))
    if regions:
        kinds = Counter("hole" if region.hole else region.kind or "unknown class" for region in regions)
        message = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        findings.append(Finding("notice", "regions_read", subject, message))
    return findings


def _is_outside(region: Region, size: NDArray[np.integer]) -> bool:
    return bool(((region.outline <= 0).all(axis=0) | (region.outline >= size).all(axis=0)).any())


def _coordinate(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _counted(count: int) -> str:
    return f"{count} region{'s' * (count > 1)}"
