"""A recipe runs a copy of its job folder: what is in the copy, what each environment is given, what is refused."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.job_def import JobMetaKey
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe import PocEnv, ProdEnv, SimEnv, poc_env, set_recipe_meta
from nvflare.recipe.session_mgr import SessionManager

from harmofl.app.cli import main
from harmofl.experiment import ExperimentError, resolve
from harmofl.flare.recipe import HarmoFLRecipe
from tests.small_job import SITES, write_small_job

EXPERIMENT = "app/config/experiment.json"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_small_job(tmp_path / "jobs" / "small_job")


@pytest.fixture
def bundle(job: Path, tmp_path: Path) -> Path:
    assert main(["bundle", str(job), "-o", str(tmp_path / "dist")]) == 0
    return tmp_path / "dist" / job.name


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def exported(recipe: HarmoFLRecipe, folder: Path) -> Path:
    recipe.export(str(folder))
    (made,) = folder.iterdir()  # and no temporary folder beside it
    return made


def settings_in(folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((folder / EXPERIMENT).read_text())
    return written


def test_without_overrides_the_export_is_the_folder_byte_for_byte(job: Path, tmp_path: Path) -> None:
    made = exported(HarmoFLRecipe(job), tmp_path / "out")
    assert made.name == job.name and files_of(made) == files_of(job)


def test_what_is_hidden_or_compiled_stays_behind(job: Path, tmp_path: Path) -> None:
    expected = files_of(job)
    (job / "app/custom/__pycache__").mkdir()
    (job / "app/custom/__pycache__/x.pyc").write_bytes(b"x")
    (job / "app/.__nvfl_sig.json").write_text("{}")
    assert files_of(exported(HarmoFLRecipe(job), tmp_path / "out")) == expected


def test_a_link_is_refused_as_flare_refuses_it(job: Path, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("CODE = 1\n")
    (job / "app/custom/code.py").symlink_to(tmp_path / "code.py")
    with pytest.raises(ExperimentError, match="app/custom/code.py: is a link, which no job may hold"):
        exported(HarmoFLRecipe(job), tmp_path / "out")


def test_overrides_stand_in_the_experiment_and_win_over_the_demo(job: Path, tmp_path: Path) -> None:
    recipe = HarmoFLRecipe(
        job, {"training.local_epochs": 2, "federation.rounds": 5, "data.fractions": (0.6, 0.2, 0.2), "seed": 7}
    )
    made = exported(recipe, tmp_path / "out")
    before, after = files_of(job), files_of(made)
    assert {name for name in after if after[name] != before.get(name)} == {EXPERIMENT}
    for demo in (False, True):  # the demo of the small job has 1 round
        experiment = resolve(settings_in(made), demo=demo)
        assert (experiment.training.local_epochs, experiment.federation.rounds, experiment.seed) == (2, 5, 7)
        assert experiment.data.fractions == (0.6, 0.2, 0.2)


def test_every_app_of_a_job_gets_the_same_settings(job: Path, tmp_path: Path) -> None:
    shutil.copytree(job / "app", job / "app_hk")
    meta = json.loads((job / "meta.json").read_text())
    meta["deploy_map"] = {"app": ["server", "BIDMC"], "app_hk": ["HK"]}
    (job / "meta.json").write_text(json.dumps(meta))
    recipe = HarmoFLRecipe(job, {"seed": 3})
    made = exported(recipe, tmp_path / "out")
    assert recipe.sites == SITES
    assert [json.loads((made / app / "config/experiment.json").read_text())["seed"] for app in meta["deploy_map"]] == [
        3,
        3,
    ]


def test_a_demo_recipe_is_the_demo_bundle_with_the_same_settings(job: Path, tmp_path: Path) -> None:
    settings = settings_in(job)
    settings["demo"]["overrides"] = {"network.width": 2, "federation.rounds": 3, "training.batch_size": 4}
    (job / EXPERIMENT).write_text(json.dumps(settings))
    made = exported(HarmoFLRecipe(job, {"training.batch_size": 6}, demo=True), tmp_path / "out")
    arguments = ["bundle", str(job), "-o", str(tmp_path / "dist"), "--demo", "--set", "training.batch_size=6"]
    assert main(arguments) == 0
    experiment = resolve(settings_in(made))
    assert (experiment.network.width, experiment.federation.rounds, experiment.training.batch_size) == (2, 3, 6)
    assert experiment.hash == resolve(settings_in(tmp_path / "dist" / job.name)).hash


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.local_epoch": 2}, "training.local_epoch: unknown setting (value 2); did you mean 'training.local_"),
        ({"reader.slice": "all"}, "reader.slice: unknown setting"),
        ({"training.local_epochs": "2"}, "training.local_epochs"),
        ({"training.local_epochs.x": 2}, "'local_epochs' is not a section"),
        ({"demo.overrides.seed": 2}, "override the key itself"),
        ({"data.simulated_root": Path("/data")}, "cannot be written as JSON"),
        ({"training.learning_rate": float("nan")}, "cannot be written as JSON"),
        ({"method": "fedavg", "perturbation.alpha": 0.5}, "method 'fedavg' makes it 0.0"),
    ],
)
def test_an_override_that_would_not_do_what_it_says_is_refused(
    job: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        HarmoFLRecipe(job, overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_no_job_is_refused(job: Path, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"meta\.json: cannot be read .*name a job folder"):
        HarmoFLRecipe(tmp_path)
    (job / "meta.json").write_text(json.dumps({"deploy_map": {"app": ["server"]}}))
    with pytest.raises(ExperimentError, match="deploy_map names no site"):
        HarmoFLRecipe(job)
    (job / "meta.json").write_text(json.dumps({"deploy_map": {"app": ["server", "HK"]}, "min_clients": 0}))
    with pytest.raises(ExperimentError, match=r"meta\.json: min_clients"):
        HarmoFLRecipe(job)
    settings = settings_in(job)
    del settings["demo"]
    (job / EXPERIMENT).write_text(json.dumps(settings))
    with pytest.raises(ExperimentError, match="has no demo settings"):
        HarmoFLRecipe(job, demo=True)


def test_the_code_of_a_task_that_the_job_brings_is_not_run(job: Path, tmp_path: Path) -> None:
    (job / EXPERIMENT).write_text(json.dumps(settings_in(job) | {"task": "disks.Disks"}))
    (job / "app/custom/disks.py").write_text("raise AssertionError('imported')\n")
    made = exported(HarmoFLRecipe(job, {"seed": 2, "reader.radius": 3}), tmp_path / "out")
    assert settings_in(made)["reader"]["radius"] == 3
    with pytest.raises(ExperimentError, match=r"training\.epochs: unknown setting"):
        HarmoFLRecipe(job, {"training.epochs": 2})


def test_an_export_replaces_nothing(job: Path, tmp_path: Path) -> None:
    recipe = HarmoFLRecipe(job)
    before = files_of(tmp_path)
    for place, message in ((job.parent, "is where the job itself lies"), (job / "app", "is where the job itself lies")):
        with pytest.raises(ExperimentError, match=message):
            recipe.export(str(place))
    assert files_of(tmp_path) == before
    recipe.export(str(tmp_path / "out"))
    with pytest.raises(ExperimentError, match="is there already; remove it"):
        recipe.export(str(tmp_path / "out"))


def test_what_a_copy_of_the_folder_would_leave_out_is_refused(job: Path) -> None:
    recipe = HarmoFLRecipe(job)
    additions = [
        lambda: recipe.set_per_site_config({"HK": {}}),
        lambda: recipe.add_server_config({"x": 1}),
        lambda: recipe.add_client_config({"x": 1}),
        lambda: recipe.add_client_output_filter(ConvertToFedEvent([], "fed.")),
        recipe.enable_log_streaming,
        lambda: recipe.execute(SimEnv(num_clients=2), client_exec_params={"x": 1}),
    ]
    for addition in additions:
        with pytest.raises(ExperimentError, match="a HarmoFLRecipe is its job folder"):
            addition()


def test_a_bundle_keeps_a_true_manifest(bundle: Path, tmp_path: Path) -> None:
    assert files_of(exported(HarmoFLRecipe(bundle), tmp_path / "same")) == files_of(bundle)
    recipe = HarmoFLRecipe(bundle, {"federation.rounds": 4})
    set_recipe_meta(recipe, JobMetaKey.SCOPE, "research")
    made = exported(recipe, tmp_path / "changed")
    assert json.loads((made / "meta.json").read_text())["scope"] == "research"
    files = files_of(made)
    manifest = json.loads(files.pop("app/config/manifest.json"))
    assert manifest["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    held = json.loads((bundle / "app/config/manifest.json").read_text())
    assert {**manifest, "files": 0} == {**held, "files": 0}
    for key, value in {"amplitude.preset": "as_published", "method": "fedavg"}.items():
        with pytest.raises(ExperimentError, match="is a bundle, where every setting is written out"):
            HarmoFLRecipe(bundle, {key: value})


@pytest.mark.parametrize("given", [{"num_clients": 2}, {"clients": ["HK", "BIDMC"]}])
def test_a_simulation_has_the_jobs_sites_and_the_folder_as_its_job(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    def simulator_run(self: FedJobConfig, workspace: str, **options: Any) -> int:
        self.generate_job_config(str(tmp_path / "seen"))
        seen.update(options, workspace=workspace)
        return 0

    monkeypatch.setattr(FedJobConfig, "simulator_run", simulator_run)
    before = files_of(job)
    run = HarmoFLRecipe(job).execute(SimEnv(**given, workspace_root=str(tmp_path / "ws")))
    assert run is not None and run.get_result() == str(tmp_path / "ws" / job.name)
    assert (seen["clients"], seen["n_clients"], seen["threads"]) == (",".join(SITES), 2, 2)
    assert files_of(tmp_path / "seen" / job.name) == before == files_of(job)


def test_other_clients_than_the_jobs_are_refused(job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = HarmoFLRecipe(job)
    for env, told in (
        (SimEnv(num_clients=3), "SimEnv has 3 clients"),
        (SimEnv(clients=["BIDMC"]), "SimEnv has the clients BIDMC"),
        (SimEnv(clients=["BIDMC", "UCL"]), "SimEnv has the clients BIDMC, UCL"),
        (PocEnv(num_clients=2, clients=["BIDMC", "UCL"]), "PocEnv has no client HK"),
    ):
        with pytest.raises(ExperimentError, match=told) as caught:
            recipe.execute(env)
        assert "the job deploys to BIDMC, HK: leave clients out and give num_clients=2" in str(caught.value)


class Session:
    """Stands for FLARE's session: keeps what was submitted, and signs in place as the real one does."""

    def __init__(self, taken: Path) -> None:
        self.taken = taken

    def submit_job(self, folder: str) -> str:
        shutil.copytree(folder, self.taken)
        (Path(folder) / ".__nvfl_sig.json").write_text("{}")
        return "0b5d0fd6"

    def close(self) -> None:
        pass


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    stand_in = Session(tmp_path / "taken")
    monkeypatch.setattr(SessionManager, "_get_session", lambda _: stand_in)
    monkeypatch.setenv("HOME", str(tmp_path))
    return stand_in


def test_production_takes_the_folder_and_leaves_no_file_in_it(job: Path, tmp_path: Path, session: Session) -> None:
    before = files_of(job)
    run = HarmoFLRecipe(job).execute(ProdEnv(str(tmp_path), username="lead@ucl.org"))
    assert run is not None and run.get_job_id() == "0b5d0fd6"
    assert files_of(session.taken) == before == files_of(job)


def test_a_poc_gets_the_jobs_sites_and_the_settings_asked_for(
    job: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: dict[str, Any] = {}
    monkeypatch.setattr(poc_env, "prepare_poc_provision", lambda **options: prepared.update(options))
    monkeypatch.setattr(poc_env, "_start_poc", lambda **_: None)
    monkeypatch.setattr(poc_env.time, "sleep", lambda _: None)
    monkeypatch.setattr(PocEnv, "_check_poc_running", lambda _: False)
    monkeypatch.setattr(PocEnv, "_get_admin_startup_kit_path", lambda _: "kit")
    HarmoFLRecipe(job, {"seed": 5}).execute(PocEnv())
    assert (prepared["clients"], prepared["number_of_clients"]) == (list(SITES), 2)
    assert settings_in(session.taken)["seed"] == 5
