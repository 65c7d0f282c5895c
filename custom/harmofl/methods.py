"""Named presets: an amplitude preset fills open settings, a method overrides some of an experiment."""

from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

# Intensity step, region, estimation and norm layer belong together: see jobs/README.md for what each one computes.
# The published ones bound no site's difference, as the paper and its code do not.
PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "robust": {
            "amplitude.intensity": "zscore",
            "amplitude.region": "site_gain",
            "amplitude.estimation": "before_training",
            "network.norm": "instance",
            "federation.norm_bound": 10.0,
        },
        "as_described": {
            "amplitude.intensity": "window",
            "amplitude.region": "full",
            "amplitude.estimation": "running_mean",
            "network.norm": "batch_stats",
            "federation.norm_bound": None,
        },
        "as_published": {
            "amplitude.intensity": "window",
            "amplitude.region": "dc",
            "amplitude.estimation": "first_batch",
            "network.norm": "batch_stats",
            "federation.norm_bound": None,
        },
    }
)

# FedAvg keeps the preset's intensity step and norm layer: what is compared is the amplitude and the perturbation alone.
_FEDAVG: dict[str, Any] = {"amplitude.region": "off", "perturbation.alpha": 0.0}

METHODS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "harmofl": {},
        "amplitude_only": {"perturbation.alpha": 0.0},
        "perturbation_only": {"amplitude.region": "off"},
        "fedavg": _FEDAVG,
        "fedprox": _FEDAVG,
        "fednova": _FEDAVG | {"federation.server_optimizer": "nova"},
        "fedadam": _FEDAVG | {"federation.server_optimizer": "adam"},
        "fedbn": _FEDAVG | {"federation.local_layers": "norm"},
        "moon": _FEDAVG,
        "local_only": _FEDAVG | {"federation.local_layers": "all"},
        "central": _FEDAVG | {"federation.pooled_data": True},
    }
)

# What a method fills where the job says nothing: whoever tunes or sweeps one of these gets the value that was asked
# for. FedBN needs norm layers that hold something; `fedavg` with the same `network.norm` is its control.
METHOD_DEFAULTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "fedprox": {"training.proximal_mu": 0.01},
        "fedadam": {"federation.server_learning_rate": 0.01},
        "fedbn": {"network.norm": "batch"},
        "moon": {"training.contrastive_weight": 1.0},
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


def method_problem(experiment: Any) -> str | None:
    """Why the settings of an experiment that belong to methods cannot stand together; None where they can."""
    training, federation = experiment.training, experiment.federation
    whose = f"(method {experiment.method})"
    if training.contrastive_weight > 0 and experiment.network.name != "densenet121":
        return (
            f"training.contrastive_weight: MOON {whose} contrasts the features before a classifier, which network "
            f"'{experiment.network.name}' has not; it is for classification with densenet121, choose another method"
        )
    if federation.server_optimizer == "nova" and training.proximal_mu > 0:
        return "training.proximal_mu: FedNova counts steps without a proximal term; set it to 0"
    kept_apart = federation.local_layers == "all" or federation.pooled_data
    if kept_apart and experiment.amplitude.region != "off":
        key = "federation.pooled_data" if federation.pooled_data else "federation.local_layers 'all'"
        return f"{key} {whose}: there is no shared amplitude to send or use; set amplitude.region to 'off'"
    if federation.pooled_data and (federation.local_layers != "none" or federation.server_optimizer != "average"):
        return (
            f"federation.pooled_data {whose}: one place trains, so federation.local_layers must be 'none' and "
            "federation.server_optimizer 'average'"
        )
    if federation.local_layers == "all" and federation.server_optimizer != "average":
        return f"federation.server_optimizer {whose}: nothing is sent to optimize; set it to 'average'"
    return None if federation.aggregation == "mean" else _aggregation_problem(federation, whose)


def _aggregation_problem(federation: Any, whose: str) -> str | None:
    """Why the median or the trimmed mean cannot be taken with the other settings of a federation."""
    key = f"federation.aggregation '{federation.aggregation}'"
    if federation.local_layers == "all" or federation.pooled_data:
        return f"{key} {whose}: nothing of several sites is averaged; set it to 'mean'"
    if federation.server_optimizer == "nova":
        return f"{key} {whose}: FedNova weights steps, which a median or trimmed mean does not; set it to 'mean'"
    if federation.weights == "samples":
        return f"{key}: every site counts the same, whatever its images; set federation.weights to 'uniform'"
    if federation.minimum_sites < 3:
        return f"{key}: of fewer than 3 sites none can be outvoted; set federation.minimum_sites to 3 or more"
    return None
