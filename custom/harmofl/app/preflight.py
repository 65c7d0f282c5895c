"""`harmofl preflight`: whether a kit, its machine, its data and a job fit together, before anything starts."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import harmofl
from harmofl.app import connection, machine, storage
from harmofl.app.approval_checks import check_approval
from harmofl.app.bundle import PACKAGE, components
from harmofl.app.console import plain_console
from harmofl.app.flare_refusals import refuse_job, refuse_job_name, unusable_path, unusable_python
from harmofl.app.hospital_names import names_in_force
from harmofl.app.job import Job, JobError, read_job
from harmofl.app.kit import (
    WORKSPACE_VARIABLE,
    Check,
    Kit,
    KitError,
    check_log_streams,
    check_policy,
    lists_own_filter,
    open_kit,
    read_json,
)
from harmofl.app.limit_checks import check_default_limits, check_limits, check_patients, minimum_cases_of
from harmofl.app.machine import Demand
from harmofl.app.privacy import check_ledger, kept_parts
from harmofl.app.silence import flare_silent
from harmofl.data.findings import Finding, count_text
from harmofl.data.splits import keep_parts
from harmofl.experiment import Experiment, ExperimentError, site_owned_problem
from harmofl.flare.site import DATA_ROOT_VARIABLE, SiteError, own_root, own_setting, site_settings
from harmofl.flare.site_settings import SiteSettings
from harmofl.job_folder import MANIFEST, META, SERVER, digests, refuse_links, sha256

Look = Callable[[], Iterable[Check]]
SHOWN = 20  # findings of a site, errors first; `harmofl check` lists all
SUBMITTERS = ("lead", "project_admin")
CONSOLE_STYLES = {"ok": "green", "note": "", "warning": "yellow", "error": "red"}


def preflight(kit: Path, job_folder: Path | None, assignments: Sequence[str]) -> int:
    """Look at everything a start would need and print a line each; nothing is started or registered.

    Args:
        kit: startup kit of a server, a site or a person.
        job_folder: the job or bundle that is to run.
        assignments: `key=value` changes of its experiment.json.

    Returns:
        1 where a start or the job would fail, else 0.

    Raises:
        JobError, ExperimentError: a mistake in the command or the job.
    """
    opened = open_kit(kit)
    if assignments and job_folder is None:
        raise JobError("--set changes a job's settings; name the job with --job")
    job = read_job(job_folder, assignments) if job_folder else None
    experiment = _experiment(job)
    console = plain_console()
    counts: Counter[str] = Counter()
    for title, look in _sections(opened, kit.absolute(), job, experiment):
        console.print(f"\n{title}", style="bold")
        for check in _guarded(look):
            counts[check.state] += 1
            console.print(str(check), style=CONSOLE_STYLES[check.state])
    again = "; fix the errors, then run preflight again" if counts["error"] else ""
    console.print(f"\n{_amounts(counts)}, {counts['ok']} good{again}")
    return int(counts["error"] > 0)


def _experiment(job: Job | None) -> Experiment | None:
    """The job's experiment; None without a job, or where its task is the job's own code, which is not run here."""
    from harmofl.tasks import is_outside

    if job is None or is_outside(str(job.settings.get("task"))):
        return None
    return job.resolve(demo=False)


def _sections(kit: Kit, given: Path, job: Job | None, experiment: Experiment | None) -> Iterator[tuple[str, Look]]:
    """What is looked at for this kind of kit, in the order that it is shown; `given` is its path as it was named."""
    yield "kit", lambda: [*_paths(kit, given), *connection.check_files(kit)]
    yield "certificate", lambda: connection.check_certificate(kit)
    if kit.kind != "admin":
        yield "processes", lambda: machine.check_running(kit)
    yield "server", lambda: machine.check_ports(kit) if kit.kind == "server" else connection.check_server(kit)
    held = 0
    if kit.kind == "client":
        checks, held = _data(kit, job, experiment)
        yield "data", lambda: checks
        yield "policy", lambda: [*check_policy(kit), *check_log_streams(kit)]
        yield "limits", lambda: check_limits(kit, job, experiment)
        yield "approval", lambda: check_approval(kit, job)
        yield "privacy", lambda: check_ledger(kit, experiment)
    demand = _demand(kit, job, experiment, held) if job and experiment else None
    if kit.kind == "client":
        yield "GPU", lambda: machine.check_gpu(kit, demand)
    if kit.kind == "server":
        yield "storage", lambda: storage.check_storage(kit)
    if kit.kind != "admin":
        yield "memory", lambda: machine.check_memory(kit, demand)
    yield "disk", lambda: storage.check_disk(kit, demand)
    yield "versions", lambda: machine.check_installed(kit)
    if job and kit.kind == "admin":
        yield "limits", lambda: check_default_limits(job, experiment)
    if job:
        yield f"job {job.folder.name}", lambda: _job(kit, job)


def _paths(kit: Kit, given: Path) -> Iterator[Check]:
    """Whether FLARE can start server or site, and then the processes of a job, by the paths of this kit."""
    if kit.kind == "admin":
        return
    # the kit as it was named: start.sh takes the path by which it is called, also one through a link
    places = {"kit": given}
    if os.environ.get(WORKSPACE_VARIABLE):
        places[WORKSPACE_VARIABLE] = kit.workspace
    for subject, place in places.items():
        if problem := unusable_path(place, of_kit=True):
            yield Check("error", subject, f"{place}: {problem}", "move it to a path without")
    if problem := unusable_python():
        yield Check("error", "Python", problem)


def _guarded(look: Look) -> Iterator[Check]:
    """All checks of a section; a file that cannot be read is one of its errors and does not hide the next section."""
    try:
        yield from look()
    except KitError as error:
        yield Check("error", "files", str(error))
    except OSError as error:
        yield Check(
            "error", "files", f"{error.filename or 'a file'}: {error.strerror or error}", "correct its permissions"
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # JSON of another shape than FLARE's
        message = f"a file of the kit or the job has another form than expected ({error!r})"
        yield Check("error", "files", message, "compare it with the one that was handed over")


def _data(kit: Kit, job: Job | None, experiment: Experiment | None) -> tuple[list[Check], int]:
    """Look for this site's images and, with a job, through them; also how many bytes of them are held in memory."""
    said = os.environ.get(DATA_ROOT_VARIABLE)
    origin = DATA_ROOT_VARIABLE if said else "data_root in local/privacy.json"
    try:
        root = said or own_setting(kit.properties(), "data_root")
    except SiteError as error:
        return [Check("error", "data", f"data_root is {json.dumps(kit.properties()['data_root'])}", str(error))], 0
    if not root:
        fix = f"set {DATA_ROOT_VARIABLE} before start.sh, or data_root in the default scope of local/privacy.json"
        return [Check("error", "data", f"site {kit.name} has no data root", fix)], 0
    try:
        own = site_settings(kit.properties())
    except SiteError:  # said where the kit's own settings are looked at
        own = SiteSettings()
    folder = own_root(root, own)
    problem = _unusable(Path(root)) or _unusable(folder)
    if problem:
        where, of = (origin, root) if _unusable(Path(root)) else ("folder in local/privacy.json", folder)
        return [Check("error", "data", f"{where}: {of} {problem[0]}", problem[1])], 0
    of_its_own = "" if own.folder is None else f", of which {folder.name} is this site's"
    checks = [Check("ok", "data", f"data root {root} (from {origin}){of_its_own}")]
    if os.access(folder, os.W_OK):
        checks.append(Check("note", "data", f"{root} is writable; training only reads it", "mount it read-only"))
    if job is None:
        return [*checks, Check("note", "data", "only looked for, not checked", "name the job with --job")], 0
    if experiment is None or kit.name not in job.sites:
        why = "the job does not deploy to this site" if experiment else "the job brings its own task"
        fix = "" if experiment else "read its code, then: harmofl check --allow-code"
        return [*checks, Check("note", "data", f"not checked: {why}", fix)], 0
    found, held = _inspected(folder, kit, job, experiment, own)
    return [*checks, *names_in_force(kit.name, experiment, own), *found], held


def _unusable(folder: Path) -> tuple[str, str] | None:
    """Why a data root cannot be used, and the fix."""
    if not folder.is_absolute():
        return "is a relative path", "give an absolute one"
    if not folder.is_dir():
        return "is not a folder", "mount it or correct the path"
    if not os.access(folder, os.R_OK | os.X_OK):
        return "cannot be read", "give the user that runs start.sh the right to read it"
    return None


def _inspected(root: Path, kit: Kit, job: Job, experiment: Experiment, own: SiteSettings) -> tuple[list[Check], int]:
    from harmofl.app.inspection import inspect
    from harmofl.tasks.at_hospital import experiment_at_hospital

    experiment = experiment_at_hospital(experiment, kit.name, patient_pattern=own.patient_pattern, centers=own.centers)
    with keep_parts(kept_parts(kit, experiment.task)):
        inspection = inspect(root, job, experiment, kit.name, minimum_cases_of(kit))
    checks = [Check("error", "data", problem) for problem in inspection.problems]
    held = 0
    for site in inspection.sites:
        held += site.report.bytes_held
        checks += check_patients(kit, site.report.training_patients)
        counts = Counter(finding.severity for finding in site.findings)
        trained = count_text(site.report.training_patients, "patient")
        summary = f"{site.folder}: {site.report.summary}; {trained} to train on; {_amounts(counts)}"
        fix = f"harmofl check {root} --job {job.folder} lists all" if counts["error"] else ""
        checks.append(Check("note" if counts["error"] else "ok", "data", summary, fix))
        listed = [finding for finding in site.findings if finding.severity != "notice"][:SHOWN]
        checks += [Check(_state(found), found.subject, found.message, found.fix) for found in listed]
    return checks, held


def _state(finding: Finding) -> Literal["error", "warning"]:
    return "error" if finding.severity == "error" else "warning"


def _demand(kit: Kit, job: Job, experiment: Experiment, images: int) -> Demand:
    import torch

    from harmofl.app.costs import PROCESS_BYTES, training_bytes
    from harmofl.flare.participant import MOST_WORKERS
    from harmofl.tasks import load_task, untrained_network

    task, data = load_task(experiment), experiment.data
    training = training_bytes(experiment)  # first: it says in a line what is wrong with a network
    with torch.device("meta"):
        network = untrained_network(experiment)
    asked = job.meta.get("resource_spec")
    site = asked.get(kit.name) if isinstance(asked, dict) else None
    return Demand(
        model=sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values()),
        training=training,
        process=PROCESS_BYTES,
        images=images,
        batch=experiment.training.batch_size * task.in_channels * data.height * data.width * 4,
        workers=min(MOST_WORKERS, torch.get_num_threads()) if task.decodes_on_access else 0,
        resources=site if isinstance(site, dict) else {},
    )


def _job(kit: Kit, job: Job) -> Iterator[Check]:
    """Hold the job against this kit: its sites, the submitter's and the site's rights, the code it was made with."""
    try:
        refuse_links(job.folder)
    except ExperimentError as error:  # what it leads to is not looked at
        yield Check("error", job.folder.name, str(error))
        return
    for refuse in (lambda: refuse_job_name(job.folder.name), lambda: refuse_job(job.folder)):
        try:
            refuse()
        except JobError as error:
            yield Check("error", META, str(error))
    if problem := site_owned_problem(job.settings):
        key, _, message = problem.partition(": ")
        yield Check("error", key, message)
    name = {"server": SERVER, "client": kit.name}.get(kit.kind)
    app = next((app for app, names in job.meta["deploy_map"].items() if name in names), None)
    if kit.kind == "client":
        sites = ", ".join(job.sites)
        if app is None:
            yield Check("error", META, f"deploys to {sites}, not to {kit.name}", "ask the lead to add this site")
        else:
            yield Check("ok", META, f"deploys to this site, of {sites}")
        scopes = [scope.get("name") for scope in kit.scopes()]
        asked = job.meta.get("scope")
        if asked and asked not in scopes:
            message = f"the job's privacy scope {asked} is none of this site's ({', '.join(map(str, scopes))})"
            yield Check("error", META, message, "add it to local/privacy.json, or ask the lead to leave it out")
        elif asked and asked != kit.scope().get("name") and not lists_own_filter(kit, asked):
            message = f"the job asks for privacy scope {asked}, which lists no filter of this package, and is refused"
            yield Check("error", META, message, "ask the lead to leave scope out")
    if kit.kind == "admin":
        role = connection.certificate_role(kit)
        refused = "" if role in SUBMITTERS else "let a lead submit the job"
        yield Check("error" if refused else "ok", kit.name, f"role {role} may {'not ' * bool(refused)}submit", refused)
    else:
        yield from _rights(kit, job, app or job.apps[0])
    yield from _manifest(kit, job)


def _rights(kit: Kit, job: Job, app: str) -> Iterator[Check]:
    """Ask FLARE's own policy whether a job with code may run here, or the classes of one without."""
    if any((job.folder / app / "custom").exists() for app in job.apps):
        from nvflare.fuel.sec.authz import AuthzContext, Person
        from nvflare.security.security import FLAuthorizer

        path = kit.local_file("authorization.json")
        lead = Person("lead", "another", "lead")
        try:
            with flare_silent():
                allowed, _ = FLAuthorizer("here", read_json(path)).authorize(AuthzContext("byoc", lead, lead))
        except (SyntaxError, TypeError) as error:
            yield Check("error", path.name, f"FLARE refuses it ({error})", "start from authorization.json.default")
            return
        if allowed:
            yield Check("ok", path.name, "a lead may bring code (BYOC), as this job does")
        else:
            fix = "ask the lead for `harmofl bundle --preinstalled`, or allow byoc"
            yield Check("error", path.name, "this job brings code (BYOC), which is not allowed here to a lead", fix)
        return
    from nvflare.apis.fl_exception import UnsafeComponentError
    from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

    path = kit.local_file("resources.json")
    place = SimpleNamespace(get_resources_file_path=lambda: str(path))
    refused = []
    for component in components(read_json(job.folder / app / "config" / f"config_fed_{kit.kind}.json")):
        try:
            with flare_silent():
                ComponentPathAuthorizer().authorize_component_config(component, workspace=place)
        except UnsafeComponentError as error:
            refused.append(
                f"{component['path']} ({error})" if "not in allow_list" not in str(error) else component["path"]
            )
    if refused:
        fix = "add them, keeping the rest of resources.json.default (provisioning/site/prepare_kit.py does it)"
        yield Check("error", path.name, f"class_allow_list lacks {', '.join(refused)}", fix)
    else:
        yield Check("ok", path.name, "the job brings no code, and its classes are on the class_allow_list")


def _manifest(kit: Kit, job: Job) -> Iterator[Check]:
    """Hold a bundle against its manifest, and the installed package against the copy that it wins over."""
    app = job.apps[0]
    path = job.folder / app / "config" / MANIFEST
    if not path.exists():
        yield Check(
            "note", job.folder.name, "is not a bundle, so its code was not compared", "harmofl bundle makes one"
        )
        return
    manifest = read_json(path)
    files = manifest.get("files")
    if not isinstance(files, dict):
        yield Check("error", MANIFEST, "lists no files", "ask the lead for the bundle as it was made")
        return
    here = digests(job.folder)
    edited = sorted(name for name in {*files, *here} if files.get(name) != here.get(name))
    if edited:
        yield Check("error", MANIFEST, f"does not fit {_some(edited)}", "ask the lead for the bundle as it was made")
    else:
        yield Check("ok", MANIFEST, f"fits all {count_text(len(files), 'file')} of the bundle")
    if kit.kind == "admin":
        return
    if manifest.get("harmofl") != harmofl.__version__:
        message = f"the bundle was made with {manifest.get('harmofl')}, {harmofl.__version__} is installed and wins"
        yield Check("error", "harmofl", message, f"install harmofl {manifest.get('harmofl')} here")
    code = f"{app}/custom/{PACKAGE.name}/"
    bundled = {name.removeprefix(code): value for name, value in files.items() if name.startswith(code)}
    other = sorted(name for name, value in bundled.items() if _installed(name) != value)
    if other:
        message = f"the installed package wins over the bundled copy and differs in {_some(other)}"
        yield Check("error", "harmofl", message, f"install commit {manifest.get('commit') or 'of the bundle'} here")
    elif bundled:
        yield Check("ok", "harmofl", f"the installed package is the bundled one, {count_text(len(bundled), 'file')}")


def _installed(name: str) -> str:
    return sha256(PACKAGE / name) if (PACKAGE / name).is_file() else ""


def _amounts(counts: Mapping[Any, int]) -> str:
    return f"{count_text(counts['error'], 'error')}, {count_text(counts['warning'], 'warning')}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
