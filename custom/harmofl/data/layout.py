"""From a data root to the cases of one site, by file names alone."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harmofl.data.findings import DataRootError, Finding, count_text
from harmofl.data.foreign_names import ARRAYS, misnamed_volumes, volumes_elsewhere

IMAGE_NAME = re.compile(r"(?P<stem>.+?)\.nii(\.gz)?", re.IGNORECASE)
MASK_STEM = re.compile(r"(?P<case>.+)_segmentation", re.IGNORECASE)
OTHER_FORMATS = (".mha", ".mhd", ".nrrd", ".mgz", ".mgh", ".hdr", ".img", ".dcm", *ARRAYS)
DEEPEST = 3  # folders below the site's in which volumes are looked for, to say where they lie
DICOM_MARK = b"DICM"  # behind a preamble of 128 bytes
JUNK = {"__macosx", "thumbs.db", "desktop.ini"}
CONVERSION = (
    "convert each series with `dcm2niix -z y -b n -f Case00 -o SITE_FOLDER SERIES_FOLDER` (Case01, Case02, ... for the"
    " next patients) and name each mask CaseNN_segmentation.nii.gz"
)


@dataclass(frozen=True)
class Case:
    """One volume with its mask: ``CaseNN.nii.gz`` and ``CaseNN_segmentation.nii.gz``."""

    name: str
    image: Path
    mask: Path


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts Case2 before Case10."""
    parts = re.split(r"([0-9]+)", name.casefold())
    return tuple((0, int(part), part) if part[:1].isdecimal() else (1, 0, part) for part in parts if part)


def find_cases(folder: Path) -> tuple[list[Case], list[Finding]]:
    """Pair images and masks of a site's folder by case name, in any letter case.

    Hidden files and the companions left by archives and desktop systems are passed over.

    Args:
        folder: the site's folder.

    Returns:
        The cases in natural order of their names, and findings for files without a partner, duplicates, volumes in
        formats that are not read or in folders below, and files with the names of other programs.

    Raises:
        DataRootError: if the folder cannot be listed.
    """
    images: dict[str, list[Path]] = defaultdict(list)
    masks: dict[str, list[Path]] = defaultdict(list)
    others: list[Path] = []
    for path in _visible_files(folder):
        named = IMAGE_NAME.fullmatch(path.name)
        if named is None:
            others += [path] * (path.suffix.casefold() in OTHER_FORMATS)
            continue
        mask = MASK_STEM.fullmatch(named["stem"])
        if mask:
            masks[mask["case"].casefold()].append(path)
        else:
            images[named["stem"].casefold()].append(path)
    findings = _about_folders(folder, empty=not (images or masks))
    findings += [_not_a_file(path) for path in _entries(folder) if IMAGE_NAME.fullmatch(path.name) and _is_odd(path)]
    misnamed, explained = misnamed_volumes(images, masks, others)
    recognized = {finding.subject for finding in misnamed}
    counts = Counter(path.suffix.casefold() for path in others if path.name not in recognized)
    findings += [_other_format(suffix, counts[suffix]) for suffix in OTHER_FORMATS if counts[suffix]]
    findings += misnamed
    cases: list[Case] = []
    for key in sorted(images.keys() | masks.keys(), key=natural_key):
        if key in explained and not (key in images and key in masks):
            continue
        problem = _pairing_problem(images.get(key, []), masks.get(key, []))
        if problem:
            findings.append(problem)
        else:
            cases.append(Case(_stem(images[key][0]), images[key][0], masks[key][0]))
    return cases, findings


def site_folder(root: Path, site: str, aliases: Sequence[str] = ()) -> Path:
    """Return the folder that holds one site's cases.

    ``<root>/<site or alias>`` if it exists, exact spelling first, then in any letter case; else the root itself if it
    holds cases.

    Args:
        root: the data root of this site, or of all sites in a simulation.
        site: name of the site.
        aliases: other folder names of the same site, such as ISBI for RUNMC.

    Raises:
        DataRootError: if neither exists, or if what is there is DICOM.
    """
    if not root.is_dir():
        raise DataRootError(f"data root {root} is not a folder; set HARMOFL_DATA_ROOT to the folder of the images")
    folder = named_folder(root, [site, *aliases])
    candidate = folder or root
    if _holds_images(candidate):
        return candidate
    if _holds_dicom(candidate):
        raise DataRootError(f"{candidate} holds DICOM files, not NIfTI volumes; {CONVERSION}")
    if folder is None:
        names = " or ".join(str(root / name) for name in [site, *aliases])
        raise DataRootError(
            f"no data for site {site}: neither the folder {names} exists, nor does {root} itself hold cases "
            "(CaseNN.nii.gz with CaseNN_segmentation.nii.gz); put the cases there or correct HARMOFL_DATA_ROOT"
        )
    return folder


def _entries(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DataRootError(f"{folder} cannot be listed ({error.strerror}); check its path and permissions") from error
    return [path for path in entries if not path.name.startswith(".") and path.name.casefold() not in JUNK]


def _visible_files(folder: Path) -> Iterator[Path]:
    return (path for path in _entries(folder) if not _is_odd(path))


def _is_odd(path: Path) -> bool:
    """A folder, pipe or device; a link to nothing counts as a file, so that reading it says what is wrong."""
    return path.exists() and not path.is_file()


def _stem(path: Path) -> str:
    named = IMAGE_NAME.fullmatch(path.name)
    assert named is not None, "only names that matched are paired"
    return named["stem"]


def _about_folders(folder: Path, *, empty: bool) -> list[Finding]:
    """What to say about a folder without volumes, and about volumes in folders below it, which are not read."""
    below = _volumes_below(folder)
    said, fix = volumes_elsewhere(below)
    if empty:
        message = f"the folder holds no NIfTI volume{f'; {said}' * bool(below)}"
        wanted = fix if below else "put CaseNN.nii.gz and CaseNN_segmentation.nii.gz of each case into it"
        return [Finding("error", "no_cases", folder.name, message, wanted)]
    return [Finding("warning", "nested_volumes", folder.name, said, fix)] if below else []


def _volumes_below(folder: Path, depth: int = DEEPEST, place: str = "") -> Counter[str]:
    """Number of volumes in each folder below, by its path from the first one."""
    counts: Counter[str] = Counter()
    for path in _entries(folder) if depth else []:
        if not path.is_dir() or IMAGE_NAME.fullmatch(path.name):
            continue
        try:
            counts[f"{place}{path.name}"] += sum(IMAGE_NAME.fullmatch(file.name) is not None for file in _entries(path))
            counts += _volumes_below(path, depth - 1, f"{place}{path.name}/")
        except DataRootError:  # a folder that is not read need not be readable
            continue
    return +counts


def _not_a_file(path: Path) -> Finding:
    kind = "a folder" if path.is_dir() else "no regular file"
    return Finding("error", "not_a_file", path.name, f"is {kind} with the name of a volume", "rename or remove it")


def _other_format(suffix: str, count: int) -> Finding:
    message = f"{count_text(count, 'file')} of a format that is not read"
    return Finding("warning", "other_format", f"*{suffix}", message, "convert each to NIfTI (.nii.gz)")


def _pairing_problem(images: list[Path], masks: list[Path]) -> Finding | None:
    if len(images) > 1 or len(masks) > 1:
        names = ", ".join(path.name for path in [*images, *masks])
        return Finding(
            "error", "duplicate_case", names, "several files claim one case", "keep one image and one mask of it"
        )
    if not masks:
        image = images[0].name
        wanted = f"add {_stem(images[0])}_segmentation.nii.gz or take the image away"
        return Finding("error", "image_without_mask", image, "the image has no mask", wanted)
    if not images:
        mask = masks[0].name
        return Finding("error", "mask_without_image", mask, "the mask has no image", "add the image of the same name")
    return None


def named_folder(root: Path, names: Sequence[str]) -> Path | None:
    """Return the folder below `root` with the first of these names, exact spelling before any letter case."""
    folders = [path for path in _entries(root) if path.is_dir()]
    by_name = {path.name: path for path in folders}
    by_letters = {path.name.casefold(): path for path in folders}
    for name in names:
        if name in by_name:
            return by_name[name]
    for name in names:
        if name.casefold() in by_letters:
            return by_letters[name.casefold()]
    return None


def _holds_images(folder: Path) -> bool:
    return any(IMAGE_NAME.fullmatch(path.name) for path in _visible_files(folder))


def _is_dicom(path: Path) -> bool:
    if path.suffix.casefold() == ".dcm":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(132).endswith(DICOM_MARK)
    except OSError:
        return False


def _holds_dicom(folder: Path) -> bool:
    below = [path for path in _entries(folder) if path.is_dir()]
    return any(_is_dicom(path) for place in [folder, *below] for path in _visible_files(place))
