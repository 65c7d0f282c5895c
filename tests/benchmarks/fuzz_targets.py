"""What is fuzzed: small valid files, and the product's own function that reads each kind."""

import gzip
import io
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.benchmarks import fuzz_mutations as change

JOBS = Path(__file__).resolve().parents[2] / "jobs"
Seeds = Sequence[tuple[str, bytes]]
PATCH_HEADER = ",patient,node,x_coord,y_coord,tumor,slide,center,split"


@dataclass(frozen=True)
class Target:
    """One kind of file.

    Attributes:
        seeds: ending and content of valid files.
        mutations: how a file of each ending is changed.
        read: opens a file as the product does; the folder of the file may hold what belongs to it.
        refusals: the only exceptions that it may raise.
    """

    seeds: Seeds
    mutations: Mapping[str, change.Mutation]
    read: Callable[[Path], None]
    refusals: tuple[type[Exception], ...]


def open_target(name: str, folder: Path) -> Target:
    """Build a target; `folder` receives the files that stay the same."""
    return TARGETS[name](folder)


def _saved(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def _volume(dtype: str, mask: bool = False, form: str = "Nifti1") -> bytes:
    import nibabel

    generator = np.random.default_rng(0)
    voxels = generator.integers(0, 2 if mask else 200, (12, 10, 5)).astype(dtype)
    swapped = nibabel.Nifti1Header(endianness=">") if form == "swapped" else None
    kind = nibabel.Nifti2Image if form == "Nifti2" else nibabel.Nifti1Image
    return bytes(kind(voxels, np.diag([-0.5, -0.5, 3.0, 1.0]), swapped, dtype=dtype).to_bytes())


def _volumes(folder: Path) -> Target:
    from harmofl.data.findings import CaseError
    from harmofl.data.layout import Case
    from harmofl.data.nifti import read_scan
    from harmofl.data.pairs import read_pair

    plain = [(".nii", _volume(dtype)) for dtype in ("int16", "float32", "uint8")]
    plain += [(".nii", _volume("int16", form=form)) for form in ("Nifti2", "swapped")]
    partner = folder / "partner.nii"
    partner.write_bytes(_volume("uint8", mask=True))

    def read(path: Path) -> None:
        """Alone, and as the image and as the mask of a pair: one refusal does not hide the others."""
        refused = []
        for look in (
            lambda: read_scan(path),
            lambda: read_pair(Case("fuzz", path, partner)),
            lambda: read_pair(Case("fuzz", partner, path)),
        ):
            try:
                found: Any = look()
            except CaseError as error:
                refused.append(error)
                continue
            if hasattr(found, "mask"):
                assert np.isfinite(found.image).all() and set(np.unique(found.mask).tolist()) <= {0, 1}
        if len(refused) == 3:
            raise refused[0]

    packed = [(".nii.gz", gzip.compress(content)) for _, content in plain]
    return Target([*plain, *packed], {".nii": change.of_nifti, ".nii.gz": change.of_gzip}, read, (CaseError,))


def _pictures() -> list[tuple[str, bytes]]:
    import tifffile

    generator = np.random.default_rng(0)
    color = Image.fromarray(generator.integers(0, 256, (12, 10, 3), np.uint8))
    pictures = [(".png", _saved(color.convert(mode), "PNG")) for mode in ("RGB", "RGBA", "L", "P", "1", "LA", "I;16")]
    pictures += [(".jpg", _saved(color, "JPEG")), (".jpg", _saved(color.convert("CMYK"), "JPEG"))]
    for options in ({}, {"compression": "lzw"}, {"compression": "jpeg"}, {"tile": (16, 16), "compression": "jpeg2000"}):
        stream = io.BytesIO()
        tifffile.imwrite(stream, np.tile(np.asarray(color), (2, 2, 1)), photometric="rgb", **options)
        pictures.append((".tif", stream.getvalue()))
    return pictures


PICTURES = {".png": change.of_png, ".jpg": change.of_bytes, ".tif": change.of_tiff}


def _images(folder: Path) -> Target:
    from harmofl.data.findings import CaseError
    from harmofl.data.rasters import read_rgb

    def read(path: Path) -> None:
        picture, _ = read_rgb(path, path.name)
        assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3

    return Target(_pictures(), PICTURES, read, (CaseError,))


def _masks(folder: Path) -> Target:
    from harmofl.data.findings import CaseError
    from harmofl.data.nuclei import NucleiCase, read_nuclei

    picture = folder / "picture.png"
    Image.new("RGB", (10, 12), (200, 150, 190)).save(picture)
    labels = np.zeros((12, 10), np.uint8)
    labels[3:6, 2:7] = 1
    masks = [Image.fromarray(labels), Image.fromarray(labels * 255), Image.fromarray(labels.astype(np.uint16) * 300)]
    seeds = [(".png", _saved(mask, "PNG")) for mask in masks] + [(".tif", _saved(mask, "TIFF")) for mask in masks]
    seeds += [(suffix, content) for suffix, content in _pictures() if suffix != ".jpg"]

    def read(path: Path) -> None:
        found = read_nuclei(NucleiCase("fuzz", "fuzz", picture, path))
        assert found.target.shape == (12, 10) and set(np.unique(found.target).tolist()) <= {0, 1, 255}

    return Target(seeds, PICTURES, read, (CaseError,))


def _outlines(folder: Path) -> Target:
    from harmofl.data.findings import CaseError
    from harmofl.data.imagescope import draw_regions, read_regions

    def region(points: Sequence[tuple[float, float]], more: str = "") -> str:
        vertices = "".join(f'<Vertex X="{x}" Y="{y}" Z="0"/>' for x, y in points)
        return f'<Region Id="1" Type="0" {more}><Vertices>{vertices}</Vertices></Region>'

    parts = region([(2, 3), (6.5, 3), (6, 9)]) + region([(1, 1), (9, 1), (9, 9), (1, 9)], 'NegativeROA="1"')
    texts = []
    for name in ("Epithelial", "Ambiguous", "Nuclei"):
        attribute = f'<Attributes><Attribute Name="{name}" Value=""/></Attributes>'
        layer = f'<Annotation Id="1" Visible="1">{attribute}<Regions>{parts}</Regions></Annotation>'
        texts.append(f'<?xml version="1.0" encoding="UTF-8"?><Annotations MicronsPerPixel="0.25">{layer}</Annotations>')

    def read(path: Path) -> None:
        regions, _ = read_regions(path, path.name)
        drawn = draw_regions(regions, (12, 10), ("nucleus",), path.name)
        assert drawn.target.shape == (12, 10)

    return Target([(".xml", text.encode()) for text in texts], {".xml": change.of_text}, read, (CaseError,))


def _index(folder: Path) -> Target:
    from harmofl.data.findings import DataRootError
    from harmofl.data.patch_index import centers_of, read_index

    lines = [f"{n},{n // 3:03d},{n % 2},{n * 96},{n * 32},{n % 2},{n // 3},{n % 3},{n % 2}" for n in range(12)]

    def read(path: Path) -> None:
        target = path.parent / "index" / "metadata.csv"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
        index = read_index(target.parent, [0, 1])
        assert all(".." not in index.name(row) for row in range(len(index)))
        centers_of(target.parent)

    text = "\n".join([PATCH_HEADER, *lines]).encode()
    return Target([(".csv", text)], {".csv": change.of_text}, read, (DataRootError,))


def _experiments(folder: Path) -> Target:
    from harmofl.experiment import ExperimentError, read_settings
    from harmofl.tasks import resolve_experiment

    seeds = [(".json", path.read_bytes()) for path in sorted(JOBS.glob("*/app/config/experiment.json"))]

    def read(path: Path) -> None:
        """With its demo and without."""
        refused = []
        for demo in (False, True):
            try:
                resolve_experiment(read_settings(path), demo=demo)
            except ExperimentError as error:
                refused.append(error)
        if len(refused) == 2:
            raise refused[0]

    return Target(seeds, {".json": change.of_json}, read, (ExperimentError,))


def _job_folders(folder: Path) -> Target:
    from harmofl.app.bundle import _check_components
    from harmofl.app.job import JobError, read_job
    from harmofl.experiment import ExperimentError

    shutil.copytree(JOBS / "harmofl_prostate", folder / "job")

    def read(path: Path) -> None:
        """As meta.json of a job, or as the configuration of its sites."""
        held = json.loads((JOBS / "harmofl_prostate" / "meta.json").read_text())
        (folder / "job" / "meta.json").write_text(json.dumps(held))
        if b"deploy_map" in path.read_bytes():
            shutil.copyfile(path, folder / "job" / "meta.json")
            read_job(folder / "job", [])
        else:
            _check_components(path, "workflows" if b'"workflows"' in path.read_bytes() else "executors")

    files = ("meta.json", "app/config/config_fed_client.json", "app/config/config_fed_server.json")
    seeds = [(".json", (JOBS / "harmofl_prostate" / name).read_bytes()) for name in files]
    return Target(seeds, {".json": change.of_json}, read, (ExperimentError, JobError))


def _site_maps(folder: Path) -> Target:
    from harmofl.data.findings import DataRootError
    from harmofl.data.sitemap import read_site_map, site_cases

    Image.new("RGB", (8, 8)).save(folder / "TCGA-55-1594-01Z_1.png")
    Image.new("L", (8, 8)).save(folder / "TCGA-55-1594-01Z_1_mask.png")
    sites = {"lung": {"organ": "lung"}, "kidney": {"patients": ["TCGA-2Z"]}, "tnbc": {"folder": "TNBC"}}
    text = json.dumps({"sites": sites, "organs": {"TCGA-55-1594": "lung", "TCGA-50": "kidney"}}).encode()

    def read(path: Path) -> None:
        found = read_site_map(path)
        for site in (*found.sites, "lung"):
            site_cases(folder, site, found)

    return Target([(".json", text)], {".json": change.of_json}, read, (DataRootError,))


def _models(folder: Path) -> Target:
    import torch

    from harmofl.app.model_file import ModelFileError, load_model
    from tests.unit.app.model_files import frozen, small_experiment, write_model, write_site

    seeds: list[tuple[str, bytes]] = []
    experiment = small_experiment("prostate", {"network.width": 2})
    data = write_site(experiment, "BIDMC", folder / "BIDMC")
    assert frozen is not None
    path = write_model(folder / "model.pt", experiment, data)
    seeds.append((".pt", path.read_bytes()))

    def of_model(generator: random.Random, content: bytes) -> bytes:
        """Other values in the content as it is loaded, or another file."""
        if generator.random() < 0.5:
            return change.of_zip(generator, content)
        held = torch.load(io.BytesIO(content), weights_only=True)
        notes, model = held["harmofl"], held["model"]
        node = generator.choice((held, notes, notes, model))
        key = generator.choice(list(node))
        tensor = torch.full((generator.choice((0, 1, 7)),), generator.choice(change.FLOATS))
        odd: tuple[Any, ...] = (tensor, tensor.int(), tensor.to(torch.complex64), torch.zeros(1).expand(10**6))
        if isinstance(node[key], str) and generator.random() < 0.6:
            node[key] = (
                change.of_json(generator, node[key].encode()).decode("utf-8", errors="replace")
                if node[key].startswith("{")
                else change.of_text(generator, node[key].encode()).decode(errors="replace")
            )
        elif generator.random() < 0.2:
            del node[key]
        else:
            node[key] = generator.choice((*odd, *change.VALUES))
        stream = io.BytesIO()
        torch.save(held, stream)
        return stream.getvalue()

    return Target(seeds, {".pt": of_model}, lambda path: _use_model(load_model(path, device="cpu")), (ModelFileError,))


def _use_model(model: Any) -> None:
    assert model.label


TARGETS: dict[str, Callable[[Path], Target]] = {
    "volumes": _volumes,
    "images": _images,
    "masks": _masks,
    "outlines": _outlines,
    "index": _index,
    "experiments": _experiments,
    "job folders": _job_folders,
    "site maps": _site_maps,
    "models": _models,
}
