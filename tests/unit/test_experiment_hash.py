"""The hash of an experiment: of every setting that decides the result, and of nothing else."""

import copy
import hashlib
import json
from typing import Any

from harmofl import experiment as experiment_module
from harmofl.experiment import Experiment, resolve, set_key


def changed(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(settings)
    set_key(copied, key, value)
    return copied


FULL = {
    "method": "harmofl",
    "data": {"aliases": {"RUNMC": ["ISBI"], "BMC": ["ISBI_1.5"]}, "simulated_root": "/data/{SITE_NAME}"},
    "network": {"name": "densenet121"},
    "amplitude": {"region": "off"},
    "training": {"clip_norm": 1.0},
    "federation": {"resume_from": "a.pt", "minimum_sites": 3},
    "reader": {"slices": "all"},
    "demo": {"overrides": {"seed": 3, "federation.rounds": 1}, "data": {"cases": 4}},
}


def merged(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = settings | more
    shared = {key for key in settings if isinstance(settings[key], dict) and key in more}
    return both | {key: merged(settings[key], more[key]) for key in shared}


def leaves(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in settings.items():
        inner = isinstance(value, dict) and f"{prefix}{key}" not in (
            "data.aliases",
            "demo.overrides",
            "reader",
            "demo.data",
        )
        found += leaves(value, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", value)]
    return found


# Another valid value of each setting that is not a plain number.
OTHER = {
    "name": "other",
    "task": "nuclei",
    "method": "fedavg",
    "data.split": "as_published",
    "data.fractions": [0.6, 0.2, 0.2],
    "data.patient_from": "before_separator",
    "data.patient_pattern": "^P[0-9]+",
    "reader": {},
    "data.aliases": {"RUNMC": ["ISBI"]},
    "data.simulated_root": None,
    "network.name": "unet",
    "network.norm": "batch",
    "amplitude.preset": "as_described",
    "amplitude.intensity": "window",
    "amplitude.region": "low",
    "amplitude.estimation": "running_mean",
    "amplitude.average": "images",
    "training.optimizer": "adam",
    "training.augmentation": "none",
    "training.precision": "bfloat16",
    "training.keep_moments": False,
    "training.proximal_mu": 0.1,
    "training.contrastive_weight": 1.0,
    "federation.weights": "samples",
    "federation.server_optimizer": "nova",
    "federation.server_betas": [0.5, 0.9],
    "federation.local_layers": "norm",
    "federation.pooled_data": True,
    "federation.aggregation": "median",
    "federation.exchange": "float16",
    "federation.resume_from": None,
    "federation.tracking": "none",
    "demo.overrides": {},
    "demo.data": {},
}


def test_the_hash_changes_with_every_setting_but_paths_and_time_limits(written):
    experiment = resolve(merged(written, FULL))
    settings = experiment.model_dump(mode="json")
    keys = leaves(settings)
    assert len(keys) > 40
    hashes = {}
    for key, value in keys:
        other = OTHER[key] if key in OTHER else value + 1 if isinstance(value, int) else value / 2
        # not by resolve: a method or preset would change other settings with it
        hashes[key] = Experiment.model_validate_json(json.dumps(changed(settings, key, other))).hash
    undecided = [
        "data.simulated_root",
        "federation.round_timeout",
        "federation.straggler_wait",
        "federation.resume_from",
        "federation.tracking",
        "demo.overrides",
    ]
    assert [key for key, value in hashes.items() if value == experiment.hash] == undecided
    different = [value for key, value in hashes.items() if key not in undecided]
    assert len(set(different)) == len(different)


def reordered(settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    return {key: reordered(settings[key]) for key in reversed(list(settings))}


def test_the_hash_does_not_depend_on_the_order_of_keys(written):
    settings = merged(written, FULL)
    assert json.dumps(reordered(settings)) != json.dumps(settings)
    assert resolve(reordered(settings)).hash == resolve(settings).hash


def test_the_hash_is_the_same_whether_defaults_are_written_or_left_out(written):
    assert resolve(changed(written, "training.momentum", 0.9)).hash == resolve(written).hash
    assert resolve(written).hash != resolve(changed(written, "training.momentum", 0.8)).hash


def test_the_hash_changes_with_every_rule(written, monkeypatch):
    hashes = {resolve(written).hash}
    for name in experiment_module.RULES:
        monkeypatch.setitem(experiment_module.RULES, name, experiment_module.RULES[name] + 1)
        hashes.add(resolve(written).hash)
    assert len(hashes) == len(experiment_module.RULES) + 1 > 2


def test_a_later_setting_enters_the_hash_only_beside_its_default(written, monkeypatch):
    """Two settings stand in for later ones: the hash at their defaults is that of experiments without the keys."""
    later = {"training.momentum": 0.9, "seed": 0}
    before = [resolve(changed(written, key, value)).hash for key, value in later.items()]
    dumped = Experiment.model_dump

    def earlier(experiment, **given):
        settings = dumped(experiment, **given)
        del settings["training"]["momentum"], settings["seed"]
        return settings

    with monkeypatch.context() as version:
        version.setattr(Experiment, "model_dump", earlier)
        old = resolve(written).hash
    assert old not in before
    monkeypatch.setattr(experiment_module, "LEFT_OUT_AT_DEFAULT", experiment_module.LEFT_OUT_AT_DEFAULT | later)
    assert resolve(written).hash == old
    others = {resolve(changed(written, key, value)).hash for key, value in (("training.momentum", 0.8), ("seed", 1))}
    assert len(others) == 2 and old not in others


def test_what_is_left_out_at_its_default_is_a_setting_with_that_default(written):
    settings = resolve(written).model_dump(mode="json")
    for key, default in experiment_module.LEFT_OUT_AT_DEFAULT.items():
        section, _, name = key.rpartition(".")
        model = Experiment.model_fields[section].annotation if section else Experiment
        assert name in (settings[section] if section else settings)
        if key != "federation.norm_bound":  # null is what a run was before the bound
            assert model.model_fields[name].get_default(call_default_factory=True) == default


def test_settings_that_came_later_do_not_enter_the_hash_where_a_run_is_what_it_was(written):
    set_key(written, "federation.norm_bound", None)
    experiment = resolve(written)
    later = {"norm_bound", "aggregation", "trimmed_share", "validate_every"}
    left_out = {"data": {"simulated_root"}, "demo": {"overrides"}}
    times_and_places = {"resume_from", "round_timeout", "straggler_wait", "tracking"}
    left_out |= {"federation": times_and_places | later}
    before = experiment.model_dump(mode="json", exclude=left_out) | {"rules": experiment_module.RULES}
    del before["data"]["patient_from"]
    assert experiment.hash == hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:16]


def test_the_hash_is_16_hex_digits(written):
    assert int(resolve(written).hash, 16) >= 0
    assert len(resolve(written).hash) == 16
