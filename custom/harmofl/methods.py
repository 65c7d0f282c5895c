"""Named presets: an amplitude preset fills open settings, a method overrides some of an experiment."""

from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

# Intensity step, region, estimation and norm layer belong together: see jobs/README.md for what each one computes.
PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "robust": {
            "amplitude.intensity": "zscore",
            "amplitude.region": "site_gain",
            "amplitude.estimation": "before_training",
            "network.norm": "instance",
        },
        "as_described": {
            "amplitude.intensity": "window",
            "amplitude.region": "full",
            "amplitude.estimation": "running_mean",
            "network.norm": "batch_stats",
        },
        "as_published": {
            "amplitude.intensity": "window",
            "amplitude.region": "dc",
            "amplitude.estimation": "first_batch",
            "network.norm": "batch_stats",
        },
    }
)

# FedAvg keeps the preset's intensity step and norm layer: what is compared is the amplitude and the perturbation alone.
METHODS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "harmofl": {},
        "amplitude_only": {"perturbation.alpha": 0.0},
        "perturbation_only": {"amplitude.region": "off"},
        "fedavg": {"amplitude.region": "off", "perturbation.alpha": 0.0},
    }
)


def method_overrides(name: str) -> dict[str, Any]:
    """The settings that a method changes, as `section.key` -> value.

    Raises:
        ValueError: no such method; the message lists them.
    """
    if name not in METHODS:
        near = get_close_matches(str(name), METHODS, n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"method: {name!r} is none of {', '.join(METHODS)}{hint}")
    return METHODS[name]
