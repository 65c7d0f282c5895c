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
    """As many as fit, at least 1.

    Cells map the images of all sites from files that they share: those that read them alike hold them once.

    Args:
        cells: of one comparison; the one that needs most decides.
        roots: data root of each site; none for demo data, which is small.
    """
    images: dict[str, int] = {}  # by what decides them: reading all data takes time, and most cells read it alike
    fitting: dict[str, int] = {}
    for cell in cells:
        reading = _reading(cell.experiment)
        if reading not in images:
            images[reading] = images_bytes(cell.experiment, roots)
    alike = len(images) == 1
    for cell in cells:
        experiment, reading = cell.experiment, _reading(cell.experiment)
        demand = repr((reading, experiment.network, experiment.training))
        if demand not in fitting:
            server, held = server_bytes(experiment), images[reading]
            fitting[demand] = fitting_processes(
                experiment, server if alike else server + held, together=held if alike else 0
            )
    return min(fitting.values(), default=1)


def _reading(experiment: Experiment) -> str:
    """What decides the decoded images of an experiment."""
    return repr((experiment.data, experiment.reader, experiment.amplitude.intensity))


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
