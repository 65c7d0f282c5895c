"""Real images of the study: data roots made of public H&E images, which stay where they are or go into its folder."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REALDATA = Path(os.environ.get("HARMOFL_REALDATA", Path(__file__).resolve().parents[3] / "shared" / "realdata"))
# 1000 x 1000 pixels each, of one patient by its barcode; there are five, a split needs three, so one is at both sites
NUCLEI = {
    "north": ["TCGA-50-5931-01Z-00-DX1", "TCGA-B0-5710-01Z-00-DX1", "TCGA-NH-A8F7-01A-01-TS1"],
    "south": ["TCGA-AO-A0J2-01A-01-BSA", "TCGA-HC-7209-01A-01-TS1", "TCGA-B0-5710-01Z-00-DX1"],
}
EVERY_PATIENT = {"amplitude.minimum_cases": 1}


@dataclass(frozen=True)
class Place:
    """Each site's data root, and what its size asks of the experiment."""

    roots: Mapping[str, Path]
    overrides: Mapping[str, Any]


def real_nuclei(folder: Path) -> Place:
    """Two sites of three images of nuclei, copied below `folder`."""
    root = folder / "real_nuclei"
    for site, names in NUCLEI.items():
        (root / site).mkdir(parents=True, exist_ok=True)
        for name in names:
            for suffix in (".tif", ".xml"):
                if not (root / site / f"{name}{suffix}").exists():
                    shutil.copy(REALDATA / "nuclei" / "monuseg_by_nc_sa" / f"{name}{suffix}", root / site)
    sizes = {"data.height": 128, "data.width": 128, "training.batch_size": 8}
    return Place(dict.fromkeys(NUCLEI, root), EVERY_PATIENT | sizes)


def real_patches() -> Place:
    """Five sources of 9 to 18 patches, of one or two patients each: only a split by patches trains."""
    root = REALDATA / "histology" / "breast5sites_wilds_layout_by_nc_sa"
    sites = [f"hospital{number}" for number in range(1, 6)]
    return Place(dict.fromkeys(sites, root), EVERY_PATIENT | {"data.split": "as_published"})
