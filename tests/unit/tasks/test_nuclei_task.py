"""The nuclei task: whose images by folder and by map, and what is read of them."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harmofl.data.findings import DataRootError
from harmofl.data.imagescope import IGNORED
from harmofl.data.nuclei import NucleiImage
from harmofl.data.synthetic_histology import NUCLEI_SITES, write_nuclei_site
from harmofl.experiment import Experiment
from harmofl.sections import ExperimentError
from harmofl.tasks import SiteData, place_sites
from harmofl.tasks.nuclei import TASK

JOB = "harmofl_nuclei"
SMALL = {"data.height": 64, "data.width": 64}
CELL_TYPES = {**SMALL, "reader.classes": "cell_types"}
ORGANS = ("lung", "kidney", "breast", "prostate")
FOUR: dict[str, Any] = {
    "sites": {organ: {"organ": organ} for organ in ORGANS},
    "organs": {f"DEMO-{NUCLEI_SITES[organ].code}": organ for organ in ORGANS},
}
SIX: dict[str, Any] = {
    "sites": {**FOUR["sites"], "monuseg": {"patients": ["DEMO-MX"]}, "tnbc": {"folder": "TNBC"}},
    "organs": FOUR["organs"],
}
Resolve = Callable[..., Experiment]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a site, of 3 patients with 2 images of 64 x 64 pixels each; read only."""
    root = tmp_path_factory.mktemp("sites")
    for profile in NUCLEI_SITES:
        write_nuclei_site(root / profile, profile, patients=3, images=6, seed=0, size=64)
    return root


@pytest.fixture(scope="module")
def collection(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Patients of all sites side by side, as MoNuSAC comes, the TNBC-like source in its own folder; read only."""
    root = tmp_path_factory.mktemp("collection")
    for profile in NUCLEI_SITES:
        shutil.copytree(sites / profile, root / "TNBC" if profile == "tnbc" else root, dirs_exist_ok=True)
    return root


def with_map(collection: Path, folder: Path, site_map: Mapping[str, Any]) -> Path:
    shutil.copytree(collection, folder)
    (folder / "sites.json").write_text(json.dumps(site_map))
    return folder


def opened(root: Path, site: str, experiment: Experiment) -> SiteData:
    return TASK.open_site(TASK.locate(root, site, experiment), site, experiment, root / "cache")


def images_of(data: SiteData) -> list[NucleiImage]:
    return [*data.training.images, *data.validation.images, *data.test.images]


class TestWhere:
    def test_a_folder_a_site_by_name_alias_and_any_letter_case(
        self, resolve_job: Resolve, sites: Path, tmp_path: Path
    ) -> None:
        experiment = resolve_job(JOB, {**SMALL, "data.aliases": {"kidney": ["KIRC"]}})
        shutil.copytree(sites / "lung", tmp_path / "Lung")
        shutil.copytree(sites / "kidney", tmp_path / "KIRC")
        assert TASK.locate(tmp_path, "lung", experiment) == tmp_path / "Lung"
        assert TASK.locate(tmp_path, "kidney", experiment) == tmp_path / "KIRC"
        assert TASK.part(tmp_path / "Lung", "lung", experiment) is None

    def test_the_root_of_one_site_itself(self, resolve_job: Resolve, sites: Path) -> None:
        assert TASK.locate(sites / "breast", "breast", resolve_job(JOB)) == sites / "breast"

    def test_neither_is_there_and_the_message_names_both(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {"data.aliases": {"lung": ["LUAD"]}})
        with pytest.raises(DataRootError) as caught:
            TASK.locate(tmp_path, "lung", experiment)
        message = str(caught.value)
        assert f"neither the folder {tmp_path / 'lung'} or {tmp_path / 'LUAD'} exists" in message
        assert f"nor does {tmp_path} itself hold images of nuclei" in message
        assert "\n" not in message

    def test_a_root_that_is_none_and_a_map_that_is_broken(self, resolve_job: Resolve, tmp_path: Path) -> None:
        with pytest.raises(DataRootError, match="away is not a folder"):
            TASK.locate(tmp_path / "away", "lung", resolve_job(JOB))
        (tmp_path / "sites.json").write_text('{"sites": {"lung": {"organs": "lung"}}}')
        with pytest.raises(DataRootError, match=r"sites\.json: sites\.lung\.organs: unknown setting"):
            TASK.locate(tmp_path, "lung", resolve_job(JOB))


class TestSiteMaps:
    def test_four_organs_of_one_collection(self, resolve_job: Resolve, collection: Path, tmp_path: Path) -> None:
        experiment, root = resolve_job(JOB, SMALL), with_map(collection, tmp_path / "all", FOUR)
        shutil.rmtree(root / "TNBC")
        assert place_sites(experiment, dict.fromkeys(ORGANS, root)) == dict.fromkeys(ORGANS, root)
        for organ in ORGANS:
            data = opened(root, organ, experiment)
            assert Counter(image.patient[:7] for image in images_of(data)) == {f"DEMO-{NUCLEI_SITES[organ].code}": 6}
            assert data.cases == {"training": 2, "validation": 2, "test": 2} and data.patient_count == 1
            # what no site of this map takes is said once, at each site
            assert [finding.subject for finding in data.findings if finding.code == "no_organ"] == [
                "DEMO-MX-0001, DEMO-MX-0002, DEMO-MX-0003"
            ]
            assert data.skipped() == {}

    def test_six_sites_of_three_layouts(self, resolve_job: Resolve, collection: Path, tmp_path: Path) -> None:
        experiment, root = resolve_job(JOB, SMALL), with_map(collection, tmp_path / "all", SIX)
        places = place_sites(experiment, dict.fromkeys(SIX["sites"], root))
        assert places == {**dict.fromkeys(SIX["sites"], root), "tnbc": root / "TNBC"}
        taken: Counter[str] = Counter()
        for site in SIX["sites"]:
            data = opened(root, site, experiment)
            images = images_of(data)
            assert data.cases == {"training": 2, "validation": 2, "test": 2} and data.skipped() == {}
            assert all(0 < (image.target == 1).mean() < 0.9 for image in images)
            assert all(set(np.unique(image.target).tolist()) <= {0, 1, IGNORED} for image in images)
            taken.update(f"{image.patient}/{image.name}" for image in images)
        assert len(taken) == 36 and set(taken.values()) == {1}

    def test_the_map_does_not_count_in_a_folder_of_the_sites_own(
        self, resolve_job: Resolve, sites: Path, tmp_path: Path
    ) -> None:
        root = with_map(sites, tmp_path / "root", FOUR)
        shutil.copytree(sites / "kidney", root / "lung", dirs_exist_ok=True)
        data = opened(root, "lung", resolve_job(JOB, SMALL))
        assert {image.patient[:7] for image in images_of(data)} == {"DEMO-LU", "DEMO-KI"}

    def test_a_site_that_the_map_does_not_name(self, resolve_job: Resolve, collection: Path, tmp_path: Path) -> None:
        experiment, root = resolve_job(JOB, SMALL), with_map(collection, tmp_path / "all", FOUR)
        places = place_sites(experiment, dict.fromkeys((*ORGANS, "liver"), root))
        assert "not liver; add the site to the map" in str(places["liver"])


class TestSettings:
    def test_tiles_are_square(self, resolve_job: Resolve) -> None:
        with pytest.raises(ExperimentError) as caught:
            resolve_job(JOB, {"data.height": 128, "data.width": 256})
        assert str(caught.value) == (
            "experiment.json: data.width: tiles are square, so it must be 128 as data.height is"
        )

    def test_classes_are_two_by_name(self, resolve_job: Resolve) -> None:
        with pytest.raises(ExperimentError, match=r"reader\.classes: Input should be 'nucleus' or 'cell_types', not"):
            resolve_job(JOB, {"reader.classes": "cells"})

    def test_the_prior_follows_the_classes(self, resolve_job: Resolve) -> None:
        for changes, classes in ((SMALL, 2), (CELL_TYPES, 5)):
            experiment = resolve_job(JOB, changes)
            prior = TASK.class_prior(experiment)
            assert len(prior) == classes and sum(prior) == pytest.approx(1)


class TestOpenSite:
    @pytest.mark.parametrize("profile", sorted(NUCLEI_SITES))
    def test_patients_stay_together(self, resolve_job: Resolve, sites: Path, profile: str) -> None:
        data = TASK.open_site(sites / profile, profile, resolve_job(JOB, SMALL), sites / "cache")
        parts = [{image.patient for image in part.images} for part in (data.training, data.validation, data.test)]
        assert [len(part) for part in parts] == [1, 1, 1] and len(set().union(*parts)) == 3
        assert data.cases == {"training": 2, "validation": 2, "test": 2}
        image, target = data.training[0]
        assert image.shape == (3, 64, 64) and target.shape == (64, 64) and target.dtype == torch.int64

    def test_the_published_split_takes_images_alone_and_warns(self, resolve_job: Resolve, sites: Path) -> None:
        experiment = resolve_job(JOB, {**SMALL, "data.split": "as_published"})
        data = TASK.open_site(sites / "lung", "lung", experiment, sites)
        assert sum(data.cases.values()) == 6 and min(data.cases.values()) >= 1
        assert ("warning", "image_leakage") in [(finding.severity, finding.code) for finding in data.findings]
        parts = [{image.patient for image in part.images} for part in (data.training, data.validation, data.test)]
        assert sum(map(len, parts)) > 3  # with 3 patients, one at least is in two parts
        names = {f"DEMO-LU-{patient:04d}-01Z-00-DX1_{number}" for patient in (1, 2, 3) for number in (1, 2)}
        assert {image.name for image in images_of(data)} == names

    def test_what_cannot_be_used_is_named_and_counted(self, resolve_job: Resolve, sites: Path, tmp_path: Path) -> None:
        folder = tmp_path / "lung"
        shutil.copytree(sites / "lung", folder)
        stems = [f"DEMO-LU-{patient:04d}-01Z-00-DX1_2" for patient in (1, 2, 3)]
        broken, lonely, cut = (folder / stem[:-2] / stem for stem in stems)
        broken.with_suffix(".tif").write_bytes(b"II*\0nothing")
        lonely.with_suffix(".xml").unlink()
        cut.with_suffix(".xml").write_text("<annotation><object/></annotation>")
        data = TASK.open_site(folder, "lung", resolve_job(JOB, SMALL), tmp_path)
        assert data.cases == {"training": 1, "validation": 1, "test": 1}
        assert data.skipped() == {
            "unreadable_image": 1,
            "image_without_annotation": 1,
            "not_imagescope": 1,
        }
        assert all(any(stem in str(finding) for finding in data.findings) for stem in stems)

    def test_images_whose_regions_were_all_dropped_are_skipped_and_counted(
        self, resolve_job: Resolve, sites: Path, tmp_path: Path
    ) -> None:
        """They would be trained on as images without a nucleus."""
        folder = tmp_path / "lung"
        shutil.copytree(sites / "lung", folder)
        stems = [f"DEMO-LU-{patient:04d}-01Z-00-DX1_2" for patient in (1, 2)]
        ellipses, whole = ((folder / stem[:-2] / stem).with_suffix(".xml") for stem in stems)
        ellipses.write_text(ellipses.read_text().replace('Type="0"', 'Type="2"'))
        # coordinates of the whole slide beside a tile of it: 30000 and more
        whole.write_text(re.sub(r'X="(-?\d+)', lambda found: f'X="{30000 + int(found[1])}', whole.read_text()))
        data = TASK.open_site(folder, "lung", resolve_job(JOB, SMALL), tmp_path)
        assert data.skipped() == {"all_regions_dropped": 1, "no_region_drawn": 1}
        assert sum(data.cases.values()) == 4
        assert not {image.name for image in images_of(data)} & set(stems)

    def test_an_empty_folder_trains_nothing_and_says_so(self, resolve_job: Resolve, tmp_path: Path) -> None:
        data = TASK.open_site(tmp_path, "lung", resolve_job(JOB, SMALL), tmp_path)
        assert data.cases == {"training": 0, "validation": 0, "test": 0}
        assert "no_cases" in data.skipped()
        assert TASK.evaluate(lambda tiles: tiles, data.test, workers=0).key_score is None

    def test_cell_types_where_the_files_have_them(self, resolve_job: Resolve, sites: Path) -> None:
        experiment = resolve_job(JOB, CELL_TYPES)
        images = images_of(TASK.open_site(sites / "lung", "lung", experiment, sites))
        assert len(images) == 6
        labels = set().union(*(np.unique(image.target).tolist() for image in images))
        assert {0, 1, 2} <= labels <= {0, 1, 2, 3, 4, 255}
        # outlines without classes have no cell types: nothing to train on
        data = TASK.open_site(sites / "monuseg", "monuseg", experiment, sites)
        assert data.cases == {"training": 0, "validation": 0, "test": 0}
        assert data.skipped() == {"no_cell_types": 6, "too_few_cases": 1}


def outlines(**regions: tuple[int, int, int, int]) -> str:
    """ImageScope XML with one rectangle (left, top, right, bottom) of each class."""
    annotations = ""
    for name, (left, top, right, bottom) in regions.items():
        corners = ((left, top), (right, top), (right, bottom), (left, bottom))
        vertices = "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in corners)
        annotations += (
            f'<Annotation><Attributes><Attribute Name="{name}"/></Attributes>'
            f"<Regions><Region><Vertices>{vertices}</Vertices></Region></Regions></Annotation>"
        )
    return f"<Annotations>{annotations}</Annotations>"


class TestInspect:
    def test_a_row_an_image_with_shares_by_hand(self, resolve_job: Resolve, tmp_path: Path) -> None:
        for number in (1, 2, 3):
            place = tmp_path / f"TCGA-55-000{number}-01Z"
            place.mkdir()
            Image.new("RGB", (100, 80), (200, 150, 200)).save(place / f"TCGA-55-000{number}-01Z.png")
            text = outlines(Epithelial=(10, 10, 50, 30), Ambiguous=(60, 40, 80, 60))
            (place / f"TCGA-55-000{number}-01Z.xml").write_text(text)
        report = TASK.inspect(tmp_path, "lung", resolve_job(JOB, SMALL))
        assert report.columns == ("image", "patient", "columns x rows", "nuclei %", "ignored %", "split")
        # of 8000 pixels 40 x 20 are nucleus and 20 x 20 ambiguous
        assert [row[:5] for row in report.rows] == [
            (f"TCGA-55-000{n}-01Z", f"TCGA-55-000{n}", "100 x 80", "10.0", "5.0") for n in (1, 2, 3)
        ]
        assert sorted(row[5] for row in report.rows) == ["test", "train", "val"]
        # 64-pixel tiles: 2 columns and 2 rows an image
        assert report.summary == "3 images of 3 patients: 1 training, 1 validation, 1 test; 12 tiles of 64 x 64"
        assert (report.training_images, report.validation_images, report.training_patients) == (4, 4, 1)
        assert report.bytes_held == 3 * 8000 * 4  # three colors and the target
        assert {finding.severity for finding in report.findings} == {"notice"}

    def test_what_it_says_is_what_training_opens(self, resolve_job: Resolve, collection: Path, tmp_path: Path) -> None:
        experiment, root = resolve_job(JOB, SMALL), with_map(collection, tmp_path / "all", SIX)
        for site in ("lung", "tnbc"):
            report = TASK.inspect(TASK.locate(root, site, experiment), site, experiment)
            data = opened(root, site, experiment)
            parts = Counter(row[5] for row in report.rows)
            assert (parts["train"], parts["val"], parts["test"]) == tuple(data.cases.values())
            assert report.training_images == len(data.training)
            assert report.findings == tuple(data.findings)
            assert report.training_patients == data.patient_count


class TestDemo:
    def test_what_is_written_is_read_back(self, resolve_job: Resolve, tmp_path: Path) -> None:
        small = {**SMALL, "demo.data.patients": 4, "demo.data.images": 8, "demo.data.size": 80}
        experiment = resolve_job(JOB, small, demo=True)
        for site in ORGANS:
            TASK.write_demo(tmp_path / site, site, experiment)
            data = TASK.open_site(tmp_path / site, site, experiment, tmp_path)
            assert sum(data.cases.values()) == 8 and min(data.cases.values()) >= 2
            assert data.skipped() == {}
            assert not [finding for finding in data.findings if finding.severity != "notice"]
            assert {image.patient[:7] for image in images_of(data)} == {f"DEMO-{NUCLEI_SITES[site].code}"}
            assert len(data.training) == 4 * data.cases["training"]  # 2 x 2 tiles of 64 in 80

    def test_a_site_without_a_profile_gets_one_by_its_name(self, resolve_job: Resolve, tmp_path: Path) -> None:
        small = {**SMALL, "demo.data.patients": 3, "demo.data.images": 3, "demo.data.size": 64}
        experiment = resolve_job(JOB, {**small, "demo.data.profiles": {}}, demo=True)
        TASK.write_demo(tmp_path / "north", "north", experiment)
        assert sum(TASK.open_site(tmp_path / "north", "north", experiment, tmp_path).cases.values()) == 3

    def test_an_unknown_profile_is_answered_with_the_known_ones(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {"demo.data.profiles": {"lung": "lungs"}}, demo=True)
        with pytest.raises(ExperimentError, match=r"demo\.data\.profiles\.lung: 'lungs' is none of breast, .*tnbc"):
            TASK.write_demo(tmp_path / "lung", "lung", experiment)

    def test_every_patient_has_an_image(self, resolve_job: Resolve) -> None:
        with pytest.raises(
            ExperimentError, match=r"demo\.data\.images: 9 patients need at least as many images, not 8"
        ):
            resolve_job(JOB, {"demo.data.patients": 9, "demo.data.images": 8})
