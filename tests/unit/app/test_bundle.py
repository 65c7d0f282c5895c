"""`harmofl bundle`: the same bytes each time, all that a site needs, and nothing that would fail there."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import harmofl
from harmofl.app.bundle import PACKAGE
from harmofl.app.cli import main
from harmofl.app.job import read_job
from harmofl.experiment import resolve
from harmofl.methods import METHODS


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def bundled(job: Path, output: Path, *more: str) -> Path:
    assert main(["bundle", str(job), "-o", str(output), *more]) == 0
    return output / job.name


def experiment_in(folder: Path) -> dict[str, Any]:
    written: dict[str, Any] = json.loads((folder / "app/config/experiment.json").read_text())
    return written


def refused(job: Path, output: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    before = files_of(output) if output.exists() else {}
    assert main(["bundle", str(job), "-o", str(output), *more]) == 2
    assert (files_of(output) if output.exists() else {}) == before
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_a_bundle_holds_the_package_as_it_is_and_a_manifest_of_every_file(job: Path, tmp_path: Path) -> None:
    files = files_of(bundled(job, tmp_path / "dist"))
    manifest = json.loads(files.pop("app/config/manifest.json"))
    assert manifest["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest["harmofl"] == harmofl.__version__
    own = {f"app/custom/harmofl/{name}": content for name, content in files_of(PACKAGE).items() if ".pyc" not in name}
    assert own.items() <= files.items() and any(name.endswith("report.html.j2") for name in own)
    assert not [name for name in files if "__pycache__" in name or Path(name).name.startswith(".")]


def test_twice_the_same_bytes(job: Path, tmp_path: Path) -> None:
    first, second = bundled(job, tmp_path / "a"), bundled(job, tmp_path / "b")
    again = files_of(bundled(job, tmp_path / "a"))
    assert files_of(first) == files_of(second) == again
    assert [path.name for path in (tmp_path / "a").iterdir()] == [job.name], "no temporary folder is left"


def test_the_experiment_has_every_default_and_is_the_one_of_the_job(job: Path, tmp_path: Path) -> None:
    written = experiment_in(bundled(job, tmp_path / "dist", "--set", "federation.rounds=7"))
    assert written["training"]["momentum"] == 0.9 and written["federation"]["rounds"] == 7
    expected = read_job(job, ["federation.rounds=7"]).resolve(demo=False)
    assert resolve(written).hash == expected.hash


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"moon"}))  # the job is no classification
def test_a_bundle_of_a_method_is_the_experiment_that_the_job_resolves_to(
    job: Path, tmp_path: Path, method: str
) -> None:
    written = experiment_in(bundled(job, tmp_path / "dist", "--preinstalled", "--set", f"method={method}"))
    assert resolve(written).hash == read_job(job, [f"method={method}"]).resolve(demo=False).hash


def test_a_demo_bundle_trains_on_files_at_the_demos_settings(job: Path, tmp_path: Path) -> None:
    settings = json.loads((job / "app/config/experiment.json").read_text())
    settings["demo"]["overrides"] = {"network.width": 2, "federation.rounds": 3}
    (job / "app/config/experiment.json").write_text(json.dumps(settings))
    written = experiment_in(bundled(job, tmp_path / "dist", "--demo"))
    assert (written["network"]["width"], written["federation"]["rounds"]) == (2, 3)
    own = experiment_in(bundled(job, tmp_path / "dist", "--demo", "--set", "network.width=6"))
    assert own["network"]["width"] == 6, "what is set on the command line wins"


def test_a_demo_bundle_of_a_job_without_a_demo_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((job / "app/config/experiment.json").read_text())
    del settings["demo"]
    (job / "app/config/experiment.json").write_text(json.dumps(settings))
    assert "this job has no demo settings" in refused(job, tmp_path / "dist", capsys, "--demo")


def test_a_bundle_can_be_bundled_again(job: Path, tmp_path: Path) -> None:
    first = bundled(job, tmp_path / "first")
    assert files_of(bundled(first, tmp_path / "again")) == files_of(first)


def test_preinstalled_leaves_the_code_out(job: Path, tmp_path: Path) -> None:
    folder = bundled(job, tmp_path / "dist", "--preinstalled")
    assert not (folder / "app/custom").exists()
    assert json.loads((folder / "app/config/manifest.json").read_text())["preinstalled"] is True


def project_of(folder: Path, *clients: str) -> Path:
    entries = [{"name": "server1", "type": "server"}, *({"name": name, "type": "client"} for name in clients)]
    path = folder / "project.yml"
    path.write_text(yaml.safe_dump({"api_version": 3, "participants": entries}))
    return path


def test_every_site_of_the_job_is_one_of_the_project(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundled(job, tmp_path / "good", "--project", str(project_of(tmp_path, "HK", "BIDMC", "UCL")))
    message = refused(job, tmp_path / "bad", capsys, "--project", str(project_of(tmp_path, "HK", "UCL")))
    assert "deploys to BIDMC, but" in message and "has only HK, UCL" in message
    for content in ("participants: 3", "a: [1\nb: c: d"):  # of the second PyYAML shows lines
        (tmp_path / "project.yml").write_text(content)
        message = refused(job, tmp_path / "bad", capsys, "--project", str(tmp_path / "project.yml"))
        assert "no project file of FLARE" in message and message.count("\n") <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "harmofl.flare.executor.HarmoFLExecuter", "args": {}}, "HarmoFLExecuter cannot be imported"),
        ({"path": "harmofl.flare.executer.HarmoFLExecutor", "args": {}}, "No module named"),
        ({"path": "harmofl.flare.executor.HarmoFLExecutor", "args": {"rounds": 3}}, "takes no rounds"),
    ],
)
def test_a_component_that_would_not_be_built_is_named(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    path = job / "app/config/config_fed_client.json"
    config = json.loads(path.read_text())
    config["executors"][0]["executor"] = change
    path.write_text(json.dumps(config))
    shown = refused(job, tmp_path / "dist", capsys)
    assert "config_fed_client.json" in shown and message in shown


def test_more_sites_needed_than_deployed_to(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = refused(job, tmp_path / "dist", capsys, "--set", "federation.minimum_sites=3")
    assert "federation.minimum_sites is 3, but the job deploys to 2 sites" in shown
    shown = refused(job, tmp_path / "dist", capsys, "--set", "amplitude.minimum_sites=3")
    assert "amplitude.minimum_sites is 3, but the job deploys to 2 sites" in shown
    without_amplitude = ["--set", "amplitude.minimum_sites=3", "--set", "method=fedavg"]
    assert main(["bundle", str(job), "-o", str(tmp_path / "dist"), "--preinstalled", *without_amplitude]) == 0


def test_a_folder_that_is_no_bundle_is_left_alone(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(job, tmp_path / "dist" / job.name)
    assert "is there and no bundle; remove it" in refused(job, tmp_path / "dist", capsys)


def test_what_somebody_put_into_a_bundle_is_not_removed(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bundled(job, tmp_path / "dist")
    (made / "app" / "custom" / "__pycache__").mkdir()
    (made / "app" / "custom" / "__pycache__" / "a.pyc").write_bytes(b"x")
    bundled(job, tmp_path / "dist")
    (made / "app" / "contract.pdf").write_bytes(b"signed")
    capsys.readouterr()
    assert "holds app/contract.pdf, which is not of the bundle; move it" in refused(job, tmp_path / "dist", capsys)


def test_the_job_itself_is_not_written_to(job: Path, tmp_path: Path) -> None:
    before = files_of(job)
    bundled(job, tmp_path / "dist")
    assert files_of(job) == before


@pytest.mark.parametrize("command", ["bundle", "resume"])
def test_a_link_brings_nothing_from_elsewhere(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "key.pem").write_text("PRIVATE")
    (job / "app/custom/key.pem").symlink_to(tmp_path / "key.pem")
    more = ["0f605ead-0000"] if command == "resume" else []
    assert main([command, str(job), *more, "-o", str(tmp_path / "dist")]) == 2
    assert capsys.readouterr().err == (
        f"harmofl {command}: app/custom/key.pem: is a link, which no job may hold; put the file itself there\n"
    )
    assert not (tmp_path / "dist").exists()


def test_a_project_file_that_is_nested_too_deeply_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project.yml").write_text("[" * 5000)
    said = refused(job, tmp_path / "dist", capsys, "--project", str(tmp_path / "project.yml"))
    assert "project.yml: no project file of FLARE (RecursionError" in said


def test_a_pattern_of_the_job_is_for_simulated_runs_only(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(job, tmp_path / "dist", capsys, "--set", "data.patient_pattern=^(P[0-9]+)")
    assert "data.patient_pattern: hospitals run no pattern of a job on file names" in message
    assert "choose data.patient_from" in message and "local/privacy.json" in message
    bundled(job, tmp_path / "dist", "--set", "data.patient_from=before_separator")
