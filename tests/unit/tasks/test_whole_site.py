"""A hospital's folder scored as a whole, without a model: whose images they are, and what is left out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harmofl.data.findings import DataRootError
from harmofl.data.imagescope import IGNORED
from harmofl.data.nuclei import find_nuclei, read_nuclei
from harmofl.data.synthetic_histology import NUCLEI_SITES, write_nuclei_site
from harmofl.experiment import Experiment
from harmofl.tasks.whole_site import SiteScores, score_nuclei

Resolve = Callable[..., Experiment]
JOB = "harmofl_nuclei"
SMALL = {"data.height": 64, "data.width": 64}
SITES = ("lung", "kidney")


def nucleus_everywhere(tiles: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(tiles[:, 0]), torch.ones_like(tiles[:, 0])], 1)


def scored(data: Path, site: str | None, experiment: Experiment) -> tuple[SiteScores, list[str]]:
    told: list[str] = []
    return score_nuclei(data, site, experiment, lambda image: nucleus_everywhere, told.append), told


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images of each of two sites side by side with their map, in a folder that has the name of the second."""
    root = tmp_path_factory.mktemp("root")
    for site in SITES:
        write_nuclei_site(root / "written" / site, site, patients=3, images=3, seed=0, size=64)
        shutil.copytree(root / "written" / site, root / "kidney", dirs_exist_ok=True)
    organs = {f"DEMO-{NUCLEI_SITES[site].code}": site for site in SITES}
    site_map = {"sites": {site: {"organ": site} for site in SITES}, "organs": organs}
    (root / "kidney" / "sites.json").write_text(json.dumps(site_map))
    return root / "kidney"


@pytest.mark.parametrize(("site", "taken"), [("lung", "lung"), ("kidney", "kidney"), (None, "kidney")])
def test_of_a_shared_folder_the_images_of_the_site_are_scored(
    resolve_job: Resolve, collection: Path, site: str | None, taken: str
) -> None:
    """The site that is named, else the one that the folder is named after."""
    found, told = scored(collection, site, resolve_job(JOB, SMALL))
    code = NUCLEI_SITES[taken].code
    assert found.names == told == [f"DEMO-{code}-{number:04d}-01Z-00-DX1_1" for number in (1, 2, 3)]
    assert found.patients == [0, 1, 2]


def test_a_shared_folder_of_another_name_needs_the_site(resolve_job: Resolve, collection: Path, tmp_path: Path) -> None:
    shutil.copytree(collection, tmp_path / "all")
    with pytest.raises(DataRootError, match="names lung, kidney, not all"):
        scored(tmp_path / "all", None, resolve_job(JOB, SMALL))


def test_images_behind_a_damaged_one_are_scored(resolve_job: Resolve, tmp_path: Path) -> None:
    write_nuclei_site(tmp_path / "lung", "lung", patients=3, images=3, seed=0, size=64)
    damaged, *others = sorted((tmp_path / "lung").rglob("*.tif"))
    damaged.write_bytes(b"II*\0nothing")
    experiment = resolve_job(JOB, SMALL)
    found, _ = scored(tmp_path / "lung", None, experiment)
    assert found.names == [path.stem for path in others] and found.patients == [0, 1]
    assert [finding.code for finding in found.findings if finding.severity == "error"] == ["unreadable_image"]
    images = [read_nuclei(case) for case in find_nuclei(tmp_path / "lung")[0] if case.image in others]
    for image, dice in zip(images, found.by_case["dice"], strict=True):
        # every pixel is called nucleus: of those that count, n are, 2 n / (n + all of them)
        nuclei, counted = int((image.target == 1).sum()), int((image.target != IGNORED).sum())
        assert dice == pytest.approx(2 * nuclei / (nuclei + counted))
