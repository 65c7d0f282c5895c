"""Whether the machine that a kit lies on can run it: processes, ports, GPU, memory, packages."""

import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

import harmofl
from harmofl.app.kit import Check, Kit, read_json
from harmofl.app.silence import flare_silent
from harmofl.data.findings import count_text
from harmofl.flare.site import SiteError, own_setting

GIB = 2**30
CONTAINER_SHARED = 64 * 2**20  # what a container has unless it is started with --shm-size
PREFETCHED = 2  # batches that each loader process holds
SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
MANAGER = "GPUResourceManager"


@dataclass(frozen=True)
class Demand:
    """What a job asks of the machine of one kit, in bytes.

    Attributes:
        model: the network's weights.
        training: training one batch, beside the process and the images.
        process: a process before any data.
        images: decoded images that are held, and kept on disk.
        batch: images of one batch.
        workers: loader processes where the site does not say.
        resources: `resource_spec` of the job for this site.
    """

    model: int
    training: int
    process: int
    images: int
    batch: int
    workers: int
    resources: Mapping[str, Any]


def check_running(kit: Kit) -> Iterator[Check]:
    """Tell whether the kit is in use, and find marks of an earlier run that keep the next one from starting."""
    alive = False
    for name in ("daemon_pid.fl", "pid.fl"):
        path = kit.workspace / name
        if path.exists():
            check = _pid_file(kit, path)
            alive = alive or check.state == "warning" and "running" in check.message
            yield check
    processes = psutil.process_iter(["cmdline"])  # a container, or sub_start.sh --once, writes no such file
    if not alive and (found := [one.pid for one in processes if is_flare(kit, one.info["cmdline"] or [])]):
        alive = True
        yield _running(kit, "processes", found[0])
    if (kit.workspace / "shutdown.fl").exists() and not alive:
        message = f"an earlier stop left it, so that the {kit.kind} stops right after its start"
        yield Check("error", "shutdown.fl", message, f"rm {kit.workspace / 'shutdown.fl'}")
    elif not alive:
        yield Check("ok", "processes", f"the {kit.kind} is not running from this kit")


def _pid_file(kit: Kit, path: Path) -> Check:
    """What a file of start.sh says: the kit runs, ran, or seems to run because another process has its number."""
    try:
        number = int(path.read_text())
        process = psutil.Process(number)
        owner = process.name()
        ended = process.status() == psutil.STATUS_ZOMBIE  # which kill -0, and so start.sh, takes for alive
        command = [] if ended else process.cmdline()
    except (OSError, ValueError, psutil.NoSuchProcess):
        fix = f"start.sh removes it by itself; or rm {path}"
        return Check("warning", path.name, "left over by a process that is gone", fix)
    except psutil.AccessDenied:
        return Check("warning", path.name, f"process {number} cannot be seen", "run preflight as the user of start.sh")
    if is_flare(kit, command):
        return _running(kit, path.name, number)
    message = f"left over; {owner} has its number {number} now, so that start.sh takes the {kit.kind} for running"
    return Check("error", path.name, message, f"rm {path}")


def _running(kit: Kit, subject: str, number: int) -> Check:
    message = f"the {kit.kind} is running as process {number}; what is checked here holds for its next start"
    return Check("warning", subject, message, "stop it before you change the kit")


def is_flare(kit: Kit, command: list[str]) -> bool:
    """Whether a command line is that of FLARE, started from this kit."""
    if any(part.startswith("nvflare.private.") for part in command):
        return str(kit.workspace.resolve()) in [str(Path(part).resolve()) for part in command if part[:1] == "/"]
    return any(part.endswith("/sub_start.sh") and Path(part).resolve().parents[1] == kit.folder for part in command)


def check_ports(kit: Kit) -> Iterator[Check]:
    """Tell whether the server's ports are free, or who holds them."""
    for port in kit.ports:
        try:
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(("", port))
        except PermissionError:
            yield Check("error", f"port {port}", "needs root rights", "choose a port from 1024 on in project.yml")
        except OSError as error:
            yield _holder(kit, port, error)
        else:
            yield Check("ok", f"port {port}", "is free")


def _holder(kit: Kit, port: int, error: OSError) -> Check:
    try:
        held = [found for found in psutil.net_connections("tcp") if found.laddr and found.laddr.port == port]
        numbers = [found.pid for found in held if found.status == psutil.CONN_LISTEN and found.pid]
        process = psutil.Process(numbers[0])
        if is_flare(kit, process.cmdline()):
            return Check("note", f"port {port}", f"is held by this server itself, process {process.pid}")
        by = f"by process {process.pid} ({process.name()})"
    except (psutil.Error, IndexError, OSError):
        by = f"by a process that cannot be seen from here ({error.strerror})"
    return Check("error", f"port {port}", f"is taken {by}", "end that process, or provision with another port")


def check_gpu(kit: Kit, demand: Demand | None) -> Iterator[Check]:
    """Hold the GPU that is here against the site's settings, its promise to FLARE, and the job."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    shown = ", ".join(f"{card.name} of {card.total_memory / GIB:.1f} GiB" for card in cards) or "no GPU"
    try:
        device = own_setting(kit.properties(), "device")
    except SiteError as error:
        yield Check("error", "gpu", f"device is {kit.properties()['device']}", str(error))
        yield from _promise(kit, demand, shown)
        return
    indices = [int(number) for number in re.findall(r"\d+", device)] or [0]
    if device.startswith("cuda") and max(indices) >= count:
        fix = "set device to auto or cpu in privacy.json, or give the container the GPU (--gpus)"
        yield Check("error", "gpu", f"device is {device}, but the machine has {shown}", fix)
    else:
        where = " (training runs on the CPU)" if not cards or device.startswith("cpu") else ""
        yield Check("ok", "gpu", f"device {device}: {shown}{where}")
    least = min((cards[min(index, count - 1)].total_memory for index in indices), default=0) if cards else 0
    if cards and not device.startswith("cpu") and demand and demand.training > least:
        message = f"training needs {size_text(demand.training)}, the GPU has {shown}"
        yield Check("error", "gpu", message, "ask the lead for a smaller training.batch_size")
    yield from _promise(kit, demand, shown)


def _promise(kit: Kit, demand: Demand | None, shown: str) -> Iterator[Check]:
    """What resources.json promises to FLARE's scheduler, in whole cards and GiB, against the machine and the job."""
    from nvflare.app_common.resource_managers.gpu_resource_manager import GPUResourceManager

    path = kit.local_file("resources.json")
    held = read_json(path).get("components")
    components = [part for part in held if isinstance(part, dict)] if isinstance(held, list) else []
    manager = next((part for part in components if str(part.get("path", "")).endswith(f".{MANAGER}")), None)
    if manager is None:
        return
    promised = manager.get("args") or {}
    count, memory = promised.get("num_of_gpus", 0), promised.get("mem_per_gpu_in_GiB", 0)
    said = f"resources.json promises {count} GPUs of {memory} GiB"
    try:
        with flare_silent():
            GPUResourceManager(**promised)
    except Exception as error:  # FLARE's own refusal, which keeps the site from starting
        fix = f"correct num_of_gpus and mem_per_gpu_in_GiB in local/{path.name.removesuffix('.default')}"
        yield Check("error", "gpu", f"{said}, the machine has {shown} ({error})", fix)
        return
    asked = demand.resources if demand else {}
    wanted, each = asked.get("num_of_gpus", 0), asked.get("mem_per_gpu_in_GiB", 0)
    if wanted > count or (wanted and each > memory):
        message = f"the job asks for {wanted} GPUs of {each} GiB, {said}, the machine has {shown}"
        yield Check("error", "gpu", f"{message}: the job would never start", "ask for less in meta.json: resource_spec")
    else:
        yield Check("ok", "gpu", said)


def check_memory(kit: Kit, demand: Demand | None) -> Iterator[Check]:
    """Hold free memory and shared memory against what training needs."""
    free = _free_memory()
    if demand is None:
        yield Check("ok", "memory", f"{size_text(free)} free")
    else:
        on_gpu = kit.kind == "server" or _trains_on_gpu(kit)
        needed = _processes(kit) * demand.process + demand.images + (demand.model if on_gpu else demand.training)
        said = f"{size_text(free)} free, about {size_text(needed)} needed"
        fix = "end other programs, raise the container's limit, or ask the lead for a smaller training.batch_size"
        yield Check("ok", "memory", said) if free >= needed else Check("error", "memory", said, fix)
    if kit.kind == "client":
        yield _shared(kit, demand)


def _processes(kit: Kit) -> int:
    """How many train: one a device, all with the same images mapped into memory."""
    return str(kit.properties().get("device", "")).count(",") + 1


def _trains_on_gpu(kit: Kit) -> bool:
    import torch

    return torch.cuda.is_available() and not str(kit.properties().get("device", "auto")).startswith("cpu")


def _shared(kit: Kit, demand: Demand | None) -> Check:
    said = kit.properties().get("workers")
    workers = _processes(kit) * (said if isinstance(said, int) else demand.workers if demand else 0)
    if not SHARED_MEMORY.is_dir():
        return Check("note", "shared memory", f"there is no {SHARED_MEMORY}, so it was not looked at")
    size = shutil.disk_usage(SHARED_MEMORY).free
    needed = workers * PREFETCHED * demand.batch if demand else CONTAINER_SHARED + 1
    shown = f"{size_text(size)} free for {count_text(workers, 'loader process', 'loader processes')}"
    if workers and size < needed:
        fix = 'start the container with --shm-size=2g, or set "workers": 0 in privacy.json'
        return Check("warning", "shared memory", f"{shown}, which need about {size_text(needed)}", fix)
    return Check("ok", "shared memory", shown)


def _free_memory() -> int:
    """Free memory of the machine, or of the container where that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no limit reads "max"
        return free


def size_text(count: float) -> str:
    """A number of bytes for a reader."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def check_installed(kit: Kit) -> Iterator[Check]:
    """Hold what is installed against what the package requires, and start.sh's Python against this one."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("harmofl") or []]
    except metadata.PackageNotFoundError:
        wanted = []
        yield Check("warning", "harmofl", "is not installed as a package", "pip install harmofl for the sites")
    wrong = 0
    for needed in wanted:
        if needed.marker and not needed.marker.evaluate():
            continue
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            version = "missing"
        if version == "missing" or not needed.specifier.contains(version, prereleases=True):
            wrong += 1
            message = f"is {version}, but harmofl {harmofl.__version__} needs {needed.specifier}"
            yield Check("error", needed.name, message, f'pip install "{needed}"')
    if not wrong:
        yield Check(
            "ok", "packages", f"harmofl {harmofl.__version__}, nvflare {metadata.version('nvflare')}, all as required"
        )
    found = shutil.which("python3")
    if kit.kind != "admin" and (found is None or Path(found).parent.resolve() != Path(sys.executable).parent.resolve()):
        message = f"start.sh runs {found or 'no python3 at all'}, not the Python of this command ({sys.executable})"
        yield Check("warning", "python3", message, "activate the environment with harmofl before start.sh")
