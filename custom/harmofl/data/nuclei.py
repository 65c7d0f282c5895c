"""Images of nuclei with their annotations: which files belong together, and one pair as arrays."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harmofl.data.findings import CaseError, DataRootError, Finding, count_text, refusal
from harmofl.data.foreign_names import misnamed_pictures
from harmofl.data.imagescope import (
    CELL_TYPES,
    IGNORED,
    NUCLEUS,
    check_something_drawn,
    draw_regions,
    read_regions,
)
from harmofl.data.layout import JUNK, natural_key
from harmofl.data.mask_meaning import share_findings, unlike_the_others
from harmofl.data.mask_pictures import read_label_picture
from harmofl.data.rasters import read_rgb
from harmofl.data.splits import FRACTIONS, PARTS, Part, split_cases

IMAGE_SUFFIXES = (".tif", ".tiff", ".png", ".svs")  # of several files of one image the first of these is read
MASK_SUFFIXES = (".tif", ".tiff", ".png")
OTHER_SUFFIXES = (".jpg", ".jpeg", ".bmp", ".ndpi", ".mrxs", ".scn", ".mat", ".npy", ".npz", ".geojson", ".dcm")
MASK_STEM = re.compile(r"(?P<image>.+)_mask", re.IGNORECASE)
MASK_FOLDER = re.compile(r"GT_(?P<slide>.+)", re.IGNORECASE)  # TNBC: Slide_01/01_1.png with GT_01/01_1.png
BARCODE = re.compile(r"(?:TCGA|DEMO)-[A-Z0-9]{2}-[A-Z0-9]{4}", re.IGNORECASE)  # project, source, patient
DEEPEST = 3  # folders below the site's
Labels = NDArray[np.uint8]
TWICE_LISTED = ("TCGA-MP-A4T7", "TCGA-A2-A0ES")  # in the training and in the test list of MoNuSAC


@dataclass(frozen=True)
class NucleiCase:
    """One image with its annotation, ImageScope XML or a picture of labels.

    Attributes:
        name: the image's name without ending, with its folder where two share a name.
        patient: TCGA barcode in the name of file or folder, else the folder of a pair that lies below the site's
            folder (its images are taken for those of one patient), else the name of the image.
        image: the picture.
        annotation: the outlines or labels.
    """

    name: str
    patient: str
    image: Path
    annotation: Path


@dataclass(frozen=True, eq=False)
class NucleiImage:
    """One case as arrays; names and findings stay at the site.

    Attributes:
        name: the case.
        patient: whose image it is.
        image: (H, W, 3) uint8.
        target: (H, W) uint8, 0 background, 1..K classes, 255 counts in neither loss nor score.
        findings: warnings and notices of both files.
    """

    name: str
    patient: str
    image: NDArray[np.uint8]
    target: NDArray[np.uint8]
    findings: tuple[Finding, ...]


@dataclass
class _Group:
    """Files that claim to be one image or its annotation."""

    images: list[Path] = field(default_factory=list)
    annotations: list[Path] = field(default_factory=list)


def find_nuclei(folder: Path) -> tuple[list[NucleiCase], list[Finding]]:
    """Pair the images and annotations of a site's folder by name, up to three folders deep.

    An image belongs to ``.xml`` or ``_mask`` picture of its name in the same folder, or to the picture of its name in
    the folder ``GT_xx`` beside its own ``Slide_xx``; failing that, to the only annotation of its name anywhere in the
    site's folder, as where images and annotations have a folder each. Of tif, png and svs of one image one is read.
    The two patients that stand in both lists of MoNuSAC are left out.

    Returns:
        The cases in natural order of their names, and findings for files without a partner, several claims to one
        image, twins, patients left out and formats that are not read.

    Raises:
        DataRootError: if a folder cannot be listed.
    """
    groups, others = _grouped(folder)
    lone = [path for group in groups if not group.annotations for path in group.images]
    paired = [path for group in groups if group.annotations for path in group.images]
    findings, explained = misnamed_pictures(lone, paired, [path for paths in others.values() for path in paths], folder)
    unread = {suffix: [path for path in paths if path not in explained] for suffix, paths in sorted(others.items())}
    findings += [_other_format(suffix, paths) for suffix, paths in unread.items() if paths]
    if not groups:
        fix = f"put images ({', '.join(IMAGE_SUFFIXES)}) with ImageScope .xml beside them into it"
        findings.append(Finding("error", "no_cases", folder.name, "the folder holds no image of nuclei", fix))
    pairs: list[tuple[Path, Path]] = []
    for group in groups:
        if not group.annotations and explained.issuperset(group.images):
            continue
        relative = [path.relative_to(folder).as_posix() for path in [*group.images, *group.annotations]]
        problem = _problem(group, ", ".join(relative))
        if problem:
            findings.append(problem)
        if not problem or problem.code == "twin_image":
            pairs.append((group.images[0], group.annotations[0]))
    cases, more = _without_twice_listed(_named(pairs, folder))
    return cases, findings + more


def read_nuclei(case: NucleiCase, classes: Sequence[str] = (NUCLEUS,)) -> NucleiImage:
    """Read one image and draw its annotation.

    Labels of a picture (`read_label_picture`): with the one class ``nucleus`` every value above 0 (0/1, 0/255, numbers
    of nuclei, colors of nuclei); with cell types 0 background, 1..K the types in their order, 255 ignored, and nothing
    else. An annotation that holds no region is background; one whose regions all leave no pixel is refused.

    Args:
        case: the two files.
        classes: names of classes 1..K, (NUCLEUS,) or CELL_TYPES.

    Raises:
        CaseError: if a file cannot be read, their sizes differ, the annotation does not say what is marked, all its
            regions are dropped, or it has no cell types where they are asked for.
    """
    image, findings = read_rgb(case.image, case.image.name)
    shape, subject = (image.shape[0], image.shape[1]), case.annotation.name
    if case.annotation.suffix.casefold() == ".xml":
        target, more = _read_outlines(subject, case.annotation, shape, classes)
    else:
        target, more = _read_labels(case, shape, classes)
    counted = target != IGNORED
    more += share_findings(counted & (target > 0), counted, subject)
    return NucleiImage(case.name, case.patient, image, target, (*findings, *more))


def _read_outlines(
    subject: str, path: Path, shape: tuple[int, int], classes: Sequence[str]
) -> tuple[Labels, list[Finding]]:
    regions, findings = read_regions(path, subject)
    if NUCLEUS not in classes and regions and all(region.kind == NUCLEUS for region in regions):
        fix = f"annotate {', '.join(CELL_TYPES)} or use the one class {NUCLEUS}"
        raise refusal("no_cell_types", subject, "the annotation names no cell type", fix)
    drawing = draw_regions(regions, shape, classes, subject)
    check_something_drawn(regions, drawing.instances, subject)
    return drawing.target, [*findings, *drawing.findings]


def _read_labels(case: NucleiCase, shape: tuple[int, int], classes: Sequence[str]) -> tuple[Labels, list[Finding]]:
    subject, one = case.annotation.name, NUCLEUS in classes
    read = read_label_picture(case.annotation, shape, case.image.name, classes=not one)
    findings = list(read.findings)
    if not read.labels.any():
        fix = "make sure that the image holds no nucleus"
        findings.append(Finding("warning", "empty_mask", subject, "nothing is labeled", fix))
    if one:
        return (read.labels > 0).astype(np.uint8), findings
    present = np.unique(read.labels)
    if IGNORED in present and not np.isin(present, range(1, len(classes) + 1)).any():
        fix = f"label {', '.join(CELL_TYPES)} as 1 to {len(classes)}, or use the one class {NUCLEUS}"
        raise refusal("no_cell_types", subject, f"the mask holds {IGNORED} (ignored) and no cell type", fix)
    strange = [f"{value:g}" for value in present.tolist() if value not in (*range(len(classes) + 1), IGNORED)]
    if strange:
        message = f"labels {', '.join(strange[:5])} are no cell type"
        raise refusal("mask_labels", subject, message, f"use 0 to {len(classes)}, and {IGNORED} for what is ignored")
    return read.labels.astype(np.uint8), findings


def _files_below(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DataRootError(f"{folder} cannot be listed ({error.strerror}); check its path and permissions") from error
    for path in entries:
        if path.name.startswith(".") or path.name.casefold() in JUNK:
            continue
        if not path.is_dir():
            yield path
        elif depth:
            yield from _files_below(path, depth - 1)


def _grouped(folder: Path) -> tuple[list[_Group], dict[str, list[Path]]]:
    """Return the groups of files of one image, and files in formats that are not read by their ending."""
    nearby: dict[tuple[str, str], _Group] = defaultdict(_Group)
    others: dict[str, list[Path]] = defaultdict(list)
    for path in _files_below(folder):
        suffix, place, stem = path.suffix.casefold(), str(path.parent).casefold(), path.stem.casefold()
        masked, slide = MASK_STEM.fullmatch(stem), MASK_FOLDER.fullmatch(path.parent.name)
        if suffix == ".xml":
            nearby[place, stem].annotations.append(path)
        elif suffix in MASK_SUFFIXES and masked:
            nearby[place, masked["image"]].annotations.append(path)
        elif suffix in MASK_SUFFIXES and slide:
            nearby[str(path.parent.with_name(f"slide_{slide['slide']}")).casefold(), stem].annotations.append(path)
        elif suffix in IMAGE_SUFFIXES:
            nearby[place, stem].images.append(path)
        elif suffix in OTHER_SUFFIXES:
            others[suffix].append(path)
    groups = [group for group in nearby.values() if group.images and group.annotations]
    lone: dict[str, list[_Group]] = defaultdict(list)
    for (_, stem), group in nearby.items():
        if not (group.images and group.annotations):
            lone[stem].append(group)
    for stem in sorted(lone, key=natural_key):
        without, of_none = ([g for g in lone[stem] if g.images], [g for g in lone[stem] if g.annotations])
        if len(without) == len(of_none) == 1:
            groups.append(_Group(without[0].images, of_none[0].annotations))
        else:
            groups += lone[stem]
    for group in groups:
        group.images.sort(key=lambda path: IMAGE_SUFFIXES.index(path.suffix.casefold()))
    return groups, others


def _problem(group: _Group, subject: str) -> Finding | None:
    if not group.annotations:
        name = group.images[0].stem
        wanted = f"add {name}.xml (ImageScope) or {name}_mask.png, or take the image away"
        return Finding("error", "image_without_annotation", subject, "the image has no annotation", wanted)
    if not group.images:
        stem = group.annotations[0].stem
        masked = MASK_STEM.fullmatch(stem)
        stem = masked["image"] if masked else stem
        wanted = " or ".join(f"{stem}{suffix}" for suffix in IMAGE_SUFFIXES)
        return Finding("error", "annotation_without_image", subject, "the annotation has no image", f"add {wanted}")
    suffixes = Counter(path.suffix.casefold() for path in group.images)
    if len(group.annotations) > 1 or max(suffixes.values()) > 1:
        fix = "keep one image and one annotation of it"
        return Finding("error", "duplicate_case", subject, "several files claim one image", fix)
    if len(suffixes) > 1:
        # the same words for every image: `harmofl check` tells of all of them in one line
        kind = group.images[0].suffix.casefold()
        return Finding("notice", "twin_image", subject, f"one image in several formats, the {kind} is read")
    return None


def _named(pairs: list[tuple[Path, Path]], folder: Path) -> list[NucleiCase]:
    stems = Counter(image.stem.casefold() for image, _ in pairs)
    cases = []
    for image, annotation in pairs:
        alone = stems[image.stem.casefold()] == 1
        name = image.stem if alone else image.relative_to(folder).with_suffix("").as_posix()
        cases.append(NucleiCase(name, _patient(image, annotation, folder), image, annotation))
    return sorted(cases, key=lambda case: natural_key(case.name))


def _patient(image: Path, annotation: Path, folder: Path) -> str:
    for text in (image.name, image.parent.name):
        barcode = BARCODE.search(text)
        if barcode:
            return barcode[0].upper()
    together = image.parent == annotation.parent or MASK_FOLDER.fullmatch(annotation.parent.name)
    return image.parent.relative_to(folder).as_posix() if together and image.parent != folder else image.stem


def _without_twice_listed(cases: list[NucleiCase]) -> tuple[list[NucleiCase], list[Finding]]:
    findings = []
    for patient in TWICE_LISTED:
        count = sum(case.patient == patient for case in cases)
        if count:
            message = (
                f"{count_text(count, 'image')} left out: the patient stands in both lists of MoNuSAC, training and test"
            )
            findings.append(Finding("notice", "excluded_patient", patient, message))
    return [case for case in cases if case.patient not in TWICE_LISTED], findings


def _other_format(suffix: str, paths: list[Path]) -> Finding:
    message = (
        f"{count_text(len(paths), 'file')} of a format that is not read"
        if len(paths) > 1
        else "a format that is not read"
    )
    subject = paths[0].name if len(paths) == 1 else f"{paths[0].name} and other *{suffix}"
    return Finding("warning", "other_format", subject, message, "convert images to TIFF or PNG, outlines to XML")


def read_site_images(
    cases: Sequence[NucleiCase],
    classes: Sequence[str] = (NUCLEUS,),
    read: Callable[[NucleiCase, Sequence[str]], NucleiImage] = read_nuclei,
) -> tuple[list[NucleiImage], list[Finding]]:
    """Read all cases of a site; a case that cannot be used becomes a finding and is left out.

    An image with far more or fewer nuclei than the others gives a warning.
    """
    images: list[NucleiImage] = []
    findings: list[Finding] = []
    for case in cases:
        try:
            image = read(case, classes)
        except CaseError as error:
            findings.append(error.finding)
        else:
            images.append(image)
            findings += image.findings
    shares = {image.name: 100 * float(np.mean(image.target[image.target != IGNORED] > 0)) for image in images}
    return images, findings + unlike_the_others(shares, "% of the pixels", most=100)


def split_images(
    images: Sequence[NucleiImage],
    seed: int,
    fractions: tuple[float, float, float] = FRACTIONS,
    patient: Callable[[NucleiImage], str] = attrgetter("patient"),
) -> tuple[dict[Part, list[NucleiImage]], list[Finding]]:
    """Split images into training, validation and test so that all images of a patient stay together."""
    by_name = {image.name: image for image in images}
    split = split_cases(by_name, seed, fractions, patient=lambda name: patient(by_name[name]))
    return {part: [by_name[name] for name in getattr(split, part)] for part in PARTS}, list(split.findings)
