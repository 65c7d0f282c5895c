"""SiteConfig: what belongs to a hospital and not to a job: its data, its machine, its limits."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.private.fed.simulator.simulator_server import SimulatorServerEngine
from pydantic import Field, ValidationError

from harmofl.experiment import FILE_NAME, Experiment, read_settings
from harmofl.flare.outside import admit_outside_task
from harmofl.flare.site_settings import SiteSettings, read_site_settings
from harmofl.sections import Section, first_problem, nearest, one_line

DATA_ROOT_VARIABLE = "HARMOFL_DATA_ROOT"
STATE_ROOT_VARIABLE = "HARMOFL_STATE_ROOT"
DEVICE = re.compile(r"auto|cpu(, ?cpu)*|cuda|cuda:\d+(, ?cuda:\d+)*")
MINIMUM_CASES = 5  # a mean amplitude of fewer patients does not leave a hospital that has not said otherwise
# Multiples of the scale: of regions dc, low and full no image of intensities 0 to 1 lies farther than 1 from the
# center, no z-scored one farther than 1.42.
MOST_CLIP = 2.0


class SiteError(RuntimeError):
    """A site cannot do what was asked; `code` and the message may leave the site, so neither holds paths or names."""

    def __init__(self, code: str, message: str) -> None:
        """Keep both."""
        super().__init__(one_line(message))
        self.code = code


Positive = Annotated[float, Field(gt=0)]


class NoiseSettings(Section):
    """A site's noise on its amplitude: to what distance a patient's part is clipped, epsilon and delta.

    The distance is in multiples of a scale that a job's settings give, so that one number fits every
    `amplitude.region`: see `harmofl.core.gaussian_mechanism.clipping_center`.
    """

    relative_clip: Annotated[float, Field(gt=0, le=MOST_CLIP)]
    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class SiteConfig:
    """This hospital's settings. `data_root` is None where the run is a simulated demo."""

    name: str
    simulated: bool
    data_root: Path | None
    state_root: Path
    device: str = "auto"  # or several with commas between
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
    def demo(self) -> bool:
        """True where this site would train on synthetic data: only in simulation, and only without any data root."""
        return self.simulated and self.data_root is None


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
    """The running job's experiment, resolved with or without its demo overrides."""
    from harmofl.tasks import resolve_experiment  # torch with it: what only registers an executor stays quick

    settings = read_job_settings(fl_ctx)
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
    root = os.environ.get(DATA_ROOT_VARIABLE) or data_root(scope)
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
    count, most = workers(scope), threads(scope)
    return SiteConfig(
        name=name,
        simulated=simulated,
        data_root=Path(root) if root else None,
        state_root=state_root(name, Path(workspace.get_root_dir())),
        device=device(scope),
        workers=0 if count is None and not root else count,
        threads=simulated_threads() if most is None and simulated else most,
        compile=compiles(scope),
        minimum_cases=minimum_cases(scope, otherwise=1 if simulated else MINIMUM_CASES),
        amplitude_noise=noise_settings(scope),
        settings=site_settings(scope),
    )


def site_settings(scope: Mapping[str, Any]) -> SiteSettings:
    """Limits, approval and names of data, as the privacy scope says.

    Raises:
        SiteError: code `site_settings`; one line with key, value and, for an unknown key, the nearest known one.
    """
    try:
        return read_site_settings(scope)
    except ValueError as error:
        raise SiteError("site_settings", str(error)) from None


def minimum_cases(scope: Mapping[str, Any], otherwise: int = MINIMUM_CASES) -> int:
    """Of how many patients at least an amplitude may leave, as the privacy scope says.

    Raises:
        SiteError: code `minimum_cases`, where it is no whole number above 0.
    """
    return _whole_number(scope, "minimum_cases", 1, otherwise)


def workers(scope: Mapping[str, Any]) -> int | None:
    """How many processes may decode, as the privacy scope says; None where it does not.

    Raises:
        SiteError: code `workers`, where it is no whole number.
    """
    return _whole_number(scope, "workers", 0, 0) if "workers" in scope else None


def threads(scope: Mapping[str, Any]) -> int | None:
    """How many threads may compute, as the privacy scope says; None where it does not.

    Raises:
        SiteError: code `threads`, where it is no whole number above 0.
    """
    return _whole_number(scope, "threads", 1, 1) if "threads" in scope else None


def device(scope: Mapping[str, Any]) -> str:
    """What the site trains on, as its privacy scope says: auto, cpu, cuda, a card by its number, or several.

    Raises:
        SiteError: code `device`.
    """
    name = scope.get("device", "auto")
    if not isinstance(name, str) or not DEVICE.fullmatch(name) or _names_a_card_twice(name):
        raise SiteError(
            "device",
            "device in local/privacy.json must be auto, cpu, cuda or, by number, cuda:1, or several such as "
            "cuda:0,cuda:1",
        )
    return name


def compiles(scope: Mapping[str, Any]) -> bool:
    """Whether training runs through torch.compile, as the privacy scope says.

    Raises:
        SiteError: code `compile`, where it is neither true nor false.
    """
    said = scope.get("compile", False)
    if not isinstance(said, bool):
        raise SiteError("compile", "compile in local/privacy.json must be true or false")
    return said


def data_root(scope: Mapping[str, Any]) -> str | None:
    """The scope's `data_root`, None where it has none.

    Raises:
        SiteError: code `data_root`, where it is not a text.
    """
    root = scope.get("data_root")
    if root is not None and not isinstance(root, str):
        raise SiteError("data_root", "data_root in local/privacy.json must be text, an absolute path")
    return root or None


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


def noise_settings(scope: Mapping[str, Any]) -> NoiseSettings | None:
    """The privacy scope's `amplitude_noise`, None where it has none.

    Raises:
        SiteError: code `noise_settings`; one line with key, value and, for an unknown key, the nearest known one.
    """
    given = scope.get("amplitude_noise")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        message = "amplitude_noise must hold relative_clip, epsilon and delta"
        raise SiteError("noise_settings", f"local/privacy.json: {message}")
    if "clip" in given:
        raise SiteError(
            "noise_settings",
            "local/privacy.json: amplitude_noise.clip was a distance in units that the job chooses, and is gone; "
            "write relative_clip, in multiples of a public scale, in its place (0.8 is a good start)",
        )
    for key in given:  # a misspelled key is better named than the one that it leaves missing
        if key not in NoiseSettings.model_fields:
            fix = nearest(key, NoiseSettings.model_fields)
            raise SiteError("noise_settings", f"local/privacy.json: amplitude_noise.{key}: unknown setting{fix}")
    try:
        return NoiseSettings.model_validate(given)
    except ValidationError as error:
        problem = first_problem(error, NoiseSettings, "amplitude_noise.")
        raise SiteError("noise_settings", f"local/privacy.json: {problem}") from None


def _whole_number(scope: Mapping[str, Any], key: str, least: int, otherwise: int) -> int:
    number = scope.get(key, otherwise)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        allowed = f"above {least - 1}" if least else "of 0 or more"
        raise SiteError(key, f"{key} in local/privacy.json must be a whole number {allowed}")
    return number


def _names_a_card_twice(device: str) -> bool:
    cards = [int(number) for number in re.findall(r"\d+", device)]
    return len(set(cards)) < len(cards)


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
