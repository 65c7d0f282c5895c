"""Scanner profiles of the synthetic demonstration data."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Scanner:
    """How one scanner images and stores the phantom.

    Tissue intensities are relative (fat of the default contrast is 1) before coil, blur and noise. Lengths are in mm.
    """

    coil: Literal["surface", "endorectal", "body"]
    coil_strength: float  # log brightening at the skin (surface, body) or drop far from the coil (endorectal)
    coil_reach: float  # distance over which an endorectal coil loses half of its sensitivity
    echo: float  # echo time over the reference one: raises the signal of long and lowers that of short T2
    blur: float  # standard deviation of the point spread in the plane
    noise: float  # Rician noise, in units of the 99th percentile of the noise-free image
    field_of_view: float  # edge of the square slice
    slab: float  # thickness of all slices together
    axis_codes: str
    intensity: float  # raw value of the 99th percentile, before the gain of the single image
    dtype: Literal["int16", "uint16"]
    mask_suffix: str = "_segmentation"
    zones: bool = False  # labels 0/1/2 (peripheral, transition) instead of 0/1
    tissue: dict[str, float] = field(default_factory=dict)  # where the contrast differs from TISSUE

    def __str__(self) -> str:
        """Return what tells its images from others, for a caption."""
        coil = {"surface": "surface coil", "endorectal": "endorectal coil", "body": "body coil"}[self.coil]
        return f"{coil}, field of view {self.field_of_view:g} mm, blur {self.blur:g} mm, noise {100 * self.noise:.2g} %"


# A T2-weighted turbo spin echo at 3 T: fat and fluid bright, muscle and air dark.
TISSUE = {
    "air": 0.0,
    "fat": 0.85,
    "muscle": 0.16,
    "cortex": 0.05,
    "marrow": 0.66,
    "urine": 1.05,
    "bladder_wall": 0.18,
    "rectal_wall": 0.26,
    "rectal_content": 0.18,
    "vesicle": 0.95,
    "vessel": 0.70,
    "bulb": 0.75,
    "peripheral": 0.50,
    "transition": 0.40,
    "stroma": 0.24,
    "capsule": 0.18,
}

SCANNERS: dict[str, Scanner] = {
    "siemens_3t_surface": Scanner("surface", 0.35, 0, 0.95, 0.8, 0.02, 172, 50, "LPS", 650, "int16", zones=True),
    "philips_1.5t_endorectal": Scanner(
        "endorectal", 1.0, 45, 1.0, 1.0, 0.05, 150, 50, "LAS", 1500, "uint16", "_Segmentation", True
    ),
    "siemens_3t_no_coil": Scanner(
        "body",
        0.1,
        0,
        1.0,
        1.0,
        0.025,
        192,
        51,
        "LPS",
        420,
        "int16",
        tissue={"fat": 0.76, "marrow": 0.60, "peripheral": 0.62, "transition": 0.50, "urine": 0.80},
    ),
    "siemens_mixed": Scanner("surface", 1.2, 0, 1.1, 0.9, 0.015, 186, 51, "RAS", 1600, "int16"),
    "ge_3t_endorectal": Scanner("endorectal", 2.7, 42, 1.0, 0.7, 0.012, 144, 50, "LPI", 5200, "int16"),
    "siemens_1.5t_endorectal": Scanner("endorectal", 1.9, 48, 1.0, 1.5, 0.03, 192, 51, "LPS", 900, "int16"),
}
