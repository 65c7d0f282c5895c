"""`harmofl simulate`: a job on one machine, one process a site, with an exit code that can be trusted."""

import copy
import dataclasses
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from harmofl.app.flare_refusals import refuse_job, refuse_path
from harmofl.app.job import Job, JobError, read_job
from harmofl.app.simulator import clear_workspace, flare_command, watch
from harmofl.app.verdict import Failure, judge, run_folder
from harmofl.data.findings import DataRootError, count_text
from harmofl.evidence.results import RESULTS_FILE
from harmofl.experiment import Experiment
from harmofl.flare.site import DATA_ROOT_VARIABLE, STATE_ROOT_VARIABLE
from harmofl.sections import one_line

MARGIN = 120  # seconds beyond a round's time limit, for the start of processes


def simulate(
    job_folder: Path,
    assignments: Sequence[str],
    *,
    data: Path | None,
    demo: bool,
    threads: int | None,
    workspace: Path,
) -> int:
    """Run a job in FLARE's simulator and judge the run by what it left.

    Args:
        job_folder: the job; a temporary copy with the assignments runs.
        assignments: `key=value` changes of experiment.json.
        data: data root of all sites; the environment's HARMOFL_DATA_ROOT where it is None.
        demo: synthetic data, whatever the environment and the job say.
        threads: sites at a time; None takes all that fit into memory.
        workspace: FLARE's workspace.

    Returns:
        0 where every site took part to the end, else 1; the last line then names the first failure.

    Raises:
        JobError, ExperimentError: a mistake in the command or the job.
    """
    job, roots = placed(read_job(job_folder, assignments), data, demo)
    job.admit_task(own_code=True)
    experiment = job.resolve(demo=not roots)
    _check_numbers(job, experiment, threads)
    refuse_job(job.folder)
    workspace = _usable_workspace(workspace, roots.values(), [job.folder, *_kept_state(experiment)])
    missing = missing_folders(roots, experiment)
    if missing:
        for absent in reversed(missing):  # the first one is the last line
            _say(f"failed: {absent}")
        return 1
    at_a_time = threads or _fitting_sites(job, experiment)
    told = f"data in {', '.join(sorted({str(root) for root in roots.values()}))}" if roots else "demo data"
    _say(f"{count_text(len(job.sites), 'site')}, {at_a_time} at a time, {told}, workspace {workspace}")
    failure = _run(
        job, workspace, at_a_time, _environment(data, demo, at_a_time), experiment.federation.round_timeout + MARGIN
    )
    if failure is not None:
        _say(f"failed: {failure}")
        return 1
    _say(
        f"all {count_text(len(job.sites), 'site')} took part to the end; results in "
        f"{run_folder(workspace) / RESULTS_FILE}"
    )
    return 0


def _run(job: Job, workspace: Path, at_a_time: int, environment: dict[str, str], patience: float) -> Failure | None:
    """Run a copy of the job to its end, good or bad."""
    clear_workspace(workspace)
    with tempfile.TemporaryDirectory(prefix="harmofl-") as place:
        command = flare_command(job.copy_to(Path(place)), workspace, at_a_time)
        ending = watch(command, environment, workspace, patience)
    return judge(workspace, job.sites, ending)


def placed(job: Job, data: Path | None, demo: bool) -> tuple[Job, dict[str, Path]]:
    """The job as it will run and each site's data root, in the order that sites themselves follow; none for a demo."""
    settings = copy.deepcopy(job.settings)
    section = settings.get("data")
    template = section.get("simulated_root") if isinstance(section, dict) else None
    root = data or os.environ.get(DATA_ROOT_VARIABLE)
    if demo:
        section = section if isinstance(section, dict) else {}
        section.pop("simulated_root", None)
        return dataclasses.replace(job, settings=settings), {}
    if root:
        return job, dict.fromkeys(job.sites, Path(root).absolute())
    if not isinstance(template, str):
        return job, {}
    assert isinstance(section, dict), "the template came from it"
    section["simulated_root"] = os.path.abspath(template)  # sites run in other folders than this process
    roots = {site: Path(section["simulated_root"].replace("{SITE_NAME}", site)) for site in job.sites}
    return dataclasses.replace(job, settings=settings), roots


def _environment(data: Path | None, demo: bool, at_a_time: int) -> dict[str, str]:
    """This process's environment with the data root that was chosen, as a path that holds in any folder."""
    environment = dict(os.environ)
    # each site's process would take half the cores otherwise, and threads that wait for a taken core cost most
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // at_a_time)))
    root = None if demo else data or environment.get(DATA_ROOT_VARIABLE)
    environment.pop(DATA_ROOT_VARIABLE, None)
    if root:
        environment[DATA_ROOT_VARIABLE] = os.path.abspath(root)
    return environment


def _check_numbers(job: Job, experiment: Experiment, threads: int | None) -> None:
    """Refuse numbers that FLARE would only refuse, or wait for, later."""
    count = len(job.sites)
    for section in ("federation",) if experiment.amplitude.region == "off" else ("federation", "amplitude"):
        needed = getattr(experiment, section).minimum_sites
        if needed > count:
            raise JobError(
                f"{section}.minimum_sites is {needed}, but meta.json deploys to {count_text(count, 'site')}; "
                f"add --set {section}.minimum_sites={count}"
            )
    if threads and threads > count:
        raise JobError(f"--threads {threads}: the job has {count_text(count, 'site')}, so at most {count} at a time")


def _kept_state(experiment: Experiment) -> list[Path]:
    """Files of an earlier run that this run resumes."""
    checkpoint, state = experiment.federation.resume_from, os.environ.get(STATE_ROOT_VARIABLE)
    if checkpoint and not Path(checkpoint).is_absolute():
        raise JobError(f"federation.resume_from: {checkpoint} is a relative path; give an absolute one")
    if state and not Path(state).is_absolute():
        raise JobError(f"{STATE_ROOT_VARIABLE}: {state} is a relative path; give an absolute one")
    return [Path(path) for path in (checkpoint, state) if path]


def _usable_workspace(workspace: Path, roots: Collection[Path], needed: Collection[Path]) -> Path:
    """The absolute path of a workspace that may be emptied and written to."""
    workspace = workspace.absolute()
    refuse_path(workspace, "--workspace", "name another folder with --workspace")
    used = (workspace / "startup").is_dir() and (workspace / "server" / "log.txt").is_file()
    if workspace.exists() and not used and (not workspace.is_dir() or any(workspace.iterdir())):
        raise JobError(f"--workspace {workspace}: is in use and no simulator workspace; name a new or empty folder")
    for path in (*roots, *needed):
        if path.resolve().is_relative_to(workspace.resolve()):
            raise JobError(f"--workspace {workspace}: holds {path}, and every run empties the workspace; name another")
    for path in roots:
        if workspace.resolve().is_relative_to(path.resolve()):
            raise JobError(
                f"--workspace {workspace}: lies in the data root {path}, which is never written to; name another"
            )
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workspace):
            pass
    except OSError as error:
        raise JobError(f"--workspace {workspace}: cannot be written ({error.strerror}); name another folder") from None
    return workspace


def missing_folders(roots: dict[str, Path], experiment: Experiment) -> list[Failure]:
    """One failure for each site whose data is not there, or is another site's too."""
    if not roots:
        return []
    from harmofl.tasks import place_sites

    places = place_sites(experiment, roots)
    return [Failure(site, str(place)) for site, place in places.items() if isinstance(place, DataRootError)]


def _fitting_sites(job: Job, experiment: Experiment) -> int:
    """All sites, or as many as fit into memory at a time.

    Cores do not count: a site without a process of its own costs a new process for each of its tasks, which takes
    longer than sharing a core.
    """
    from harmofl.app.costs import fitting_processes

    fitting = min(len(job.sites), fitting_processes(experiment))
    if fitting < len(job.sites):
        _say(f"memory for {fitting} of {len(job.sites)} sites at a time, so each task starts a new process")
    return fitting


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl simulate: {one_line(line)}\n")
    sys.stdout.flush()
