"""Presets and methods: each names settings that an experiment has."""

from difflib import get_close_matches

import pytest

from harmofl.experiment import resolve
from harmofl.methods import METHODS, PRESETS, method_overrides


def look_up(experiment, dotted):
    for part in dotted.split("."):
        experiment = getattr(experiment, part)
    return experiment


@pytest.mark.parametrize("name", METHODS)
def test_every_override_of_a_method_reaches_the_experiment(name, written):
    experiment = resolve(written | {"method": name})
    assert experiment.method == name
    for key, value in METHODS[name].items():
        assert look_up(experiment, key) == value


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_of_a_preset_reaches_the_experiment(name, written):
    written["amplitude"]["preset"] = name
    experiment = resolve(written)
    for key, value in PRESETS[name].items():
        assert look_up(experiment, key) == value


def test_presets_set_the_same_four_settings():
    expected = {"amplitude.intensity", "amplitude.region", "amplitude.estimation", "network.norm"}
    assert all(set(settings) == expected for settings in PRESETS.values())


def test_methods_are_the_paper_s_ablation():
    # Table 3 of the paper: both parts, either part, none.
    parts = {
        name: (settings.get("amplitude.region") != "off", settings.get("perturbation.alpha") != 0.0)
        for name, settings in METHODS.items()
    }
    assert parts == {
        "harmofl": (True, True),
        "amplitude_only": (True, False),
        "perturbation_only": (False, True),
        "fedavg": (False, False),
    }


def test_unknown_method_lists_all_and_the_nearest():
    with pytest.raises(ValueError, match="fedavgg") as caught:
        method_overrides("fedavgg")
    assert all(name in str(caught.value) for name in METHODS)
    assert str(caught.value).endswith("did you mean 'fedavg'?")


def test_a_name_near_to_none_gets_no_hint():
    # none of the names shares half of its letters with "zzz"
    assert not get_close_matches("zzz", METHODS, cutoff=0.5)
    with pytest.raises(ValueError, match="zzz") as caught:
        method_overrides("zzz")
    assert "did you mean" not in str(caught.value)


def test_presets_and_methods_cannot_be_changed_by_a_caller():
    with pytest.raises(TypeError):
        METHODS["new"] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        PRESETS["new"] = {}  # type: ignore[index]
