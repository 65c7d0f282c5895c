"""SiteConfig: what belongs to a hospital and not to a job: its data, its machine, its limits."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.private.fed.simulator.simulator_server import SimulatorServerEngine

from harmofl.experiment import FILE_NAME, Experiment, read_settings, site_owned_problem
from harmofl.flare.outside import admit_outside_task
from harmofl.flare.site_settings import (
    MINIMUM_CASES,
    NOISE,
    LimitSettings,
    NoiseSettings,
    SettingsError,
    SiteSettings,
    read_site_settings,
)
from harmofl.sections import ExperimentError, one_line

DATA_ROOT_VARIABLE = "HARMOFL_DATA_ROOT"
STATE_ROOT_VARIABLE = "HARMOFL_STATE_ROOT"


class SiteError(RuntimeError):
    """A site cannot do what was asked; `code` and the message may leave the site, so neither holds paths or names."""

    def __init__(self, code: str, message: str) -> None:
        """Keep both."""
        super().__init__(one_line(message))
        self.code = code


@dataclass(frozen=True)
class SiteConfig:
    """This hospital's settings. `data_root` is None where the run is a simulated demo."""

    name: str
    simulated: bool
    data_root: Path | None
    state_root: Path
    device: str = "auto"  # or several with commas between
    shared_data: Path | None = None  # where runs of one machine share decoded images; None keeps them in state_root
    workers: int | None = None  # None: as the task needs
    threads: int | None = None
    compile: bool = False
    minimum_cases: int = MINIMUM_CASES
    amplitude_noise: NoiseSettings | None = None
    settings: SiteSettings = SiteSettings()

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that train together; the first one evaluates."""
        return tuple(name.strip() for name in self.device.split(","))

    @property
    def limits(self) -> LimitSettings | None:
        """What a job may ask for; None in simulation, where one machine holds all data and nothing leaves it."""
        return None if self.simulated else self.settings.limits

    @property
    def demo(self) -> bool:
        """True where this site would train on synthetic data: only in simulation, and only without any data root."""
        return self.simulated and self.data_root is None

    def own_words_in(self, experiment: Experiment) -> Experiment:
        """A job's experiment as this site reads its folder: outside simulation names there are the site's to tell."""
        from harmofl.tasks.at_hospital import experiment_at_hospital

        if self.simulated:
            return experiment
        own = self.settings
        return experiment_at_hospital(experiment, self.name, patient_pattern=own.patient_pattern, centers=own.centers)


def is_simulated(fl_ctx: FLContext) -> bool:
    """True in FLARE's simulator, on both sides; FLARE 2.9 marks the sites' context only, the server's engine tells."""
    return bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False)) or isinstance(
        fl_ctx.get_engine(), SimulatorServerEngine
    )


def read_job_settings(fl_ctx: FLContext) -> dict[str, Any]:
    """experiment.json of the running job, from the app's config folder at server or site."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    folder = Path(workspace.get_app_config_dir(fl_ctx.get_job_id()))
    return read_settings(folder / FILE_NAME, shown=FILE_NAME)


def server_wants_demo(settings: Mapping[str, Any], fl_ctx: FLContext) -> bool:
    """True where a simulated run has no data root: neither the environment nor the job names one."""
    return is_simulated(fl_ctx) and not os.environ.get(DATA_ROOT_VARIABLE) and not _simulated_root(settings)


def simulated_data_root(site: str, fl_ctx: FLContext) -> Path | None:
    """The data root of a simulated site; None for a demo and outside simulation."""
    if not is_simulated(fl_ctx):
        return None
    root = os.environ.get(DATA_ROOT_VARIABLE) or _simulated_root(read_job_settings(fl_ctx))
    return Path(root.replace("{SITE_NAME}", site)) if root else None


def resolve_job(fl_ctx: FLContext, demo: bool) -> Experiment:
    """The running job's experiment, resolved with or without its demo overrides.

    Raises:
        ExperimentError: it cannot be used; outside simulation also where it says what is a hospital's to say.
    """
    from harmofl.tasks import resolve_experiment  # torch with it: what only registers an executor stays quick

    settings = read_job_settings(fl_ctx)
    if not is_simulated(fl_ctx) and (problem := site_owned_problem(settings)):
        raise ExperimentError(problem)
    admit_outside_task(settings, fl_ctx)
    return resolve_experiment(settings, demo=demo)


def site_config(fl_ctx: FLContext) -> SiteConfig:
    """Read this site's settings from the environment, its privacy scope and, in simulation, the job.

    The order for the data root is: HARMOFL_DATA_ROOT, the scope's `data_root`, the job's `data.simulated_root`.

    Raises:
        SiteError: code `no_data_root` outside simulation, naming the two ways to set it; `relative_data_root` and
            `relative_state_root`; for a property of the scope that cannot be used its name, for noise
            `noise_settings`.
    """
    name = fl_ctx.get_identity_name()
    simulated = is_simulated(fl_ctx)
    scope: Mapping[str, Any] = fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES) or {}
    settings = site_settings(scope)
    root = os.environ.get(DATA_ROOT_VARIABLE) or settings.data_root
    if not root and simulated:
        template = _simulated_root(read_job_settings(fl_ctx))
        root = template.replace("{SITE_NAME}", name) if template else None
    if not root and not simulated:
        raise SiteError(
            "no_data_root",
            f"site {name} has no data: set {DATA_ROOT_VARIABLE} before start.sh, or data_root in local/privacy.json",
        )
    if root and not Path(root).is_absolute():
        raise SiteError("relative_data_root", f"site {name}: its data root is a relative path; give an absolute one")
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    count, most = settings.workers, settings.threads
    return SiteConfig(
        name=name,
        simulated=simulated,
        data_root=own_root(root, settings) if root else None,
        state_root=state_root(name, Path(workspace.get_root_dir())),
        device=settings.device,
        workers=0 if count is None and not root else count,
        threads=simulated_threads() if most is None and simulated else most,
        compile=settings.compile,
        minimum_cases=1 if simulated and "minimum_cases" not in scope else settings.minimum_cases,
        amplitude_noise=settings.amplitude_noise,
        settings=settings,
    )


def site_settings(scope: Mapping[str, Any]) -> SiteSettings:
    """What the site says in the properties of its privacy scope.

    Raises:
        SiteError: code is the name of the property that cannot be used, `noise_settings` for noise and
            `site_settings` for an unknown one; one line, with the nearest known name.
    """
    try:
        return read_site_settings(scope)
    except SettingsError as error:
        raise SiteError("noise_settings" if error.name == NOISE else error.name, str(error)) from None


def own_setting(scope: Mapping[str, Any], name: str) -> Any:
    """One property, whatever else is wrong with the scope: preflight shows each problem where it belongs.

    Raises:
        SiteError: as `site_settings`.
    """
    return getattr(site_settings({name: scope[name]} if name in scope else {}), name)


def own_root(root: str, settings: SiteSettings) -> Path:
    """The data root, or the one folder in it that the site's own settings name as its own."""
    if settings.folder is None:
        return Path(root)
    from harmofl.data.findings import DataRootError
    from harmofl.data.layout import named_folder

    try:
        found = named_folder(Path(root), [settings.folder])
    except DataRootError:
        found = None
    return found or Path(root) / settings.folder  # that there is none is said where the folder is read


def state_root(name: str, workspace: Path) -> Path:
    """Where what must last is kept for a site: below HARMOFL_STATE_ROOT in a folder of its name, else the workspace.

    Raises:
        SiteError: code `relative_state_root`; its jobs and its commands run in different folders.
    """
    root = os.environ.get(STATE_ROOT_VARIABLE)
    if not root:
        return workspace / "harmofl"
    if not Path(root).is_absolute():
        raise SiteError(
            "relative_state_root", f"site {name}: {STATE_ROOT_VARIABLE} is a relative path; give an absolute one"
        )
    return Path(root) / name


def simulated_threads() -> int:
    """Half the cores: the simulated server shares the machine, and threads that wait for a taken core cost most.

    Whoever runs several sites at a time says by OMP_NUM_THREADS how many threads each may have.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() and int(said) else max(1, (os.cpu_count() or 2) // 2)


def _simulated_root(settings: Mapping[str, Any]) -> str | None:
    data = settings.get("data")
    root = data.get("simulated_root") if isinstance(data, Mapping) else None
    return str(root) if root else None
