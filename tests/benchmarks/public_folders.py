"""How long does `harmofl check` take on the public data sets? Folders of their real size and layout, made-up content.

    python -m tests.benchmarks.public_folders [prostate] [camelyon17] [nuclei]

Prostate: 116 volumes of 384 x 384 pixels with 20 to 60 slices. Camelyon17-WILDS: an index of 455,954 rows, its patches
hard links to a few images. MoNuSAC: 209 images of 600 x 600 pixels with 220 outlines each. Prints processor seconds and
peak memory of the command; needs 2 GB in the folder for temporary files.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

from tests.benchmarks.patch_index import LINKS, PUBLISHED
from tests.public_layouts import MONUSAC_PATIENTS, PROSTATE_CASES, WILDS_SIZE, WILDS_SLIDES, write_monusac

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SLICES = {"BIDMC": 40, "BMC": 34, "HK": 24, "I2CVB": 60, "RUNMC": 20, "UCL": 23}
IMAGES, EDGE, OUTLINES = 209, 600, 220  # of MoNuSAC's training list; pixels; nuclei of an image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(WRITERS), help=f"of {', '.join(WRITERS)}")
    lines = ["| job | what lies there | processor seconds | peak MiB |", "|---|---|---|---|"]
    for task in parser.parse_args().tasks:
        with tempfile.TemporaryDirectory() as folder:
            said = WRITERS[task](Path(folder))
            seconds, peak = check_seconds(Path(folder), task)
        lines.append(f"| {task} | {said} | {seconds:.0f} | {peak:.0f} |")
    sys.stdout.write("\n".join(lines) + "\n")


def check_seconds(root: Path, task: str) -> tuple[float, float]:
    """Processor seconds and peak memory of the command, in a process of its own."""
    command = "import sys; from harmofl.app.cli import main; sys.exit(main(sys.argv[1:]))"
    job = str(JOBS / f"harmofl_{task}")
    process = subprocess.Popen([sys.executable, "-c", command, "check", str(root), "--job", job])
    # of this process alone: the peak of all children would be that of the largest so far
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"harmofl check of {task} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def write_prostate(root: Path) -> str:
    random = np.random.default_rng(0)
    for site, numbers in PROSTATE_CASES.items():
        (root / site).mkdir()
        for number in numbers:
            mask = np.zeros((384, 384, SLICES[site]), np.uint8)
            mask[150:230, 150:230, 4:-4] = 1
            image = random.integers(0, 800, (96, 96, SLICES[site]), np.int16).repeat(4, 0).repeat(4, 1)
            for name, voxels in ((f"Case{number:02d}", image), (f"Case{number:02d}_segmentation", mask)):
                placed = nibabel.Nifti1Image(voxels, np.diag([-0.5, -0.5, 3.0, 1.0]))
                nibabel.save(placed, root / site / f"{name}.nii.gz")
    slices = sum(SLICES[site] * len(numbers) for site, numbers in PROSTATE_CASES.items())
    return f"116 volumes of 384 x 384, {slices} slices"


def write_wilds(root: Path) -> str:
    random = np.random.default_rng(0)
    with (root / "metadata.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"))
        row = 0
        for center, count in enumerate(PUBLISHED):
            slides = [(slide, *held) for slide, held in enumerate(WILDS_SLIDES) if held[0] // 20 == center]
            for position in range(count):
                slide, patient, node = slides[position % len(slides)]
                name = f"patient_{patient:03d}_node_{node}"
                path = root / "patches" / name / f"patch_{name}_x_{position}_y_{position}.png"
                if position < len(slides):
                    path.parent.mkdir(parents=True)
                if row % LINKS == 0:
                    source = root / f"{row}.png"
                    pixels = random.integers(0, 255, (WILDS_SIZE, WILDS_SIZE, 4), np.uint8)
                    Image.fromarray(pixels | np.uint8([0, 0, 0, 255])).save(source)
                os.link(source, path)
                table.writerow(
                    (row, f"{patient:03d}", node, position, position, position // len(slides) % 2, slide, center, 0)
                )
                row += 1
    return f"{row:,} patches of 50 slides"


def write_nuclei(root: Path) -> str:
    write_monusac(root)  # sites.json and a small image or two of each patient, replaced here
    folders = sorted((root / "MoNuSAC_images_and_annotations").iterdir())
    assert len(folders) == sum(MONUSAC_PATIENTS.values())
    for folder in folders:
        for path in folder.iterdir():
            path.unlink()
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        folder = folders[number % len(folders)]
        stem = folder / f"{folder.name}_{number // len(folders) + 1}"
        pixels = random.integers(150, 240, (EDGE // 4, EDGE // 4, 3), np.uint8).repeat(4, 0).repeat(4, 1)
        Image.fromarray(pixels).save(stem.with_suffix(".tif"), format="TIFF")
        os.link(stem.with_suffix(".tif"), stem.with_suffix(".svs"))
        stem.with_suffix(".xml").write_text(_annotation(random))
    return f"{IMAGES} images of {EDGE} x {EDGE}, {OUTLINES} outlines each"


def _annotation(random: np.random.Generator) -> str:
    angles = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    regions = ""
    for number in range(OUTLINES):
        center = random.uniform(15, EDGE - 15, 2)
        corners = center + 8 * np.stack([np.cos(angles), np.sin(angles)], 1)
        vertices = "".join(f'<Vertex X="{x:.1f}" Y="{y:.1f}" Z="0"/>' for x, y in corners)
        regions += f'<Region Id="{number}" Type="0"><Attributes/><Vertices>{vertices}</Vertices></Region>'
    attributes = '<Attributes><Attribute Name="Epithelial" Id="0" Value=""/></Attributes>'
    annotation = f'<Annotation Id="1" Type="4">{attributes}<Regions>{regions}</Regions></Annotation>'
    return f'<Annotations MicronsPerPixel="0.25">{annotation}</Annotations>'


WRITERS: dict[str, Callable[[Path], str]] = {
    "prostate": write_prostate,
    "camelyon17": write_wilds,
    "nuclei": write_nuclei,
}

if __name__ == "__main__":
    main()
