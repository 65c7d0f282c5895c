"""HarmoFLRecipe: a job folder as a FLARE recipe, for SimEnv, PocEnv and ProdEnv."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nvflare.job_config.api import FedJob
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from harmofl.data.findings import count_text
from harmofl.experiment import ExperimentError, resolve
from harmofl.job_folder import META, JobFolder, copy_job, is_bundle
from harmofl.tasks import is_outside, resolve_experiment


class HarmoFLRecipe(Recipe):
    """The job of a folder, with other settings where asked for.

    What runs is a copy of the folder, file by file, so that a run by recipe and one by `nvflare simulator` or
    `nvflare job submit` are the same run. `execute(env)` runs it in `SimEnv`, `PocEnv` or `ProdEnv`; `export(folder)`
    writes it. Nothing is written into the job folder. Sites of a POC or of production need the package installed, or
    the job is a bundle: `HarmoFLRecipe(job="dist/harmofl_prostate")` after `harmofl bundle`, whose manifest is kept
    true where a setting is overridden.

    Attributes:
        sites: the sites that the job deploys to; `SimEnv` must have exactly these.
    """

    def __init__(self, job: str | Path, overrides: Mapping[str, Any] | None = None, *, demo: bool = False) -> None:
        """Read and validate.

        Args:
            job: a job folder or a bundle.
            overrides: values by `section.key`, as `--set` of the command line; they win over the demo's.
            demo: run at the demo's settings on whatever data the sites have, as `harmofl bundle --demo`. In `SimEnv`
                without a data root sites train on synthetic data anyway.

        Raises:
            ExperimentError: no job folder, or settings that it does not take; one line with the fix.
        """
        held = JobFolder.read(Path(job), _plain(overrides or {}), demo=demo)
        _refuse_idle_overrides(held)
        _refuse_unusable(held)
        self.sites = held.sites
        try:
            super().__init__(_FolderJob(held, held.experiment_files() if overrides or demo else {}))
        except (TypeError, ValueError) as error:  # FLARE's rules for names and numbers of a job
            raise ExperimentError(f"{held.folder / META}: {error}") from None

    def process_env(self, env: ExecEnv) -> None:
        """Give a simulation or POC without named clients the job's sites.

        Raises:
            ExperimentError: the environment has other clients than the job's sites.
        """
        if isinstance(env, PocEnv) and not env.project_conf_path:
            env.clients = list(self.sites) if env.clients is None else env.clients
            env.num_clients = len(env.clients)
            missing = set(self.sites) - set(env.clients)
            if missing:
                raise ExperimentError(f"PocEnv has no client {', '.join(sorted(missing))}; {self._wanted()}")
        if not isinstance(env, SimEnv):
            return
        if env.clients is None and env.num_clients != len(self.sites):
            raise ExperimentError(f"SimEnv has {count_text(env.num_clients, 'client')}; {self._wanted()}")
        if env.clients is not None and sorted(env.clients) != sorted(self.sites):
            raise ExperimentError(f"SimEnv has the clients {', '.join(env.clients)}; {self._wanted()}")
        env.clients = list(self.sites)

    def _wanted(self) -> str:
        return f"the job deploys to {', '.join(self.sites)}: leave clients out and give num_clients={len(self.sites)}"

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> None:
        _refuse_additions()


class _FolderJob(FedJob):
    """FLARE's handle of a job that is a folder already."""

    def __init__(self, held: JobFolder, changed: Mapping[str, Any]) -> None:
        minimum = held.meta.get("min_clients", 1)
        super().__init__(name=held.folder.name, min_clients=minimum)
        self.clients = list(held.sites)
        self.job = _FolderConfig(held, minimum, changed)

    def to(self, obj: Any, target: str, id: Any = None, **kwargs: Any) -> Any:
        """Refuse what a recipe's `add_...` methods add: it would be left out of the copy."""
        _refuse_additions()


class _FolderConfig(FedJobConfig):
    """Writes the job by copying its folder; FLARE's own writer guesses arguments and knows no experiment.json."""

    def __init__(self, held: JobFolder, minimum: int, changed: Mapping[str, Any]) -> None:
        super().__init__(job_name=held.folder.name, min_clients=minimum)
        self._held = held
        self._changed = dict(changed)

    def generate_job_config(self, job_root: str) -> None:
        """Write the job below `job_root`, as a whole or not at all.

        Raises:
            ExperimentError: something is in the way.
        """
        written = {META: self._held.meta | self.meta_props} if self.meta_props else {}  # by FLARE's set_recipe_meta
        copy_job(self._held.folder, Path(job_root) / self.job_name, self._changed | written)


def _refuse_additions() -> NoReturn:
    raise ExperimentError(
        "a HarmoFLRecipe is its job folder: write what is to be added into the folder's config_fed_server.json or "
        "config_fed_client.json"
    )


def _plain(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides as they will be read back from experiment.json."""
    for key, value in overrides.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ExperimentError(f"{key}: {value!r} cannot be written as JSON ({error})") from None
    return {key: json.loads(json.dumps(value)) for key, value in overrides.items()}


def _refuse_idle_overrides(held: JobFolder) -> None:
    """A bundle has every default written out, so that a preset or method would fill nothing."""
    idle = sorted({"amplitude.preset", "method"} & set(held.assigned))
    if idle and is_bundle(held.folder):
        raise ExperimentError(
            f"{idle[0]}: {held.folder} is a bundle, where every setting is written out, so that it would change none; "
            "override it in the job that was bundled"
        )


def _refuse_unusable(held: JobFolder) -> None:
    """Resolve as a run will; what the job's own task reads is left to the run, which decides whether its code may."""
    task = held.settings.get("task")
    own_code = isinstance(task, str) and is_outside(task)
    held.refuse_undone(resolve(held.settings) if own_code else resolve_experiment(held.settings))
