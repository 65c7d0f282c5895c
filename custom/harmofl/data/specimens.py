"""What lies on a slide: lymph nodes with or without a metastasis, and pieces of organs."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial import cKDTree

from harmofl.data.tissue import Plane, Section

CENTER = 32  # pixels along both edges of the middle square whose tumor decides the label of a patch


def lay_stroma(section: Section, density: float, spacing: float) -> None:
    """Cover everything with wavy bundles of collagen, clefts between them, and spindle-shaped nuclei along them."""
    rng = section.rng
    angle = rng.uniform(0, np.pi)
    across = section.x * np.float32(np.cos(angle)) + section.y * np.float32(np.sin(angle)) + 6 * section.noise(40.0)
    phase = across * np.float32(2 * np.pi / rng.uniform(7, 11))
    bundles = 0.5 + 0.5 * np.sin(phase + 0.7 * section.noise(12.0))
    strands = np.sin(2.7 * phase + 0.8 * section.noise(9.0))
    eosin = np.float32(density) * (0.5 + 0.35 * bundles + 0.10 * strands + 0.04 * section.grain)
    clefts = np.clip(5 * (0.22 - bundles), 0, 1) * np.clip(1.5 * section.noise(22.0), 0, 1)
    number = section.cover(np.full_like(section.x, -1), 0.05, np.maximum(eosin * (1 - clefts), 0.02))
    section.crowd("fibroblast", number, spacing, along=angle + np.pi / 2)


def lay_spaces(section: Section, distance: Plane, diameter: float, wall: float) -> int:
    """Cover a region with round empty spaces between thin walls, as fat cells or alveoli; returns its number."""
    count = max(3, round((section.extent / diameter + 2) ** 2))
    seeds = section.rng.uniform(-diameter, section.extent + diameter, (count, 2))
    bent = np.stack((section.x + 2 * section.noise(12.0), section.y + 2 * section.noise(12.0)), -1)
    near, _ = cKDTree(seeds).query(bent.reshape(-1, 2), k=2)
    gap = (near[:, 1] - near[:, 0]).reshape(section.x.shape).astype(np.float32)
    walls = np.clip((wall - gap) / np.float32(section.pixel) + 0.5, 0, 1)
    number = section.cover(distance, 0.06 * walls, 0.5 * walls + np.float32(0.01))
    section.crowd("fibroblast", number, 16, where=gap < wall)
    return number


def lay_gland(section: Section, center: tuple[float, float], radius: float, wall: float, clear: float) -> None:
    """Paint a gland or tubule: one regular layer of nuclei around an open lumen.

    Args:
        section: receives it.
        center: x, y in micrometers.
        radius: outer one in micrometers.
        wall: height of the cells in micrometers.
        clear: share by which the cytoplasm is emptier than usual.
    """
    outer = section.disc(center, radius)
    section.cover(outer - 1.2, 0.05, 0.75)  # basement membrane
    cytoplasm = np.float32(0.45 * (1 - clear)) * (1 + 0.2 * section.noise(3.0))
    number = section.cover(outer, 0.14 * (1 - clear), cytoplasm)
    section.cover(outer + np.float32(wall), 0.0, 0.01)
    section.crowd("epithelial", number, 8.5, where=outer > -min(wall, 8.0))


def lay_nest(section: Section, distance: Plane, spacing: float) -> None:
    """Paint a tumor: crowded large nuclei of very different size, shape and darkness in purple cytoplasm."""
    number = section.cover(distance, 0.18, 0.42 * (1 + np.float32(0.2) * section.noise(3.0)))
    section.crowd("tumor", number, spacing)


def lay_lymphoid(section: Section, distance: Plane, kind: str, spacing: float) -> int:
    """Paint a crowd of small, round, dark nuclei of equal size; returns its number."""
    number = section.cover(distance, 0.10, 0.17 * (1 + np.float32(0.5) * section.noise(4.0)).clip(0))
    section.crowd(kind, number, spacing)
    return number


def lymph_node(rng: np.random.Generator, size: int, pixel: float, tumor: bool) -> Section:
    """A patch of a lymph node; with a tumor if any of it shall lie in the middle square of CENTER pixels.

    A patch without tumor may show some of it at its border. Sheets of dark lymphocytes, follicles of larger pale ones,
    dense stroma and ducts of regular epithelium stand in patches of either label.
    """
    section = Section(rng, size, pixel)
    middle = section.extent / 2
    everywhere = np.full_like(section.x, -1)
    lay_stroma(section, rng.uniform(0.6, 1.25), rng.uniform(11, 18))
    setting = rng.choice(("sheet", "stroma", "fat", "duct"), p=(0.45, 0.25, 0.12, 0.18))
    spot = (rng.uniform(0, section.extent), rng.uniform(0, section.extent))
    if setting == "sheet":
        lay_lymphoid(section, everywhere, "lymphocyte", rng.uniform(7.0, 9.5))
        if rng.random() < 0.4:
            lay_lymphoid(section, section.disc(spot, rng.uniform(18, 32)), "follicular", 9.5)
    elif setting == "fat":
        lay_spaces(section, section.disc(spot, rng.uniform(25, 60)), 30, 1.8)
    elif setting == "duct":
        spot = (middle + rng.normal(0, 18), middle + rng.normal(0, 18))
        lay_gland(section, spot, rng.uniform(17, 30), rng.uniform(10, 14), rng.uniform(0, 0.4))
    if setting != "sheet" and rng.random() < 0.6:
        spot = (rng.uniform(0, section.extent), rng.uniform(0, section.extent))
        lay_lymphoid(section, section.disc(spot, rng.uniform(12, 30)), "lymphocyte", 7.8)
    if tumor:
        spot = (middle + rng.normal(0, 9), middle + rng.normal(0, 9))
        lay_nest(section, section.disc(spot, rng.uniform(22, 46)), rng.uniform(9, 11.5))
    elif rng.random() < 0.2:
        _lay_nest_at_border(section)
    section.settle()
    return section


def _lay_nest_at_border(section: Section) -> None:
    """Paint tumor in a corner or along an edge, well away from the middle square."""
    turn, middle = section.rng.uniform(0, 2 * np.pi), section.extent / 2
    center = (middle + 1.3 * middle * np.cos(turn), middle + 1.3 * middle * np.sin(turn))
    beside = np.maximum(np.abs(section.x - middle), np.abs(section.y - middle))
    guard = np.float32((CENTER / 2 + 10) * section.pixel) - beside  # the largest nuclei reach 13 micrometers
    lay_nest(section, np.maximum(section.disc(center, 0.75 * middle), guard), 10)


@dataclass(frozen=True)
class Organ:
    """What a piece of an organ is made of; lengths in micrometers, counts in a square of 64 micrometers."""

    collagen: float  # density
    spaces: float = 0.0  # diameter of fat cells or alveoli; 0 where there are none
    glands: tuple[int, int] = (0, 0)  # least and most
    gland_radius: float = 0.0
    clear: float = 0.0  # how empty the cytoplasm of the glands is
    nests: float = 0.0  # probability of a tumor
    lymphoid: float = 0.5  # probability of a lymphoid aggregate
    strays: tuple[str, ...] = ("lymphocyte",)  # single cells in the stroma


ORGANS: dict[str, Organ] = {
    "lung": Organ(0.7, 34, nests=0.4, lymphoid=0.4, strays=("macrophage", "lymphocyte", "neutrophil", "unsharp")),
    "kidney": Organ(0.5, glands=(4, 7), gland_radius=14, clear=0.5, nests=0.1, strays=("macrophage", "lymphocyte")),
    "breast": Organ(0.95, glands=(0, 2), gland_radius=17, nests=0.6, strays=("lymphocyte", "unsharp")),
    "prostate": Organ(0.9, glands=(1, 4), gland_radius=21, nests=0.2, strays=("lymphocyte", "neutrophil")),
    "mixed": Organ(0.7, 40, glands=(0, 3), gland_radius=16, nests=0.4, strays=("lymphocyte", "macrophage")),
    "triple negative breast": Organ(0.8, nests=0.9, lymphoid=0.8),
}


def organ_piece(rng: np.random.Generator, size: int, pixel: float, organ: Organ) -> Section:
    """A piece of an organ; now and then one nucleus has a vacuole, which annotators cut out."""
    section = Section(rng, size, pixel)
    places = (section.extent / 64) ** 2
    lay_stroma(section, organ.collagen * rng.uniform(0.8, 1.2), rng.uniform(18, 26))
    floor = int(section.owner.max())

    def spot() -> tuple[float, float]:
        return rng.uniform(0, section.extent), rng.uniform(0, section.extent)

    if organ.spaces and rng.random() < 0.7:
        floor = lay_spaces(section, section.disc(spot(), 0.8 * section.extent), organ.spaces, rng.uniform(3, 6))
    if rng.random() < organ.lymphoid:
        lay_lymphoid(section, section.disc(spot(), rng.uniform(12, 22)), "lymphocyte", 8.2)
    for _ in range(round(rng.uniform(*organ.glands) * places)):
        radius = organ.gland_radius * rng.uniform(0.8, 1.2)
        lay_gland(section, spot(), radius, rng.uniform(9, 11), organ.clear)
    if rng.random() < organ.nests:
        lay_nest(section, section.disc(spot(), rng.uniform(20, 38)), rng.uniform(10, 12))
    for kind in organ.strays:
        section.crowd(kind, floor, rng.uniform(18, 30))
    section.settle()
    if rng.random() < 0.3:
        _hollow_one(section)
    return section


def _hollow_one(section: Section) -> None:
    """Put a vacuole into the largest nucleus that lies fully on the image."""
    spans = [np.ptp(nucleus.outline, axis=0).min() for nucleus in section.nuclei]
    whole = [
        index
        for index, nucleus in enumerate(section.nuclei)
        if nucleus.outline.min() > 1 and nucleus.outline.max() < section.size - 2
    ]
    if whole:
        section.hollow(max(whole, key=lambda index: float(spans[index])), 0.4)
