"""A job folder on disk: its meta.json and experiment.json with overrides, and the manifest that a bundle has."""

import copy
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from harmofl.experiment import FILE_NAME, Experiment, ExperimentError, read_settings, set_key
from harmofl.files import part_folder
from harmofl.sections import parse_json

META = "meta.json"
MANIFEST = "manifest.json"  # in each app's config folder; what has one is a bundle
SERVER = "server"
SITE_NAME = re.compile(r"[A-Za-z0-9_-]+")  # what FLARE takes; a dot would split its addresses
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # what FLARE takes as the name of a job's folder or of an app
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")  # a signature of an earlier submission is hidden too
FILES_OF_SUBMISSION = ".__nvfl"  # FLARE's Python API signs a job where it lies


@dataclass(frozen=True)
class JobFolder:
    """A job: `apps` and `sites` as `meta` deploys them, `settings` with the keys of `assigned` changed."""

    folder: Path
    meta: dict[str, Any]
    apps: tuple[str, ...]
    sites: tuple[str, ...]
    settings: dict[str, Any]
    assigned: tuple[str, ...] = ()

    asked_by: ClassVar[str] = ""  # what stands before the key of an override in messages

    @classmethod
    def read(cls, folder: Path, overrides: Mapping[str, Any], *, demo: bool = False) -> Self:
        """Read meta.json and experiment.json and apply overrides, which win over the demo's.

        Args:
            folder: the job folder.
            overrides: values by `section.key`.
            demo: apply the demo's overrides too, for a run at its settings on whatever data the sites have.

        Raises:
            ExperimentError: no job folder, no sites, a broken experiment.json or override; one line with the fix.
        """
        folder = folder.resolve()
        meta = read_json(folder / META, "name a job folder such as jobs/harmofl_prostate")
        deploy_map = _deploy_map(folder / META, meta)
        apps = tuple(deploy_map)
        sites = tuple(name for names in deploy_map.values() for name in names if name != SERVER)
        settings = _settings_of_all(folder, apps)
        for key in overrides:
            if key.startswith("demo.overrides"):
                raise ExperimentError(
                    f"{cls.asked_by}{key}: override the key itself; it wins over the demo's overrides"
                )
        _apply(settings, overrides)
        if demo:
            _apply(settings, {**demo_overrides(settings), **overrides})
        return cls(folder, meta, apps, sites, settings, tuple(overrides))

    def refuse_undone(self, experiment: Experiment) -> None:
        """Hold the overrides against the experiment that these settings resolve to.

        Raises:
            ExperimentError: a method undoes one of them.
        """
        resolved = experiment.model_dump(mode="json")
        for key in self.assigned:
            given, held = _value_at(self.settings, key), _value_at(resolved, key)
            if not isinstance(given, dict) and given != held:
                raise ExperimentError(
                    f"{self.asked_by}{key}={json.dumps(given)}: method '{experiment.method}' makes it "
                    f"{json.dumps(held)}; choose another method or leave it out"
                )

    def experiment_files(self) -> dict[str, Any]:
        """The experiment.json of every app with these settings, by its path in the job."""
        return {experiment_path(app): self.settings for app in self.apps}


def experiment_path(app: str) -> str:
    """Where the experiment.json of an app lies in its job."""
    return f"{app}/config/{FILE_NAME}"


def demo_overrides(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that make a run of these settings the demo.

    Raises:
        ExperimentError: the job has no demo.
    """
    overrides = _demo_overrides(settings)
    if overrides is None:
        raise ExperimentError("demo: this job has no demo settings")
    return overrides


def is_bundle(folder: Path) -> bool:
    """Whether an app in this folder has a manifest."""
    return any(folder.glob(f"*/config/{MANIFEST}"))


def unlisted_files(folder: Path) -> list[str]:
    """Files in a bundle that its manifest does not list, but for what running its code leaves."""
    listed = {name for path in folder.glob(f"*/config/{MANIFEST}") for name in _manifest(path)["files"]}
    return [name for name in digests(folder) if name not in listed and "__pycache__" not in name]


def copy_job(folder: Path, target: Path, changed: Mapping[str, Any]) -> None:
    """Copy a job without what is hidden or compiled, as a whole or not at all.

    Args:
        folder: the job.
        target: does not exist and lies outside the job.
        changed: content of the JSON files that the copy has otherwise, by their path in the job; the manifest of a
            bundle is kept true.

    Raises:
        ExperimentError: something is in the way, the job cannot be copied or holds a link, or a manifest that no bundle
            has.
    """
    folder, target = folder.resolve(), target.resolve()
    refuse_links(folder)
    if target.is_relative_to(folder):
        raise ExperimentError(f"{target}: is where the job itself lies; name another folder")
    if target.exists():
        raise ExperimentError(f"{target}: is there already; remove it or name another folder")
    manifests = {path.relative_to(folder): _manifest(path) for path in folder.glob(f"*/config/{MANIFEST}") if changed}
    try:
        with part_folder(target) as made:
            shutil.copytree(folder, made, ignore=LEFT_OUT, dirs_exist_ok=True)
            for name, content in changed.items():
                write_json(made / name, content)
            for path, manifest in manifests.items():
                manifest["files"] |= {name: sha256(made / name) for name in changed}
                write_json(made / path, manifest)
            made.replace(target)
    except OSError as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
        raise ExperimentError(f"{target}: the job cannot be copied there ({reason})") from None


def refuse_links(folder: Path) -> None:
    """Refuse a job that brings files from elsewhere on this machine: a copy or a hash would be of what a link names.

    Raises:
        ExperimentError: something below the folder is a link, or neither file nor folder; one line with its path there.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ExperimentError(
                f"{path.relative_to(folder).as_posix()}: is a link, which no job may hold; put the file itself there"
            )
        if not path.is_file() and not path.is_dir():
            raise ExperimentError(
                f"{path.relative_to(folder).as_posix()}: is neither a file nor a folder; remove it from the job"
            )


def digests(folder: Path) -> dict[str, str]:
    """What a manifest lists: SHA-256 of every file of a job by its path in it, sorted, but for the manifests.

    Raises:
        ExperimentError: see `refuse_links`.
    """
    refuse_links(folder)
    manifests = set(folder.glob(f"*/config/{MANIFEST}"))
    return {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path not in manifests and not path.name.startswith(FILES_OF_SUBMISSION)
    }


def sha256(path: Path) -> str:
    """SHA-256 of a file in hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path, absent: str, shown: str | None = None) -> Any:
    """Read a JSON file of a job.

    Args:
        path: the file.
        absent: the fix where it cannot be read.
        shown: how messages call it, where its path must not be told.

    Raises:
        ExperimentError: it cannot be read or is not JSON; one line with the place.
    """
    called = shown or str(path)
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExperimentError(f"{called}: cannot be read ({error.strerror}); {absent}") from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{called}: is not UTF-8 text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ExperimentError(f"{called}: line {error.lineno} column {error.colno}: {error.msg}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file of a job; the same content gives the same bytes."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path, "make the bundle again")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ExperimentError(f"{path}: lists no files; make the bundle again")
    return manifest


def _settings_of_all(folder: Path, apps: Sequence[str]) -> dict[str, Any]:
    """The settings of the apps as written, which are one: what is shown of a job would else not be what a site runs."""
    settings = read_settings(folder / experiment_path(apps[0]))
    for app in apps[1:]:
        path = folder / experiment_path(app)
        # as text: 1, 1.0 and true are equal in Python and not to a strict section
        if json.dumps(read_settings(path), sort_keys=True) != json.dumps(settings, sort_keys=True):
            raise ExperimentError(
                f"{path}: differs from the settings of app {apps[0]}; server and sites run one experiment, so copy the "
                "file into every app"
            )
    return settings


def _deploy_map(path: Path, meta: Any) -> dict[str, list[str]]:
    deploy_map = meta.get("deploy_map") if isinstance(meta, dict) else None
    if not isinstance(deploy_map, dict):
        raise ExperimentError(f"{path}: deploy_map is missing; it names the app of the server and of each site")
    for app, names in deploy_map.items():
        if not JOB_NAME.fullmatch(app):
            raise ExperimentError(
                f"{path}: deploy_map: {json.dumps(app)} is no name of an app for FLARE; letters, digits, '.', '_' and "
                "'-' make one, the first a letter or a digit"
            )
        wrong = [name for name in names if not _is_site_name(name)] if isinstance(names, list) else [names]
        if wrong:
            raise ExperimentError(
                f"{path}: deploy_map: {app}: {json.dumps(wrong[0])} is no list of site names; "
                "they are made of letters, digits, - and _"
            )
    everyone = [name for names in deploy_map.values() for name in names]
    if not set(everyone) - {SERVER}:
        raise ExperimentError(f"{path}: deploy_map names no site; list them, for example ['server', 'UCL']")
    if SERVER not in everyone:
        raise ExperimentError(f"{path}: deploy_map does not name the server; list 'server' beside the sites")
    twice = [name for name in dict.fromkeys(everyone) if everyone.count(name) > 1]
    if twice:
        raise ExperimentError(f"{path}: deploy_map names {', '.join(twice)} twice; FLARE takes one app for each")
    return deploy_map


def _is_site_name(name: Any) -> bool:
    return isinstance(name, str) and SITE_NAME.fullmatch(name) is not None


def _apply(settings: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set keys in place, also where the demo would override them."""
    for key, value in overrides.items():
        set_key(settings, key, copy.deepcopy(value))  # a key inside of it may be set next
        held = _demo_overrides(settings)
        if held is not None and key in held:
            held[key] = value


def _demo_overrides(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    section = settings.get("demo")
    overrides = section.get("overrides", {}) if isinstance(section, dict) else None
    return overrides if isinstance(overrides, dict) else None


def _value_at(settings: Any, dotted: str) -> Any:
    """The value of `section.key`, None where it is not set."""
    for part in dotted.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings
