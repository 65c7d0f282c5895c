"""What a site's process loads: little to register the executor, torch for a task, MONAI only where a part is used."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "monai", "nibabel", "scipy", "skimage", "pandas", "matplotlib", "tensorboard", "imagecodecs", "rich")
TASKS = ", ".join(f"harmofl.tasks.{task}" for task in ("prostate", "camelyon17", "nuclei"))


# With MONAI loaded by a network: everything of it that is used here, and what was hidden from it.
AFTERWARDS = """
import sys
from pathlib import Path
import numpy as np, torch
from harmofl.flare.lean_monai import import_lean_monai
import_lean_monai()
from harmofl.core.networks import build_network
network = build_network("unet", 3, (0.9, 0.1), width=4, norm="instance", seed=0)
assert not [name for name in ("matplotlib", "skimage", "tensorboard", "scipy.stats") if name in sys.modules]
from harmofl.core.distances import surface_distances
from harmofl.data.layout import find_cases
from harmofl.data.nuclei import NucleiImage
from harmofl.data.synthetic import write_prostate_site
from harmofl.data.tiles import whole_image_logits
from harmofl.data.volumes import VolumeSettings, read_site
from harmofl.tasks.nuclei import TASK as NUCLEI
from harmofl.tasks.prostate import TASK as PROSTATE
write_prostate_site(Path(FOLDER), "siemens_1.5t_endorectal", 1, 0, matrix=64, slices=4)
(volume,), findings = read_site(find_cases(Path(FOLDER))[0], VolumeSettings(48, 48, 99.0))
mask = torch.from_numpy(volume.mask)
assert surface_distances(mask, mask, volume.spacing) == (0.0, 0.0)
image = NucleiImage("a", "a", np.zeros((70, 80, 3), np.uint8), np.zeros((70, 80), np.uint8), ())
assert whole_image_logits(lambda tiles: tiles[:, :2], image, 64).shape == (1, 2, 70, 80)
for task in (PROSTATE, NUCLEI):
    assert task.loss()(torch.zeros(1, 2, 4, 4), torch.ones(1, 4, 4, dtype=torch.int64)) > 0
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import build_optimizer
for name in ("adam", "sgd"):
    optimizer = WeightPerturbation(build_optimizer(network, name, 0.01, 0.9, 1e-4), 0.05, network)
    closure = lambda: PROSTATE.loss()(network(torch.rand(2, 3, 32, 32)), torch.ones(2, 32, 32, dtype=torch.int64))
    assert not optimizer.step(closure).skipped
assert not [name for name in ("torch._dynamo", "torch._inductor", "sympy", "pandas") if name in sys.modules]
import matplotlib.pyplot, scipy.signal, scipy.stats, skimage.morphology
"""


def test_a_network_loads_monai_without_what_it_does_not_need(tmp_path: Path) -> None:
    script = AFTERWARDS.replace("FOLDER", repr(str(tmp_path / "site")))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


def loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import harmofl.flare.executor", set()),
        ("import harmofl.flare.executor, harmofl.flare.participant", {"torch"}),
        (f"import harmofl.flare.participant, {TASKS}", {"torch"}),
    ],
    ids=["executor", "participant", "tasks"],
)
def test_heavy_packages_wait_until_they_are_used(statement: str, loaded: set[str]) -> None:
    assert loaded_by(statement) == loaded


OTHER_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace
import harmofl.flare.lean_monai as lean
def instead_of_monai(name):  # while the packages are hidden
    try:
        import_module("requests")
    except ModuleNotFoundError:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(import_module, "requests").result()
        print("one thread")
lean.import_module = instead_of_monai
lean.import_lean_monai()
import_module("jsonschema")
"""


def test_what_monai_does_not_find_other_threads_still_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_THREADS], capture_output=True, text=True, check=False, timeout=99
    )
    assert done.stdout == "one thread\n", done.stderr
