"""Reading: an epoch from a warm cache against memory-mapped files, and patches against the bare PNG decoder."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nibabel
import numpy as np
import torch
from imagecodecs import png_decode
from PIL import Image
from torch.utils.data import DataLoader

from harmofl.core.loading import _AsStored, batches
from harmofl.data.layout import Case, find_cases
from harmofl.data.patch_index import read_index
from harmofl.data.patches import Patches
from harmofl.data.volumes import VolumeCache, VolumeSettings, read_site
from harmofl.data.windows import SliceWindows
from tests.benchmarks.rows import Row, ratio

VOLUMES, SIZE, DEPTH, BATCH = 12, 384, 24, 16
PATCHES, PATCH, PATCH_BATCH, TURNS = 1024, 96, 128, 6
SETTLED = 3.5  # seconds after which the cache trusts the times of files


def measure() -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return [first_epoch(Path(folder) / "volumes"), *patch_rows(Path(folder) / "patches")]


def first_epoch(folder: Path) -> Row:
    """All windows of all volumes once, in batches as the network takes them, from opening the site on."""
    cases, settings = write_volumes(folder / "HK"), VolumeSettings(SIZE, SIZE, 99.0)
    volumes, _ = read_site(cases, settings, VolumeCache(folder / "cache"))
    time.sleep(SETTLED)
    read_site(cases, settings, VolumeCache(folder / "cache"))
    for volume in volumes:
        np.save(folder / f"{volume.name}_image.npy", volume.image)
        np.save(folder / f"{volume.name}_mask.npy", volume.mask)
    order = torch.randperm(VOLUMES * DEPTH, generator=torch.Generator().manual_seed(0)).tolist()

    def ours() -> None:
        held, _ = read_site(cases, settings, VolumeCache(folder / "cache"))
        for _ in batches(SliceWindows(held, "all"), BATCH, torch.Generator().manual_seed(0)):
            pass

    def mapped_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The least that reads the same bytes into the same batches."""
        images = [np.load(folder / f"{volume.name}_image.npy", mmap_mode="c") for volume in volumes]
        masks = [np.load(folder / f"{volume.name}_mask.npy", mmap_mode="c") for volume in volumes]
        for start in range(0, len(order), BATCH):
            windows, targets = [], []
            for volume, index in (divmod(item, DEPTH) for item in order[start : start + BATCH]):
                taken = np.clip(np.arange(index - 1, index + 2), 0, DEPTH - 1)
                inside = 0 < index < DEPTH - 1
                image = images[volume][index - 1 : index + 2] if inside else images[volume][taken]
                windows.append(torch.from_numpy(image))
                targets.append(torch.from_numpy(masks[volume][index]))
            yield torch.stack(windows).float(), torch.stack(targets).long()

    def mapped() -> None:
        for _ in mapped_batches():
            pass

    found = ratio(ours, mapped, seconds=30)
    what = f"first epoch, warm cache, {VOLUMES} volumes {SIZE} x {SIZE} x {DEPTH}"
    return Row(what, "the same windows from memory-mapped files into the same batches", found.median, 1.2, found.noise)


def write_volumes(folder: Path) -> list[Case]:
    """Smooth noise in int16, with masks, as NIfTI files."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(VOLUMES):
        coarse = random.normal(300, 80, (SIZE // 8, SIZE // 8, DEPTH))
        image = coarse.repeat(8, 0).repeat(8, 1) + random.normal(0, 10, (SIZE, SIZE, DEPTH))
        mask = np.zeros(image.shape, np.uint8)
        mask[150:230, 150:230, :] = 1
        for name, array in (("", image.astype(np.int16)), ("_segmentation", mask)):
            file = nibabel.Nifti1Image(array, np.diag([0.5, 0.5, 3.0, 1.0]))
            nibabel.save(file, folder / f"Case{number:02d}{name}.nii.gz")
    return find_cases(folder)[0]


def patch_rows(folder: Path) -> list[Row]:
    patches = write_patches(folder)
    paths = [patches.index.folder / patches.index.name(row) for row in range(PATCHES)]
    many = Patches(patches.index, np.tile(np.arange(PATCHES), TURNS), PATCH, PATCH)  # workers take a while to start

    def epoch(workers: int) -> Callable[[], None]:
        def run() -> None:
            for _ in batches(many, PATCH_BATCH, None, workers):
                pass

        return run

    def pillow() -> None:
        for path in paths:
            with Image.open(path) as image:
                np.asarray(image)

    def libpng() -> None:
        for path in paths:
            png_decode(path.read_bytes())

    def loader() -> None:
        """What a worker does; the step to float32 is the device's."""
        for _ in DataLoader(_AsStored(patches), PATCH_BATCH):
            pass

    size = f"{PATCH} x {PATCH} patches"
    rows = []
    for name, decoder in (("Pillow", pillow), ("libpng by imagecodecs, which it uses", libpng)):
        found = ratio(loader, decoder)
        what = f"camelyon17 loader in one process, {size}, beside {name}"
        rows.append(Row(what, "the bare decoder (90 % of its rate)", found.median, 1 / 0.9, found.noise))
    found = ratio(epoch(2), epoch(1), seconds=40, clock=time.perf_counter)
    what = f"camelyon17 loader with two workers, {size}"
    return [*rows, Row(what, "one worker (1.6 x its rate)", found.median, 1 / 1.6, found.noise)]


def write_patches(folder: Path) -> Patches:
    """Patches with noise on large shapes, opaque RGBA as those of Camelyon17-WILDS, 27 KB each in memory."""
    folder.mkdir()
    lines = [f"{row},{row // 100:03d},1,{row},{row},{row % 2},0,0,0" for row in range(PATCHES)]
    header = ",patient,node,x_coord,y_coord,tumor,slide,center,split"
    (folder / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    index, random = read_index(folder, [0]), np.random.default_rng(0)
    for row in range(PATCHES):
        shapes = Image.fromarray(random.integers(60, 240, (12, 12, 3), np.uint8)).resize((PATCH, PATCH))
        noisy = np.clip(np.asarray(shapes) + random.normal(0, 8, (PATCH, PATCH, 3)), 0, 255).astype(np.uint8)
        path = folder / index.name(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.dstack([noisy, np.full((PATCH, PATCH), 255, np.uint8)])).save(path)
    return Patches(index, np.arange(PATCHES), PATCH, PATCH)
