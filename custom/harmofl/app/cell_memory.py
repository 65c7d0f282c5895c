"""How many cells of a comparison fit into the memory of this machine side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harmofl.app.costs import fitting_processes
from harmofl.app.grid import Cell
from harmofl.data.findings import DataRootError
from harmofl.experiment import Experiment
from harmofl.tasks import load_task, place_sites, untrained_network

# Of a server in one process with its sites, a value of the network, whatever the number of sites: the sum in 8 bytes,
# drift in two sums of float64, one site's difference in float32 and in float64, this model and the next in float32.
SERVER_BYTES = 8 + 2 * 8 + 4 + 8 + 2 * 4


def fitting_cells(cells: Sequence[Cell], roots: Mapping[str, Path]) -> int:
    """As many as fit where every process holds the data of all its sites, at least 1.

    Args:
        cells: of one comparison; the one that needs most decides.
        roots: data root of each site; none for demo data, which is small.
    """
    images: dict[str, int] = {}  # by what decides them: reading all data takes time, and most cells read it alike
    fitting: dict[str, int] = {}
    for cell in cells:
        experiment, pooled = cell.experiment, cell.experiment.federation.pooled_data
        reading = repr((experiment.data, experiment.reader, experiment.amplitude.intensity))
        if reading not in images:
            images[reading] = images_bytes(experiment, roots)
        demand = repr((reading, experiment.network, experiment.training, pooled))
        if demand not in fitting:
            held = images[reading] * (2 if pooled else 1)  # the site that trains has a copy of every other one's
            beside = held + server_bytes(experiment)
            fitting[demand] = fitting_processes(experiment, beside)
    return min(fitting.values(), default=1)


def images_bytes(experiment: Experiment, roots: Mapping[str, Path]) -> int:
    """Decoded images of all sites that are kept in memory; a folder that cannot be read is left to the cells."""
    task, total = load_task(experiment), 0
    for site, place in place_sites(experiment, roots).items():
        try:
            total += task.inspect(place, site, experiment).bytes_held if isinstance(place, Path) else 0
        except DataRootError:
            continue
    return total


def server_bytes(experiment: Experiment) -> int:
    """What the server's part of a cell holds of the network."""
    values = sum(parameter.numel() for parameter in untrained_network(experiment).parameters())
    return values * SERVER_BYTES
