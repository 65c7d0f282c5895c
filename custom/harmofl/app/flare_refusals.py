"""What FLARE cannot use or refuses later, told before anything is made: paths, this Python's place, jobs."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from harmofl.app.job import JobError
from harmofl.app.silence import flare_silent
from harmofl.job_folder import JOB_NAME, META

# FLARE joins the command of a process as text and splits it by shlex.split(line, comments=True): a word ends at white
# space, quotes and backslashes are dropped, and everything behind # is
_SPLIT = {" ": "a blank", "\t": "a tab", "\n": "a line break", "\r": "a line break"}
_SPLIT |= {"'": "a quote", '"': "a quote", "\\": "a backslash", "#": "#"}
# sites find the code that a job brings by PYTHONPATH
_SPLIT |= {os.pathsep: os.pathsep}
# start.sh of a kit calls sub_start.sh without quotes: its shell would look for other folders of such a name
_EXPANDED = {"*": "*", "?": "?", "[": "["}


def unusable_path(path: Path, *, of_kit: bool = False) -> str:
    """Why FLARE cannot start processes below a path, empty where it can.

    Args:
        path: the absolute path of a workspace or a kit.
        of_kit: FLARE's start.sh runs there too.
    """
    marks = _SPLIT | (_EXPANDED if of_kit else {})
    found = dict.fromkeys(name for mark, name in marks.items() if mark in str(path))
    return f"FLARE cannot start processes in a path with {' or '.join(found)}" if found else ""


def unusable_python() -> str:
    """Why FLARE cannot start this Python again, empty where it can; names its path."""
    package = importlib.util.find_spec("nvflare")
    for place in (sys.executable, *((package.submodule_search_locations or []) if package else [])):
        problem = unusable_path(Path(place))
        if problem:
            return f"{place}: {problem}; install Python and its packages into a folder without"
    return ""


def refuse_path(path: Path, asked_by: str, fix: str, *, of_kit: bool = False) -> None:
    """Refuse a folder below which FLARE is to start processes, or the Python that it would start.

    Args:
        path: the absolute path.
        asked_by: the option or argument that named it.
        fix: what to do about the path.
        of_kit: FLARE's start.sh runs there too.

    Raises:
        JobError: one line.
    """
    problem = unusable_path(path, of_kit=of_kit)
    if problem:
        raise JobError(f"{asked_by} {path}: {problem}; {fix}")
    if python := unusable_python():
        raise JobError(python)


def refuse_job_name(name: str) -> None:
    """Refuse a job folder that FLARE would refuse at submission by its name.

    Raises:
        JobError: one line.
    """
    if not JOB_NAME.fullmatch(name):
        raise JobError(
            f"job folder {name!r}: FLARE refuses the name when the job is submitted; rename the folder: letters, "
            "digits, '.', '_' and '-', the first one a letter or a digit"
        )


def refuse_job(folder: Path) -> None:
    """Let FLARE's own check look at a job as it would be submitted.

    Raises:
        JobError: FLARE refuses it; its reason in one line.
    """
    from nvflare.fuel.utils.zip_utils import zip_directory_to_file
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

    with tempfile.TemporaryDirectory(prefix="harmofl-") as place, flare_silent():
        packed = Path(place) / "job.zip"
        zip_directory_to_file(str(folder.parent), folder.name, str(packed))
        try:
            taken, reason, _ = JobMetaValidator().validate(folder.name, str(packed))
        except Exception as error:  # a meta.json of another form than it expects makes it raise anything
            taken, reason = False, f"{type(error).__name__}: {error}"
    if not taken:
        raise JobError(f"{folder.name}/{META}: FLARE refuses the job: {' '.join(reason.split())}; fix {META}")
