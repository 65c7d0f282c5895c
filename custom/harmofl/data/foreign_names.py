"""Names that other programs give to masks and images, recognized so that a message can say what to rename."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from harmofl.data.findings import Finding

_WORDS = (
    "segmentations?|segm|seg|labelmap|labels?|masks?|gt|ground[-_ ]?truth|annotations?|annot|manual|roi|contours?"
    "|instances?"
)
MASK_ENDING = re.compile(rf"(?P<case>.+?)(?:[-_. ](?:{_WORDS}))+", re.IGNORECASE)  # Case00-label, Case00_seg
MASK_BEGINNING = re.compile(rf"(?:{_WORDS})[-_. ](?P<case>.+)", re.IGNORECASE)  # mask_Case00
MASK_FOLDER = re.compile(rf"(?:.*[-_. ])?(?:{_WORDS})(?:tr|ts|[-_. ].*)?", re.IGNORECASE)  # Labels, labelsTr, GT_01
CHANNEL = re.compile(r"(?P<case>.+)_(?P<number>[0-9]{4})")  # nnU-Net: Case00_0000 with the mask Case00
FIRST = "0000"
ARRAYS = (".mat", ".npy", ".npz")  # such a file of an image's name is its mask: no program keeps the image in one too
NNUNET_FOLDERS = ("imagestr", "labelstr")
Named = Mapping[str, Sequence[Path]]  # files by the name of their case in small letters


def masked_case(stem: str) -> str | None:
    """The case whose mask a file looks like by its name without ending, None if it does not."""
    found = MASK_ENDING.fullmatch(stem) or MASK_BEGINNING.fullmatch(stem)
    return found["case"] if found else None


def is_mask_folder(name: str) -> bool:
    """Whether a folder's name says that it holds masks."""
    return MASK_FOLDER.fullmatch(name) is not None


def volume_stem(path: Path) -> str:
    """A file's name without its ending, ``.nii.gz`` as one."""
    return re.sub(r"(?i)(\.nii)?\.[^.]*$", "", path.name) or path.name


def is_mask_beside_image(path: Path) -> bool:
    """Whether a file looks like the mask of another file of its folder by both names."""
    case = masked_case(volume_stem(path))
    if case is None or not path.parent.is_dir():
        return False
    return any(volume_stem(other).casefold() == case.casefold() for other in path.parent.iterdir())


def _ending(path: Path) -> str:
    return path.name[len(volume_stem(path)) :]


def misnamed_volumes(images: Named, masks: Named, others: Sequence[Path]) -> tuple[list[Finding], set[str]]:
    """Explain volumes without a partner that have the names of other programs.

    Args:
        images: volumes that are no ``_segmentation``.
        masks: those that are.
        others: files of other formats.

    Returns:
        A finding for each file that is recognized, and the names of cases that need no other finding.
    """
    findings: list[Finding] = []
    explained: set[str] = set()
    lone = {key: paths[0] for key, paths in images.items() if key not in masks and len(paths) == 1}
    for key, path in lone.items():
        channel, case = CHANNEL.fullmatch(volume_stem(path)), masked_case(volume_stem(path))
        finding: Finding | None = None
        if channel:
            finding, more = _channel_finding(path, channel["case"], channel["number"], images, masks)
        if case and not finding:
            finding, more = _mask_finding(path, case, images, masks), {key, case.casefold()}
        if finding:
            findings.append(finding)
            explained |= more
    for path in others:
        stem, ending = path.stem, path.suffix.casefold()
        case = masked_case(stem) or (stem if ending in ARRAYS else "")
        image = lone.get(case.casefold())
        if image is not None:
            name = volume_stem(image)
            fix = f"save it as {name}_segmentation.nii.gz, on the grid of the image"
            findings.append(Finding("error", "misnamed_mask", path.name, f"looks like the mask of {name}", fix))
            explained.add(name.casefold())
    return findings, explained


def _mask_finding(path: Path, name: str, images: Named, masks: Named) -> Finding:
    case = name.casefold()
    name = volume_stem(images[case][0]) if case in images else name
    wanted = f"{name}_segmentation{_ending(path)}"
    if case in images and case in masks:
        message, fix = f"looks like another mask of {name}, which has one", "take one of the two masks away"
    elif case in images:
        message, fix = f"looks like the mask of {name}", f"rename it to {wanted}"
    else:
        message = f"looks like a mask whose image {name}.nii.gz is not here"
        fix = f"add the image and rename the mask to {wanted}"
    return Finding("error", "misnamed_mask", path.name, message, fix)


def _channel_finding(
    path: Path, name: str, number: str, images: Named, masks: Named
) -> tuple[Finding | None, set[str]]:
    """What to say about Case00_0000 where there is a Case00, and about Case00_0001 where there is a Case00_0000."""
    case, key = name.casefold(), volume_stem(path).casefold()
    if number != FIRST:
        if f"{case}_{FIRST}" not in images or not (case in images or case in masks):
            return None, set()
        message, fix = f"looks like another sequence of {name}", "keep one sequence of a case, take this away"
        return Finding("error", "misnamed_image", path.name, message, fix), {key}
    if case in masks and case not in images:
        message, fix = f"looks like the image of {name}, as nnU-Net names it", f"rename it to {name}{_ending(path)}"
        return Finding("error", "misnamed_image", path.name, message, fix), {key, case}
    if case not in images or case in masks:
        return None, set()
    mask = images[case][0]
    message = f"looks like the mask of {name}, as nnU-Net names it beside its image {path.name}"
    fix = f"rename it to {name}_segmentation{_ending(mask)}, then the image to {name}{_ending(path)}"
    return Finding("error", "misnamed_mask", mask.name, message, fix), {key, case}


def misnamed_pictures(
    lone: Sequence[Path], paired: Sequence[Path], others: Sequence[Path], folder: Path
) -> tuple[list[Finding], set[Path]]:
    """Explain pictures without an annotation that have the names of other programs.

    Args:
        lone: images without an annotation.
        paired: images that have one.
        others: files of formats that are not read.
        folder: the site's.

    Returns:
        A finding for each file that is recognized, and the files that need no other finding.
    """
    by_name: dict[str, list[Path]] = defaultdict(list)
    for path in [*lone, *paired]:
        if not _mask_of(path, folder):
            by_name[path.stem.casefold()].append(path)
            channel = CHANNEL.fullmatch(path.stem.casefold())
            if channel and channel["number"] == FIRST:
                by_name[channel["case"]].append(path)
    findings: list[Finding] = []
    explained: set[Path] = set()
    for path in [*lone, *others]:
        is_array = path in others and path.suffix.casefold() in ARRAYS
        held = [
            image for image in by_name[(_mask_of(path, folder) or path.stem * is_array).casefold()] if image != path
        ]
        near = [image for image in held if image.parent == path.parent] or held
        if len(near) != 1:
            continue
        [image] = near
        subject = path.relative_to(folder).as_posix()
        if image in paired and path in lone:
            message, fix = f"looks like another mask of {image.stem}, which has an annotation", "take one of them away"
        elif path in lone:
            message, fix = f"looks like the mask of {image.stem}", f"rename it to {image.stem}_mask{path.suffix}"
        elif image in lone:
            message = f"looks like the mask of {image.stem}"
            fix = f"save it as {image.stem}_mask.png, whole numbers without loss"
        else:
            continue
        findings.append(Finding("error", "misnamed_mask", subject, message, fix))
        explained |= {path, image}
    return findings, explained


def _mask_of(path: Path, site: Path) -> str:
    """The image whose mask a file looks like by its own name or a folder's below the site's, empty if it does not."""
    in_masks = any(is_mask_folder(part) for part in path.relative_to(site).parts[:-1])
    return masked_case(path.stem) or path.stem * in_masks


def volumes_elsewhere(counts: Mapping[str, int]) -> tuple[str, str]:
    """What to say where volumes lie in folders below, by their number in each, and how to put them right."""
    shown = [f"{count} in {name}" for name, count in list(counts.items())[:4]]
    more = f" and {len(counts) - 4} more folders" if len(counts) > 4 else ""
    said = f"volumes lie in folders below, which are not read ({', '.join(shown)}{more})"
    named = {Path(name).name.casefold(): name for name in counts}
    if all(folder in named for folder in NNUNET_FOLDERS):
        images, labels = (named[folder] for folder in NNUNET_FOLDERS)
        fix = f"copy {images}/CASE_0000.nii.gz to CASE.nii.gz and {labels}/CASE.nii.gz to CASE_segmentation.nii.gz"
        return said, f"these are nnU-Net's folders: {fix} in the site's own folder"
    return said, "put them directly into the site's folder, as CaseNN.nii.gz and CaseNN_segmentation.nii.gz"
