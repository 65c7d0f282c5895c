"""A fourth task, from a folder outside the package: it runs where it may, and nowhere else."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from harmofl.app.cli import main
from harmofl.flare.outside import admit_outside_task
from harmofl.sections import ExperimentError
from tests.federation.conftest import Run, simulate

OUTSIDE = Path(__file__).parent / "outside" / "disks.py"
TASK = "disks.DiskTask"
PAGE = (Path(__file__).resolve().parents[2] / "jobs" / "README.md").read_text()
EXPERIMENT, COMPONENTS = (
    json.loads("{" + part + "}")
    for part in re.findall(r"```json\n(.*?)```", PAGE[PAGE.index("### A task of your own") :], re.DOTALL)[:2]
)


def make_disk_job(folder: Path, components: dict[str, Any] = COMPONENTS) -> Path:
    """A copy of the nuclei job with what jobs/README.md tells to change, and nothing else."""
    job = folder / "job"
    shutil.copytree(Path(__file__).resolve().parents[2] / "jobs" / "harmofl_nuclei", job)
    path = job / "app" / "config" / "experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | EXPERIMENT))
    shutil.copy(OUTSIDE, job / "app" / "custom")
    for name in ("config_fed_server.json", "config_fed_client.json"):
        config = json.loads((job / "app" / "config" / name).read_text())
        config["components"] += components["components"]
        (job / "app" / "config" / name).write_text(json.dumps(config))
    return job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("disks")
    return simulate(make_disk_job(folder), folder, 4, {})


def test_a_task_from_outside_trains_and_reports_like_the_others(run: Run) -> None:
    assert run.code == 0, run.output
    results = run.results
    assert results.experiment["task"] == TASK and results.experiment["reader"] == {"scale": 1.0}
    assert set(map(tuple, results.sites_accepted)) == {("breast", "kidney", "lung", "prostate")}
    assert results.sites["lung"].test["dice"].n > 0 and results.score_note.startswith("foreground Dice of each image")


def test_a_task_that_no_configuration_names_is_not_imported(tmp_path: Path) -> None:
    run = simulate(make_disk_job(tmp_path, {"components": []}), tmp_path, 4, {})
    assert run.code != 0
    assert "disks.DiskTask comes from outside the package; name it as component 'task'" in run.output


class Engine:
    """As much of FLARE's engine as hands out a component."""

    def __init__(self, component: object) -> None:
        self.component = component

    def get_component(self, _: str) -> object:
        return self.component


def test_a_component_of_another_class_is_refused() -> None:
    fl_ctx = FLContextManager(Engine(object()), "HK", "job", {}, {}).new_context()  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match="the experiment names disks.DiskTask, but component 'task' is builtins"):
        admit_outside_task({"task": TASK}, fl_ctx)


def test_a_task_of_the_package_needs_no_component() -> None:
    fl_ctx = FLContextManager(Engine(None), "HK", "job", {}, {}).new_context()  # type: ignore[arg-type]
    admit_outside_task({"task": "prostate"}, fl_ctx)


@pytest.mark.parametrize(
    ("allowed", "byoc", "built"),
    [
        (["nvflare.", "harmofl."], False, False),
        (["nvflare.", "harmofl.", "disks."], False, True),
        (["nvflare.", "harmofl."], True, True),
    ],
    ids=["neither", "on the class allow list", "bring your own code"],
)
def test_flares_own_policy_decides_whether_the_task_is_built(
    tmp_path: Path, allowed: list[str], byoc: bool, built: bool
) -> None:
    """FLARE asks this widget before it builds any component of a job."""

    def authorize() -> None:
        fl_ctx = site_context(tmp_path, allowed, byoc)
        ComponentPathAuthorizer().handle_event(EventType.BEFORE_BUILD_COMPONENT, fl_ctx)

    if built:
        authorize()
    else:
        with pytest.raises(UnsafeComponentError, match="disks.DiskTask"):
            authorize()


def site_context(folder: Path, allowed: list[str], byoc: bool) -> FLContext:
    """The context in which a site with this class allow list builds the component `task`."""
    from nvflare.apis.workspace import Workspace

    for name in ("startup", "local"):
        (folder / name).mkdir()
    (folder / "local" / "resources.json").write_text(json.dumps({"format_version": 2, "class_allow_list": allowed}))
    fl_ctx = FLContextManager(None, "HK", "job", {}, {}).new_context()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(folder), "HK"), private=True)
    fl_ctx.set_prop(FLContextKey.JOB_META, {"byoc": byoc}, private=True)
    fl_ctx.set_prop(FLContextKey.COMPONENT_CONFIG, {"id": "task", "path": TASK}, private=True)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    return fl_ctx


def test_check_runs_a_jobs_code_only_when_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_disk_job(tmp_path)
    assert main(["check", str(tmp_path), "--job", str(job)]) == 2
    assert "read its code, then add --allow-code" in capsys.readouterr().err
    (tmp_path / "data" / "lung").mkdir(parents=True)
    assert main(["check", str(tmp_path / "data"), "--job", str(job), "--allow-code"]) == 1
    assert "no data for site kidney" in capsys.readouterr().out
