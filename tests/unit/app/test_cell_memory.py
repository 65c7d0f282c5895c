"""Cells side by side: together they hold the images of all sites, each the server's part, as memory allows."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harmofl.app import costs
from harmofl.app.cell import CellPlan
from harmofl.app.cell_memory import fitting_cells, images_bytes, server_bytes
from harmofl.app.grid import Cell
from harmofl.app.job import read_job
from harmofl.evidence.comparison import CellKey
from harmofl.experiment import Experiment
from harmofl.tasks import untrained_network
from tests.small_job import SITES

# 3 cases of 4 slices of 64 x 64 pixels a site, float16 image and uint8 mask
IMAGES = 2 * 3 * 4 * 64 * 64 * 3
Resolve = Callable[..., Experiment]


@pytest.fixture
def resolve(job: Path) -> Resolve:
    return lambda *assignments: read_job(job, assignments).resolve(demo=False)


def cell(experiment: Experiment, folder: Path) -> Cell:
    key = CellKey(experiment_hash=experiment.hash, version="0", data="", sites=list(SITES), left_out=None)
    return Cell("cell", "a cell", CellPlan(folder, folder, {}, key, None, 1, False), experiment)


def test_the_images_of_all_sites_are_counted_and_demo_data_is_not(resolve: Resolve, sites_root: Path) -> None:
    assert images_bytes(resolve(), dict.fromkeys(SITES, sites_root)) == IMAGES
    # raw intensities are kept in float32
    raw = resolve("amplitude.intensity=none", "amplitude.region=off")
    assert images_bytes(raw, dict.fromkeys(SITES, sites_root)) == IMAGES // 3 * 5
    assert images_bytes(resolve(), {}) == 0


def test_the_server_holds_sums_and_models_and_one_site_s_difference(resolve: Resolve) -> None:
    values = sum(parameter.numel() for parameter in untrained_network(resolve()).parameters())
    # three sums of 8 bytes, two float32 models, a difference in float32 and in float64
    assert server_bytes(resolve()) == values * (3 * 8 + 2 * 4 + 4 + 8)


def test_fewer_cells_fit_where_the_images_of_all_sites_are_large(
    resolve: Resolve, sites_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if costs.torch.cuda.is_available():
        pytest.skip("a GPU is there, whose memory counts as well")
    monkeypatch.setattr(costs, "PROCESS_BYTES", 0)  # else the images of this test would not count
    average = resolve("method=fedavg")
    roots = dict.fromkeys(SITES, sites_root)
    bare = costs.training_bytes(average) + server_bytes(average)
    memory = psutil.virtual_memory()._replace(available=int((4 * bare + IMAGES) / costs.SPARED) + 1000)
    monkeypatch.setattr(costs.psutil, "virtual_memory", lambda: memory)
    # four cells and the images once
    assert fitting_cells([cell(average, tmp_path)], roots) == 4
    assert fitting_cells([cell(resolve("method=fedavg", "seed=1"), tmp_path)] * 2, roots) == 4
    assert fitting_cells([cell(average, tmp_path)], {}) == int((4 * bare + IMAGES) / bare)
    # cells that read the images otherwise hold them each; these split them otherwise
    other = cell(resolve("method=fedavg", "data.fractions=[0.6,0.2,0.2]"), tmp_path)
    both = [cell(average, tmp_path), other]
    assert fitting_cells(both, roots) == fitting_cells(both[::-1], roots)
    assert fitting_cells(both, roots) == int((4 * bare + IMAGES) / (bare + IMAGES)) < 4
    wide = cell(resolve("method=fedavg", "network.width=16"), tmp_path)
    assert fitting_cells([cell(average, tmp_path), wide], roots) == fitting_cells([wide], roots) < 4
