"""A male pelvis in T2 contrast: smooth random shapes in millimetres, painted back to front."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Volume = NDArray[np.float32]

PERIPHERAL, TRANSITION = 1, 2
GLAND_HALF_EXTENTS = (26.5, 21.0, 22.5)  # LR, AP, SI in mm; PI-CAI masks: half of 54/43/46
VOLUME_LOG_SPREAD = 0.45  # 5th and 95th percentile about half and twice the median


@dataclass(frozen=True)
class Patient:
    """What differs from patient to patient; lengths in mm, x to the left, y to the back, z to the head."""

    gland: tuple[float, float, float]
    shift: tuple[float, float, float]
    turn: float
    lean: float
    build: float
    rectum: float
    bladder: float


def draw_patient(rng: np.random.Generator, balloon: bool) -> Patient:
    """Draw size, pose and filling of the organs; a rectal balloon flattens the gland."""
    scale = np.exp(np.clip(rng.normal(0, VOLUME_LOG_SPREAD), -0.9, 0.9) / 3)
    aspect = np.exp(rng.normal(0, 0.06, 3))
    aspect *= (1.06, 0.90, 1.05) if balloon else (1, 1, 1)
    aspect /= np.cbrt(aspect.prod())
    half = scale * aspect * GLAND_HALF_EXTENTS
    return Patient(
        gland=(half[0], half[1], half[2]),
        shift=(rng.normal(0, 3.5), rng.normal(0, 6.0), rng.normal(-1.5, 2.5)),
        turn=rng.normal(0, 0.05),
        lean=rng.normal(-0.15, 0.08),
        build=np.exp(rng.normal(0, 0.06)),
        rectum=rng.normal(20, 2) if balloon else rng.normal(14, 2.5),
        bladder=rng.uniform(0.65, 1.25),
    )


class Canvas:
    """A signal volume into which soft-edged ellipsoids are painted one over the other."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, int, int], spacing: tuple[float, ...], who: Patient):
        self.rng = rng
        self.edge = 0.7 * spacing[0]  # half width of the partial-volume ramp
        axes = [(np.arange(n, dtype=np.float32) - (n - 1) / 2) * d for n, d in zip(shape, spacing, strict=True)]
        self.grid = axes
        x, y, z = np.meshgrid(*axes, indexing="ij", sparse=True)
        x, y, z = x - who.shift[0], y - who.shift[1], z - who.shift[2]
        cos, sin = np.float32(np.cos(who.turn)), np.float32(np.sin(who.turn))
        self.shift = who.shift
        self.x, self.y, self.z = self._warped(cos * x + sin * y, cos * y - sin * x, z)
        self.signal: Volume = np.zeros(shape, np.float32)

    def _warped(self, x: Volume, y: Volume, z: Volume) -> tuple[Volume, Volume, Volume]:
        """Bend the coordinates smoothly, so that no organ is an exact ellipsoid."""
        out = [np.broadcast_to(a, np.broadcast_shapes(x.shape, y.shape, z.shape)).copy() for a in (x, y, z)]
        for size, length in ((2.5, 75.0), (0.8, 24.0)):
            for axis in (0, 1, 2):
                k = self.rng.normal(0, 2 * np.pi / length / np.sqrt(3), 3).astype(np.float32)
                phase = np.float32(self.rng.uniform(0, 2 * np.pi))
                out[axis] += np.float32(size) * np.sin(k[0] * x + k[1] * y + k[2] * z + phase)
        return out[0], out[1], out[2]

    def box(self, center: tuple[float, float, float], reach: float) -> tuple[slice, ...]:
        """Index box around a point that surely holds everything within `reach` mm of it."""
        margin = reach + 9  # the warp and the turn move points by a few mm
        return tuple(
            slice(*np.searchsorted(axis, (c + s - margin, c + s + margin)))
            for axis, c, s in zip(self.grid, center, self.shift, strict=True)
        )

    def distance(
        self,
        center: tuple[float, float, float],
        radii: tuple[float, float, float],
        angle: float,
        box: tuple[slice, ...],
    ) -> Volume:
        """Approximate signed distance in mm (negative inside) to an ellipsoid turned in the axial plane."""
        x, y, z = self.x[box] - center[0], self.y[box] - center[1], self.z[box] - center[2]
        if angle:
            cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            x, y = cos * x + sin * y, cos * y - sin * x
        rho = np.sqrt((x / radii[0]) ** 2 + (y / radii[1]) ** 2 + (z / radii[2]) ** 2)
        return (rho - 1) * np.float32(min(radii[0], radii[1]))

    def blend(self, box: tuple[slice, ...], distance: Volume, value: float | Volume, opacity: float = 1.0) -> None:
        """Paint `value` where `distance` is negative, with a partial-volume ramp at the edge."""
        alpha = np.clip(0.5 - distance / (2 * self.edge), 0, opacity)
        part = self.signal[box]
        part += alpha * (value - part)

    def ellipsoid(
        self,
        center: tuple[float, float, float],
        radii: tuple[float, float, float],
        value: float,
        angle: float = 0.0,
        rim: tuple[float, float] | None = None,
        *,
        opacity: float = 1.0,
    ) -> None:
        """Paint an ellipsoid, with a rim of (thickness in mm, value) inside its surface if given."""
        box = self.box(center, max(radii))
        if 0 in self.signal[box].shape:
            return
        distance = self.distance(center, radii, angle, box)
        if rim is None:
            self.blend(box, distance, value, opacity)
        else:
            self.blend(box, distance, rim[1], opacity)
            self.blend(box, distance + rim[0], value, opacity)


def texture(rng: np.random.Generator, shape: tuple[int, ...], spacing: tuple[float, ...], length: float) -> Volume:
    """Smooth noise of unit standard deviation with a correlation length in mm."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    noise = ndimage.gaussian_filter(noise, [length / d for d in spacing], mode="wrap", truncate=2.5)
    return noise / noise.std()


def _paint_body(canvas: Canvas, tissue: Mapping[str, float], who: Patient, grain: Volume, septa: Volume) -> None:
    everything = (slice(None),) * 3
    front, back = -92 * who.build, 112 * who.build
    body = canvas.distance((0, (front + back) / 2, 0), (178, (back - front) / 2, 600), 0, everything)
    canvas.blend(everything, body, tissue["fat"] * (1 + 0.05 * grain))
    canvas.ellipsoid((0, back + 6, 0), (5, 42, 400), tissue["air"])
    canvas.signal *= 1 - np.float32(0.22) * np.exp(-((septa / 0.22) ** 2))  # fasciae: zero lines of a smooth noise


def _paint_walls(canvas: Canvas, tissue: Mapping[str, float], who: Patient) -> None:
    """Paint muscles, bones and large vessels on both sides of the pelvis."""
    rng, wide = canvas.rng, who.build
    muscle, marrow, bone_rim = tissue["muscle"], tissue["marrow"], (2.5, tissue["cortex"])
    for side in (-1, 1):
        b = wide * rng.normal(1, 0.03)
        canvas.ellipsoid((side * 17, -74 * b, 12), (17, 6, 60), muscle, side * 0.1)  # rectus abdominis
        canvas.ellipsoid((side * 48 * b, -52 * b, -30), (36, 13, 26), muscle, side * 0.5)  # pectineus
        canvas.ellipsoid((side * 74 * b, 88 * b, -5), (46, 15, 80), muscle * 1.1, side * -0.45)  # gluteus maximus
        canvas.ellipsoid((side * 68 * b, 8, 6), (13, 44, 60), marrow * 0.9, side * -0.15, bone_rim)  # acetabulum
        canvas.ellipsoid((side * 62 * b, 42 * b, -26), (14, 17, 22), marrow, side * 0.4, bone_rim)  # ischium
        canvas.ellipsoid((side * 92 * b, 0, 22), (25, 25, 25), marrow * 1.25, 0.0, bone_rim)  # femoral head
        canvas.ellipsoid((side * 19, -45 * b, -24), (13, 24, 20), marrow, side * -0.55, bone_rim)  # pubis
        canvas.ellipsoid((side * 46 * b, -6, 0), (8, 46, 48), muscle, side * -0.22)  # obturator internus
        for height, radius in ((-58, 5.5), (-47, 4.5)):
            level = tissue["vessel"] if rng.random() < 0.5 else tissue["cortex"]  # slow flow is bright, fast is void
            canvas.ellipsoid(
                (side * rng.normal(60, 3) * b, height * b, 10), (radius, radius, 90), level, 0.0, (1.5, muscle)
            )


def _paint_organs(canvas: Canvas, tissue: Mapping[str, float], who: Patient, balloon: bool) -> Volume:
    """Paint bladder, rectum, vesicles, levator, bulb and vessels; return the distance to the rectal axis in mm."""
    rng = canvas.rng
    a, b, c = who.gland
    back = b * (0.80 if balloon else 0.87) + who.rectum
    radii = (who.rectum * 1.1, who.rectum, 62.0)
    for side in (-1, 1):  # levator ani: two thin sheets that meet behind the rectum
        canvas.ellipsoid((side * (a * 0.75 + 5), b * 0.6, -10), (6, back + 4, c + 22), tissue["muscle"], side * 0.12)
        canvas.ellipsoid((side * (a * 0.75 + 1), b * 0.6, -6), (6, back + 2, c + 24), tissue["fat"] * 0.8, side * 0.12)
    _scatter(canvas, tissue, who)
    size = who.bladder
    canvas.ellipsoid(
        (rng.normal(0, 3), -0.3 * b - 2, c * 0.75 + 25 * size),
        (40 * size, 30 * size, 27 * size),
        tissue["urine"],
        0.0,
        (rng.uniform(3, 5), tissue["bladder_wall"]),
    )
    for side in (-1, 1):
        for step in range(4):
            center = (side * (5 + 8 * step), b * 0.55 + rng.normal(3, 2), c * 0.85 + rng.normal(5 + 2 * step, 2))
            canvas.ellipsoid(
                center, (6, 4.5, 7), tissue["vesicle"] * rng.uniform(0.7, 1.1), side * 0.4, (1.2, tissue["muscle"])
            )
    canvas.ellipsoid((0, 0, -c - 14), (a * 0.75, b, 17), tissue["muscle"])  # urogenital diaphragm below the apex
    canvas.ellipsoid((0, -1, -c - 12), (4, 4, 20), tissue["peripheral"], 0.0, (1.5, tissue["muscle"]))  # urethra
    canvas.ellipsoid((0, 2, -c - 24), (9, 8, 10), tissue["bulb"], 0.0, (1.5, tissue["muscle"]))
    content = tissue["air"] if balloon or rng.random() < 0.35 else tissue["rectal_content"] * rng.uniform(0.6, 1.3)
    axis = (rng.normal(0, 2), back, 4.0)
    canvas.ellipsoid(axis, radii, content, 0.0, (2.0 if balloon else 4.0, tissue["rectal_wall"]))
    everything = (slice(None),) * 3
    return np.maximum(canvas.distance(axis, radii, 0.0, everything), 0)


def _scatter(canvas: Canvas, tissue: Mapping[str, float], who: Patient) -> None:
    """Paint the venous plexus and neurovascular bundles beside the gland and lymph nodes farther out."""
    rng = canvas.rng
    a, b, c = who.gland
    for _ in range(12):
        angle, reach = rng.uniform(0, 2 * np.pi), rng.uniform(1.12, 1.45)
        center = (a * reach * np.cos(angle), b * reach * np.sin(angle), rng.uniform(-c, c))
        radius = rng.uniform(1.8, 3.6)
        canvas.ellipsoid(center, (radius, radius, 3 * radius), tissue["vessel"] * rng.uniform(0.4, 1.3))
    for _ in range(6):
        center = (rng.uniform(-75, 75), rng.uniform(-75, 85), rng.uniform(-34, 34))
        radius = rng.uniform(3, 7)
        canvas.ellipsoid(
            center, (radius, radius * rng.uniform(0.6, 1), radius), tissue["peripheral"] * rng.uniform(0.4, 1.3)
        )


def _gland_distance(canvas: Canvas, who: Patient, balloon: bool, box: tuple[slice, ...]) -> Volume:
    """Signed distance in mm to the gland: pointed apex, blunt base, hollow where the rectum lies."""
    a, b, c = who.gland
    w = canvas.z[box] / np.float32(c)
    u = canvas.x[box] / np.float32(a)
    v = (canvas.y[box] - np.float32(who.lean) * canvas.z[box]) / np.float32(b)
    hollow = np.float32(0.28 if balloon else 0.12) * np.exp(-((u / 0.45) ** 2)) * np.maximum(v, 0)
    v = v + hollow
    end = np.where(w > 0, np.abs(w) ** 2.8, np.abs(w) ** 1.9)
    rho = np.sqrt((np.abs(u) ** 2.3 + np.abs(v) ** 2.3) ** (2 / 2.3) + end)
    return (rho - 1) * np.float32(b)


def _paint_gland(
    canvas: Canvas, tissue: Mapping[str, float], who: Patient, balloon: bool, grain: Volume
) -> NDArray[np.uint8]:
    """Paint both zones, nodules, stroma and urethra; return the zone labels."""
    rng = canvas.rng
    a, b, c = who.gland
    box = canvas.box((0, 0, 0), 1.1 * max(who.gland) + 5)
    outer = _gland_distance(canvas, who, balloon, box)
    growth = np.clip(0.66 + 0.35 * np.log(b / 21.5) + rng.normal(0, 0.05), 0.5, 0.85)  # hyperplasia is central
    inner = canvas.distance((0, -0.22 * b, 0.15 * c), (a * growth, b * growth, c * growth * 1.1), 0, box)
    inner = np.maximum(inner, outer + 2)
    canvas.blend(box, outer - 4.5, tissue["fat"] * 1.05, opacity=0.85)  # fat and veins around the capsule
    canvas.blend(box, outer - 1.3, tissue["capsule"])
    canvas.blend(box, outer, tissue["peripheral"] * (1 + 0.07 * grain[box]))
    canvas.blend(box, inner, tissue["transition"] * (1 + 0.09 * grain[box]))
    before, interior = canvas.signal[box].copy(), np.clip(0.5 - (outer + 2) / (2 * canvas.edge), 0, 1)
    for _ in range(rng.integers(4, 9)):
        spot = rng.uniform(-0.6, 0.6, 3) * growth * who.gland + np.array((0, -0.15 * b, 0.1 * c))
        radius = rng.uniform(2.5, 7.0)
        canvas.ellipsoid(
            (spot[0], spot[1], spot[2]),
            (radius, radius * rng.uniform(0.7, 1.2), radius),
            tissue["transition"] * rng.uniform(0.65, 1.6),
            rng.uniform(0, 3),
            (1.2, tissue["stroma"]),
        )
    canvas.ellipsoid((0, -0.85 * b, 0.1 * c), (0.45 * a, 0.28 * b, 0.7 * c), tissue["stroma"])
    canvas.ellipsoid((0, 0.05 * b, -0.2 * c), (2.5, 2.5, 0.7 * c), tissue["peripheral"] * 1.3)
    if rng.random() < 0.4:  # a tumor: dark focus in the peripheral zone
        side = rng.choice((-1, 1))
        canvas.ellipsoid(
            (side * 0.55 * a, 0.6 * b, rng.uniform(-0.4, 0.4) * c), (5, 4, 6), tissue["stroma"], opacity=0.8
        )
    part = canvas.signal[box]
    part[...] = before + interior * (part - before)
    zones = np.zeros(canvas.signal.shape, np.uint8)
    zones[box] = np.where(outer < 0, np.where(inner < 0, TRANSITION, PERIPHERAL), 0)
    return zones


def paint_pelvis(
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    spacing: tuple[float, float, float],
    tissue: Mapping[str, float],
    balloon: bool,
) -> tuple[Volume, NDArray[np.uint8], Volume]:
    """Paint one patient on an LPS grid.

    Args:
        rng: source of everything that differs between patients.
        shape: voxels to the left, to the back and to the head.
        spacing: voxel size in mm.
        tissue: signal of each tissue.
        balloon: a coil balloon fills the rectum and flattens the gland.

    Returns:
        Signal, zone labels (0, PERIPHERAL, TRANSITION) and distance to the rectum in mm, all of `shape`.
    """
    who = draw_patient(rng, balloon)
    canvas = Canvas(rng, shape, spacing, who)
    grain = texture(rng, shape, spacing, 3.0)
    _paint_body(canvas, tissue, who, grain, texture(rng, shape, spacing, 6.0))
    _paint_walls(canvas, tissue, who)
    rectum = _paint_organs(canvas, tissue, who, balloon)
    zones = _paint_gland(canvas, tissue, who, balloon, grain)
    return canvas.signal, zones, rectum
