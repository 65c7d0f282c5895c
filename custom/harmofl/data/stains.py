"""Staining laboratories and slide scanners of the synthetic histology, and how they turn tissue into pixels."""

from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

Vector = tuple[float, float, float]


@dataclass(frozen=True)
class Laboratory:
    """How one laboratory stains with hematoxylin and eosin, and how its scanner stores the slide.

    A stain vector holds the optical density (decadic) in red, green and blue of one unit of the stain; its length is
    about 1. A strength is the density that a fully stained nucleus (hematoxylin) or fiber (eosin) reaches.
    """

    hematoxylin: Vector
    eosin: Vector
    strengths: tuple[float, float]  # hematoxylin, eosin
    background: Vector  # red, green, blue of bare glass, 0..255
    blur: float  # standard deviation of the point spread in micrometers
    noise: float  # standard deviation of the sensor noise, in gray levels
    quality: int  # of the JPEG compression in the slide file; a low one softens the detail

    def __str__(self) -> str:
        """Return what tells its images from others, for a caption."""
        hematoxylin, eosin = self.strengths
        return (
            f"optical density of hematoxylin {hematoxylin:g}, of eosin {eosin:g}, blur {self.blur:g} µm, "
            f"noise {self.noise:g} gray levels, JPEG quality {self.quality}"
        )


# Vectors, strengths and backgrounds are near those estimated (method of Macenko) from five tissue source sites of
# TCGA breast slides, whose mean colors are in the order below 165/140/175, 161/96/139, 195/150/185, 133/67/122 and
# 126/90/139. Their scanners are not recorded: blur, noise and compression are chosen.
HOSPITALS: dict[str, Laboratory] = {
    "purple_gray": Laboratory((0.64, 0.69, 0.35), (0.30, 0.81, 0.51), (0.80, 0.34), (240, 237, 241), 0.30, 2.0, 90),
    "red_pink": Laboratory((0.52, 0.75, 0.41), (0.13, 0.81, 0.57), (1.00, 0.80), (240, 230, 236), 0.45, 2.5, 80),
    "pale_pink": Laboratory((0.56, 0.74, 0.38), (0.15, 0.82, 0.55), (0.56, 0.32), (245, 241, 244), 0.60, 1.5, 92),
    "crimson": Laboratory((0.55, 0.74, 0.39), (0.16, 0.91, 0.38), (1.33, 1.08), (230, 210, 221), 0.40, 4.0, 70),
    "dark_violet": Laboratory((0.65, 0.66, 0.37), (0.31, 0.87, 0.38), (1.20, 0.68), (226, 219, 227), 0.85, 3.0, 85),
}

# Of mean colors as in slides of these organs in the same collection: lung 159/93/135, kidney 197/150/180, breast
# 133/67/122, prostate 193/140/174. The last two stand for a mixed collection and for one laboratory of its own.
ORGAN_LABORATORIES: dict[str, Laboratory] = {
    "lung": Laboratory((0.54, 0.75, 0.39), (0.14, 0.83, 0.54), (1.00, 0.80), (240, 228, 235), 0.25, 2.5, 80),
    "kidney": Laboratory((0.58, 0.72, 0.38), (0.20, 0.83, 0.52), (0.80, 0.40), (246, 241, 245), 0.40, 1.5, 90),
    "breast": Laboratory((0.55, 0.74, 0.39), (0.18, 0.91, 0.38), (1.30, 0.95), (229, 208, 220), 0.30, 3.5, 75),
    "prostate": Laboratory((0.63, 0.69, 0.36), (0.12, 0.90, 0.42), (0.65, 0.48), (247, 240, 247), 0.50, 2.0, 85),
    "monuseg": Laboratory((0.65, 0.66, 0.37), (0.31, 0.87, 0.38), (1.25, 0.65), (226, 219, 227), 0.35, 3.0, 90),
    "tnbc": Laboratory((0.70, 0.65, 0.29), (0.22, 0.85, 0.48), (0.90, 0.55), (236, 232, 238), 0.55, 2.0, 95),
}

LABORATORIES = {**HOSPITALS, **ORGAN_LABORATORIES}


def stain_slide(laboratory: Laboratory, rng: np.random.Generator) -> Laboratory:
    """The laboratory as it stained one slide: both strengths vary log-normally by about 12 %, the vectors a little."""
    strengths = np.array(laboratory.strengths) * np.exp(rng.normal(0, 0.12, 2))
    vectors = np.array((laboratory.hematoxylin, laboratory.eosin)) * np.exp(rng.normal(0, 0.03, (2, 3)))
    return replace(
        laboratory,
        hematoxylin=tuple(vectors[0].tolist()),
        eosin=tuple(vectors[1].tolist()),
        strengths=(float(strengths[0]), float(strengths[1])),
    )


def absorb(laboratory: Laboratory, hematoxylin: NDArray[np.float32], eosin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Light that passes the stained tissue, by Beer's and Lambert's law: background times 10^-density.

    Args:
        laboratory: stains and background.
        hematoxylin: amount of stain, (H, W), 1 in a dark nucleus.
        eosin: the same, 1 in a dense fiber.

    Returns:
        (H, W, 3) in 0..255, neither blurred nor rounded.
    """
    densities = np.stack((hematoxylin * laboratory.strengths[0], eosin * laboratory.strengths[1]), -1)
    vectors = np.array((laboratory.hematoxylin, laboratory.eosin), np.float32)
    return np.array(laboratory.background, np.float32) * np.float32(10) ** -(densities.astype(np.float32) @ vectors)


def scan(
    laboratory: Laboratory,
    hematoxylin: NDArray[np.float32],
    eosin: NDArray[np.float32],
    pixel: float,
    *,
    rng: np.random.Generator,
    defocus: float = 0.0,
) -> NDArray[np.uint8]:
    """Image a piece of stained tissue as the laboratory's scanner does.

    Args:
        laboratory: stains and scanner.
        hematoxylin: amount of stain, (H, W).
        eosin: the same.
        pixel: edge of a pixel in micrometers.
        rng: of the sensor noise.
        defocus: standard deviation in micrometers of a further blur, where the slide was out of focus.

    Returns:
        RGB, (H, W, 3).
    """
    light = absorb(laboratory, hematoxylin, eosin)
    sigma = float(np.hypot(laboratory.blur, defocus)) / pixel
    light = ndimage.gaussian_filter(light, (sigma, sigma, 0), truncate=3, mode="nearest")
    light += laboratory.noise * rng.standard_normal(light.shape, dtype=np.float32)
    stored = BytesIO()
    pixels = np.clip(np.rint(light), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(stored, "JPEG", quality=laboratory.quality)
    return np.array(Image.open(stored))
