"""The breast histology task: which folder and which rows are a site's, and which settings fit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harmofl.data.findings import DataRootError
from harmofl.experiment import Experiment
from harmofl.sections import ExperimentError
from harmofl.tasks.camelyon17 import TASK
from tests.wilds import row, write_index

JOB = "harmofl_camelyon17"
Resolve = Callable[..., Experiment]


@pytest.fixture
def experiment(resolve_job: Resolve) -> Experiment:
    return resolve_job(JOB)


class TestWhere:
    def test_a_sites_folder_an_alias_and_any_letter_case(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {"data.aliases": {"hospital2": ["RST"]}})
        write_index(tmp_path / "Hospital1", row(0))
        write_index(tmp_path / "RST", row(0, center=1))
        assert TASK.locate(tmp_path, "hospital1", experiment) == tmp_path / "Hospital1"
        assert TASK.locate(tmp_path, "hospital2", experiment) == tmp_path / "RST"

    def test_a_folder_of_all_centers(self, experiment: Experiment, tmp_path: Path) -> None:
        write_index(tmp_path, row(0))
        assert TASK.locate(tmp_path, "hospital1", experiment) == tmp_path
        assert TASK.part(tmp_path, "hospital1", experiment) != TASK.part(tmp_path, "hospital2", experiment)

    def test_neither_is_there_and_the_message_names_both(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {"data.aliases": {"hospital1": ["RST"]}})
        with pytest.raises(DataRootError) as caught:
            TASK.locate(tmp_path, "hospital1", experiment)
        message = str(caught.value)
        assert f"neither the folder {tmp_path / 'hospital1'} or {tmp_path / 'RST'} exists" in message
        assert f"nor does {tmp_path} itself hold metadata.csv" in message
        assert "\n" not in message

    def test_a_folder_without_an_index_and_a_root_that_is_none(self, experiment: Experiment, tmp_path: Path) -> None:
        (tmp_path / "hospital1").mkdir()
        with pytest.raises(DataRootError, match=r"hospital1 holds no metadata.csv; put it there"):
            TASK.locate(tmp_path, "hospital1", experiment)
        with pytest.raises(DataRootError, match=r"away is not a folder; set HARMOFL_DATA_ROOT"):
            TASK.locate(tmp_path / "away", "hospital1", experiment)

    def test_a_site_without_a_center_names_those_that_have_one(self, experiment: Experiment, tmp_path: Path) -> None:
        write_index(tmp_path, row(0))
        calls: list[Callable[[], object]] = [
            lambda: TASK.part(tmp_path, "hospital9", experiment),
            lambda: TASK.open_site(tmp_path, "hospital9", experiment, tmp_path),
            lambda: TASK.write_demo(tmp_path / "new", "hospital9", experiment),
        ]
        for call in calls:
            with pytest.raises(ExperimentError) as caught:
                call()
            assert str(caught.value) == (
                "reader.centers: has no site hospital9, only hospital1, hospital2, hospital3, hospital4, hospital5; "
                "add its centers"
            )


class TestSettings:
    @pytest.mark.parametrize("preset", ["as_described", "as_published"])
    def test_a_preset_with_norm_layers_that_densenet_cannot_have(self, resolve_job: Resolve, preset: str) -> None:
        network, amplitude = {"name": "densenet121", "width": 8}, {"preset": preset, "minimum_sites": 5}
        with pytest.raises(
            ExperimentError, match=r"network\.norm: DenseNet121 cannot have 'batch_stats' .* beside the"
        ):
            resolve_job(JOB, {"network": network, "amplitude": amplitude})
        experiment = resolve_job(JOB, {"network": {**network, "norm": "batch"}, "amplitude": amplitude})
        assert (experiment.network.norm, experiment.amplitude.intensity) == ("batch", "window")

    def test_a_center_is_a_number_of_0_or_more_and_every_site_has_one(self, resolve_job: Resolve) -> None:
        for centers, key in (({"hospital1": []}, "hospital1"), ({"hospital1": [-1]}, r"hospital1\.0")):
            with pytest.raises(ExperimentError, match=rf"reader\.centers\.{key}: "):
                resolve_job(JOB, {"reader.centers": centers})

    def test_centers_are_needed(self, resolve_job: Resolve) -> None:
        with pytest.raises(ExperimentError, match=r"reader\.centers: is missing"):
            resolve_job(JOB, {"reader": {}})
