"""Real patches of five sources and real images of nuclei train two rounds; the data folder is left as it is."""

import math
import shutil
from pathlib import Path

import pytest

from tests.benchmarks.study_data import NUCLEI
from tests.federation.conftest import Run, RunJob
from tests.federation.test_real_images import digests

HOSPITALS = ["hospital1", "hospital2", "hospital3", "hospital4", "hospital5"]
# Patches of centers 0 to 4 (A7, AR, E2, AC, AO), of 1 or 2 patients: only a split by patches trains, 64/16/20 %.
PATCHES = {"hospital1": 18, "hospital2": 18, "hospital3": 18, "hospital4": 9, "hospital5": 9}
SMALL = {"amplitude.minimum_cases": 1, "training.local_epochs": 1, "federation.rounds": 2}


def all_losses_are_finite(run: Run) -> bool:
    losses = [loss for record in run.rounds for loss in record.loss.values()]
    return bool(losses) and all(loss is not None and math.isfinite(loss) and loss > 0 for loss in losses)


@pytest.mark.slow
def test_five_sources_of_real_patches_train_two_rounds(run_job: RunJob, realdata: Path) -> None:
    root = realdata / "histology" / "breast5sites_wilds_layout_by_nc_sa"
    if not root.is_dir():
        pytest.skip("the real images hold no patches")
    before = digests(root)
    run = run_job(
        HOSPITALS,
        SMALL | {"data.split": "as_published", "network.width": 8, "training.batch_size": 8},
        demo=False,
        original="harmofl_camelyon17",
        environment={"HARMOFL_DATA_ROOT": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert run.code == 0, run.output
    assert "DEMO" not in run.output and not run.results.demo
    assert run.results.sites_accepted == [HOSPITALS] * 2
    assert all_losses_are_finite(run)
    for site, count in PATCHES.items():
        result = run.results.sites[site]
        training, validation = count * 64 // 100, count * 80 // 100 - count * 64 // 100
        assert result.cases_used == {
            "training": training,
            "validation": validation,
            "test": count - training - validation,
        }
        assert result.cases_skipped == {}
        assert result.test["accuracy"].n == result.cases_used["test"]
        assert result.amplitude_sent
    assert run.results.warnings[0].startswith("split as_published")
    assert digests(root) == before


@pytest.mark.slow
def test_real_images_of_nuclei_train_two_rounds(run_job: RunJob, realdata: Path, tmp_path: Path) -> None:
    source, root = realdata / "nuclei" / "monuseg_by_nc_sa", tmp_path / "data"
    if not source.is_dir():
        pytest.skip("the real images hold no nuclei")
    for site, names in NUCLEI.items():
        (root / site).mkdir(parents=True)
        for name in names:
            for suffix in (".tif", ".xml"):
                shutil.copy(source / f"{name}{suffix}", root / site)
    before = digests(root)
    settings = {"data.height": 128, "data.width": 128, "network.width": 4, "training.learning_rate": 0.003}
    run = run_job(
        list(NUCLEI),
        SMALL | settings,
        demo=False,
        original="harmofl_nuclei",
        environment={"HARMOFL_DATA_ROOT": str(root), "OMP_NUM_THREADS": "1"},
    )
    assert run.code == 0, run.output
    assert "DEMO" not in run.output and not run.results.demo
    assert run.results.sites_accepted == [list(NUCLEI)] * 2
    assert all_losses_are_finite(run)
    for site in NUCLEI:
        result = run.results.sites[site]
        assert result.cases_used == {"training": 1, "validation": 1, "test": 1}
        assert result.cases_skipped == {}
        assert result.test["dice"].mean is not None and 0 <= result.test["dice"].mean <= 1
    # each site trains on 64 tiles a round: enough for the loss to show that something was trained
    first, last = run.rounds[0].loss, run.rounds[-1].loss
    assert sum(last.values()) < sum(first.values()), (first, last)  # type: ignore[arg-type]
    assert digests(root) == before
