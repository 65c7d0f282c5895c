"""Where a site keeps demo data and decoded images: beside its state, or in a folder that several runs share."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harmofl.experiment import Experiment
from harmofl.files import locked_folder
from harmofl.flare.site import SiteConfig
from harmofl.tasks import is_outside


@contextmanager
def data_folder(site: SiteConfig, name: str) -> Iterator[Path]:
    """The folder for what is made of the files of site `name`, which is another one than `site` for pooled data.

    A shared folder is one process's at a time: the first one writes and decodes, the others wait and then read.
    """
    if site.shared_data is None:
        yield site.state_root
        return
    with locked_folder(site.shared_data / name) as folder:
        yield folder


def demo_folder(folder: Path, name: str, experiment: Experiment) -> Path:
    """Where below `folder` the demo data of a site lie: experiments that differ only in training share them."""
    decides: list[object] = [experiment.hash]
    if not is_outside(experiment.task):
        demo = experiment.demo.data if experiment.demo else {}
        data = experiment.data.model_dump(mode="json", exclude={"simulated_root"})
        decides = [experiment.task, experiment.seed, data, experiment.reader, demo]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "demo_data" / key / name
