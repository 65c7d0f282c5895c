"""A job folder as the command line sees it: with --set applied, its task admitted and its experiment resolved."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from harmofl.experiment import Experiment, parse_assignment
from harmofl.job_folder import JobFolder, copy_job
from harmofl.sections import one_line


class JobError(ValueError):
    """A command that cannot be used; one line with the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Job(JobFolder):
    """A job folder whose overrides came with --set."""

    asked_by = "--set "

    def resolve(self, *, demo: bool) -> Experiment:
        """The experiment that a run will resolve.

        Raises:
            ExperimentError: see `harmofl.tasks.resolve_experiment`; also where a method undoes what was set.
        """
        from harmofl.tasks import resolve_experiment

        experiment = resolve_experiment(self.settings, demo=demo)
        self.refuse_undone(experiment)
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
            raise JobError(f"task: {name} cannot be used ({problem}); fix its code") from None
        finally:
            sys.path.remove(str(custom))

    def copy_to(self, parent: Path) -> Path:
        """Copy the job below `parent`, with these settings in its experiment.json, and return the copy.

        Raises:
            ExperimentError: see `copy_job`; nothing was written.
        """
        copy = parent / self.folder.name
        copy_job(self.folder, copy, self.experiment_files())
        return copy


def read_job(folder: Path, assignments: Sequence[str], *, demo: bool = False) -> Job:
    """Read a job and apply `key=value` assignments, which win over the demo's overrides.

    Raises:
        ExperimentError: see `JobFolder.read`; also an assignment of another form.
    """
    return Job.read(folder, dict(parse_assignment(text) for text in assignments), demo=demo)
