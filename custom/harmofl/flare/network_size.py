"""How large a network is, before any memory is taken for it."""

import torch

from harmofl.experiment import Experiment
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_limits import Excess
from harmofl.flare.site_settings import LimitSettings
from harmofl.tasks import untrained_network


def parameter_count(experiment: Experiment) -> int:
    """Parameters of the experiment's network; none is allocated.

    Raises:
        ValueError: the experiment names a combination that cannot be built.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in untrained_network(experiment).parameters())


def large_network(limits: LimitSettings, experiment: Experiment) -> list[Excess]:
    """What of a job's network exceeds a site's limits, for preflight and bundle; none where it cannot be built."""
    try:
        count, most = parameter_count(experiment), limits.parameters
    except ValueError:  # said where its memory is asked for
        return []
    if count <= most:
        return []
    message = f"makes a network of {count} parameters, limits.parameters is {most}"
    return [Excess("network.width", message, "lower it, or ask the hospital to raise its limit")]


def refuse_large_network(experiment: Experiment, site: SiteConfig) -> None:
    """Hold a job's network against the site's own limit.

    Raises:
        SiteError: outside simulation, code `parameters` where it has more than `limits.parameters`, `network` where it
            cannot be built.
    """
    if site.simulated:
        return
    try:
        count, most = parameter_count(experiment), site.settings.limits.parameters
    except ValueError as error:
        raise SiteError("network", f"site {site.name}: {error}") from None
    if count > most:
        raise SiteError(
            "parameters",
            f"site {site.name}: the network has {count} parameters, limits.parameters here is {most}; lower "
            "network.width, or ask the hospital to raise its limit",
        )
