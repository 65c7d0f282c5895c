"""What a site trains on."""

import os

import psutil
import torch
from torch import nn

from harmofl.core.parallel import has_batch_norm
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.site import SiteConfig, SiteError

GIB = 2**30
# torch has an exception of its own for a full card only; these are the words of the others
FULL = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


class FullMemoryError(MemoryError):
    """A site's memory is full; the message is one line that may leave the site."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the machine or of a card ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def full_memory(site: SiteConfig, experiment: Experiment) -> FullMemoryError:
    """What did not fit into how much memory, and a smaller value to try."""
    device = main_device(site)
    if device.type == "cuda":
        place, (free, total) = "GPU memory", torch.cuda.mem_get_info(device)
    else:
        memory = psutil.virtual_memory()
        place, free, total = "memory", memory.available, memory.total
    batch, data = experiment.training.batch_size, experiment.data
    fix = f"set training.batch_size to {batch // 2}" if batch > 1 else "lower data.height and data.width"
    return FullMemoryError(
        f"site {site.name} ran out of {place} ({free / GIB:.1f} of {total / GIB:.1f} GiB free) in a step of "
        f"{count_text(batch, 'image')} of {data.height} x {data.width}; {fix}"
    )


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
    _refuse_missing_card(site, first)
    return torch.device(first)


def described(device: torch.device) -> str:
    """A device for the site's log; a card with its name and the number that no process renumbers."""
    if device.type != "cuda":
        return device.type
    card = torch.cuda.get_device_properties(device)
    return f"{device} ({card.name}, GPU-{card.uuid})"


def _refuse_missing_card(site: SiteConfig, device: str) -> None:
    count = torch.cuda.device_count()
    if device.startswith("cuda:") and int(device.partition(":")[2]) >= count:
        raise SiteError("no_gpu", f"site {site.name} asks for {device} and has {count} GPUs; set device to those")


def check_several(site: SiteConfig, network: nn.Module) -> None:
    """Refuse several devices that are not here or cannot train this network together.

    Raises:
        SiteError: code `no_gpu` or `batch_norm`.
    """
    for device in site.devices:
        _refuse_missing_card(site, device)
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
