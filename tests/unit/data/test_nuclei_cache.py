from pathlib import Path

import numpy as np
import pytest

from harmofl.data import nuclei_cache
from harmofl.data.imagescope import CELL_TYPES
from harmofl.data.nuclei import NUCLEUS, find_nuclei, read_nuclei
from harmofl.data.nuclei_cache import NucleiCache
from harmofl.data.synthetic_histology import NUCLEI_SITES, write_nuclei_site


def test_an_image_is_decoded_once_for_each_choice_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nuclei_site(tmp_path / "site", sorted(NUCLEI_SITES)[0], patients=3, images=3, seed=0, size=64)
    case = find_nuclei(tmp_path / "site")[0][0]
    decoded: list[tuple[str, ...]] = []

    def counted(case, classes):
        decoded.append(tuple(classes))
        return read_nuclei(case, classes)

    monkeypatch.setattr(nuclei_cache, "read_nuclei", counted)
    for classes in ((NUCLEUS,), CELL_TYPES):
        fresh = read_nuclei(case, classes)
        for _ in range(2):
            held = NucleiCache(tmp_path / "cache").read(case, classes)
            assert (held.name, held.patient, held.findings) == (fresh.name, fresh.patient, fresh.findings)
            np.testing.assert_array_equal(held.image, fresh.image)
            np.testing.assert_array_equal(held.target, fresh.target)
    assert decoded == [(NUCLEUS,), tuple(CELL_TYPES)]
