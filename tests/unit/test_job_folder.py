"""A job folder on disk: what it deploys, what overrides do to it, what a copy and a manifest hold."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harmofl.experiment import ExperimentError, resolve
from harmofl.job_folder import MANIFEST, JobFolder, copy_job, demo_overrides, digests, is_bundle
from tests.small_job import write_small_job

EXPERIMENT = "app/config/experiment.json"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_small_job(tmp_path / "small_job")


def write_manifest(job: Path, files: Any) -> None:
    (job / "app/config" / MANIFEST).write_text(json.dumps({"harmofl": "0.0.9", "files": files}))


def test_each_app_has_the_settings_and_sites_are_those_beside_the_server(job: Path) -> None:
    shutil.copytree(job / "app", job / "app_hk")
    (job / "meta.json").write_text(json.dumps({"deploy_map": {"app": ["server", "UCL"], "app_hk": ["HK"]}}))
    held = JobFolder.read(job, {"seed": 7})
    assert (held.apps, held.sites) == (("app", "app_hk"), ("UCL", "HK"))
    files = held.experiment_files()
    assert {name: content["seed"] for name, content in files.items()} == {
        EXPERIMENT: 7,
        "app_hk/config/experiment.json": 7,
    }


@pytest.mark.parametrize("other", [{"federation": {"rounds": 500}}, {"data": {"height": 64.0}}])
def test_an_app_with_other_settings_than_the_one_that_is_shown_is_refused(job: Path, other: dict[str, Any]) -> None:
    # approve and preflight show the settings of the first app, a site runs those of its own
    shutil.copytree(job / "app", job / "app_hk")
    (job / "meta.json").write_text(json.dumps({"deploy_map": {"app": ["server", "UCL"], "app_hk": ["HK"]}}))
    settings = json.loads((job / EXPERIMENT).read_text())
    for section, values in other.items():
        settings[section] |= values
    (job / "app_hk/config/experiment.json").write_text(json.dumps(settings))
    with pytest.raises(ExperimentError, match=r"app_hk/config/experiment\.json: differs from the settings of app app;"):
        JobFolder.read(job, {})
    (job / "app_hk/config/experiment.json").unlink()
    with pytest.raises(ExperimentError, match="app_hk/config/experiment.json: cannot be read"):
        JobFolder.read(job, {})


@pytest.mark.parametrize(
    ("meta", "part"),
    [
        (None, "cannot be read"),
        ("{", "line 1 column 2"),
        ("\udcff", "is not UTF-8 text"),
        ("[]", "deploy_map is missing"),
        ('{"deploy_map": {}}', "names no site"),
        ('{"deploy_map": {"app": ["server"]}}', "names no site"),
        ('{"deploy_map": {"app": ["server", "@ALL"]}}', "@ALL"),
        ('{"deploy_map": {"app": ["server", "ISBI_1.5"]}}', "ISBI_1.5"),
        ('{"deploy_map": {"app": [{"sites": ["HK"]}]}}', "no list of site names"),
        ('{"deploy_map": {"app": "HK"}}', 'app: "HK" is no list of site names'),
    ],
)
def test_a_broken_meta_json_is_one_line_that_names_it(job: Path, meta: str | None, part: str) -> None:
    path = job / "meta.json"
    path.unlink() if meta is None else path.write_bytes(meta.encode(errors="surrogateescape"))
    with pytest.raises(ExperimentError) as error:
        JobFolder.read(job, {})
    assert "meta.json" in str(error.value) and part in str(error.value) and "\n" not in str(error.value)


# the small job has 1 epoch; its demo here has 2, in batches of 4
@pytest.mark.parametrize(
    ("overrides", "demo", "expected"),
    [
        ({}, False, (1, 8)),
        ({}, True, (2, 4)),
        ({"training.local_epochs": 3}, False, (3, 8)),
        ({"training.local_epochs": 3}, True, (3, 4)),
        ({"training": {"optimizer": "sgd", "learning_rate": 0.1, "local_epochs": 5, "batch_size": 9}}, True, (5, 9)),
    ],
)
def test_overrides_win_over_the_demos(
    job: Path, overrides: dict[str, Any], demo: bool, expected: tuple[int, int]
) -> None:
    settings = json.loads((job / EXPERIMENT).read_text())
    settings["demo"]["overrides"] = {"training.local_epochs": 2, "training.batch_size": 4}
    (job / EXPERIMENT).write_text(json.dumps(settings))
    before = json.dumps(overrides)
    training = resolve(JobFolder.read(job, overrides, demo=demo).settings).training
    assert (training.local_epochs, training.batch_size) == expected
    assert json.dumps(overrides) == before


def test_an_override_also_changes_what_a_simulated_demo_would_override(job: Path) -> None:
    # the small job's demo overrides federation.rounds with 1
    held = JobFolder.read(job, {"federation.rounds": 5})
    assert demo_overrides(held.settings) == {"federation.rounds": 5}
    assert resolve(held.settings, demo=True).federation.rounds == 5


@pytest.mark.parametrize("demo", [None, 3, {"overrides": 3}])
def test_a_job_without_a_demo_cannot_run_at_its_settings(job: Path, demo: Any) -> None:
    (job / EXPERIMENT).write_text(json.dumps(json.loads((job / EXPERIMENT).read_text()) | {"demo": demo}))
    assert JobFolder.read(job, {"seed": 2}).settings["seed"] == 2
    with pytest.raises(ExperimentError, match="has no demo settings"):
        JobFolder.read(job, {}, demo=True)


def test_what_a_method_undoes_is_refused_where_it_was_asked_for(job: Path) -> None:
    # fedavg sets perturbation.alpha to 0, which the job itself may hold otherwise
    held = JobFolder.read(job, {"method": "fedavg"})
    held.settings["perturbation"] = {"alpha": 0.5}
    held.refuse_undone(resolve(held.settings))
    held = JobFolder.read(job, {"method": "fedavg", "perturbation.alpha": 0.5})
    with pytest.raises(ExperimentError, match=r"^perturbation\.alpha=0\.5: method 'fedavg' makes it 0\.0; choose"):
        held.refuse_undone(resolve(held.settings))


def test_a_copy_leaves_out_what_is_hidden_or_compiled_and_changes_what_it_is_told(job: Path, tmp_path: Path) -> None:
    before = digests(job)
    (job / "app/.__nvfl_sig.json").write_text("{}")
    (job / "app/custom/__pycache__").mkdir()
    (job / "app/custom/__pycache__/x.pyc").write_bytes(b"x")
    copy_job(job, tmp_path / "same", {})
    assert digests(tmp_path / "same") == before
    copy_job(job, tmp_path / "other", {EXPERIMENT: {"seed": 3}})
    assert (tmp_path / "other" / EXPERIMENT).read_text() == '{\n  "seed": 3\n}\n'
    after = digests(tmp_path / "other")
    assert {name for name in before if after[name] != before[name]} == {EXPERIMENT} and after.keys() == before.keys()


def test_a_manifest_lists_all_but_itself_and_a_signature_and_stays_true_in_a_copy(job: Path, tmp_path: Path) -> None:
    assert not is_bundle(job)
    files = {
        path.relative_to(job).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in job.rglob("*")
        if path.is_file()
    }
    write_manifest(job, files)
    (job / "app/config/.__nvfl_sig.json").write_text("{}")
    assert is_bundle(job) and digests(job) == files
    (job / "app/custom/manifest.json").write_text("{}")
    assert digests(job).keys() - files.keys() == {"app/custom/manifest.json"}, "only the bundle's own is left out"
    (job / "app/custom/manifest.json").unlink()

    copy_job(job, tmp_path / "copy", {EXPERIMENT: {"seed": 3}})
    held = json.loads((tmp_path / "copy/app/config" / MANIFEST).read_text())
    assert held["harmofl"] == "0.0.9" and held["files"] == digests(tmp_path / "copy") != files


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("inside", ["", "again", "app/again/job"])
def test_a_job_is_not_copied_into_itself(job: Path, inside: str) -> None:
    before = files_of(job.parent)
    with pytest.raises(ExperimentError, match="is where the job itself lies; name another folder"):
        copy_job(job, job / inside, {})
    assert files_of(job.parent) == before


def test_a_copy_replaces_nothing(job: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    with pytest.raises(ExperimentError, match="is there already"):
        copy_job(job, tmp_path / "copy", {})


@pytest.mark.parametrize("place", ["app/custom/data.py", "app/config", "other"])
def test_a_link_in_a_job_is_neither_copied_nor_hashed(job: Path, tmp_path: Path, place: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "experiment.json").write_text("{}")
    if (job / place).is_dir():
        shutil.rmtree(job / place)
    (job / place).symlink_to(secret / "experiment.json" if place.endswith(".py") else secret)
    for use in (lambda: copy_job(job, tmp_path / "out/copy", {}), lambda: digests(job)):
        with pytest.raises(ExperimentError) as caught:
            use()
        assert str(caught.value) == f"{place}: is a link, which no job may hold; put the file itself there"
    assert not (tmp_path / "out").exists()


def test_a_pipe_in_a_job_is_not_waited_for(job: Path) -> None:
    os.mkfifo(job / "app/custom/pipe")
    with pytest.raises(ExperimentError, match="app/custom/pipe: is neither a file nor a folder"):
        digests(job)


def test_a_copy_that_fails_late_leaves_nothing(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()

    def fail(source: Path, target: Path, **_: Any) -> None:
        (Path(target) / "app").mkdir()
        raise shutil.Error([(source, target, "[Errno 2] No such file or directory")])

    with monkeypatch.context() as changed:
        changed.setattr(shutil, "copytree", fail)
        with pytest.raises(ExperimentError, match=r"out/copy: the job cannot be copied there \(.*No such fi") as caught:
            copy_job(job, tmp_path / "out/copy", {EXPERIMENT: {}})
    assert "\n" not in str(caught.value) and not files_of(tmp_path / "out")
    with pytest.raises(ExperimentError, match=r"the job cannot be copied there \(No such file or directory\)"):
        copy_job(job, tmp_path / "out/copy", {"absent/config/experiment.json": {}})
    assert not files_of(tmp_path / "out")


@pytest.mark.parametrize("files", [None, ["app"]])
def test_a_manifest_that_cannot_be_kept_true_is_named(job: Path, tmp_path: Path, files: Any) -> None:
    write_manifest(job, files)
    with pytest.raises(ExperimentError) as error:
        copy_job(job, tmp_path / "copy", {EXPERIMENT: {}})
    assert str(error.value) == f"{job}/app/config/manifest.json: lists no files; make the bundle again"
    assert not (tmp_path / "copy").exists()
