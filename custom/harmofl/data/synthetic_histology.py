"""Multi-site demonstration histology, written as real files: Camelyon17-WILDS patches, and nuclei as polygons."""

import csv
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from harmofl.data.specimens import ORGANS, lymph_node, organ_piece
from harmofl.data.stains import HOSPITALS, ORGAN_LABORATORIES, scan, stain_slide
from harmofl.data.tissue import KINDS, Nucleus
from harmofl.data.whole_folder import write_whole

PATCH_PIXEL = 1.0  # micrometers; the public patches have about 0.9
NUCLEI_PIXEL = 0.5  # half the resolution of the public images: a small image holds more than a few nuclei
MOST_SLIDES = 20  # of a hospital; the public data has 10, too few test patients for an interval
PLACES = 64  # positions along both edges of a slide
TO_CORNERS = 0.5  # ImageScope counts from the corner of the first pixel, outlines from its center
COLUMNS = ("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")


@dataclass(frozen=True)
class NucleiSite:
    """What a site of the nuclei task holds, and in which files.

    ``classes`` writes TIFF with ImageScope XML and one annotation a class, ``one_class`` the same without class names,
    ``masks`` writes PNG images and PNG masks in separate folders.
    """

    organ: str
    code: str
    layout: Literal["classes", "one_class", "masks"]
    compression: Literal["raw", "tiff_lzw", "packbits", "tiff_adobe_deflate"] = "raw"
    opacity: bool = False  # TIFF with a fourth, constant channel


NUCLEI_SITES: dict[str, NucleiSite] = {
    "lung": NucleiSite("lung", "LU", "classes", "tiff_lzw", opacity=True),
    "kidney": NucleiSite("kidney", "KI", "classes"),
    "breast": NucleiSite("breast", "BR", "classes", "tiff_lzw"),
    "prostate": NucleiSite("prostate", "PR", "classes", "tiff_adobe_deflate"),
    "monuseg": NucleiSite("mixed", "MX", "one_class", "packbits"),
    "tnbc": NucleiSite("triple negative breast", "TN", "masks"),
}


def write_patches_site(
    folder: Path, profile: str, centers: Sequence[int], *, slides: int, patches: int, seed: int, size: int = 96
) -> None:
    """Write the patches of one synthetic hospital in the layout of Camelyon17-WILDS.

    The folder appears under its name only when all files are in it; a folder that already holds these files is kept.
    A patch depends on profile, seed, slide, its number within the slide and the size, not on how many there are. Every
    second patch of a slide has tumor in its middle 32 x 32 pixels; a slide is a patient of its own.

    Args:
        folder: receives metadata.csv and patches/; must be missing or empty.
        profile: one of HOSPITALS.
        centers: 0-based numbers in the column `center`, to which the slides are dealt out in turn; patients and slides
            are numbered by them.
        slides: number of slides, at most MOST_SLIDES.
        patches: number of patches on all slides together.
        seed: of the whole data set.
        size: pixels along both edges of a patch, of about 1 micrometer.

    Raises:
        ValueError: an unknown profile, more slides or patches than there are places, or a center without any.
        FileExistsError: the folder holds something else.
    """
    _check_known(profile, HOSPITALS)
    if not 1 <= slides <= MOST_SLIDES or patches > slides * PLACES**2:
        raise ValueError(f"{slides} slides with {patches} patches: at most {MOST_SLIDES} slides of {PLACES**2} patches")
    if not 1 <= len(centers) <= min(slides, patches):
        raise ValueError(f"centers: {len(centers)}, slides: {slides}, patches of each: {patches}; give each center one")
    rows = []
    for slide in range(slides):
        count = len(range(slide, patches, slides))
        rows += _slide_rows(
            _generator(seed, profile, slide, PLACES**2), centers[slide % len(centers)], slide, count, size
        )

    def write(part: Path) -> None:
        _write_metadata(part / "metadata.csv", rows)
        for row in rows:
            _write_patch(part / row.path, profile, row, seed, size)

    write_whole(folder, {"metadata.csv", *(row.path for row in rows)}, write)


@dataclass(frozen=True)
class _PatchRow:
    """One line of metadata.csv; slide and number count from 0 within the site and the slide."""

    slide: int
    number: int
    center: int
    node: int
    x: int
    y: int
    split: int

    @property
    def tumor(self) -> bool:
        return (self.slide + self.number) % 2 == 1

    @property
    def patient(self) -> str:
        return f"{MOST_SLIDES * self.center + self.slide:03d}"

    @property
    def path(self) -> str:
        case = f"patient_{self.patient}_node_{self.node}"
        return f"patches/{case}/patch_{case}_x_{self.x}_y_{self.y}.png"


def _write_patch(path: Path, profile: str, row: _PatchRow, seed: int, size: int) -> None:
    rng = _generator(seed, profile, row.slide, row.number)
    slide = stain_slide(HOSPITALS[profile], _generator(seed, profile, row.slide))
    node = lymph_node(rng, size, PATCH_PIXEL, row.tumor)
    defocus = rng.uniform(0.8, 1.6) if rng.random() < 0.12 else 0.0
    pixels = scan(slide, node.hematoxylin, node.eosin, PATCH_PIXEL, rng=rng, defocus=defocus)
    _save(path, pixels, opacity=True)


def _slide_rows(rng: np.random.Generator, center: int, slide: int, count: int, size: int) -> list[_PatchRow]:
    """The patches of one slide: each at a place of its own, a tenth of them marked for validation."""
    node, places = int(rng.integers(5)), size * rng.permutation(PLACES**2)
    validation = rng.random(PLACES**2) < 0.1
    across, down = places % (size * PLACES), places // PLACES // size * size
    return [_PatchRow(slide, n, center, node, int(across[n]), int(down[n]), int(validation[n])) for n in range(count)]


def _write_metadata(path: Path, rows: list[_PatchRow]) -> None:
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(COLUMNS)
        for index, row in enumerate(rows):
            slide = MOST_SLIDES * row.center + row.slide
            table.writerow((index, row.patient, row.node, row.x, row.y, int(row.tumor), slide, row.center, row.split))


def write_nuclei_site(folder: Path, profile: str, *, patients: int, images: int, seed: int, size: int) -> None:
    """Write the images of one synthetic site with the outline of every nucleus, as the site's NucleiSite says.

    The folder appears under its name only when all files are in it; a folder that already holds these files is kept.
    An image depends on profile, seed, patient, its number within the patient and the size, not on how many there are.

    Args:
        folder: receives a folder a patient; must be missing or empty.
        profile: one of NUCLEI_SITES.
        patients: number of patients; the images are dealt out to them in turn.
        images: number of images of all patients together, at least one a patient.
        seed: of the whole data set.
        size: pixels along both edges of an image, of 0.5 micrometers.

    Raises:
        ValueError: an unknown profile, or fewer images than patients.
        FileExistsError: the folder holds something else.
    """
    _check_known(profile, NUCLEI_SITES)
    site = NUCLEI_SITES[profile]
    if not 1 <= patients <= images:
        raise ValueError(f"{patients} patients with {images} images: give every patient at least one image")
    cases = [(index % patients, index // patients) for index in range(images)]
    files = {case: _nuclei_files(site, *case) for case in cases}

    def write(part: Path) -> None:
        for patient, number in cases:
            rng = _generator(seed, profile, patient, number)
            slide = stain_slide(ORGAN_LABORATORIES[profile], _generator(seed, profile, patient))
            piece = organ_piece(rng, size, NUCLEI_PIXEL, ORGANS[site.organ])
            pixels = scan(slide, piece.hematoxylin, piece.eosin, NUCLEI_PIXEL, rng=rng)
            image, annotation = (part / name for name in files[patient, number])
            _save(image, pixels, opacity=site.opacity, compression=site.compression)
            if site.layout == "masks":
                _save(annotation, nuclei_mask(piece.nuclei, size))
            else:
                _write_annotations(annotation, piece.nuclei, site.layout == "classes")

    write_whole(folder, {name for pair in files.values() for name in pair}, write)


def nuclei_mask(nuclei: list[Nucleus], size: int) -> NDArray[np.uint8]:
    """Pixels whose center lies in a nucleus and not in its hole as 255, all others as 0, (size, size)."""
    from skimage.draw import polygon

    mask = np.zeros((size, size), np.uint8)
    for outlines, value in (
        ([nucleus.outline for nucleus in nuclei], 255),
        ([nucleus.hole for nucleus in nuclei if nucleus.hole is not None], 0),
    ):
        for outline in outlines:
            mask[polygon(outline[:, 1], outline[:, 0], mask.shape)] = value
    return mask


def _nuclei_files(site: NucleiSite, patient: int, number: int) -> tuple[str, str]:
    """Names of image and annotation below the site's folder."""
    if site.layout == "masks":
        case = f"{patient + 1:02d}"
        return f"Slide_{case}/{case}_{number + 1}.png", f"GT_{case}/{case}_{number + 1}.png"
    case = f"DEMO-{site.code}-{patient + 1:04d}-01Z-00-DX1"
    return f"{case}/{case}_{number + 1}.tif", f"{case}/{case}_{number + 1}.xml"


def _save(path: Path, pixels: NDArray[np.uint8], *, opacity: bool = False, compression: str = "raw") -> None:
    """Write PNG or TIFF by the name's ending; `opacity` adds a fourth channel of 255."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if opacity:
        pixels = np.concatenate((pixels, np.full((*pixels.shape[:2], 1), 255, np.uint8)), -1)
    options = {"compression": compression} if path.suffix == ".tif" else {}
    Image.fromarray(pixels).save(path, **options)


def _write_annotations(path: Path, nuclei: list[Nucleus], by_class: bool) -> None:
    """Write outlines as Aperio ImageScope does; a hole is a region of its own with NegativeROA 1."""
    root = ElementTree.Element("Annotations", MicronsPerPixel=f"{NUCLEI_PIXEL:.6f}")
    groups: dict[str, list[Nucleus]] = {}
    for nucleus in nuclei:
        groups.setdefault(KINDS[nucleus.kind].cell if by_class else "", []).append(nucleus)
    for number, (name, group) in enumerate(groups.items(), 1):
        annotation = ElementTree.SubElement(root, "Annotation", Id=str(number), Name="", Type="4", Visible="1")
        attributes = ElementTree.SubElement(annotation, "Attributes")
        if name:
            ElementTree.SubElement(attributes, "Attribute", Name=name, Id="0", Value="")
        regions = ElementTree.SubElement(annotation, "Regions")
        ElementTree.SubElement(regions, "RegionAttributeHeaders")
        for nucleus in group:
            _add_region(regions, nucleus.outline, negative=False)
            if nucleus.hole is not None:
                _add_region(regions, nucleus.hole, negative=True)
    ElementTree.indent(root, "\t")
    ElementTree.ElementTree(root).write(path)


def _add_region(regions: ElementTree.Element, outline: NDArray[np.float64], negative: bool) -> None:
    number = str(len(regions))  # the headers come first
    region = ElementTree.SubElement(regions, "Region", Id=number, Type="0", NegativeROA=str(int(negative)))
    ElementTree.SubElement(region, "Attributes")
    vertices = ElementTree.SubElement(region, "Vertices")
    for x, y in outline + TO_CORNERS:
        ElementTree.SubElement(vertices, "Vertex", X=f"{x:.2f}", Y=f"{y:.2f}")


def _check_known(profile: str, profiles: Iterable[str]) -> None:
    if profile not in profiles:
        raise ValueError(f"profile {profile!r} is unknown; choose one of {', '.join(profiles)}")


def _generator(seed: int, profile: str, *numbers: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(profile.encode()), *numbers])
