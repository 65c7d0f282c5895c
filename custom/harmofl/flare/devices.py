"""What a site trains on."""

import os

import torch
from torch import nn

from harmofl.core.parallel import has_batch_norm
from harmofl.flare.site import SiteConfig, SiteError


def main_device(site: SiteConfig) -> torch.device:
    """The first device that a site's settings name, or the GPU where there is one.

    Raises:
        SiteError: code `no_gpu`, where the settings name a GPU that is not here.
    """
    first = site.devices[0]
    if first == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if first.startswith("cuda") and not torch.cuda.is_available():
        raise SiteError("no_gpu", f"site {site.name} asks for a GPU and has none; set device to auto or cpu")
    return torch.device(first)


def check_several(site: SiteConfig, network: nn.Module) -> None:
    """Refuse several devices that are not here or cannot train this network together.

    Raises:
        SiteError: code `no_gpu` or `batch_norm`.
    """
    count = torch.cuda.device_count()
    for device in site.devices:
        if device.startswith("cuda") and int(device.partition(":")[2]) >= count:
            raise SiteError("no_gpu", f"site {site.name} asks for {device} and has {count} GPUs; set device to those")
    if site.devices[0] == "cpu" and has_batch_norm(network):
        raise SiteError(
            "batch_norm",
            f"site {site.name} trains in several processes on the CPU, where torch cannot synchronize batch norm; set "
            "device to cpu alone, or network.norm to instance in the job",
        )


def make_deterministic(device: torch.device) -> None:
    """Let CUDA choose repeatable kernels; the few that have none warn and go on."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it, and each fill costs
