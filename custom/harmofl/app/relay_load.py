"""What the server and each relay carry in a round where relays sum what their sites send: bytes, memory, time."""

import math
from dataclasses import dataclass

from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from rich.console import Console
from rich.table import Table

from harmofl.app.check import duration_text, size_text
from harmofl.app.forecast import MODELS_AT_SERVER, REPEATS, Forecast, Parts
from harmofl.app.job import JobError
from harmofl.app.processor_time import spent
from harmofl.core.grid_sum import MOST
from harmofl.core.partial_sum import PartialSum
from harmofl.core.partition import partition_of, select
from harmofl.core.server_rules import ServerRule
from harmofl.core.training import state_arrays
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.tasks import untrained_network

# Of a relay: model and task as received and as sent, answer as received and as arrays, sums in 8 bytes a value, and
# these once more as they are sent.
MODELS_AT_RELAY = 8
PARTIAL_SUMS = 2  # models: the server has a partial sum as received and as arrays in the place of an answer
_ADDED = 1e-3


@dataclass(frozen=True)
class SumParts:
    """Bytes of a partial sum as a message of FLARE, and seconds to make one and to add one, read and checked."""

    size: int
    make: float
    merge: float


@dataclass(frozen=True)
class Carried:
    """What one place carries in a round.

    Attributes:
        down, up: bytes that it sends towards the sites, and that it receives from them.
        memory: bytes of its process.
        line: seconds that its line is busy, both ways.
        summing: seconds that its processor adds what it receives.
    """

    down: int
    up: int
    memory: int
    line: float
    summing: float


@dataclass(frozen=True)
class RelayLoad:
    """A round with relays: `flat` is the server without them, `behind` the most sites that a relay has."""

    behind: int
    flat: Carried
    root: Carried
    relay: Carried

    @property
    def bottleneck(self) -> str:
        """What takes longest of a round beside training."""
        times = {
            "the server's line": self.root.line,
            "the server's sum": self.root.summing,
            "a relay's line": self.relay.line,
            "a relay's sum": self.relay.summing,
        }
        return max(times, key=lambda name: times[name])


def check_relays(relays: int, sites: int, experiment: Experiment) -> None:
    """Refuse a tree that no run can have.

    Raises:
        JobError: more relays than sites, more sites than a mean takes, or a rule that has no partial sums.
    """
    if relays > sites:
        raise JobError(f"--relays {relays}: there are {count_text(sites, 'site')}; a relay needs one at least")
    if sites > MOST:
        raise JobError(f"--sites {sites}: a mean is of at most {MOST} sites, with relays too")
    if experiment.federation.aggregation != "mean":
        raise JobError(
            f"--relays: federation.aggregation '{experiment.federation.aggregation}' needs the difference of each "
            "site, which a relay does not send on; leave --relays out, or set it to 'mean'"
        )


def measure_sums(experiment: Experiment) -> SumParts:
    """Measure a partial sum on this machine, in processor time, which other programs do not lengthen."""
    common_decomposers.register()
    network = untrained_network(experiment)
    partition = partition_of(network, experiment.federation.local_layers)
    weights = select(state_arrays(network), partition.shared)
    rule = ServerRule(experiment.federation, experiment.training, partition.parameters)
    mean, root = rule.open_round(weights), rule.open_round(weights)
    mean.add({name: (value * 0 + _ADDED).astype(value.dtype) for name, value in weights.items()}, 1, 1)

    def make() -> bytes:
        return bytes(fobs.dumps(mean.partial().message()))

    message = make()

    def merge() -> None:
        root.merge(PartialSum.from_message(fobs.loads(message)), [1])

    merge()  # the first one makes the sums
    seconds = [min(spent(work)[1].idle for _ in range(REPEATS)) for work in (make, merge)]
    return SumParts(len(message), *seconds)


def relay_load(
    parts: Parts, sums: SumParts, flat: Forecast, *, sites: int, relays: int, server_rate: float, relay_rate: float
) -> RelayLoad:
    """Put the parts together.

    Args:
        parts: as measured.
        sums: as measured.
        flat: the forecast without relays.
        sites: that take part.
        relays: that sum, each with the same number of sites, or one more.
        server_rate: bytes a second of the server's line, in each direction.
        relay_rate: of a relay's line.
    """
    taken, behind = parts.unpack_answer + parts.add, math.ceil(sites / relays)

    def carried(count: int, up: int, memory: int, rate: float, summing: float) -> Carried:
        return Carried(count * parts.down, count * up, memory, count * (parts.down + up) / rate, summing)

    # the relay's own way to the server is on its line too
    relay = carried(
        behind, parts.up, parts.process + MODELS_AT_RELAY * parts.model, relay_rate, behind * taken + sums.make
    )
    own = (parts.down + sums.size) / relay_rate
    root_memory = parts.server_process + (MODELS_AT_SERVER + PARTIAL_SUMS) * parts.model
    return RelayLoad(
        behind=behind,
        flat=carried(sites, parts.up, flat.server_memory, server_rate, sites * taken),
        root=carried(relays, sums.size, root_memory, server_rate, relays * sums.merge),
        relay=Carried(relay.down, relay.up, relay.memory, relay.line + own, relay.summing),
    )


def show_relays(console: Console, load: RelayLoad, sums: SumParts, relays: int) -> None:
    """Print what server and relays carry, beside the server without relays."""
    console.print(
        f"\nwith {count_text(relays, 'relay')} that sum, each of at most {count_text(load.behind, 'site')} "
        f"(a partial sum has {size_text(sums.size)}; relays have lines like the server's and machines like this one):\n"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("a round")
    for name in ("sends", "receives", "memory", "line", "sum"):
        table.add_column(name, justify="right")
    for name, held in (("server without relays", load.flat), ("server", load.root), ("a relay", load.relay)):
        table.add_row(
            name,
            *(size_text(size) for size in (held.down, held.up, held.memory)),
            *(duration_text(seconds) for seconds in (held.line, held.summing)),
        )
    console.print(table)
    console.print(f"what bounds the round beside training: {load.bottleneck}")
