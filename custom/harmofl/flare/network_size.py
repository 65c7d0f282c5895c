"""How large a network is, before any memory is taken for it."""

import torch

from harmofl.experiment import Experiment
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.tasks import untrained_network


def parameter_count(experiment: Experiment) -> int:
    """Parameters of the experiment's network; none is allocated.

    Raises:
        ValueError: the experiment names a combination that cannot be built.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in untrained_network(experiment).parameters())


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
