"""What lies on the slides: the label of a patch is true, and organs hold the cells that they have."""

import numpy as np
import pytest
from skimage.draw import polygon2mask

from harmofl.data.specimens import CENTER, ORGANS, lymph_node, organ_piece
from harmofl.data.tissue import KINDS


def tumor_pixels(section):
    masks = [
        polygon2mask((section.size, section.size), n.outline[:, ::-1]) for n in section.nuclei if n.kind == "tumor"
    ]
    return np.logical_or.reduce(masks) if masks else np.zeros((section.size, section.size), bool)


@pytest.mark.parametrize("size", [64, 96])
def test_the_label_tells_whether_tumor_lies_in_the_middle(size):
    first = (size - CENTER) // 2
    middle = (slice(first, first + CENTER),) * 2
    beside = 0
    for seed in range(60):
        with_tumor = lymph_node(np.random.default_rng([seed, 1]), size, 1.0, True)
        assert tumor_pixels(with_tumor)[middle].any()
        without = tumor_pixels(lymph_node(np.random.default_rng([seed, 2]), size, 1.0, False))
        assert not without[middle].any()
        beside += int(without.any())
    assert beside > 0, "some patches without the label have tumor at their border"


def test_normal_patches_hold_crowds_of_small_dark_nuclei_too():
    counts = {True: [], False: []}
    for seed in range(40):
        for tumor in (True, False):
            section = lymph_node(np.random.default_rng([seed, int(tumor)]), 96, 1.0, tumor)
            counts[tumor].append(sum(n.kind == "lymphocyte" for n in section.nuclei))
    # a sheet fills 96 x 96 micrometers at about 8 between centers: more than 100
    for numbers in counts.values():
        assert max(numbers) > 100 and min(numbers) == 0


def test_organs_differ_in_their_cells_and_spaces():
    kinds, empty = {}, {}
    for name, organ in ORGANS.items():
        sections = [organ_piece(np.random.default_rng([0, seed]), 128, 0.5, organ) for seed in range(12)]
        kinds[name] = {n.kind for section in sections for n in section.nuclei}
        empty[name] = np.mean([(s.hematoxylin + s.eosin < 0.05).mean() for s in sections])
        counts = [len(section.nuclei) for section in sections]
        # 64 x 64 micrometers hold at most 9 x 9 lymphocytes
        assert min(counts) >= 3 and max(counts) <= 81
        assert any(n.hole is not None for section in sections for n in section.nuclei)
        assert any(n.hole is None for section in sections for n in section.nuclei)
    assert "macrophage" in kinds["lung"] & kinds["kidney"] and "macrophage" not in kinds["breast"]
    assert "neutrophil" in kinds["lung"] and "neutrophil" not in kinds["kidney"]
    assert {KINDS[kind].cell for found in kinds.values() for kind in found} == {
        "Epithelial",
        "Lymphocyte",
        "Macrophage",
        "Neutrophil",
        "Ambiguous",
    }
    assert empty["lung"] > 2 * empty["triple negative breast"]


def test_amounts_of_stain_stay_in_range():
    for seed in range(10):
        section = lymph_node(np.random.default_rng(seed), 96, 1.0, bool(seed % 2))
        for plane in (section.hematoxylin, section.eosin):
            assert plane.dtype == np.float32 and plane.min() >= 0 and plane.max() < 4
