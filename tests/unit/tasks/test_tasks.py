"""What every task of the package keeps to, and whose folder is whose on one machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.data.findings import SharedFolderError
from harmofl.data.synthetic import write_prostate_site
from harmofl.data.synthetic_histology import write_nuclei_site
from harmofl.experiment import Experiment
from harmofl.sections import ExperimentError
from harmofl.tasks import load_task, place_sites, untrained_network
from tests.wilds import row, write_index

JOBS = ("harmofl_prostate", "harmofl_camelyon17", "harmofl_nuclei")
Resolve = Callable[..., Experiment]


@pytest.mark.parametrize("job", JOBS)
def test_the_prior_is_one_share_a_class_and_the_untrained_network_predicts_it(resolve_job: Resolve, job: str) -> None:
    experiment = resolve_job(job, {"data.height": 64, "data.width": 64}, demo=True)
    prior = load_task(experiment).class_prior(experiment)
    assert sum(prior) == pytest.approx(1, abs=1e-12) and min(prior) > 0
    with torch.no_grad():
        logits = untrained_network(experiment).eval()(torch.zeros(2, 3, 64, 64))
    assert logits.shape[1] == len(prior)


@pytest.mark.parametrize("job", JOBS)
def test_the_loss_takes_what_the_network_returns_and_its_gradient_is_finite(resolve_job: Resolve, job: str) -> None:
    experiment = resolve_job(job, {"data.height": 64, "data.width": 64}, demo=True)
    logits = untrained_network(experiment)(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    logits.retain_grad()
    shape = (2, *logits.shape[2:])
    loss = load_task(experiment).loss()(logits, torch.arange(shape[0]).reshape(2, *[1] * len(shape[1:])).expand(shape))
    loss.backward()
    assert loss.ndim == 0 and torch.isfinite(loss) and logits.grad is not None
    assert torch.isfinite(logits.grad).all() and logits.grad.abs().max() > 0


@pytest.mark.parametrize("job", JOBS)
def test_every_site_of_a_job_is_one_that_the_demo_can_write(resolve_job: Resolve, job: str, tmp_path: Path) -> None:
    """Two sites of one job look different: what a site's images are is set by its name in the job."""
    small: dict[str, dict[str, Any]] = {
        "harmofl_prostate": {"cases": 1, "matrix": 64, "slices": 3},
        "harmofl_camelyon17": {"slides": 3, "patches": 6},
        "harmofl_nuclei": {"patients": 3, "images": 3, "size": 64},
    }
    changes = {f"demo.data.{key}": value for key, value in small[job].items()}
    experiment = resolve_job(job, changes | {"data.height": 64, "data.width": 64}, demo=True)
    meta = json.loads((Path(__file__).resolve().parents[3] / "jobs" / job / "meta.json").read_text())
    contents = []
    for site in meta["deploy_map"]["app"][1:]:
        load_task(experiment).write_demo(tmp_path / site, site, experiment)
        contents.append(tuple(path.read_bytes() for path in sorted((tmp_path / site).rglob("*")) if path.is_file()))
    assert len(contents) >= 4 and len(set(contents)) == len(contents)


@pytest.mark.parametrize(
    ("job", "demo"),
    [
        ("harmofl_prostate", {"cases": 8, "matrix": 64, "slices": 4}),
        ("harmofl_camelyon17", {"slides": 10, "patches": 20}),
        ("harmofl_nuclei", {"patients": 6, "images": 8, "size": 100}),
    ],
)
def test_every_training_item_has_its_patient(
    resolve_job: Resolve, job: str, demo: dict[str, int], tmp_path: Path
) -> None:
    changes = {f"demo.data.{key}": value for key, value in demo.items()} | {"data.height": 64, "data.width": 64}
    experiment = resolve_job(job, changes, demo=True)
    task, meta = load_task(experiment), Path(__file__).resolve().parents[3] / "jobs" / job / "meta.json"
    site = json.loads(meta.read_text())["deploy_map"]["app"][1]
    task.write_demo(tmp_path / site, site, experiment)
    data = task.open_site(tmp_path / site, site, experiment, tmp_path / "cache")
    assert len(data.training_patients) == len(data.training) > data.patient_count
    assert data.patient_count == task.inspect(tmp_path / site, site, experiment).training_patients
    assert list(data.unreadable()) == []
    if job != "harmofl_camelyon17":  # whose keys are files
        by_case: dict[str, set[Any]] = {}
        for key, patient in zip(data.training.keys, data.training_patients, strict=True):
            by_case.setdefault(key[0], set()).add(patient)
        assert all(len(patients) == 1 for patients in by_case.values())
        assert set.union(*by_case.values()) == set(data.training_patients)


@pytest.mark.parametrize(
    ("job", "reader"),
    [
        ("harmofl_prostate", {"upper_percentile": 99.0, "slices": "foreground"}),
        ("harmofl_nuclei", {"classes": "nucleus"}),
    ],
)
def test_defaults_of_the_reader_are_written_out(resolve_job: Resolve, job: str, reader: dict[str, Any]) -> None:
    experiment = resolve_job(job, {"reader": {}})
    assert experiment.reader == reader
    assert experiment.hash == resolve_job(job, {"reader": reader}).hash


@pytest.mark.parametrize(
    ("job", "demo"),
    [
        ("harmofl_prostate", {"cases": 20, "matrix": 96, "slices": 6, "scanners": {}}),
        ("harmofl_camelyon17", {"slides": 20, "patches": 120, "laboratories": {}}),
        ("harmofl_nuclei", {"patients": 20, "images": 20, "size": 96, "profiles": {}}),
    ],
)
def test_defaults_of_the_demo_are_written_out(resolve_job: Resolve, job: str, demo: dict[str, Any]) -> None:
    experiment = resolve_job(job, {"demo.data": {}})
    assert experiment.demo is not None and experiment.demo.data == demo


@pytest.mark.parametrize(
    ("job", "key", "near"),
    [
        ("harmofl_prostate", "reader.slice", "reader.slices"),
        ("harmofl_camelyon17", "reader.bad_shares", "reader.bad_share"),
        ("harmofl_nuclei", "reader.class", "reader.classes"),
        ("harmofl_prostate", "demo.data.matrx", "demo.data.matrix"),
        ("harmofl_camelyon17", "demo.data.patchs", "demo.data.patches"),
        ("harmofl_nuclei", "demo.data.profile", "demo.data.profiles"),
    ],
)
def test_an_unknown_key_of_a_tasks_own_section_gets_the_nearest_name(
    resolve_job: Resolve, job: str, key: str, near: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        resolve_job(job, {key: 1})
    assert str(caught.value) == (f"experiment.json: {key}: unknown setting (value 1); did you mean '{near}'?")


@pytest.mark.parametrize(
    ("job", "network", "message"),
    [
        ("harmofl_camelyon17", "unet", "network.name: task camelyon17 needs densenet121, not 'unet'"),
        ("harmofl_nuclei", "densenet121", "network.name: task nuclei needs unet, not 'densenet121'"),
    ],
)
def test_a_network_that_does_not_fit_the_task(resolve_job: Resolve, job: str, network: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        resolve_job(job, {"network.name": network})
    assert str(caught.value) == f"experiment.json: {message}"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("camelyon", "'camelyon' is none of prostate, camelyon17, nuclei, nor the path of a class"),
        ("outside.Task", "'outside.Task' comes from outside the package and was not admitted here; name its class"),
    ],
)
def test_a_task_that_is_not_here(resolve_job: Resolve, task: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        resolve_job("harmofl_nuclei", {"task": task})
    assert str(caught.value).startswith(f"experiment.json: task: {message}")


class TestPlaceSites:
    SITES = ("hospital1", "hospital2")

    def test_centers_of_one_folder_are_each_a_site_of_its_own(self, resolve_job: Resolve, tmp_path: Path) -> None:
        write_index(tmp_path, row(0), row(1, center=1))
        experiment = resolve_job("harmofl_camelyon17")
        places = place_sites(experiment, dict.fromkeys(self.SITES, tmp_path))
        assert places == dict.fromkeys(self.SITES, tmp_path)

    @pytest.mark.parametrize("second", [[0, 1], [1, 0], [1]])
    def test_two_sites_that_share_a_center_of_one_folder(
        self, resolve_job: Resolve, tmp_path: Path, second: list[int]
    ) -> None:
        write_index(tmp_path, row(0), row(1, center=1))
        experiment = resolve_job("harmofl_camelyon17", {"reader.centers": {"hospital1": [0, 1], "hospital2": second}})
        places = place_sites(experiment, dict.fromkeys(self.SITES, tmp_path))
        assert places["hospital1"] == tmp_path
        assert isinstance(places["hospital2"], SharedFolderError)
        assert f"would read {tmp_path}, where the data of hospital1 lies" in str(places["hospital2"])

    def test_the_same_center_in_two_folders_is_no_mistake(self, resolve_job: Resolve, tmp_path: Path) -> None:
        for site in self.SITES:
            write_index(tmp_path / site, row(0))
        experiment = resolve_job("harmofl_camelyon17", {"reader.centers": {"hospital1": [0], "hospital2": [0]}})
        places = place_sites(experiment, dict.fromkeys(self.SITES, tmp_path))
        assert places == {site: tmp_path / site for site in self.SITES}

    def test_a_misspelt_folder_does_not_make_a_site_read_all_the_others(
        self, resolve_job: Resolve, tmp_path: Path
    ) -> None:
        for name in ("kidney", "Lungs"):
            write_nuclei_site(tmp_path / name, name.lower().rstrip("s"), patients=3, images=3, seed=0, size=64)
        for sites in (("kidney", "lung"), ("lung", "kidney")):
            places = place_sites(resolve_job("harmofl_nuclei"), dict.fromkeys(sites, tmp_path))
            refused = [site for site, place in places.items() if isinstance(place, SharedFolderError)]
            assert refused == [sites[1]], "whichever comes second; the job does not start"

    def test_images_of_nuclei_in_one_folder_need_a_map(self, resolve_job: Resolve, tmp_path: Path) -> None:
        write_nuclei_site(tmp_path / "all", "lung", patients=1, images=1, seed=0, size=64)
        experiment, roots = resolve_job("harmofl_nuclei"), dict.fromkeys(("lung", "kidney"), tmp_path / "all")
        places = place_sites(experiment, roots)
        assert places["lung"] == tmp_path / "all" and isinstance(places["kidney"], SharedFolderError)
        sites = {"lung": {"organ": "lung"}, "kidney": {"organ": "kidney"}}
        (tmp_path / "all" / "sites.json").write_text(json.dumps({"sites": sites}))
        assert place_sites(experiment, roots) == roots

    def test_two_sites_that_a_map_sends_to_one_folder(self, resolve_job: Resolve, tmp_path: Path) -> None:
        write_nuclei_site(tmp_path / "all" / "Set", "lung", patients=1, images=1, seed=0, size=64)
        (tmp_path / "all" / "sites.json").write_text(
            json.dumps({"sites": {"lung": {"folder": "Set"}, "kidney": {"folder": "Set"}}})
        )
        places = place_sites(resolve_job("harmofl_nuclei"), dict.fromkeys(("lung", "kidney"), tmp_path / "all"))
        assert places["lung"] == tmp_path / "all" / "Set" and isinstance(places["kidney"], SharedFolderError)

    def test_a_site_without_a_folder_does_not_hide_the_others(self, resolve_job: Resolve, tmp_path: Path) -> None:
        write_index(tmp_path / "hospital1", row(0))
        places = place_sites(resolve_job("harmofl_camelyon17"), dict.fromkeys(self.SITES, tmp_path))
        assert places["hospital1"] == tmp_path / "hospital1"
        assert str(places["hospital2"]).startswith("no data for site hospital2: ")
        assert not isinstance(places["hospital2"], SharedFolderError)


def test_volumes_of_one_patient_are_one_unit(resolve_job: Resolve, tmp_path: Path) -> None:
    folder = tmp_path / "RUNMC"
    write_prostate_site(folder, "siemens_3t_surface", 6, 0, matrix=64, slices=3)
    for number, name in enumerate(("P0_a", "P0_b", "P1_a", "P1_b", "P2_a", "P2_b")):
        for path in sorted(folder.glob(f"Case0{number}*")):
            path.rename(path.with_name(path.name.replace(f"Case0{number}", name)))
    small = {"data.height": 64, "data.width": 64, "data.patient_pattern": "^P[0-9]"}
    for split in ("patient", "as_published"):
        experiment = resolve_job("harmofl_prostate", small | {"data.split": split})
        task = load_task(experiment)
        data = task.open_site(folder, "RUNMC", experiment, tmp_path / "cache")
        held = task.evaluate(lambda images: torch.zeros(len(images), 2, 64, 64), data.test, workers=0)
        names = [case.volume.name[:2] for case in data.test]
        assert held.patients is not None and len(held.patients) == len(held.scores["dice"])
        assert len(set(held.patients)) == len(set(names)) < len(names)
