"""A small experiment for the tests of whatever needs one."""

import copy
from typing import Any

import pytest

_WRITTEN: dict[str, Any] = {
    "name": "small",
    "task": "prostate",
    "data": {"height": 64, "width": 64},
    "network": {"name": "unet", "width": 2},
    "amplitude": {"preset": "robust", "minimum_sites": 2, "minimum_cases": 4},
    "training": {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 4},
    "federation": {"rounds": 3, "minimum_sites": 2},
}


@pytest.fixture
def written() -> dict[str, Any]:
    """The least that an experiment.json must hold: every default and preset is still open."""
    return copy.deepcopy(_WRITTEN)
