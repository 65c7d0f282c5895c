"""Presets and methods: each names settings that an experiment has."""

from difflib import get_close_matches

import pytest

from harmofl.experiment import ExperimentError, resolve, set_key
from harmofl.methods import METHOD_DEFAULTS, METHODS, PRESETS, method_overrides


def look_up(experiment, dotted):
    for part in dotted.split("."):
        experiment = getattr(experiment, part)
    return experiment


@pytest.fixture
def classification(written):
    """An experiment that every method can run: MOON needs a classifier."""
    written["network"]["name"] = "densenet121"
    return written


@pytest.mark.parametrize("name", METHODS)
def test_every_override_of_a_method_reaches_the_experiment(name, classification):
    experiment = resolve(classification | {"method": name})
    assert experiment.method == name
    for key, value in (METHODS[name] | METHOD_DEFAULTS.get(name, {})).items():
        assert look_up(experiment, key) == value


@pytest.mark.parametrize("name", METHOD_DEFAULTS)
def test_a_number_of_a_method_that_the_job_sets_is_kept(name, classification):
    others = {"network.norm": "batch_stats"}
    for key, value in METHOD_DEFAULTS[name].items():
        asked = others.get(key, value if isinstance(value, str) else value / 2)
        set_key(classification, key, asked)
        assert look_up(resolve(classification | {"method": name}), key) == asked


def test_baselines_are_fedavg_but_for_their_own_part(classification):
    """The same task, network, data, seed and local training: only what the method is about differs."""
    own = {
        "fedprox": {"training.proximal_mu"},
        "fednova": {"federation.server_optimizer"},
        "fedadam": {"federation.server_optimizer", "federation.server_learning_rate"},
        "fedbn": {"federation.local_layers", "network.norm"},
        "moon": {"training.contrastive_weight"},
        "local_only": {"federation.local_layers"},
        "central": {"federation.pooled_data"},
    }
    plain = resolve(classification | {"method": "fedavg"}).model_dump()
    for name, expected in own.items():
        other = resolve(classification | {"method": name}).model_dump()
        sections = [key for key in plain if isinstance(plain[key], dict)]
        different = {f"{s}.{key}" for s in sections for key in plain[s] if plain[s][key] != other[s][key]}
        assert different == expected, name


def test_fedbn_and_its_control_differ_in_the_norm_layers_place_alone(written):
    fedbn = resolve(written | {"method": "fedbn"}).model_dump()
    set_key(written, "network.norm", "batch")
    control = resolve(written | {"method": "fedavg"}).model_dump()
    assert (control["method"], control["federation"]["local_layers"]) == ("fedavg", "none")
    fedbn["method"], fedbn["federation"]["local_layers"] = "fedavg", "none"
    assert fedbn == control


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "moon"}, "MOON (method moon) contrasts the features before a classifier, which network 'unet'"),
        ({"method": "fednova", "training.proximal_mu": 0.1}, "training.proximal_mu: FedNova counts steps"),
        ({"federation.aggregation": "median"}, "set federation.minimum_sites to 3 or more"),
        ({"federation.aggregation": "trimmed_mean", "federation.weights": "samples"}, "set federation.weights to"),
        ({"federation.aggregation": "median", "method": "fednova"}, "FedNova weights steps"),
        ({"federation.aggregation": "median", "method": "local_only"}, "nothing of several sites is averaged"),
        ({"federation.aggregation": "median", "method": "central"}, "nothing of several sites is averaged"),
        ({"federation.local_layers": "all"}, "set amplitude.region to 'off'"),
        ({"federation.pooled_data": True}, "federation.pooled_data (method harmofl)"),
        ({"method": "central", "federation.local_layers": "norm"}, "federation.local_layers must be 'none'"),
        ({"method": "local_only", "federation.server_optimizer": "adam"}, "nothing is sent to optimize"),
    ],
)
def test_settings_that_cannot_stand_together_are_refused_in_one_line(written, changes, words):
    for key, value in changes.items():
        set_key(written, key, value)
    with pytest.raises(ExperimentError) as caught:
        resolve(written)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_of_a_preset_reaches_the_experiment(name, written):
    written["amplitude"]["preset"] = name
    experiment = resolve(written)
    for key, value in PRESETS[name].items():
        assert look_up(experiment, key) == value


def test_presets_set_the_same_settings():
    expected = {"amplitude.intensity", "amplitude.region", "amplitude.estimation", "network.norm"}
    assert all(set(settings) == expected | {"federation.norm_bound"} for settings in PRESETS.values())


def test_the_published_presets_bound_no_difference(written):
    bounds = {}
    for name in PRESETS:
        written["amplitude"] = {"preset": name, "minimum_sites": 2, "minimum_cases": 4}
        bounds[name] = resolve(written).federation.norm_bound
    assert bounds == {"robust": 10.0, "as_described": None, "as_published": None}


def test_methods_are_the_paper_s_ablation():
    # Table 3 of the paper: both parts, either part, none.
    parts = {
        name: (settings.get("amplitude.region") != "off", settings.get("perturbation.alpha") != 0.0)
        for name, settings in METHODS.items()
        if name in ("harmofl", "amplitude_only", "perturbation_only", "fedavg")
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
