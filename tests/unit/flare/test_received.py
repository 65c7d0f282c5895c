"""What a server sends beside the header: weights that fit the network, and the amplitude that the experiment has."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harmofl.core.training import TrainingError, state_arrays
from harmofl.experiment import resolve
from harmofl.flare.local_model import LocalModel
from harmofl.flare.received_amplitude import refuse_amplitude_task, refuse_other_amplitude
from harmofl.flare.state import SiteState
from harmofl.flare.wire import AmplitudeStatistic, Arrays, MessageError
from harmofl.tasks import untrained_network

AMPLITUDE = AmplitudeStatistic(np.ones((3, 5), np.float32), 9)


@pytest.mark.parametrize(
    ("preset", "region", "asked"),
    [("robust", "site_gain", True), ("as_described", "full", False), ("as_published", "dc", False)],
)
def test_a_site_measures_its_amplitude_once_and_only_as_the_experiment_says(
    written: dict[str, Any], preset: str, region: str, asked: bool
) -> None:
    """Of the presets `robust` alone estimates before training; the others do so in round 0, and freeze it then."""
    written["amplitude"]["preset"] = preset
    experiment = resolve(written)
    assert experiment.amplitude.region == region
    if asked:
        refuse_amplitude_task(experiment)
        with pytest.raises(MessageError, match="no global amplitude"):
            refuse_other_amplitude(experiment, None, first_round=True)
    else:
        with pytest.raises(MessageError, match="asks for an amplitude before training, but amplitude.region is"):
            refuse_amplitude_task(experiment)
        refuse_other_amplitude(experiment, None, first_round=True)
    refuse_other_amplitude(experiment, AMPLITUDE)
    with pytest.raises(MessageError, match="no global amplitude"):
        refuse_other_amplitude(experiment, None)


def test_a_job_without_an_amplitude_takes_none_and_measures_none(written: dict[str, Any]) -> None:
    experiment = resolve(written | {"method": "fedavg"})
    refuse_other_amplitude(experiment, None, first_round=True)
    with pytest.raises(MessageError, match="amplitude.region is off"):
        refuse_other_amplitude(experiment, AMPLITUDE)
    with pytest.raises(MessageError, match="region is off"):
        refuse_amplitude_task(experiment)


def changed(weights: Arrays, name: str, value: Any) -> Arrays:
    return weights | {name: value}


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda value: value[:1], "does not fit this network: "),
        (lambda value: value.astype(np.float64), "does not fit this network: "),
        (lambda value: np.broadcast_to(value, (10**6, *value.shape)), "does not fit this network: "),
        (lambda value: np.full_like(value, np.nan), "not finite in "),
        (lambda value: np.full_like(value, np.inf), "not finite in "),
    ],
)
def test_weights_of_another_form_are_refused_by_name_before_they_are_copied(
    written: dict[str, Any], tmp_path: Path, spoil: Any, part: str
) -> None:
    experiment = resolve(written)
    weights = state_arrays(untrained_network(experiment))
    model = LocalModel(experiment, SiteState(tmp_path, "run"), logging.getLogger("HK"))
    name = next(iter(weights))
    with pytest.raises(TrainingError) as caught:
        model.before_round(changed(weights, name, spoil(weights[name])), 0)
    assert part in str(caught.value) and name in str(caught.value)


def test_an_entry_with_a_forged_name_is_one_short_line(written: dict[str, Any], tmp_path: Path) -> None:
    experiment = resolve(written)
    weights = state_arrays(untrained_network(experiment))
    model = LocalModel(experiment, SiteState(tmp_path, "run"), logging.getLogger("HK"))
    with pytest.raises(TrainingError) as caught:
        model.before_round(changed(weights, "\nERROR " + "x" * 5000, np.zeros(1, np.float32)), 0)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 150
