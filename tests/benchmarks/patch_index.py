"""Does a site with all patches of Camelyon17-WILDS start within a minute? Index, split, check and first batch.

    python -m tests.benchmarks.patch_index [--rows 455954] [--site 146722] [--workers 2]

Writes an index of the published size and the images of its largest hospital (hard links to a few noise patches, so
that the disk holds little) into a temporary folder. Prints seconds and peak memory of each step, in a process of its
own, and how many times longer the index takes than its lines alone.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

PUBLISHED = (59436, 34904, 85054, 129838, 146722)  # patches of the centers 0 to 4, Camelyon17-WILDS v1.0
SLIDES = 10  # of a center
LINKS = 20_000  # of one file; many file systems stop at 65,000
BATCH = 128
MEASURED = 20  # batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=sum(PUBLISHED))
    parser.add_argument("--site", type=int, default=PUBLISHED[-1])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), options.rows, min(options.site, options.rows))
        command = [sys.executable, "-m", "tests.benchmarks.patch_index", "--measure", folder]
        subprocess.run([*command, "--workers", str(options.workers)], check=True)


def write_folder(folder: Path, rows: int, site: int) -> None:
    """Write the index of all centers and, for the last one, the files."""
    random = np.random.default_rng(0)
    x, y, tumor = random.integers(0, 100_000, (2, rows)), np.arange(rows), random.integers(0, 2, rows)
    center = np.where(np.arange(rows) >= rows - site, 4, np.arange(rows) % 4)
    slide = random.integers(0, SLIDES, rows)
    with (folder / "metadata.csv").open("w") as stream:
        stream.write(",patient,node,x_coord,y_coord,tumor,slide,center,split\n")
        for row in range(rows):
            named = f"{20 * center[row] + slide[row]:03d},{slide[row] % 5}"
            place = f"{x[0, row]},{y[row]},{tumor[row]}"
            stream.write(f"{row},{named},{place},{SLIDES * center[row] + slide[row]},{center[row]},0\n")
    link_images(folder, random)


def link_images(folder: Path, random: np.random.Generator) -> None:
    from harmofl.data.patch_index import read_index

    index = read_index(folder, [4])
    for row in range(len(index)):
        path = folder / index.name(row)
        if row % LINKS == 0:
            source = folder / f"{row}.png"
            Image.fromarray(random.integers(0, 255, (96, 96, 4), np.uint8) | np.uint8([0, 0, 0, 255])).save(source)
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
        os.link(source, path)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, workers: int) -> None:
    lines = read_lines(folder / "metadata.csv")
    steps: list[tuple[str, float, float]] = [("lines of the file alone", lines, peak_mib())]

    def step(name: str, start: float) -> None:
        steps.append((name, time.perf_counter() - start, peak_mib()))

    from harmofl.data.patch_index import read_index

    start = time.perf_counter()
    index = read_index(folder, range(5))
    step(f"index of {len(index):,} rows", start)
    ratio = steps[-1][1] / lines
    start = time.perf_counter()
    index = read_index(folder, [4])
    step(f"index of one site, {len(index):,} rows", start)
    start = time.perf_counter()
    import torch

    from harmofl.data.patches import Patches, split_by_slide

    step("import of torch", start)
    start = time.perf_counter()
    split = split_by_slide(index, 0)
    step("split", start)
    dataset = Patches(index, split.train, 96, 96)
    start = time.perf_counter()
    dataset.check(0)
    step("check of a sample", start)
    start = time.perf_counter()
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches)
    step(f"first batch of {BATCH}, {workers} workers", start)
    start = time.perf_counter()
    for _ in range(MEASURED):
        next(batches)
    step(f"{MEASURED} more batches", start)
    amplitude = amplitude_seconds(batches) * len(dataset)
    steps.append(
        (f"amplitude of {len(dataset):,} images before round 0, from {MEASURED} batches", amplitude, peak_mib())
    )
    table = ["| step | seconds | peak MiB |", "|---|---|---|"]
    table += [f"| {name} | {seconds:.2f} | {peak:.0f} |" for name, seconds, peak in steps]
    sys.stdout.write("\n".join(table) + f"\nindex / lines alone: {ratio:.1f}\n")


def amplitude_seconds(batches: Iterator["list[Tensor]"]) -> float:
    """Seconds an image that the task `amplitude` takes, decoding by the workers included."""
    from harmofl.app.job import read_job
    from harmofl.flare.local_amplitude import build_normalization

    experiment = read_job(Path(__file__).resolve().parents[2] / "jobs" / "harmofl_camelyon17", []).resolve(demo=False)
    normalization = build_normalization(experiment, 3)
    start = time.perf_counter()
    for _ in range(MEASURED):
        normalization.observe(next(batches)[0])
    return (time.perf_counter() - start) / (MEASURED * BATCH)


def read_lines(path: Path) -> float:
    start = time.perf_counter()
    with path.open() as stream:
        for _ in stream:
            pass
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
