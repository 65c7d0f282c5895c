"""What a job would do at a site, in lines for whoever approves it there."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harmofl.app.bundle import PACKAGE
from harmofl.app.job import Job, JobError
from harmofl.app.kit import Kit, read_json
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.approval import REWRITTEN, settings_of_scope
from harmofl.flare.site import SiteError, own_setting
from harmofl.job_folder import sha256
from harmofl.methods import PRESETS
from harmofl.sections import one_line

CLIENT_CONFIG = "config/config_fed_client"
BUNDLED = f"custom/{PACKAGE.name}/"
NOT_USED_AT_SITES = ("demo", "data.simulated_root")
UNSAID = "(no default, the job chooses)"
# keys by which FLARE finds the class of a component
CLASS_KEYS = ("path", "class_path", "name")


def describe_job(kit: Kit, job: Job, app: str, files: Mapping[str, str]) -> list[str]:
    """Lines about a job as this site would run it; nothing of the job is imported.

    Args:
        kit: of the site.
        job: as handed over.
        app: the app that it deploys to this site.
        files: `harmofl.flare.approval.app_digests` of that app.

    Raises:
        JobError, ExperimentError, KitError: a part of it cannot be read, so that nobody could say what it does.
    """
    from harmofl.tasks import is_outside

    outside = is_outside(str(job.settings.get("task")))
    experiment = None if outside else job.resolve(demo=False)
    config = _client_config(job.folder / app, files)
    sections = {
        "the job": _job_lines(kit, job),
        "settings that differ from the package's defaults": _setting_lines(job, experiment),
        "code": _code_lines(files),
        "classes that FLARE builds at this site": _class_lines(config, files),
        "filters": _filter_lines(kit, job, config),
        "other files": _file_lines(files),
        "what would leave this site": _leaving_lines(kit, job, experiment),
    }
    shown = []
    for title, lines in sections.items():
        shown += ["", title, *(f"  {one_line(line)}" for line in lines)]
    return shown[1:]


def _job_lines(kit: Kit, job: Job) -> Iterator[str]:
    yield f"name {job.meta.get('name', job.folder.name)}, folder {job.folder.name}"
    yield f"sites {', '.join(job.sites)}"
    yield f"privacy scope {job.meta.get('scope') or kit.scope().get('name', 'none')} of this site"
    for key, value in job.meta.items():
        if key not in ("name", "deploy_map", "scope"):
            yield f"{key} = {value}"


def _setting_lines(job: Job, experiment: Experiment | None) -> Iterator[str]:
    """Settings that a job chooses, with the default beside it where there is one."""
    given = job.settings if experiment is None else experiment.model_dump(mode="json")
    defaults = _defaults(Experiment) | PRESETS["robust"] | {"amplitude.preset": "robust"}
    for key, value in sorted(_flat(given)):
        if key == "name" or any(key == left or key.startswith(f"{left}.") for left in NOT_USED_AT_SITES):
            continue
        if key not in defaults:
            yield f"{key} = {value} {UNSAID}"
        elif value != defaults[key]:
            yield f"{key} = {value} (default {defaults[key]})"


def _defaults(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """The default of every setting that has one, by `section.key`."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _defaults(kind, f"{prefix}{name}.")
        elif not field.is_required():
            default = field.get_default(call_default_factory=True)
            found[prefix + name] = list(default) if isinstance(default, tuple) else default
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by `section.key`; an empty section is a value."""
    for name, value in settings.items():
        if isinstance(value, dict) and value and not prefix:
            yield from _flat(value, f"{name}.")
        else:
            yield prefix + str(name), value


def _code_lines(files: Mapping[str, str]) -> Iterator[str]:
    """The job's own code by file; a copy of the package is one line where it equals the installed one."""
    code = {name: value for name, value in files.items() if name.startswith("custom/") and value}
    copied = {name.removeprefix(BUNDLED): value for name, value in code.items() if name.startswith(BUNDLED)}
    other = sorted(name for name, value in copied.items() if _installed(name) != value)
    if not code:
        yield "the job brings no code (no folder custom)"
    if copied and not other:
        yield f"{BUNDLED}: {count_text(len(copied), 'file')}, each equal to that of the harmofl installed here"
    for name in other:
        yield f"{BUNDLED}{name}: sha256 {copied[name]}, NOT that of the harmofl installed here"
    for name, value in sorted(code.items()):
        if not name.startswith(BUNDLED):
            yield f"{name}: sha256 {value}"


def _installed(name: str) -> str:
    return sha256(PACKAGE / name) if (PACKAGE / name).is_file() else ""


def _client_config(app: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """What FLARE reads at a site to build components.

    Raises:
        JobError: it is not there, or FLARE could read another file than the one that is shown.
    """
    found = sorted(name for name in files if name.rpartition(".")[0] == CLIENT_CONFIG)
    if found != [f"{CLIENT_CONFIG}.json"]:
        raise JobError(
            f"{app.name}: FLARE would read {', '.join(found) or 'no configuration'}; the job needs "
            f"{CLIENT_CONFIG}.json and no other form of it"
        )
    return read_json(app / f"{CLIENT_CONFIG}.json")


def _class_lines(config: Any, files: Mapping[str, str]) -> Iterator[str]:
    brought = {name.split("/")[1].removesuffix(".py") for name in files if name.startswith("custom/")}
    for name, arguments in _classes(config):
        package = name.split(".")[0]
        origin = {PACKAGE.name: "this package", "nvflare": "FLARE"}.get(package, "installed at this site")
        origin = "brought by the job" if package in brought - {PACKAGE.name} else origin
        yield f"{name} ({origin})" + (f", arguments {arguments}" if arguments else "")


def _classes(node: Any) -> Iterator[tuple[str, Any]]:
    """Every class that a configuration names, whatever it is an argument of, with its own arguments."""
    if isinstance(node, dict):
        yield from ((node[key], node.get("args")) for key in CLASS_KEYS if isinstance(node.get(key), str))
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from _classes(value)


def _filter_lines(kit: Kit, job: Job, config: Mapping[str, Any]) -> Iterator[str]:
    for whose, place in (("this site's", _scope(kit, job)), ("the job's", config)):
        for key, what in (("task_data_filters", "what arrives"), ("task_result_filters", "what leaves")):
            names = [name for name, _ in _classes(place.get(key))]
            yield f"{whose}, on {what}: {', '.join(names) or 'none'}"


def _scope(kit: Kit, job: Job) -> dict[str, Any]:
    """The privacy scope that the job names, else the site's default one."""
    asked = job.meta.get("scope")
    return next((held for held in kit.scopes() if held.get("name") == asked), {}) if asked else kit.scope()


def _file_lines(files: Mapping[str, str]) -> Iterator[str]:
    for name, value in sorted(files.items()):
        if value and not name.startswith("custom/"):
            of_content = " of its JSON content, since FLARE writes it anew at submission" if name in REWRITTEN else ""
            yield f"{name}: sha256 {value}{of_content}"


def _leaving_lines(kit: Kit, job: Job, experiment: Experiment | None) -> Iterator[str]:
    """The table of jobs/README.md for this job and this site."""
    if experiment is None:
        yield (
            f"the task {job.settings.get('task')} is the job's own, so its code decides; this site's filters let out "
            "weight differences, one mean amplitude and numbers without names, and nothing else"
        )
        return
    yield _weights_line(experiment)
    yield from _amplitude_lines(_scope(kit, job).get("properties") or {}, experiment)
    limits = _limits(kit, job)
    fewest = count_text(limits.scored_patients, "patient")
    yield (
        "every round: counts of cases by split and of skipped cases and warnings by reason (a code), of amplitudes "
        "released, sent again and held back over all jobs, steps, loss, mean validation score (of at least "
        f"{fewest}), seconds, hash of the model received, this site's limits"
    )
    yield f"at the end: test scores of at least {fewest}, " + (
        "a number a case without its name, and which cases are of one patient"
        if limits.case_scores
        else "their mean and interval (limits.case_scores is off at this site)"
    )
    yield "where a task fails: a code and one line, without paths and names"


def _limits(kit: Kit, job: Job) -> Any:
    try:
        return settings_of_scope(kit.folder / "local", job.meta.get("scope")).limits
    except SiteError as error:
        raise JobError(str(error)) from None


def _weights_line(experiment: Experiment) -> str:
    import torch

    from harmofl.core.partition import partition_of
    from harmofl.tasks import untrained_network

    settings = experiment.federation
    with torch.device("meta"):
        network = untrained_network(experiment)
    shared = partition_of(network, settings.local_layers).shared
    if not shared:
        return "every round: no weights (federation.local_layers keeps all layers here)"
    count = sum(value.numel() for name, value in network.state_dict().items() if name in shared)
    kept = ", without the norm layers" if settings.local_layers == "norm" else ""
    return (
        f"every one of {count_text(settings.rounds, 'round')}: weight differences of {experiment.network.name}{kept}, "
        f"{count:,} numbers ({settings.exchange}); no noise is added to them"
    )


def _amplitude_lines(properties: Mapping[str, Any], experiment: Experiment) -> Iterator[str]:
    from harmofl.core.amplitude import AmplitudeNormalization
    from harmofl.flare.local_amplitude import build_normalization
    from harmofl.tasks import load_task

    settings, data = experiment.amplitude, experiment.data
    if settings.region == "off":
        yield "no amplitude (amplitude.region off)"
        return
    try:
        needed, noise = own_setting(properties, "minimum_cases"), own_setting(properties, "amplitude_noise")
    except SiteError as error:
        raise JobError(str(error)) from None
    channels = load_task(experiment).in_channels
    normalization: AmplitudeNormalization = build_normalization(experiment, channels)
    numbers = math.prod(_statistic_shape(normalization, channels, data.height, data.width))
    noised = "without noise" if noise is None else f"with noise of epsilon {noise.epsilon:g}, delta {noise.delta:g}"
    yield (
        f"once: mean amplitude of the training images (region {settings.region}, {settings.estimation}), {numbers:,} "
        f"numbers, of at least {count_text(max(settings.minimum_cases, needed), 'patient')}, {noised}; the number of "
        "images and patients behind it"
    )


def _statistic_shape(normalization: Any, channels: int, height: int, width: int) -> Sequence[int]:
    import torch

    shape: Sequence[int] = normalization.statistics(torch.rand(1, channels, height, width)).shape[1:]
    return shape
