"""A task from outside the package: FLARE's own policy decides whether it may run here."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.fl_context import FLContext

from harmofl.sections import ExperimentError

COMPONENT = "task"


def admit_outside_task(settings: Mapping[str, Any], fl_ctx: FLContext) -> None:
    """Take over the task that FLARE built as component `task`, where the job names one from outside the package.

    FLARE builds a component only where the job may bring code (BYOC) or the site's class allow list names its class,
    so that what was not allowed is not there. Nothing is imported here.

    Raises:
        ExperimentError: the component is missing, or is another class than the experiment names.
    """
    from harmofl.tasks import admit, is_outside

    name = settings.get("task")
    if not isinstance(name, str) or not is_outside(name):
        return
    component = fl_ctx.get_engine().get_component(COMPONENT)
    if component is None:
        raise ExperimentError(
            f"task: {name} comes from outside the package; name it as component '{COMPONENT}' in "
            "config_fed_server.json and config_fed_client.json, so that each site's policy decides about it"
        )
    built = f"{type(component).__module__}.{type(component).__qualname__}"
    if built != name:
        raise ExperimentError(f"task: the experiment names {name}, but component '{COMPONENT}' is {built}; name one")
    admit(name, component)
