"""A job folder as the command line sees it: its sites and its experiment, with --set applied."""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from harmofl.experiment import FILE_NAME, Experiment, ExperimentError, parse_assignment, read_settings, set_key

SITE_NAME = re.compile(r"[A-Za-z0-9_-]+")  # what FLARE takes; a dot would split its addresses
SERVER = "server"


class JobError(ValueError):
    """A command or job folder that cannot be used; one line with the mend."""


@dataclass(frozen=True)
class Job:
    """A job folder: `apps` and `sites` as meta.json deploys them, `settings` with the keys of `assigned` changed."""

    folder: Path
    apps: tuple[str, ...]
    sites: tuple[str, ...]
    settings: dict[str, Any]
    assigned: tuple[str, ...] = ()

    def resolve(self, *, demo: bool) -> Experiment:
        """The experiment that a run will resolve.

        Raises:
            ExperimentError: see `harmofl.tasks.resolve_experiment`; also where a method undoes what was set.
        """
        from harmofl.tasks import resolve_experiment

        experiment = resolve_experiment(self.settings, demo=demo)
        resolved = experiment.model_dump(mode="json")
        for key in self.assigned:
            given, held = _value_at(self.settings, key), _value_at(resolved, key)
            if not isinstance(given, dict) and given != held:
                raise ExperimentError(
                    f"--set {key}={json.dumps(given)}: method '{experiment.method}' makes it {json.dumps(held)}; "
                    "choose another method or leave it out"
                )
        return experiment

    def admit_task(self, *, own_code: bool) -> None:
        """Import a task from outside the package, from the job's own custom folder or where it is installed.

        Args:
            own_code: whoever runs the command lets the job's code run on this machine.

        Raises:
            JobError: it may not run, or is not there.
        """
        from harmofl.tasks import admit, is_outside

        name, custom = self.settings.get("task"), self.folder / self.apps[0] / "custom"
        if not isinstance(name, str) or not is_outside(name):
            return
        if not own_code:
            raise JobError(
                f"task: {name} comes from outside the package; read its code, then add --allow-code to run it"
            )
        sys.path.insert(0, str(custom))
        module, _, kind = name.rpartition(".")
        try:
            admit(name, getattr(import_module(module), kind)())
        except ImportError as error:
            raise JobError(f"task: {name} cannot be imported ({error}); put it into {custom} or install it") from None
        except Exception as error:  # whatever the job's own code raises
            problem = f"{type(error).__name__}: {error}"
            raise JobError(f"task: {name} cannot be used ({problem}); mend its code") from None
        finally:
            sys.path.remove(str(custom))

    def copy_to(self, parent: Path) -> Path:
        """Copy the job below `parent`, with these settings in its experiment.json, and return the copy."""
        copy = parent / self.folder.name
        shutil.copytree(self.folder, copy)
        for app in self.apps:
            path = copy / app / "config" / FILE_NAME
            path.write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")
        return copy


def read_job(folder: Path, assignments: Sequence[str]) -> Job:
    """Read meta.json and experiment.json of a job and apply `key=value` assignments.

    What is set on the command line also wins over the demo's overrides.

    Raises:
        JobError: no job folder, or a meta.json that names no sites.
        ExperimentError: a broken experiment.json or assignment.
    """
    folder = folder.resolve()
    deploy_map = _deploy_map(folder)
    apps = tuple(deploy_map)
    sites = tuple(name for names in deploy_map.values() for name in names if name != SERVER)
    if not sites:
        raise JobError(f"{folder / 'meta.json'}: deploy_map names no site; list them, for example ['server', 'UCL']")
    settings = read_settings(folder / apps[0] / "config" / FILE_NAME)
    parsed = dict(parse_assignment(text) for text in assignments)
    for key, value in parsed.items():
        if key.startswith("demo.overrides"):
            raise ExperimentError(f"--set {key}: set the key itself; what is set here wins over the demo's overrides")
        set_key(settings, key, value)
        demo = settings.get("demo")
        overrides = demo.get("overrides") if isinstance(demo, dict) else None
        if isinstance(overrides, dict) and key in overrides:
            overrides[key] = value
    return Job(folder, apps, sites, settings, tuple(parsed))


def _value_at(settings: Any, dotted: str) -> Any:
    """The value of `section.key`, None where it is not set."""
    for part in dotted.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _deploy_map(folder: Path) -> dict[str, list[str]]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(
            f"{path}: cannot be read ({error.strerror}); name a job folder such as jobs/harmofl_prostate"
        ) from None
    except UnicodeDecodeError:
        raise JobError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise JobError(f"{path}: line {error.lineno} column {error.colno}: {error.msg}") from None
    deploy_map = meta.get("deploy_map") if isinstance(meta, dict) else None
    if not isinstance(deploy_map, dict) or not deploy_map:
        raise JobError(f"{path}: deploy_map is missing; it names the app of the server and of each site")
    for app, names in deploy_map.items():
        for name in names if isinstance(names, list) else [names]:
            if not isinstance(name, str) or not SITE_NAME.fullmatch(name):
                raise JobError(
                    f"{path}: deploy_map: {app}: {json.dumps(name)} is no list of site names; "
                    "they are made of letters, digits, - and _"
                )
    return deploy_map
