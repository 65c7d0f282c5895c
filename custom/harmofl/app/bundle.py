"""`harmofl bundle`: a job with its code and a manifest, which a site can review before anything runs."""

import inspect
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

import harmofl
from harmofl.app.flare_refusals import refuse_job, refuse_job_name
from harmofl.app.job import Job, JobError, read_job
from harmofl.app.limit_checks import warnings_for_careful_sites
from harmofl.data.findings import count_text
from harmofl.experiment import site_owned_problem
from harmofl.files import part_folder
from harmofl.job_folder import (
    LEFT_OUT,
    MANIFEST,
    META,
    digests,
    experiment_path,
    is_bundle,
    read_json,
    refuse_links,
    unlisted_files,
    write_json,
)

PACKAGE = Path(harmofl.__file__).parent
# what FLARE reads of an app, and the list that must not be empty in it
CONFIGS = {"config_fed_server.json": "workflows", "config_fed_client.json": "executors"}
LISTS = ("workflows", "executors", "components", "task_data_filters", "task_result_filters")
CODE = {".py", ".j2", ".typed"}


def bundle(
    job_folder: Path,
    assignments: Sequence[str],
    *,
    output: Path,
    demo: bool,
    preinstalled: bool,
    project: Path | None,
) -> int:
    """Write a self-contained copy of a job below `output`; the same job gives the same bytes.

    Args:
        job_folder: the job.
        assignments: `key=value` changes of experiment.json.
        output: receives a folder with the job's name; an earlier bundle of this name is replaced.
        demo: train at the demo's settings, on whatever data the sites have.
        preinstalled: leave the code out, for sites that installed the package.
        project: project.yml of the consortium, which must have every site of the job.

    Returns:
        0.

    Raises:
        JobError, ExperimentError: the job would fail, or the output is in the way; nothing was written.
    """
    job = read_job(job_folder, assignments, demo=demo)
    refuse_job_name(job.folder.name)
    if problem := site_owned_problem(job.settings):
        raise JobError(problem)
    job.admit_task(own_code=True)
    experiment = job.resolve(demo=False)
    settings = experiment.model_dump(mode="json")  # every default written out
    _check_sites(job, settings)
    if project is not None:
        _check_project(job, project)
    for app in job.apps:
        for name, needed in CONFIGS.items():
            _check_components(job.folder / app / "config" / name, needed)
    if output.exists() and not output.is_dir():
        raise JobError(f"-o {output}: is a file; name a folder")
    target = output / job.folder.name
    refuse_links(job.folder)
    refuse_job(job.folder)
    _refuse_other_files(target)
    with part_folder(target) as made:
        count = _write(made, job, settings, preinstalled)
        if target.exists():
            shutil.rmtree(target)
        made.replace(target)
    sys.stdout.write(
        f"harmofl bundle: {target}: {count_text(count, 'file')}, listed in {job.apps[0]}/config/{MANIFEST}\n"
    )
    for warning in warnings_for_careful_sites(job, experiment):
        sys.stdout.write(f"harmofl bundle: warning: {warning}\n")
    return 0


def _check_sites(job: Job, settings: dict[str, Any]) -> None:
    if not isinstance(job.meta.get("name", ""), str | None):
        raise JobError(f"{META}: name is {job.meta['name']!r}; give a text")
    minimums = {
        f"{META}: min_clients": job.meta.get("min_clients", 1),
        "federation.minimum_sites": settings["federation"]["minimum_sites"],
    }
    if settings["amplitude"]["region"] != "off":
        minimums["amplitude.minimum_sites"] = settings["amplitude"]["minimum_sites"]
    for name, needed in minimums.items():
        if not isinstance(needed, int):
            raise JobError(f"{name} is {needed!r}; give a whole number")
        if needed > len(job.sites):
            raise JobError(
                f"{name} is {needed}, but the job deploys to {count_text(len(job.sites), 'site')}; lower "
                f"it or add sites"
            )


def _check_project(job: Job, project: Path) -> None:
    """Refuse sites that the consortium does not have."""
    try:
        participants = yaml.safe_load(project.read_text(encoding="utf-8"))["participants"]
        clients = {entry["name"] for entry in participants if entry["type"] == "client"}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())  # PyYAML shows the place on lines of its own
        raise JobError(f"{project}: no project file of FLARE ({type(error).__name__}: {reason})") from None
    missing = [site for site in job.sites if site not in clients]
    if missing:
        raise JobError(
            f"{job.folder / META}: deploys to {', '.join(missing)}, but {project} has only {', '.join(sorted(clients))}"
        )


def _check_components(path: Path, needed: str) -> None:
    """Import every class that a configuration names, and compare its arguments with the constructor's."""
    config = read_json(path, "every app of a job needs it")
    if not isinstance(config, dict):
        raise JobError(f"{path}: holds no JSON object; start from a shipped job's")
    for key in LISTS:
        parts = config.get(key, [])
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise JobError(f"{path}: {key} must be a list of objects; start from a shipped job's")
    if not config.get(needed):
        raise JobError(f"{path}: {needed} is missing or empty; start from a shipped job's")
    for component in components(config):
        name, arguments = component["path"], component.get("args", {})
        if not isinstance(arguments, dict):
            raise JobError(f"{path}: {name}: args must be an object of arguments by name")
        module, _, kind = name.rpartition(".")
        try:
            parameters = inspect.signature(getattr(import_module(module), kind)).parameters
        except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last for a name such as ..x
            raise JobError(f"{path}: {name} cannot be imported ({error})") from None
        unknown = [argument for argument in arguments if argument not in parameters]
        if unknown:
            raise JobError(
                f"{path}: {name} takes no {', '.join(unknown)}; it takes {', '.join(parameters) or 'nothing'}"
            )


def components(node: Any) -> list[dict[str, Any]]:
    """Every part of a configuration that names a class."""
    if isinstance(node, dict):
        inner = [found for value in node.values() for found in components(value)]
        return [node, *inner] if isinstance(node.get("path"), str) else inner
    return [found for value in node for found in components(value)] if isinstance(node, list) else []


def _refuse_other_files(target: Path) -> None:
    if target.exists() and not is_bundle(target):
        raise JobError(f"{target}: is there and no bundle; remove it or choose another folder")
    if target.exists() and (others := unlisted_files(target)):
        raise JobError(f"{target}: holds {others[0]}, which is not of the bundle; move it or choose another folder")


def _write(folder: Path, job: Job, settings: dict[str, Any], preinstalled: bool) -> int:
    """Write the bundle and return how many files its manifest lists."""
    for app in job.apps:
        shutil.copytree(job.folder / app, folder / app, ignore=LEFT_OUT)
        write_json(folder / experiment_path(app), settings)
        if preinstalled:
            shutil.rmtree(folder / app / "custom", ignore_errors=True)
        else:
            _copy_package(folder / app / "custom" / PACKAGE.name)
    shutil.copyfile(job.folder / META, folder / META)
    files = digests(folder)
    manifest = {"harmofl": harmofl.__version__, "commit": _commit(), "preinstalled": preinstalled, "files": files}
    for app in job.apps:
        write_json(folder / app / "config" / MANIFEST, manifest)
    return len(files)


def _copy_package(target: Path) -> None:
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in CODE:
            place = target / path.relative_to(PACKAGE)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _commit() -> str:
    """The commit that the package's files stand at, with a plus where they were changed; empty outside a checkout."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(PACKAGE), *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.strip() + ("+" if changes.strip() else "")
