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


# A T2-weighted turbo spin echo at 3 T: fat and fluid bright, muscle and air dark.
TISSUE = {
    "air": 0.0,
    "fat": 0.80,
    "muscle": 0.16,
    "cortex": 0.05,
    "marrow": 0.48,
    "urine": 1.05,
    "bladder_wall": 0.18,
    "rectal_wall": 0.34,
    "rectal_content": 0.30,
    "vesicle": 0.85,
    "vessel": 0.70,
    "bulb": 0.62,
    "peripheral": 0.52,
    "transition": 0.34,
    "stroma": 0.17,
    "capsule": 0.18,
}

SCANNERS: dict[str, Scanner] = {
    "siemens_3t_surface": Scanner(
        "surface",
        0.45,
        0,
        1.0,
        0.8,
        0.02,
        176,
        64,
        "LPS",
        650,
        "int16",
        zones=True,
        tissue={"peripheral": 0.68, "transition": 0.44, "stroma": 0.2},
    ),
    "philips_1.5t_endorectal": Scanner(
        "endorectal", 1.3, 45, 1.0, 1.0, 0.06, 152, 64, "LAS", 1500, "uint16", "_Segmentation", True
    ),
    "siemens_3t_no_coil": Scanner(
        "body",
        0.1,
        0,
        1.0,
        1.0,
        0.03,
        204,
        66,
        "LPS",
        420,
        "int16",
        tissue={"fat": 0.52, "marrow": 0.3, "peripheral": 0.72, "transition": 0.46, "muscle": 0.12, "bulb": 0.7},
    ),
    "siemens_mixed": Scanner("surface", 1.4, 0, 1.3, 0.9, 0.015, 196, 66, "RAS", 1600, "int16"),
    "ge_3t_endorectal": Scanner(
        "endorectal",
        3.6,
        38,
        1.0,
        0.7,
        0.012,
        146,
        64,
        "LPI",
        5200,
        "int16",
        tissue={"fat": 0.6, "peripheral": 0.72, "transition": 0.55},
    ),
    "siemens_1.5t_endorectal": Scanner(
        "endorectal",
        2.9,
        42,
        1.0,
        1.5,
        0.035,
        206,
        66,
        "LPS",
        900,
        "int16",
        tissue={"peripheral": 0.65, "transition": 0.46},
    ),
}
