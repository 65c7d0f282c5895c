"""Experiment: one line for every mistake; presets, methods and demo in their order."""

import copy
import json
from typing import Any

import pytest
from pydantic import ValidationError

from harmofl.experiment import ExperimentError, read_settings, resolve, set_key


def changed(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(settings)
    set_key(copied, key, value)
    return copied


def message_of(settings: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ExperimentError) as caught:
        resolve(settings, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.learning_rat", "training.learning_rate"),
        ("amplitude.minimum_site", "amplitude.minimum_sites"),
        ("federation.round", "federation.rounds"),
        ("sed", "seed"),
        ("trainning.momentum", "training"),
    ],
)
def test_unknown_key_names_file_key_value_and_the_nearest_name(written, key, nearest):
    message = message_of(changed(written, key, 0.25), source="jobs/a/experiment.json")
    assert message.startswith(f"jobs/a/experiment.json: {key.partition('.')[0]}")
    assert "unknown setting" in message
    assert "0.25" in message
    assert nearest in message.partition("did you mean ")[2]


def test_unknown_key_of_the_demo_section_gets_the_nearest_name(written):
    settings = written | {"demo": {"date": {}, "overrides": {}}}
    assert message_of(settings).endswith("demo.date: unknown setting (value {}); did you mean 'demo.data'?")


def test_a_long_value_is_cut(written):
    message = message_of(changed(written, "training.unheard", "x" * 500))
    assert "..." in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("data.height", 63),
        ("network.width", 0),
        ("network.name", "unet3d"),
        ("amplitude.low_fraction", 0.6),
        ("amplitude.momentum", 1.0),
        ("amplitude.region", "middle"),
        ("perturbation.alpha", -0.01),
        ("training.learning_rate", 0.0),
        ("training.momentum", 1.0),
        ("training.precision", "float64"),
        ("training.clip_norm", 0.0),
        ("training.learning_rate", float("nan")),
        ("training.clip_norm", float("inf")),
        ("federation.rounds", 0),
        ("federation.round_timeout", 59),
        ("federation.server_learning_rate", 0),
        ("federation.weights", "cases"),
        ("name", "two words"),
        ("name", "../up"),
    ],
)
def test_a_value_out_of_range_names_key_and_value(written, key, value):
    message = message_of(changed(written, key, value))
    assert message.startswith(f"experiment.json: {key}: ")
    assert json.dumps(value) in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "3"),
        ("seed", True),
        ("seed", 3.0),
        ("training.learning_rate", "0.05"),
        ("training.learning_rate", True),
        ("training.keep_moments", 1),
        ("training.keep_moments", "true"),
        ("federation.rounds", 3.5),
        ("name", 7),
        ("data.aliases", ["ISBI"]),
        ("data.fractions", ["0.64", "0.16", "0.20"]),
        ("network", None),
        ("training", 3),
    ],
)
def test_types_are_not_converted(written, key, value):
    assert f"{key}" in message_of(changed(written, key, value))


def test_a_whole_number_is_a_valid_float(written):
    assert resolve(changed(written, "training.learning_rate", 1)).training.learning_rate == 1.0


@pytest.mark.parametrize(
    ("fractions", "words"),
    [
        ([0.5, 0.5, 0.5], "add up to 1, not 1.5"),
        ([0.5, 0.25, 0.25], "multiples of 0.04"),  # 0.5 * 25 = 12.5 cases of a block of 25
        ([0.8, 0.2], "data.fractions"),
        ([1.0, 0.0, 0.0], "data.fractions.0"),
    ],
)
def test_fractions_of_the_split_are_checked(written, fractions, words):
    assert words in message_of(changed(written, "data.fractions", fractions))


# the preset sets something in `federation`, so that a setting of it is what is missing
@pytest.mark.parametrize(("section", "named"), [("data",) * 2, ("training",) * 2, ("federation", "federation.rounds")])
def test_a_missing_section_is_named(written, section, named):
    del written[section]
    assert message_of(written) == f"experiment.json: {named}: is missing"


def test_mean_shift_after_zscore_is_refused(written):
    assert "zscore" in message_of(changed(written, "amplitude.region", "dc"))


@pytest.mark.parametrize("key", ["amplitude.preset", "method"])
@pytest.mark.parametrize("value", ["robustt", 3, None, ["robust"], {}])
def test_a_preset_or_method_that_is_no_known_name_is_refused(written, key, value):
    assert message_of(changed(written, key, value)).startswith(f"experiment.json: {key}: ")


@pytest.mark.parametrize("value", ["robust", ["robust"], None, 3])
def test_an_amplitude_that_is_no_section_is_refused(written, value):
    assert "amplitude" in message_of(written | {"amplitude": value})


def test_a_preset_fills_only_what_is_open(written):
    written["amplitude"] |= {"preset": "as_published", "estimation": "running_mean"}
    written["network"]["norm"] = "instance"
    experiment = resolve(written)
    assert experiment.amplitude.estimation == "running_mean"
    assert experiment.network.norm == "instance"
    assert (experiment.amplitude.intensity, experiment.amplitude.region) == ("window", "dc")


def test_without_a_preset_it_is_robust(written):
    del written["amplitude"]["preset"]
    experiment = resolve(written)
    assert (experiment.amplitude.preset, experiment.amplitude.region) == ("robust", "site_gain")


def test_a_method_is_stronger_than_the_written_settings(written):
    written["amplitude"]["region"] = "full"
    written["perturbation"] = {"alpha": 0.2}
    experiment = resolve(written | {"method": "fedavg"})
    assert (experiment.amplitude.region, experiment.perturbation.alpha) == ("off", 0.0)
    # FedAvg keeps the preset's intensity step and norm layer: only the amplitude and the perturbation are compared
    assert (experiment.amplitude.intensity, experiment.network.norm) == ("zscore", "instance")


def with_demo(settings: dict[str, Any], overrides: Any) -> dict[str, Any]:
    return settings | {"demo": {"data": {"cases": 4}, "overrides": overrides}}


def test_demo_overrides_apply_in_the_demo_only(written):
    settings = with_demo(written, {"federation.rounds": 1, "perturbation.alpha": 0.5})
    plain, demo = resolve(settings), resolve(settings, demo=True)
    assert (plain.federation.rounds, plain.perturbation.alpha) == (3, 0.05)
    assert (demo.federation.rounds, demo.perturbation.alpha) == (1, 0.5)
    assert plain.hash != demo.hash


def test_a_method_is_stronger_than_the_demo(written):
    # or a demo of FedAvg would train with the demo's perturbation
    settings = with_demo(written | {"method": "fedavg"}, {"perturbation.alpha": 0.5, "amplitude.region": "full"})
    experiment = resolve(settings, demo=True)
    assert (experiment.perturbation.alpha, experiment.amplitude.region) == (0.0, "off")


def test_a_method_named_by_the_demo_is_applied(written):
    experiment = resolve(with_demo(written, {"method": "fedavg"}), demo=True)
    assert (experiment.method, experiment.perturbation.alpha) == ("fedavg", 0.0)


def test_a_demo_override_beats_the_preset(written):
    settings = with_demo(written, {"amplitude.preset": "as_described", "network.norm": "instance"})
    experiment = resolve(settings, demo=True)
    assert (experiment.amplitude.region, experiment.network.norm) == ("full", "instance")


@pytest.mark.parametrize("demo", [{}, {"demo": None}])
def test_a_demo_of_a_job_without_one_says_what_to_do(written, demo):
    assert "HARMOFL_DATA_ROOT" in message_of(written | demo, demo=True)


@pytest.mark.parametrize("overrides", [[1], "federation.rounds=1", None, 3])
def test_demo_overrides_of_another_form_are_refused(written, overrides):
    assert "demo.overrides: " in message_of(with_demo(written, overrides), demo=True)


def test_an_unknown_demo_override_is_refused_by_name(written):
    message = message_of(with_demo(written, {"federation.round": 1}), demo=True)
    assert "federation.round: unknown setting" in message


def test_an_override_through_a_value_is_refused(written):
    message = message_of(with_demo(written, {"name.first": 1}), demo=True)
    assert message == "experiment.json: name.first: 'name' is not a section"


def test_resolving_leaves_the_written_settings_alone(written):
    settings = with_demo(written | {"method": "fedavg"}, {"federation.rounds": 1})
    before = copy.deepcopy(settings)
    resolve(settings, demo=True)
    assert settings == before


def test_a_resolved_experiment_resolves_to_itself(written):
    experiment = resolve(written | {"method": "perturbation_only"})
    again = resolve(experiment.model_dump(mode="json"))
    assert again == experiment
    assert again.hash == experiment.hash


def test_an_experiment_is_frozen(written):
    experiment = resolve(written)
    with pytest.raises(ValidationError):
        experiment.seed = 1
    with pytest.raises(ValidationError):
        experiment.training.learning_rate = 1.0


def test_time_limits_and_paths_do_not_make_another_experiment(written):
    before = resolve(written).hash
    for key, value in {
        "federation.round_timeout": 120,
        "federation.straggler_wait": 1,
        "federation.resume_from": "/runs/FL_global_model.pt",
        "data.simulated_root": "/data",
    }.items():
        set_key(written, key, value)
    assert resolve(written).hash == before
    set_key(written, "perturbation.alpha", 0.5)
    assert resolve(written).hash != before


@pytest.mark.parametrize(
    ("pattern", "case", "patient"),
    [
        (None, "P1_visit2", "P1_visit2"),
        ("^(P[0-9]+)_", "P1_visit2", "P1"),
        ("^P[0-9]+", "P1_visit2", "P1"),
        ("^(P[0-9]+)_", "Case07", "Case07"),
        ("^(P[0-9]+)?", "Case07", "Case07"),
        ("[0-9]*", "Case07", "Case07"),
    ],
)
def test_the_patient_of_a_case(written, pattern, case, patient):
    set_key(written, "data.patient_pattern", pattern)
    assert resolve(written).data.patient_of(case) == patient


def test_a_pattern_that_does_not_compile_is_refused(written):
    set_key(written, "data.patient_pattern", "(P")
    with pytest.raises(ExperimentError, match="data.patient_pattern: is no regular expression"):
        resolve(written)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "a" * 101),
        ("task", "a." * 101),
        ("seed", 2**63),
        ("federation.round_timeout", 10**400),
        ("federation.straggler_wait", 10**9),
        ("data.patient_pattern", "a" * 201),
    ],
)
def test_numbers_and_texts_without_bound_are_refused(written, key, value):
    set_key(written, key, value)
    with pytest.raises(ExperimentError, match=f"{key}: "):
        resolve(written)


def test_a_file_without_bound_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "experiment.json"
    path.write_text('{"data": {"aliases": {}}, "x": "' + "a" * 2_000_000)
    with pytest.raises(ExperimentError, match="has more than 1000000 bytes"):
        read_settings(path)


def test_a_first_batch_that_no_site_would_send_is_refused(written):
    set_key(written, "amplitude.preset", "as_published")
    set_key(written, "training.batch_size", 3)
    with pytest.raises(
        ExperimentError, match="batch_size 3 is below amplitude.minimum_cases 4, .* raise the one or lower"
    ):
        resolve(written)
    set_key(written, "amplitude.region", "off")
    resolve(written)
