"""The three public data sets in miniature: their own folders, file names and numbers of patients, pixels made up."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

# prostate MRI of six sites (SAML): the numbers in CaseNN; in the zip RUNMC and BMC, ISBI and ISBI_1.5 where HarmoFL's
# released code reads them
PROSTATE_CASES: dict[str, tuple[int, ...]] = {
    "BIDMC": (0, *range(2, 13)),
    "BMC": tuple(range(30)),
    "HK": tuple(range(38, 50)),
    "I2CVB": tuple(range(19)),
    "RUNMC": tuple(range(30)),
    "UCL": (1, *range(26, 38)),
}
HARMOFL_FOLDERS = {"RUNMC": "ISBI", "BMC": "ISBI_1.5"}

# Camelyon17-WILDS: (patient, node) of the 50 slides; a center is patient // 20
WILDS_SLIDES = (
    *((4, 4), (9, 1), (10, 4), (12, 0), (15, 1), (15, 2), (16, 1), (17, 1), (17, 2), (17, 4)),
    *((20, 2), (20, 4), (21, 3), (22, 4), (24, 1), (24, 2), (34, 3), (36, 3), (38, 2), (39, 1)),
    *((40, 2), (41, 0), (42, 3), (44, 4), (45, 1), (46, 3), (46, 4), (48, 1), (51, 2), (52, 1)),
    *((60, 3), (61, 4), (62, 2), (64, 0), (66, 2), (67, 4), (68, 1), (72, 0), (73, 1), (75, 4)),
    *((80, 1), (81, 4), (86, 0), (86, 4), (87, 0), (88, 1), (89, 3), (92, 1), (96, 0), (99, 4)),
)
WILDS_PATIENTS = (7, 8, 9, 10, 9)  # of the centers 0 to 4
WILDS_SIZE = 96

# MoNuSAC: patients of an organ in the training list; one of lung and one of breast stand in the test list too
MONUSAC_PATIENTS = {"lung": 10, "kidney": 12, "breast": 10, "prostate": 14}
MONUSAC_TWICE = {"lung": "TCGA-MP-A4T7", "breast": "TCGA-A2-A0ES"}


def write_prostate(root: Path, *, as_harmofl: bool = False) -> Path:
    """Write 116 volumes of 16 x 16 x 3 voxels, BMC's masks with a capital S, zones as labels 1 and 2 in two sites."""
    random = np.random.default_rng(0)
    for site, numbers in PROSTATE_CASES.items():
        folder = root / (HARMOFL_FOLDERS.get(site, site) if as_harmofl else site)
        folder.mkdir(parents=True)
        suffix = "_Segmentation" if site == "BMC" else "_segmentation"
        for number in numbers:
            mask = np.zeros((16, 16, 3), np.uint8)
            mask[5:11, 5:11, 1] = 1
            mask[5:8, 5:11, 1] += site in {"RUNMC", "BMC"}
            image = random.integers(0, 400, mask.shape).astype(np.int16) + 300 * (mask > 0).astype(np.int16)
            for name, voxels in ((f"Case{number:02d}", image), (f"Case{number:02d}{suffix}", mask)):
                placed = nibabel.Nifti1Image(voxels, np.diag([-8.0, -8.0, 10.0, 1.0]))
                nibabel.save(placed, folder / f"{name}.nii.gz")
    return root


def write_wilds(root: Path) -> Path:
    """Write metadata.csv and two patches a slide, one normal and one tumor."""
    random = np.random.default_rng(0)
    rows: list[Iterable[object]] = [("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")]
    for slide, (patient, node) in enumerate(WILDS_SLIDES):
        name = f"patient_{patient:03d}_node_{node}"
        (root / "patches" / name).mkdir(parents=True)
        for tumor in (0, 1):
            x, y = 1000 + WILDS_SIZE * tumor, 2000
            pixels = random.integers(90, 250, (WILDS_SIZE // 8, WILDS_SIZE // 8, 4), np.uint8)
            pixels[..., 3] = 255
            patch = Image.fromarray(pixels).resize((WILDS_SIZE, WILDS_SIZE), Image.Resampling.NEAREST)
            patch.save(root / "patches" / name / f"patch_{name}_x_{x}_y_{y}.png", compress_level=1)
            rows.append((len(rows) - 1, f"{patient:03d}", node, x, y, tumor, slide, patient // 20, 0))
    with (root / "metadata.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return root


def write_monusac(root: Path) -> Path:
    """Write sites.json and a folder a patient, each with one or two images as .svs, .tif and ImageScope .xml."""
    random = np.random.default_rng(0)
    organs = {}
    for organ, count in MONUSAC_PATIENTS.items():
        patients = [f"TCGA-{organ[:2].upper()}-{number:04d}" for number in random.choice(9999, count, replace=False)]
        if organ in MONUSAC_TWICE:
            patients[0] = MONUSAC_TWICE[organ]
        organs |= dict.fromkeys(patients, organ)
        for place, patient in enumerate(patients):
            name = f"{patient}-01Z-00-DX1"
            folder = root / "MoNuSAC_images_and_annotations" / name
            folder.mkdir(parents=True)
            for image in range(1 + place % 2):
                _write_nuclei(folder / f"{name}_{image + 1}", random)
    sites = {organ: {"organ": organ} for organ in MONUSAC_PATIENTS}
    (root / "sites.json").write_text(json.dumps({"sites": sites, "organs": organs}))
    return root


def _write_nuclei(stem: Path, random: np.random.Generator) -> None:
    """Two square nuclei in an image of 80 x 64 pixels."""
    pixels = random.integers(150, 240, (64, 80, 3), np.uint8)
    regions = ""
    for number, (left, top) in enumerate(((10, 10), (50, 30)), start=1):
        pixels[top : top + 16, left : left + 16] //= 2
        corners = ((left, top), (left + 16, top), (left + 16, top + 16), (left, top + 16))
        vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in corners)
        regions += f'<Region Id="{number}" Type="0"><Attributes/><Vertices>{vertices}</Vertices></Region>'
    attributes = '<Attributes><Attribute Name="Epithelial" Id="0" Value=""/></Attributes>'
    annotation = f'<Annotation Id="1" Type="4">{attributes}<Regions>{regions}</Regions></Annotation>'
    stem.with_suffix(".xml").write_text(f'<Annotations MicronsPerPixel="0.25">{annotation}</Annotations>')
    for suffix in (".tif", ".svs"):
        Image.fromarray(pixels).save(stem.with_suffix(suffix), format="TIFF")
