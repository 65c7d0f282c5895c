"""Reading experiment.json and the --set of the command line."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harmofl.experiment import ExperimentError, parse_assignment, read_settings, set_key


def test_settings_are_read_from_a_file(tmp_path, written):
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps(written), encoding="utf-8")
    assert read_settings(path) == written


@pytest.mark.parametrize("shown", [None, "experiment.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, shown):
    path = tmp_path / "missing.json"
    with pytest.raises(ExperimentError) as caught:
        read_settings(path, shown)
    assert str(caught.value).startswith(f"{shown or path}: cannot be read (No such file")
    assert (str(tmp_path) in str(caught.value)) == (shown is None)


def test_broken_json_gives_line_and_column(tmp_path):
    path = tmp_path / "experiment.json"
    path.write_text('{\n  "name": }', encoding="utf-8")
    with pytest.raises(ExperimentError, match="line 2 column 11"):
        read_settings(path)


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("3", "int"), ("null", "NoneType")])
def test_a_file_that_holds_no_object_is_refused(tmp_path, text, kind):
    path = tmp_path / "experiment.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ExperimentError, match=f"must hold one JSON object, not a {kind}"):
        read_settings(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.local_epochs=2", ("training.local_epochs", 2)),
        ("perturbation.alpha=0.1", ("perturbation.alpha", 0.1)),
        ("training.keep_moments=false", ("training.keep_moments", False)),
        ("training.clip_norm=null", ("training.clip_norm", None)),
        ("method=fedavg", ("method", "fedavg")),
        ('method="fedavg"', ("method", "fedavg")),
        ("data.fractions=[0.6,0.2,0.2]", ("data.fractions", [0.6, 0.2, 0.2])),
        ("federation.resume_from=/a/b=c.pt", ("federation.resume_from", "/a/b=c.pt")),
        ("name=", ("name", "")),
    ],
)
def test_assignments_of_the_command_line(text, expected):
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["training.local_epochs", "=2", ""])
def test_an_assignment_of_another_form_is_refused(text):
    with pytest.raises(ExperimentError, match="section.key=value"):
        parse_assignment(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(value=json_values)
def test_any_json_value_survives_an_assignment(value):
    assert parse_assignment(f"data.aliases={json.dumps(value)}") == ("data.aliases", value)


def test_set_key_makes_missing_sections_and_keeps_others():
    settings: dict[str, Any] = {"training": {"momentum": 0.5}}
    set_key(settings, "training.batch_size", 8)
    set_key(settings, "demo.overrides", {"seed": 1})
    set_key(settings, "seed", 2)
    assert settings == {
        "training": {"momentum": 0.5, "batch_size": 8},
        "demo": {"overrides": {"seed": 1}},
        "seed": 2,
    }
