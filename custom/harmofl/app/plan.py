"""`harmofl plan`: what a round of many sites will take, before anybody has set one up."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harmofl.app.check import NARROWEST, duration_text, size_text
from harmofl.app.console import plain_console
from harmofl.app.forecast import Forecast, Parts, forecast, measure_parts
from harmofl.app.job import JobError, read_job
from harmofl.app.processor_time import busy_line
from harmofl.app.relay_load import check_relays, measure_sums, relay_load, show_relays
from harmofl.core.training import TrainingError
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment, parse_assignment, set_key

# A job to plan with where there is none yet: the settings of the jobs that use these networks.
_OF_NETWORK = {
    "unet": {
        "task": "prostate",
        "data": {"height": 384, "width": 384},
        "network": {"name": "unet"},
        "training": {"optimizer": "adam", "learning_rate": 1e-4, "batch_size": 16},
    },
    "densenet121": {
        "task": "camelyon17",
        "data": {"height": 96, "width": 96},
        "reader": {"centers": {"site": [0]}},  # must be there; nothing is read
        "network": {"name": "densenet121", "norm": "batch"},
        "training": {"optimizer": "sgd", "learning_rate": 1e-3, "batch_size": 128},
    },
}
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_VALIDATION = 0.25  # images for validation by image for training: 16 % and 64 % of a site's cases


@dataclass(frozen=True)
class Request:
    """What is to be planned; rates in bytes a second, `images` for training at a site, `relays` that sum."""

    model: str
    assignments: Sequence[str]
    sites: int
    server_rate: float
    site_rate: float
    images: int
    relays: int = 0


def plan(request: Request) -> int:
    """Print time, memory and bytes of a round; returns 0.

    Raises:
        JobError, ExperimentError: a mistake in the command or the job.
    """
    experiment = experiment_of(request.model, request.assignments)
    if request.relays:
        check_relays(request.relays, request.sites, experiment)
    try:
        parts = measure_parts(experiment)
    except (TrainingError, ChildProcessError) as error:
        raise JobError(f"{request.model}: a training step cannot be measured ({error})") from None
    console = plain_console()
    console.soft_wrap = not console.is_terminal  # sentences to read, which break between words
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    predicted = _forecast(request, experiment, parts)
    _show(console, request, experiment, parts, predicted)
    if request.relays:
        _print_relays(console, request, experiment, parts, predicted)
    if busy := _busy(request, experiment, parts):
        console.print(f"\n{busy}")
    return 0


def _forecast(request: Request, experiment: Experiment, parts: Parts) -> Forecast:
    return forecast(
        parts,
        experiment,
        sites=request.sites,
        images=request.images,
        validation=round(request.images * _VALIDATION),
        server_rate=request.server_rate,
        site_rate=request.site_rate,
    )


def _busy(request: Request, experiment: Experiment, parts: Parts) -> str | None:
    """What a round takes while this machine has as much other work, where it has any."""
    now = _forecast(request, experiment, parts.as_busy)
    return busy_line(
        min(parts.share, parts.pace.share),
        f"a round takes {duration_text(now.simulated)} in FLARE's simulator, and training and validation take a site "
        f"{duration_text(now.training)}",
    )


def _print_relays(console: Console, request: Request, experiment: Experiment, parts: Parts, flat: Forecast) -> None:
    """What the server and each relay carry."""
    sums, rate = measure_sums(experiment), request.server_rate
    load = relay_load(parts, sums, flat, sites=request.sites, relays=request.relays, server_rate=rate, relay_rate=rate)
    show_relays(console, load, sums, request.relays)


def experiment_of(model: str, assignments: Sequence[str]) -> Experiment:
    """The experiment of a job folder, or of a network's usual settings.

    Raises:
        JobError: neither a folder nor a network.
        ExperimentError: see `read_job`.
    """
    if Path(model).is_dir():
        job = read_job(Path(model), assignments)
        job.admit_task(own_code=False)
        return job.resolve(demo=False)
    if model not in _OF_NETWORK:
        raise JobError(f"--model {model}: is neither a job folder nor one of {', '.join(_OF_NETWORK)}")
    from harmofl.tasks import resolve_experiment

    settings = {
        "name": model,
        "amplitude": {"minimum_sites": 1},
        "federation": {"rounds": 1, "minimum_sites": 1},
        **{key: dict(value) if isinstance(value, dict) else value for key, value in _OF_NETWORK[model].items()},
    }
    for text in assignments:
        set_key(settings, *parse_assignment(text))
    return resolve_experiment(settings)


def rate_of(text: str) -> float:
    """Bytes a second of a line such as `100Mbit`.

    Raises:
        ValueError: another form; one line with the fix.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s)?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is not a bandwidth; write a number with kbit, Mbit or Gbit, for example 100Mbit")
    return float(found[1]) * _UNITS[found[2]] / 8


def _show(console: Console, request: Request, experiment: Experiment, parts: Parts, predicted: Forecast) -> None:
    network = experiment.network
    console.print(
        f"{network.name} of width {network.width} at {experiment.data.height} x {experiment.data.width}, "
        f"{count_text(request.sites, 'site')} with {count_text(request.images, 'training image')} each, "
        f"every site on a machine like this one and idle\n"
    )
    stretches = [
        ("model to all sites", predicted.down, f"{size_text(parts.down)} a site"),
        (
            "training and validation",
            predicted.training,
            f"{parts.pace.training:.2g} s an image, {count_text(experiment.training.local_epochs, 'local epoch')}",
        ),
        ("the rest of a site's task", predicted.site, "network, state file, packing"),
        (
            "differences to the server",
            predicted.up,
            f"{size_text(parts.up)} a site, {parts.add:.2g} s to add",
        ),
        ("next model at the server", predicted.server, ""),
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("a round")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, seconds, note in stretches:
        table.add_row(name, duration_text(seconds), f"{seconds / predicted.seconds:.0%}", note)
    table.add_row("together", duration_text(predicted.seconds), "", "")
    console.print(table)
    longest = max(stretches, key=lambda stretch: stretch[1])[0]
    advice = _advice(longest, request, parts, experiment.federation.exchange)
    console.print(f"\nwhat bounds the round: {longest}; {advice}")
    _show_sums(console, request, experiment, parts, predicted)


def _show_sums(console: Console, request: Request, experiment: Experiment, parts: Parts, predicted: Forecast) -> None:
    traffic = request.sites * (parts.down + parts.up)
    console.print(
        f"bytes: the server's line carries {size_text(traffic)} a round; a site receives {size_text(parts.down)} and "
        f"sends {size_text(parts.up)} (the model has {size_text(parts.model)})"
    )
    console.print(
        f"memory: a site needs about {size_text(predicted.site_memory)} beside its images, the server about "
        f"{size_text(predicted.server_memory)}, {_held(request, experiment)}"
    )
    console.print(
        f"simulation: FLARE's simulator takes {duration_text(predicted.simulated)} a round on this machine, one site "
        f"after the other; the start of a process takes {duration_text(predicted.process)} of each site's part"
    )
    for line in _minimums(request, experiment):
        console.print(line)
    console.print(_precision(experiment))
    console.print(f"measured: {parts.pace.how}; transfers are computed from the bandwidth, without delays")


def _held(request: Request, experiment: Experiment) -> str:
    """What the server's memory grows with."""
    if experiment.federation.aggregation == "mean":
        return "whatever the number of sites"
    return (
        f"which holds the differences of all {count_text(request.sites, 'site')} until the round has closed "
        f"(federation.aggregation '{experiment.federation.aggregation}')"
    )


def _precision(experiment: Experiment) -> str:
    """What sites with a GPU compute in, and what they could."""
    asked = experiment.training.precision
    offer = "; for GPUs with bfloat16 there is --set training.precision=auto" if asked == "float32" else ""
    return f"precision: {asked}{offer}; scores of other than float32 on a GPU are not known (jobs/README.md, Precision)"


def _minimums(request: Request, experiment: Experiment) -> list[str]:
    """How many sites the job needs, in every round and for its amplitude; none for a job that is not there yet."""
    if not Path(request.model).is_dir():
        return []
    amplitude, federation = experiment.amplitude, experiment.federation
    lines = []
    if amplitude.region != "off":
        lines.append(
            f"amplitude: a site of fewer training patients than {amplitude.minimum_cases} or its own limit sends none "
            f"and trains with the global one; {count_text(amplitude.minimum_sites, 'site')} must send theirs"
        )
    for name, needed in (
        ("federation", federation.minimum_sites),
        ("amplitude", amplitude.minimum_sites if lines else 0),
    ):
        if needed > request.sites:
            lines.append(
                f"{name}.minimum_sites is {needed}: with {count_text(request.sites, 'site')} the job fails; lower it"
            )
    return lines


def _advice(longest: str, request: Request, parts: Parts, exchange: str) -> str:
    if longest.startswith("training"):
        return "a GPU, fewer images or a lower training.local_epochs shorten it"
    if not longest.startswith(("model", "differences")):
        return "a narrower network (network.width) shortens it"
    up = longest.startswith("differences")
    taken = parts.unpack_answer + parts.add
    if up and request.sites * taken > max(request.sites * parts.up / request.server_rate, parts.up / request.site_rate):
        return "a faster core at the server or a narrower network (network.width) shortens it"
    whose = "the server" if request.sites * request.site_rate > request.server_rate else "the sites"
    halved = "" if exchange == "float16" else ", and so does federation.exchange=float16"
    return f"a faster line at {whose} shortens it{halved}"
