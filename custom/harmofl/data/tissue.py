"""Stained tissue: amounts of hematoxylin and eosin on a grid, with every nucleus known as a polygon."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Plane = NDArray[np.float32]
Outline = NDArray[np.float64]
Amount = float | NDArray[np.floating]

LEAST_VISIBLE = 6  # pixels; of nuclei cut by the border, smaller pieces are left out
VERTICES = 28  # of an outline; the polygon is 0.8 % smaller than the smooth shape


@dataclass(frozen=True)
class Kind:
    """How the nuclei of one kind of cell look; lengths in micrometers."""

    cell: str  # class name that a pathologist would give it
    radius: float
    spread: float  # standard deviation of the log radius
    stretch: float  # long axis over short axis
    waviness: float  # how far the outline is from an ellipse
    lobes: float  # depth of three lobes
    darkness: float  # hematoxylin
    contrast: float  # standard deviation of the log darkness between nuclei
    vesicular: float  # how much paler the inside is than the rim
    cytoplasm: float = 0.0  # eosin in a ring around the nucleus, which is drawn with it


KINDS = {
    "lymphocyte": Kind("Lymphocyte", 3.3, 0.07, 1.1, 0.03, 0, 1.0, 0.10, 0.1),
    "follicular": Kind("Lymphocyte", 4.3, 0.09, 1.15, 0.04, 0, 0.75, 0.12, 0.3),
    "epithelial": Kind("Epithelial", 4.2, 0.08, 1.35, 0.04, 0, 0.75, 0.12, 0.25),
    "tumor": Kind("Epithelial", 6.0, 0.22, 1.3, 0.10, 0, 0.85, 0.25, 0.4),
    "macrophage": Kind("Macrophage", 4.8, 0.12, 1.4, 0.12, 0, 0.55, 0.12, 0.3, cytoplasm=0.45),
    "neutrophil": Kind("Neutrophil", 3.6, 0.08, 1.1, 0.04, 0.32, 1.05, 0.08, 0.0, cytoplasm=0.6),
    "fibroblast": Kind("Ambiguous", 3.0, 0.12, 3.6, 0.05, 0, 0.75, 0.15, 0.1),
    "unsharp": Kind("Ambiguous", 4.5, 0.15, 1.3, 0.05, 0, 0.3, 0.10, 0.0),
}


class Nucleus(NamedTuple):
    """One nucleus: its kind, and outlines (n, 2) as x, y in pixels, where a whole number is the center of a pixel."""

    kind: str
    outline: Outline
    hole: Outline | None = None


class Section:
    """A square piece of tissue into which compartments, and then their nuclei, are painted.

    Attributes:
        hematoxylin: amount of stain, (size, size), about 1 in a dark nucleus.
        eosin: the same, about 1 in a dense fiber.
        owner: number of the compartment that a pixel belongs to.
        nuclei: all nuclei, some of them only in part on the image.
    """

    def __init__(self, rng: np.random.Generator, size: int, pixel: float) -> None:
        self.rng, self.size, self.pixel = rng, size, pixel
        axis = np.arange(size, dtype=np.float32) * np.float32(pixel)
        self.x, self.y = np.meshgrid(axis, axis)
        self.extent = size * pixel
        self.hematoxylin: Plane = np.zeros((size, size), np.float32)
        self.eosin: Plane = np.zeros((size, size), np.float32)
        self.owner = np.zeros((size, size), np.int16)
        self.nuclei: list[Nucleus] = []
        self.grain = self.noise(1.6)
        self._planned: list[tuple[str, int, float, float | None, NDArray[np.bool_] | None]] = []
        self._placed = np.empty((0, 3))  # x, y and radius in micrometers

    def noise(self, length: float) -> Plane:
        """Smooth noise of about unit standard deviation that varies over `length` micrometers."""
        count = max(4, round(self.extent / length) + 3)
        coarse = self.rng.standard_normal((count, count), dtype=np.float32)
        fine = ndimage.zoom(coarse, self.size / (count - 3) + 1e-6, order=3, mode="nearest", grid_mode=True)
        start = (len(fine) - self.size) // 2
        return fine[start : start + self.size, start : start + self.size] * np.float32(1.6)

    def disc(self, center: tuple[float, float], radius: float) -> Plane:
        """Signed distance in micrometers (negative inside) to a disc with a wavy edge."""
        rough = 1 + np.float32(0.14) * self.noise(max(0.7 * radius, 8.0))
        return np.hypot(self.x - center[0], self.y - center[1]) - np.float32(radius) * rough

    def cover(self, distance: Plane, hematoxylin: Amount, eosin: Amount) -> int:
        """Paint a compartment where `distance` is negative and return its number."""
        alpha = np.clip(0.5 - distance / np.float32(self.pixel), 0, 1)
        self.hematoxylin += alpha * (np.maximum(hematoxylin, 0) - self.hematoxylin)
        self.eosin += alpha * (np.maximum(eosin, 0) - self.eosin)
        number = int(self.owner.max()) + 1
        self.owner[distance < 0] = number
        return number

    def crowd(
        self,
        kind: str,
        number: int,
        spacing: float,
        *,
        along: float | None = None,
        where: NDArray[np.bool_] | None = None,
    ) -> None:
        """Plan nuclei of one kind, `spacing` micrometers apart, for what stays visible of a compartment.

        Args:
            kind: one of KINDS.
            number: of the compartment.
            spacing: distance from center to center.
            along: angle of the long axes in radians; random without it.
            where: the part of the compartment that has these nuclei; all of it by default.
        """
        self._planned.append((kind, number, spacing, along, where))

    def settle(self) -> None:
        """Paint the planned nuclei, now that all compartments lie in place; none lies over another."""
        for kind, number, spacing, along, where in self._planned:
            inside = self.owner == number
            self._populate(kind, inside if where is None else inside & where, spacing, along)
        self._planned.clear()

    def hollow(self, index: int, share: float) -> None:
        """Put a pale vacuole into a nucleus: a hole of its outline, `share` of it in size."""
        nucleus = self.nuclei[index]
        middle = nucleus.outline.mean(0)
        hole = middle + share * (nucleus.outline - middle)
        distance = np.hypot(self.x / self.pixel - middle[0], self.y / self.pixel - middle[1])
        edge = np.interp(
            np.arctan2(self.y / self.pixel - middle[1], self.x / self.pixel - middle[0]),
            *_polar(hole - middle),
            period=2 * np.pi,
        )
        alpha = np.clip(0.5 + edge - distance, 0, 1).astype(np.float32)
        self.hematoxylin *= 1 - np.float32(0.9) * alpha
        self.nuclei[index] = nucleus._replace(hole=hole)

    def _populate(self, kind: str, inside: NDArray[np.bool_], spacing: float, along: float | None) -> None:
        look, rng = KINDS[kind], self.rng
        ticks = np.arange(-2 * look.radius, self.extent + 2 * look.radius, spacing)
        spots = np.stack(np.meshgrid(ticks, ticks), -1)
        spots[1::2, :, 0] += spacing / 2
        spots = (spots + rng.uniform(-0.25, 0.25, spots.shape) * spacing).reshape(-1, 2)
        rng.shuffle(spots)
        # A region goes on beyond the border of the image, so that nuclei are cut there.
        at = np.clip(np.rint(spots / self.pixel).astype(int), 0, self.size - 1)
        spots = spots[inside[at[:, 1], at[:, 0]]]
        radii = look.radius * np.exp(np.clip(rng.normal(0, look.spread, len(spots)), -0.6, 0.6))
        keep = self._free(spots, radii, 0.6 if look.stretch > 2 else 0.95)
        if keep:
            self._paint(kind, spots[keep], radii[keep], along)

    def _free(self, spots: NDArray[np.float64], radii: NDArray[np.float64], share: float) -> list[int]:
        """Indices of the spots that lie on no nucleus yet; these places are taken then."""
        taken, count = np.vstack((self._placed, np.empty((len(spots), 3)))), len(self._placed)
        keep = []
        for index, (spot, radius) in enumerate(zip(spots, radii, strict=True)):
            near = taken[:count]
            gaps = (near[:, 0] - spot[0]) ** 2 + (near[:, 1] - spot[1]) ** 2 - (share * (near[:, 2] + radius)) ** 2
            if count == 0 or gaps.min() > 0:
                taken[count] = (*spot, radius)
                count += 1
                keep.append(index)
        self._placed = taken[:count]
        return keep

    def _paint(self, kind: str, spots: NDArray[np.float64], radii: NDArray[np.float64], along: float | None) -> None:
        """Stain nuclei of one kind, all at once in boxes of equal size, and remember their outlines."""
        look = KINDS[kind]
        shape = _Shapes.draw(self.rng, look, radii / self.pixel, along)
        centers = spots / self.pixel
        turns = shape.vertex_angles()
        reach = shape.radius(turns)
        outlines = np.stack((reach * np.cos(turns), reach * np.sin(turns)), -1) + centers[:, None]
        half = int(np.ceil(reach.max() * (1.6 if look.cytoplasm else 1.0))) + 2
        boxes = _Boxes.around(centers, half, shape)
        darkness = look.darkness * np.exp(self.rng.normal(0, look.contrast, (len(spots), 1, 1)))
        paler = look.vesicular * (1 - np.minimum(boxes.rho / boxes.edge, 1) ** 3)
        stain = (darkness * (1 - paler)).astype(np.float32)
        inside = np.clip(0.5 + boxes.edge - boxes.rho, 0, 1)
        body = np.clip(0.5 + 1.6 * boxes.edge - boxes.rho, 0, 1)
        for index, outline in enumerate(outlines):
            here, part = boxes.overlap(index, self.size)
            cell, grain = inside[index][part], self.grain[here]
            if cell.sum() < LEAST_VISIBLE:
                continue
            if look.cytoplasm:
                self._blend(here, body[index][part], 0.06, look.cytoplasm * np.maximum(1 + 0.3 * grain, 0))
            clumps = np.clip(1 + (0.08 + 0.3 * look.vesicular) * grain, 0.4, 1.8)
            self._blend(here, cell, stain[index][part] * clumps, 0.18)
            self.nuclei.append(Nucleus(kind, outline))

    def _blend(self, here: tuple[slice, slice], alpha: Plane, hematoxylin: Amount, eosin: Amount) -> None:
        blue, red = self.hematoxylin[here], self.eosin[here]
        blue += alpha * (hematoxylin - blue)
        red += alpha * (eosin - red)


@dataclass(frozen=True)
class _Shapes:
    """Star-shaped outlines, one a row: an ellipse times a short Fourier series."""

    radii: NDArray[np.float32]
    stretch: NDArray[np.float32]
    turn: NDArray[np.float32]
    waves: NDArray[np.float32]  # (n, orders) amplitudes
    phases: NDArray[np.float32]

    @classmethod
    def draw(cls, rng: np.random.Generator, look: Kind, radii: NDArray[np.float64], along: float | None) -> "_Shapes":
        count = (len(radii), 1)
        turn = rng.uniform(0, np.pi, count) if along is None else rng.normal(along, 0.25, count)
        stretch = 1 + (look.stretch - 1) * np.exp(rng.normal(0, 0.3, count))
        waves = rng.normal(0, look.waviness, (len(radii), 3)) / (1.0, 1.2, 1.6)
        waves[:, 1] += look.lobes
        waves = np.clip(waves, -0.35, 0.35)
        phases = rng.uniform(0, 2 * np.pi, waves.shape)
        return cls(*(a.astype(np.float32) for a in (radii[:, None], stretch, turn, waves, phases)))

    def vertex_angles(self) -> NDArray[np.float64]:
        """Angles (n, VERTICES) of the vertices, closest together where an ellipse bends most."""
        steps = np.linspace(0, 2 * np.pi, VERTICES, endpoint=False)
        root = np.sqrt(self.stretch.astype(np.float64))
        return self.turn + np.arctan2(np.sin(steps) / root, np.cos(steps) * root)

    def radius(self, angle: NDArray[np.floating]) -> NDArray[np.float32]:
        """Distance from center to edge in pixels at angles (n, m)."""
        angle = angle.astype(np.float32) - self.turn
        root = np.sqrt(self.stretch)
        ellipse = 1 / np.sqrt((np.cos(angle) / root) ** 2 + (np.sin(angle) * root) ** 2)
        factor = np.ones_like(ellipse)
        for order in range(self.waves.shape[1]):
            if self.waves[:, order].any():
                factor += self.waves[:, order, None] * np.cos((order + 2) * angle + self.phases[:, order, None])
        return self.radii * ellipse * factor


class _Boxes(NamedTuple):
    """Square boxes around the nuclei: corner in pixels, distance from the center, and distance to the edge."""

    corner: NDArray[np.intp]  # (n, 2) x, y
    rho: Plane  # (n, b, b)
    edge: Plane

    @classmethod
    def around(cls, centers: NDArray[np.float64], half: int, shape: _Shapes) -> "_Boxes":
        corner = np.rint(centers).astype(int) - half
        steps = np.arange(2 * half + 1)
        from_center = (corner - centers)[:, :, None] + steps
        dx, dy = from_center[:, 0, None, :].astype(np.float32), from_center[:, 1, :, None].astype(np.float32)
        rho, angle = np.hypot(dx, dy), np.arctan2(dy, dx)
        return cls(corner, rho, shape.radius(angle.reshape(len(centers), -1)).reshape(rho.shape))

    def overlap(self, index: int, size: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """The pixels of the image under a box, and the part of the box that lies on the image."""
        length = self.rho.shape[1]
        inside, part = [], []
        for start in reversed(self.corner[index].tolist()):
            first, last = min(max(start, 0), size), max(min(start + length, size), 0)
            inside.append(slice(first, last))
            part.append(slice(first - start, max(last - start, 0)))
        return (inside[0], inside[1]), (part[0], part[1])


def _polar(outline: Outline) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Angles and radii of the vertices, seen from the origin."""
    return np.arctan2(outline[:, 1], outline[:, 0]), np.hypot(outline[:, 0], outline[:, 1])
