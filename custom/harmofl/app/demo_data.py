"""`harmofl demo-data`: the synthetic data of a job as real files, and a page of example images."""

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harmofl.app.job import Job, JobError, read_job
from harmofl.data.findings import DataRootError, count_text
from harmofl.experiment import Experiment, ExperimentError, parse_assignment
from harmofl.job_folder import demo_overrides
from harmofl.tasks import load_task

GALLERY_FILE = "gallery.html"


def demo_data(
    job_folder: Path, assignments: Sequence[str], *, output: Path, gallery: bool, allow_code: bool = False
) -> int:
    """Write the data of all sites below `output`, which is then a data root, and say how to train on it.

    Args:
        job_folder: the job.
        assignments: `key=value` changes of experiment.json.
        output: receives a folder a site; one that holds its files already is kept.
        gallery: also write gallery.html there.
        allow_code: let a task that the job brings along run.

    Returns:
        0, or 1 where data that was there already cannot be read for the gallery.

    Raises:
        JobError, ExperimentError: a mistake in the command or the job.
    """
    job = read_job(job_folder, assignments)
    job.admit_task(own_code=allow_code)
    experiment = job.resolve(demo=True)
    for site in job.sites:
        _say(_write_site(output / site, site, experiment))
    if gallery:
        try:
            _say(_write_gallery(output, job, experiment))
        except DataRootError as error:
            _say(f"failed: {error}")
            return 1
    command = ["harmofl", "simulate", str(job_folder), "--data", str(output.absolute())]
    for assignment in _demo_assignments(job, assignments):
        command += ["--set", assignment]
    _say(f"to train on it as the demo does: {shlex.join(command)}")
    return 0


def _demo_assignments(job: Job, assignments: Sequence[str]) -> list[str]:
    """The assignments that give a run on files the settings of the demo: its overrides and what the command set."""
    overrides = demo_overrides(job.settings).items()
    return [*(_assignment(key, value) for key, value in overrides if key not in job.assigned), *assignments]


def _assignment(key: str, value: object) -> str:
    plain = f"{key}={value}"
    return plain if parse_assignment(plain)[1] == value else f"{key}={json.dumps(value)}"


def _write_site(folder: Path, site: str, experiment: Experiment) -> str:
    task = load_task(experiment)
    try:
        found = folder.exists() and any(folder.iterdir())
        task.write_demo(folder, site, experiment)
    except FileExistsError as error:
        raise JobError(str(error)) from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    except ExperimentError:
        raise
    except ValueError as error:
        raise JobError(f"demo.data: {error}") from None
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    kept = "kept, delete it for other settings: " if found else ""
    return f"{folder}: {kept}{count_text(len(files), 'file')}, {size:.1f} MB; {task.describe_demo(site, experiment)}"


def _write_gallery(root: Path, job: Job, experiment: Experiment) -> str:
    from harmofl.app.gallery import collect_gallery
    from harmofl.evidence.gallery import write_gallery

    with tempfile.TemporaryDirectory(prefix="harmofl-") as cache:
        page = collect_gallery(root, job.sites, experiment, Path(cache))
    try:
        write_gallery(page, root / GALLERY_FILE)
    except OSError as error:
        raise _unwritable(root / GALLERY_FILE, error) from None
    return f"{root / GALLERY_FILE}: example images of every site before and after each step"


def _unwritable(path: Path, error: OSError) -> JobError:
    return JobError(f"{path}: cannot be written ({error.strerror}); name another folder with -o")


def _say(line: str) -> None:
    sys.stdout.write(f"harmofl demo-data: {line}\n")
    sys.stdout.flush()
